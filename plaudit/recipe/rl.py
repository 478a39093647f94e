"""Reinforcement learning: its sections and its recipe. What a kind of reward adds stands in `plaudit/rewards/`."""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from plaudit.objectives.registry import ESTIMATORS, POLICY_LOSSES, described
from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.rewards import Rewards
from plaudit.recipe.section import BelowOne, Files, FilesOrNone, Section, any_number, names_a_file
from plaudit.recipe.training import (
    HARMLESS,
    ROUNDING,
    Checkpointing,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    Placement,
    RunSettings,
)


class RLDataSettings(Section):
    train: Files
    """Files (.parquet, .jsonl, .json) of prompts: `prompt` (messages), `data_source`, `reward_model.ground_truth`, `extra_info`."""
    val: FilesOrNone = ()
    """The same, for validation."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, rendered with the chat template."""
    too_long: Literal["filter", "error", "cut_left"] = "filter"
    """What happens to longer ones: left out and counted, an error, or cut on the left."""

    _some_files = field_validator("train")(names_a_file)


class RolloutSettings(Section):
    engine: str = "native"
    """native: plaudit's own, on the trainer's weights. Or an engine of yours: path/to/file.py:Class."""
    n: PositiveInt = 8
    """Samples per prompt: the group."""
    max_new_tokens: PositiveInt = 1024
    """Longest response; what is longer is cut there and counted as truncated."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it. Training's log-probs are of the divided logits too."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: PositiveInt | None = None
    """Sample from so many likeliest tokens."""
    min_p: BelowOne = 0.0
    """Sample from tokens at least this many times as likely as the likeliest."""
    stop: Annotated[tuple[str, ...], BeforeValidator(any_number)] = ()
    """Strings that end a response, besides the end token. They stay in it."""
    max_sequences: PositiveInt | None = None
    """Sequences sampled side by side; default: 256 on a CPU, 1024 on a GPU. Where memory runs out, some wait."""

    @field_validator("stop")
    @classmethod
    def _ends_something(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty string would end every response at once")
        return stop


class ValidationSettings(Section):
    n: PositiveInt = 1
    """Samples per validation prompt."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; default: the rollout's."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As the rollout's."""
    top_k: PositiveInt | None = None
    """As the rollout's."""
    min_p: BelowOne = 0.0
    """As the rollout's."""
    max_prompts: PositiveInt | None = None
    """Validate on the first so many prompts only."""

    def idle(self) -> dict[str, str]:
        why = "chooses between tokens, and temperature 0 takes the likeliest one: set a temperature"
        return dict.fromkeys(("top_p", "top_k", "min_p"), why) if self.temperature == 0 else {}


def _both(clip: Any) -> Any:
    return (clip, clip) if isinstance(clip, int | float) and not isinstance(clip, bool) else clip


class KLRewardSettings(Section):
    coefficient: PositiveFloat = 0.001
    """What a token pays for its distance to the reference; with a target, what it begins with."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """The estimate of that distance, as kl_estimator. k1 is unbiased, and in a reward it has the right gradient."""
    target: PositiveFloat | None = None
    """Mean KL per token to be held: the coefficient rises above it and falls below it. Default: the coefficient stays."""
    horizon: PositiveInt = 10_000
    """With a target: samples over which the coefficient moves by up to a fifth."""

    def idle(self) -> dict[str, str]:
        why = "is how fast the coefficient follows a target, and there is no target: set one"
        return {"horizon": why} if self.target is None else {}


class ImportanceSettings(Section):
    level: Literal["token", "sequence"] = "token"
    """Whether each token has its weight, or all tokens of a response have their product."""
    mode: Literal["truncate", "mask"] = "truncate"
    """A weight above `high` becomes `high`; or one outside [low, high] becomes 0."""
    high: Annotated[float, Field(gt=1.0)] = 2.0
    """Greatest weight."""
    low: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """With mask: least weight; default: none."""

    def idle(self) -> dict[str, str]:
        return {"low": "is for mode mask; truncate bounds weights from above only"} if self.mode == "truncate" else {}


class DynamicSamplingSettings(Section):
    max_rounds: PositiveInt = 5
    """Rounds of sampling a step may take, the first one too. Behind the last it goes on with the groups it has."""


if TYPE_CHECKING:
    EstimatorName = PolicyLossName = str
else:
    EstimatorName, PolicyLossName = Literal[tuple(ESTIMATORS)], Literal[tuple(POLICY_LOSSES)]


class AlgorithmSettings(Section):
    kind: EstimatorName = Field("grpo", description=f"How rewards become advantages. {described(ESTIMATORS)}")
    divide_by_std: bool = True
    """With grpo: divide them by the group's standard deviation (Dr.GRPO: false)."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """With reinforce++ and ppo: what a reward one token later counts less."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """With ppo: 1 trusts what was paid, 0 what the critic expects of the next token."""
    loss: PolicyLossName = Field("clipped", description=f"How advantages become a loss. {described(POLICY_LOSSES)}")
    clip_ratio: Annotated[tuple[BelowOne, NonNegativeFloat], BeforeValidator(_both)] = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1 before it stops counting: two numbers, or one for both."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound of the ratio where the advantage is negative; null for none."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"  # fmt: skip
    """How token losses become one: over all tokens of an update, or first within each response. norm: by max_new_tokens."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the distance to the reference model (the model training starts from) in the loss; 0 loads no reference."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Its estimate from one token: log-ratio, its absolute value, half its square, or the low-variance one."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    positive_sft_coefficient: NonNegativeFloat = 0.0
    """Weight of a supervised term on tokens with A > 0: −A · log π."""
    kl_reward: KLRewardSettings | None = None
    """Distance to the reference as a cost in the reward of each token, besides or instead of kl_coefficient."""
    reference_placement: Placement = "resident"
    """offload: the reference's weights are on the GPU only while it is asked, and in the host's memory otherwise; on a CPU they are
    read again from disk each time."""
    old_logprobs: Literal["recomputed", "sampler"] = "recomputed"
    """What the ratio is taken against: the trainer's log-probs as the step began, or those the sampler had."""
    importance: ImportanceSettings | None = None
    """Weight losses by π_old / sampler, for a sampler whose log-probs are not the trainer's (metric: mismatch)."""

    dynamic_sampling: DynamicSamplingSettings | None = None
    """Leave out groups whose rewards are all equal, and sample further prompts until prompts_per_step have a signal (DAPO)."""

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl_coefficient) or self.kl_reward is not None

    @property
    def compares_groups(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return "group" in ESTIMATORS[self.kind].needs

    def idle(self) -> dict[str, str]:
        idle = {}
        estimator, loss = ESTIMATORS[self.kind], POLICY_LOSSES[self.loss]
        for name in ("divide_by_std", "discount", "gae_lambda"):
            if name not in estimator.settings:
                users = " and ".join(other.name for other in ESTIMATORS.values() if name in other.settings)
                idle[name] = f"is for {users}, not for {self.kind}"
        for name in ("clip_ratio", "dual_clip"):
            if name not in loss.settings:
                users = ", ".join(other.name for other in POLICY_LOSSES.values() if name in other.settings)
                idle[name] = f"is for loss {users}, not for {self.loss}"
        if not loss.uses_ratio and self.kl_reward is None and self.importance is None:
            idle["old_logprobs"] = f"is what a ratio is relative to, and {self.loss} has none"
        if not self.needs_reference:
            idle["kl_estimator"] = "is how a distance to the reference is estimated, and none is: set kl_coefficient or kl_reward"
            idle["reference_placement"] = "is of a reference, and without kl_coefficient or kl_reward there is none"
        if not self.compares_groups:
            idle["dynamic_sampling"] = f"looks for groups whose rewards differ, and {self.kind} compares no groups"
        return idle

    @model_validator(mode="after")
    def _sampler_is_corrected_once(self) -> "AlgorithmSettings":
        if self.importance is not None and self.old_logprobs == "sampler":
            raise ValueError(
                "importance corrects for the sampler's log-probs not being the trainer's: take old_logprobs recomputed"
            )
        return self


class RLTrainSettings(Section):
    prompts_per_step: PositiveInt = 64
    """Prompts sampled per step."""
    prompts_per_update: PositiveInt | None = None
    """Prompts per optimiser update; default: all of the step's, one update."""
    epochs_per_step: PositiveInt = 1
    """Passes over the step's samples."""
    shuffle: bool = True
    """Each pass takes the prompts in another order."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass. Changes memory and speed, never the gradient. A longer sequence goes alone."""
    max_skipped_steps: NonNegativeInt = 10
    """Updates with a non-finite loss or gradient are skipped; more of them than this stop the run."""

    @property
    def updates_per_step(self) -> int:
        return self.epochs_per_step * math.ceil(self.prompts_per_step / (self.prompts_per_update or self.prompts_per_step))

    @model_validator(mode="after")
    def _updates_fit_into_steps(self) -> "RLTrainSettings":
        if self.prompts_per_update is not None and self.prompts_per_update > self.prompts_per_step:
            raise ValueError(f"prompts_per_update is {self.prompts_per_update}, more than prompts_per_step {self.prompts_per_step}")
        return self


class RLOptimSettings(OptimSettings):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up. wsd stays at the peak and falls linearly over the last decay_ratio of the steps."""


class CriticOptimSettings(RLOptimSettings):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""


OF_ITS_OWN = ("path", "dtype", "gradient_checkpointing", "liger", "placement", "lora", "trust_remote_code")
"""Settings of a critic that is a model of its own."""


class CriticSettings(Section):
    shared: bool = False
    """A value head on the policy's own layers instead of a model of its own: no second model in memory, one pass for log-probs and
    values, and what the values teach moves the policy's layers too."""
    loss_coefficient: NonNegativeFloat = 0.5
    """With shared: what the value loss counts beside the policy's in the layers they share; 0: it moves the head alone."""
    path: str | None = None
    """A causal model, which gets a new value head, or a sequence classifier with one label (a reward model, a saved critic), whose
    head is used. It reads the policy's tokens. Default: model.path."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """As model.dtype; the value head is always in fp32."""
    gradient_checkpointing: Checkpointing = False
    """As model.gradient_checkpointing."""
    liger: bool = False
    """As model.liger."""
    placement: Placement = "resident"
    """offload: its weights wait in the host's memory while the policy is sampled; critic.optim.offload is for the rest of what it
    takes. On a CPU they stay."""
    lora: LoraSettings | None = None
    """Train a low-rank update and the value head instead of all weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""
    pretrain_steps: NonNegativeInt = 0
    """So many first steps train the critic alone: the policy is sampled and stays as it is. Its schedule goes on meanwhile."""
    clip_value: PositiveFloat | None = 0.5
    """How far a value may move away from what it was as the step began before it stops counting; null for no bound."""
    optim: CriticOptimSettings = CriticOptimSettings()
    """How it moves. With shared: how its head does; the layers follow the policy's."""

    def idle(self) -> dict[str, str]:
        if not self.shared:
            return {"loss_coefficient": "weighs a loss in layers that are shared, and this critic shares none"}
        return dict.fromkeys(
            OF_ITS_OWN, "is of a model of its own; shared puts a head on the policy's layers, which model.* describes"
        )

    @model_validator(mode="after")
    def _saved_whole(self) -> "CriticSettings":
        if self.lora is not None and not self.lora.merge_on_save:
            raise ValueError("critic.lora.merge_on_save is false, but a critic is saved whole, with its head: leave it out")
        return self

    def model(self, policy: ModelSettings) -> ModelSettings:
        """What it is made of, in the words that describe a model."""
        own = {name: getattr(self, name) for name in OF_ITS_OWN if name not in ("path", "placement")}
        trusted = self.trust_remote_code or (self.path is None and policy.trust_remote_code)
        return ModelSettings(path=self.path or policy.path, **{**own, "trust_remote_code": trusted})


INSIDE = ("", "scorer.", "rule.", "judge.")
"""Where a reward has its model: itself, or in a reward that it is made of."""
HOW_MODELS_ARE_REACHED = ("url", "credential", "port", "start_timeout_s", "program", "limits.*", "prompt_price", "answer_price")


class RLRecipe(Section):
    """Reinforcement learning against rewards."""

    stage: Literal["rl"] = "rl"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of prompts, sampling, dropout and new weights."""
    model: ModelSettings
    """What is trained."""
    data: RLDataSettings
    """What it is asked."""
    rollout: RolloutSettings = RolloutSettings()
    """How it is sampled."""
    validation: ValidationSettings = ValidationSettings()
    """How it is sampled when it is validated."""
    rewards: Rewards
    """What it is paid for: a list, each with a kind."""
    audit: AuditSettings = AuditSettings()
    """What an audit of the rewards must show; `require` an audit that passed before training begins."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """How rewards become a loss."""
    critic: CriticSettings | None = None
    """With ppo: the model that says what can be expected, learnt beside the policy. {} for one that starts as the policy does."""
    train: RLTrainSettings = RLTrainSettings()
    """How much at a time."""
    optim: RLOptimSettings = RLOptimSettings()
    """How it moves."""
    run: RunSettings
    """Where the run lives and how long it goes."""

    @model_validator(mode="after")
    def _groups_to_compare(self) -> "RLRecipe":
        if self.rollout.n < 2 and self.algorithm.compares_groups:
            raise ValueError(
                f"rollout.n is 1, but {self.algorithm.kind} compares the samples of a group with each other: take 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _reference_to_offload(self) -> "RLRecipe":
        if self.algorithm.reference_placement == "offload" and self.model.lora is not None:
            raise ValueError(
                "algorithm.reference_placement is offload, but with model.lora the reference is the policy without its adapters: "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _critic_of_ppo(self) -> "RLRecipe":
        kind, needs_critic = self.algorithm.kind, "critic" in ESTIMATORS[self.algorithm.kind].needs
        if self.critic is None and needs_critic:
            raise ValueError(
                f"algorithm.kind is {kind}, which needs a critic: add the section, critic: {{}} for one like the policy"
            )
        if self.critic is not None and not needs_critic:
            raise ValueError(f"algorithm.kind is {kind}, which uses no critic: use ppo, or leave critic out")
        return self

    @model_validator(mode="after")
    def _gdpo_normalises_each_reward(self) -> "RLRecipe":
        for reward in self.rewards if "normalised rewards" in ESTIMATORS[self.algorithm.kind].needs else ():
            if reward.weight and (reward.normalise != "group" or reward.combine != "add"):
                raise ValueError(
                    f"algorithm.kind is {self.algorithm.kind}, which normalises each reward by its group and adds them up: "
                    f"give {reward.label} normalise: group and combine: add"
                )
        return self

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *HARMLESS, "run.validate_every", "validation.*", "rewards.*.max_failure_rate", "rewards.*.workers", "rewards.*.limits.*",
        "rewards.*.cache", "audit.*", "critic.placement", "critic.optim.offload", "algorithm.reference_placement",
        *(f"rewards.*.{inside}model.{setting}" for inside in INSIDE for setting in HOW_MODELS_ARE_REACHED),
    )  # fmt: skip
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = (
        *(name for name in ROUNDING if name != "run.validate_every"), "rollout.max_sequences", "critic.gradient_checkpointing",
        "critic.liger",
        "rewards.*.timeout_s", "rewards.*.on_failure",  # what one mends when a reward has stopped the run
        "rewards.*.model.placement", "rewards.*.model.dialect", "rewards.*.model.device", "rewards.*.model.arguments",
    )  # fmt: skip
