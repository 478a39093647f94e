"""Reinforcement learning: its sections and recipe. The settings of each kind of reward are in `plaudit/rewards/`."""

import math
from typing import ClassVar, Literal

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from plaudit.objectives.registry import ESTIMATORS
from plaudit.recipe.algorithm import AlgorithmSettings, ImportanceSettings
from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.evaluation import EvalSettings
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.model_owners import models_of, models_with_gpus
from plaudit.recipe.reward_models import RewardModel
from plaudit.recipe.rewards import Rewards, RewardSettings, nested_rewards
from plaudit.recipe.rollout import SERVED_ENGINES, RolloutSettings, ValidationSettings
from plaudit.recipe.section import Files, OptionalFiles, Section, require_files
from plaudit.recipe.training import (
    ANY_RESUME,
    ROUNDING,
    Checkpointing,
    ClusterSettings,
    KeptLogits,
    LastBatch,
    LoraSettings,
    MicroBatch,
    ModelSettings,
    OptimSettings,
    Placement,
    ReferenceSettings,
    RLRunSettings,
)


class RLDataSettings(Section):
    train: Files
    """Files of prompts (.parquet, .jsonl, .json): `prompt` (messages), `data_source`, `reward_model.ground_truth`, `extra_info`."""
    val: OptionalFiles = ()
    """The same, for validation."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, rendered with the chat template."""
    too_long: Literal["filter", "error", "cut_left"] = "filter"
    """What to do with longer prompts. filter: skip and count them; cut_left: truncate the left side."""
    special_tokens: Literal["text", "control"] = "text"
    """What control tokens (`<|im_end|>`) inside messages are. text: characters like any other, so that no message can end its turn
    or speak for another role. control: control tokens."""

    _require_files = field_validator("train")(require_files)


class RLReferenceSettings(ReferenceSettings):
    placement: Placement = "resident"
    """offload: on the GPU only while it computes log-probs, otherwise in host memory (on a CPU: read from disk again each time)."""


class RLTrainSettings(Section):
    prompts_per_step: PositiveInt = 64
    """Prompts sampled per step."""
    prompts_per_update: PositiveInt | None = None
    """Prompts per optimiser update; default: all prompts of the step, in one update."""
    epochs_per_step: PositiveInt = 1
    """Passes over the step's samples."""
    shuffle: bool = True
    """Shuffle the prompts in each pass."""
    last_batch: LastBatch = "keep"
    """What happens to the prompts that are left at the end of an epoch, fewer than prompts_per_step. keep: they and the first of
    the next epoch are a step; the run's last step may be short. drop: that epoch leaves them out (verl, TRL's GRPO)."""
    tokens_per_micro_batch: MicroBatch = "auto"
    """Tokens per forward pass. Affects memory and speed, never the gradient. A longer sequence is a micro-batch by itself. auto:
    on a GPU what should be fastest in the memory there is, up to 32,768, decided when a run starts; 16,384 on a CPU."""
    share_prompts: bool = True
    """Compute the tokens of a prompt once for all its samples in a micro-batch, instead of once for each. The same log-probs and
    gradients (up to the order of sums) in less time; off, for comparison."""
    keep_logits: KeptLogits = "auto"
    """Keep a micro-batch's logits for the backward pass instead of computing them twice: 4 bytes × vocabulary for each token that
    is trained on, to save a product. The same bits either way. auto: on a GPU, if there is memory for them."""
    max_skipped_steps: NonNegativeInt = 10
    """Updates with a non-finite loss or gradient are skipped; more of them than this stop the run."""

    @property
    def updates_per_step(self) -> int:
        return self.epochs_per_step * math.ceil(self.prompts_per_step / (self.prompts_per_update or self.prompts_per_step))

    @model_validator(mode="after")
    def _require_updates_within_steps(self) -> "RLTrainSettings":
        if self.prompts_per_update is not None and self.prompts_per_update > self.prompts_per_step:
            raise ValueError(f"prompts_per_update is {self.prompts_per_update}, more than prompts_per_step {self.prompts_per_step}")
        return self


class RLOptimSettings(OptimSettings):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up. wsd: constant, then a linear decay over the last decay_ratio of all steps."""


class CriticOptimSettings(RLOptimSettings):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""


SEPARATE_MODEL_ONLY = ("path", "dtype", "gradient_checkpointing", "liger", "placement", "lora", "trust_remote_code")
"""Settings of a critic that is a separate model."""


class CriticSettings(Section):
    shared: bool = False
    """A value head on the policy's layers instead of a separate model: no second model in memory, one forward pass for log-probs
    and values; the value loss also trains the policy's layers."""
    loss_coefficient: NonNegativeFloat = 0.5
    """With shared: weight of the value loss in the shared layers, relative to the policy loss. 0: it trains the head only."""
    path: str | None = None
    """A causal model, which gets a new value head, or a sequence classifier with one label (a reward model, a saved critic), whose
    head is used. It must share the policy's tokenizer. Default: model.path."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """As model.dtype; the value head is always in fp32."""
    gradient_checkpointing: Checkpointing = False
    """As model.gradient_checkpointing."""
    liger: bool = False
    """As model.liger."""
    placement: Placement = "resident"
    """offload: the weights are in host memory while the policy samples (no difference on a CPU). The optimiser state has its own
    setting, critic.optim.placement."""
    lora: LoraSettings | None = None
    """Train a low-rank update and the value head instead of all weights."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Leave it off unless you have read that code."""
    pretrain_steps: NonNegativeInt = 0
    """Train only the critic in the first n steps; the policy is sampled but not updated, while its schedule advances."""
    clip_value: PositiveFloat | None = 0.5
    """How far a value may move from its value at the start of the step before the loss is clipped; null for no clipping."""
    optim: CriticOptimSettings = CriticOptimSettings()
    """The critic's optimiser. With shared: that of the value head; the layers follow the policy's."""

    def ineffective_settings(self) -> dict[str, str]:
        if not self.shared:
            return {"loss_coefficient": "it applies to a shared critic only"}
        return dict.fromkeys(
            SEPARATE_MODEL_ONLY, "it applies to a separate critic; a shared one uses the policy's layers (model.*)"
        )

    @model_validator(mode="after")
    def _require_merge_on_save(self) -> "CriticSettings":
        if self.lora is not None and not self.lora.merge_on_save:
            raise ValueError("critic.lora.merge_on_save is false, but a critic is always saved merged, with its head: remove it")
        (self.lora or LoraSettings()).refuse_liger(self.liger)
        return self

    def model(self, policy: ModelSettings) -> ModelSettings:
        """The critic as model settings."""
        settings = {name: getattr(self, name) for name in SEPARATE_MODEL_ONLY if name not in ("path", "placement")}
        trusted = self.trust_remote_code or (self.path is None and policy.trust_remote_code)
        return ModelSettings(path=self.path or policy.path, **{**settings, "trust_remote_code": trusted})


INSIDE = ("", "scorer.", "rule.", "judge.")
"""Where a reward's model may be: in the reward itself, or in one that it contains."""
HOW_MODELS_ARE_REACHED = ("url", "credential", "port", "program", "sleep", "rank", "prompt_price", "answer_price")


class RLRecipe(Section):
    """Reinforcement learning against rewards."""

    stage: Literal["rl"] = "rl"
    """The command this recipe is for."""
    seed: NonNegativeInt = 0
    """Seed of the prompt order, sampling, dropout and new weights."""
    model: ModelSettings
    """The policy to train."""
    reference: RLReferenceSettings = RLReferenceSettings()
    """The model that KL is measured against (algorithm.kl_coefficient, algorithm.kl_reward)."""
    data: RLDataSettings
    """Training and validation prompts."""
    rollout: RolloutSettings = RolloutSettings()
    """How responses are sampled."""
    validation: ValidationSettings = ValidationSettings()
    """How responses are sampled for validation."""
    rewards: Rewards
    """The rewards: a list, each entry with a kind."""
    audit: AuditSettings = AuditSettings()
    """Criteria for an audit of the rewards; with `require`, training starts only after a passed audit."""
    eval: EvalSettings = EvalSettings()
    """What an evaluation of the rewards (`plaudit eval`) must have shown; with `require`, training starts only then."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Advantages, policy loss and KL."""
    critic: CriticSettings | None = None
    """With ppo: the value model, trained alongside the policy. {} for one that starts from the policy's weights."""
    train: RLTrainSettings = RLTrainSettings()
    """Batch sizes and updates per step."""
    optim: RLOptimSettings = RLOptimSettings()
    """Optimiser and learning-rate schedule."""
    run: RLRunSettings
    """Run folder, length, validation and checkpoints."""
    cluster: ClusterSettings = ClusterSettings()
    """GPUs and how they share the work."""

    @field_validator("rewards")
    @classmethod
    def _name_the_policy(cls, rewards: tuple[RewardSettings, ...], info: ValidationInfo) -> tuple[RewardSettings, ...]:
        model = info.data.get("model")  # missing if it is not valid
        return rewards if model is None else tuple(reward.of_policy(model.path) for reward in rewards)

    def ineffective_settings(self) -> dict[str, str]:
        if self.algorithm.needs_reference:
            return {}
        return {"reference": "no KL is computed; set algorithm.kl_coefficient or algorithm.kl_reward"}

    @property
    def resolved_algorithm(self) -> AlgorithmSettings:
        return self.algorithm.model_copy(update={"importance": self.importance})

    @property
    def importance(self) -> ImportanceSettings | None:
        """algorithm.importance, with auto resolved. A server's log-probs under top-p, top-k or min-p are those of another
        distribution, and weights by them would be wrong."""
        chosen, rollout = self.algorithm.importance, self.rollout
        if chosen != "auto":
            return chosen
        served = rollout.engine in SERVED_ENGINES
        truncates = rollout.top_p < 1.0 or rollout.top_k is not None or rollout.min_p > 0.0
        another_policy = (served or rollout.lag > 0) and not (served and truncates)
        return ImportanceSettings() if another_policy and self.algorithm.old_logprobs == "recomputed" else None

    @model_validator(mode="after")
    def _require_possible_servers(self) -> "RLRecipe":
        server = self.rollout.server
        if server.gpus and self.cluster.nodes > 1:
            raise ValueError(
                "rollout.server.gpus: with cluster.nodes, Ray gives every process one GPU, so that it has no others for a server. "
                "Start servers yourself (plaudit engine-command) and name them in rollout.server.url"
            )
        if server.lora == "adapters" and (self.rollout.lag or self.cluster.sharding == "full"):
            setting = "rollout.lag" if self.rollout.lag else "cluster.sharding full"
            raise ValueError(f"rollout.server.lora adapters: with {setting} all weights are sent, merged; set it to auto")
        return self

    @model_validator(mode="after")
    def _require_machines_for_models(self) -> "RLRecipe":
        if self.cluster.nodes == 1 and (with_gpus := models_with_gpus(models_of(self.rewards))):
            raise ValueError(
                f"rewards: {with_gpus[0][0].path} has model.gpus, which Ray finds on several machines (cluster.nodes). On one, "
                "choose its server's GPUs: placement: launch, program: env CUDA_VISIBLE_DEVICES=7 vllm"
            )
        return self

    @model_validator(mode="after")
    def _require_room_for_lag(self) -> "RLRecipe":
        """What needs the trainer's GPU cannot wait until it rests: it never does."""
        if not self.rollout.lag:
            return self
        server = self.rollout.server
        if self.rollout.engine in SERVED_ENGINES and server.sleep and not (server.gpus or server.url):
            raise ValueError(
                "rollout.lag samples while the trainer computes, and rollout.server.sleep stops the server then: set "
                "rollout.server.sleep to false, or rollout.lag to 0"
            )
        for name, reward in (each for outer in self.rewards for each in nested_rewards(outer, outer.label)):
            model = getattr(reward, "model", None)
            if isinstance(model, RewardModel) and model.on_device != "always":
                setting = "placement offload" if model.on_device == "scoring" else "sleep"
                raise ValueError(
                    f"rollout.lag scores while the trainer computes, and the model of reward {name} has {setting}: it is on the "
                    "device while the trainer rests. Choose placement resident, launch without sleep, or server, or set "
                    "rollout.lag to 0"
                )
        return self

    @model_validator(mode="after")
    def _require_rewards_for_metrics(self) -> "RLRecipe":
        self.validation.require_rewards({reward.label: reward.reads_answers for reward in self.rewards})
        return self

    @model_validator(mode="after")
    def _require_groups_to_compare(self) -> "RLRecipe":
        if self.rollout.n < 2 and self.algorithm.compares_groups:
            raise ValueError(f"rollout.n is 1, but {self.algorithm.kind} compares the samples of a group: set it to 2 or more")
        return self

    @model_validator(mode="after")
    def _require_reference_to_place(self) -> "RLRecipe":
        if self.model.lora is not None and self.reference.path is None and "placement" in self.reference.model_fields_set:
            raise ValueError(
                "reference.placement has no effect: with model.lora the reference is the policy without its adapters. Remove it."
            )
        return self

    @model_validator(mode="after")
    def _require_matching_critic(self) -> "RLRecipe":
        kind, needs_critic = self.algorithm.kind, "critic" in ESTIMATORS[self.algorithm.kind].needs
        if self.critic is None and needs_critic:
            raise ValueError(
                f"algorithm.kind is {kind}, which needs a critic: add the section (critic: {{}} starts from the policy)"
            )
        if self.critic is not None and not needs_critic:
            raise ValueError(f"algorithm.kind is {kind}, which uses no critic: set it to ppo, or remove critic")
        return self

    @model_validator(mode="after")
    def _require_normalised_rewards(self) -> "RLRecipe":
        for reward in self.rewards if "normalised rewards" in ESTIMATORS[self.algorithm.kind].needs else ():
            if reward.weight and (reward.normalise != "group" or reward.combine != "add"):
                raise ValueError(
                    f"algorithm.kind is {self.algorithm.kind}, which normalises each reward by its group and adds them up: "
                    f"give {reward.label} normalise: group and combine: add"
                )
        return self

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *ANY_RESUME, "run.validate_every", "run.keep_samples", "run.keep_tokens", "validation.metrics",
        "rollout.drafts", "rewards.*.max_failure_rate", "rewards.*.workers",
        "rewards.*.cache", "audit.*", "eval.*", "critic.placement", "critic.optim.placement", "reference.placement",
        *(f"rewards.*.{inside}model.{setting}" for inside in INSIDE for setting in HOW_MODELS_ARE_REACHED),
        # Not the retries of unreadable answers: they change which answer is read.
        *(f"rewards.*.{inside}limits.{setting}" for inside in INSIDE for setting in ModelLimits.model_fields),
    )  # fmt: skip
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = (
        *(name for name in ROUNDING if name != "run.validate_every"), "train.share_prompts", "rollout.max_sequences",
        "rollout.server.*", "critic.gradient_checkpointing", "critic.liger",
        # Changed to fix a reward that stopped the run:
        "rewards.*.limits.timeout_s", "rewards.*.limits.function_timeout_s", "rewards.*.limits.worker_memory_gb",
        "rewards.*.on_failure",
        "rewards.*.model.placement", "rewards.*.model.dialect", "rewards.*.model.device", "rewards.*.model.arguments",
    )  # fmt: skip
