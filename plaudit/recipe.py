"""Every setting a recipe may have, with what it means: one class per section, one recipe class per stage.

`plaudit config R.yaml --explain` prints these descriptions; `plaudit.config` reads the files. Nothing here imports torch:
a wrong recipe is told in well under a second.
"""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from plaudit import plugins


class Section(BaseModel):
    """Frozen, and closed: a setting it does not know is an error, not a silent nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, given: Any) -> Any:
        # pydantic takes `lr: true` for 1.0; nobody means that. (A validator of each field would do, but pydantic allows
        # none on the field that tells the sections of a list apart.)
        wrong = []
        for name, value in given.items() if isinstance(given, dict) else ():
            boolean = next((v for v in (value if isinstance(value, list) else [value]) if isinstance(v, bool)), None)
            if boolean is not None and name in cls.model_fields and bool not in _leaf_types(cls.model_fields[name].annotation):
                reason = {"error": ValueError(f"should not be {str(boolean).lower()}")}
                wrong.append(InitErrorDetails(type="value_error", loc=(name,), input=value, ctx=reason))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return given


def _leaf_types(annotation: Any) -> set[Any]:
    parts = getattr(annotation, "__args__", None)
    return set().union(*map(_leaf_types, parts)) if parts else {annotation}


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _any_number(value: Any) -> Any:
    return () if value is None else _one_or_more(value)


def _names_a_file(train: tuple[str, ...]) -> tuple[str, ...]:
    if not train:
        raise ValueError("names no file")
    return train


Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
"""A path or a list of paths."""
FilesOrNone = Annotated[tuple[str, ...], BeforeValidator(_any_number)]
"""The same, or null for none: `data.val=` takes back what a recipe has."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


class Lora(Section):
    rank: PositiveInt = 16
    """Rank of the update."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapter's input."""
    targets: str | tuple[str, ...] = "all-linear"
    """Module names to adapt, or all-linear: every linear layer but the output head."""
    merge_on_save: bool = True
    """Saved models are whole ones with the update merged in; if false, the adapter alone."""

    @field_validator("targets")
    @classmethod
    def _not_the_head(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if "lm_head" in targets:
            raise ValueError("lm_head cannot be adapted: log-probs are computed from its plain weight")
        return targets


class Model(Section):
    path: str
    """A folder in Hugging Face format, or a model's name on the hub."""
    tokenizer: str | None = None
    """Another folder or model whose tokenizer to use (a base model with its instruct tokenizer)."""
    chat_template: str | None = None
    """chatml, llama3, qwen or plain; a .jinja file; or another model's folder or name. Default: the tokenizer's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; bfloat16 has fp32 master weights in the optimiser. auto: bfloat16 on a GPU, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory for about a third more time."""
    lora: Lora | None = None
    """Train a low-rank update instead of all weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""


class SFTData(Section):
    train: Files
    """Files (.parquet, .jsonl, .json), save_to_disk folders, or names in dataset_info."""
    val: FilesOrNone = ()
    """The same, for the validation loss."""
    dataset_info: str | None = None
    """A LLaMA-Factory dataset_info.json; train and val may then be names in it."""
    max_tokens: PositiveInt = 4096
    """Longest sequence, prompt and answer together."""
    too_long: Literal["filter", "error", "cut_left", "cut_right"] = "filter"
    """What happens to longer ones: left out and counted, an error, or cut at that end."""
    train_on: Literal["all", "last"] = "all"
    """Learn every assistant turn, or only the last (for templates that hide earlier thoughts)."""

    _some_files = field_validator("train")(_names_a_file)


class SFTTrain(Section):
    rows_per_step: PositiveInt = 64
    """Rows per optimiser step: the batch size."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass. Changes memory and speed, never the gradient. A longer row goes alone."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient are skipped; more of them than this stop the run."""


class Optim(Section):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of the gradient's running mean and square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled; matrices only, never biases or norms."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients with a larger norm are scaled down to it; null for no clipping."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after the warm-up. wsd stays at the peak and falls linearly over the last decay_ratio of the steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up; or give warmup_ratio."""
    warmup_ratio: Fraction | None = None
    """The same as a share of all steps."""
    min_lr_ratio: Fraction = 0.0
    """The schedule ends at this share of lr."""
    decay_ratio: Fraction = 0.1
    """wsd only: the share of all steps over which the rate falls; at most what the warm-up leaves."""

    @model_validator(mode="after")
    def _one_warmup(self) -> "Optim":
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        return self

    @model_validator(mode="after")
    def _an_end_to_fall_to(self) -> "Optim":
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ValueError("min_lr_ratio means nothing where schedule is constant; leave it out, or choose another schedule")
        return self


class Run(Section):
    dir: str
    """The run folder: recipe, metrics, curves, checkpoints, the trained model. Started again, a run goes on from there."""
    epochs: PositiveFloat = 1.0
    """Passes over the training rows."""
    max_steps: PositiveInt | None = None
    """Stop after so many steps, if that comes first; the schedule knows of it."""
    validate_every: PositiveInt | None = None
    """Steps between validations; besides them, one before the first step and one after the last."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; the last step always makes one."""
    save_every_minutes: PositiveFloat | None = 30.0
    """A checkpoint after so many minutes without one; null for none. When a run is saved does not change its result."""
    keep_last: PositiveInt = 2
    """Checkpoints kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best validation besides those."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...], BeforeValidator(_one_or_more)] = ()
    """Where else metrics go. Keys come from the environment; wandb also works with WANDB_MODE=offline."""
    project: str = "plaudit"
    """The trackers' project or experiment."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    repeatable: bool = True
    """The same bits when run again or resumed, on a GPU too, where the kernels that are sure of it are somewhat slower."""


HARMLESS = (
    "run.dir", "run.save_every", "run.save_every_minutes", "run.keep_last", "run.keep_best", "run.trackers", "run.project",
    "train.max_skipped_steps",
)  # fmt: skip
"""Settings that cannot change the trained weights, so a resumed run may differ in them. `*` stands for anything."""
ROUNDING = ("train.tokens_per_micro_batch", "model.gradient_checkpointing", "run.validate_every", "run.device", "run.repeatable")
"""Settings that change results in the last bits at most (or when they are measured): allowed, and said."""


# Supervised fine-tuning ----------------------------------------------------------------------------------------------


class SFTRecipe(Section):
    """Supervised fine-tuning on conversations."""

    stage: Literal["sft"] = "sft"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of rows, dropout and new weights."""
    model: Model
    """What is trained."""
    data: SFTData
    """What it is trained on."""
    train: SFTTrain = SFTTrain()
    """How much at a time."""
    optim: Optim = Optim()
    """How it moves."""
    run: Run
    """Where the run lives and how long it goes."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = HARMLESS
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = ROUNDING


# Reinforcement learning ----------------------------------------------------------------------------------------------


class RLData(Section):
    train: Files
    """Files (.parquet, .jsonl, .json) of prompts: `prompt` (messages), `data_source`, `reward_model.ground_truth`, `extra_info`."""
    val: FilesOrNone = ()
    """The same, for validation."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, rendered with the chat template."""
    too_long: Literal["filter", "error", "cut_left"] = "filter"
    """What happens to longer ones: left out and counted, an error, or cut on the left."""

    _some_files = field_validator("train")(_names_a_file)


class Rollout(Section):
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
    stop: Annotated[tuple[str, ...], BeforeValidator(_any_number)] = ()
    """Strings that end a response, besides the end token. They stay in it."""
    max_sequences: PositiveInt = 256
    """Sequences sampled side by side: memory against speed."""


class Validation(Section):
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


class RewardSettings(Section):
    """What every reward has. Its kind adds its own settings (`plaudit/rewards/`)."""

    kind: str
    """Which reward: the name of its file in plaudit/rewards."""
    name: str | None = None
    """What it is called in metrics and samples; default: its kind."""
    weight: float = 1.0
    """Its share in the sum. 0: measured, not trained on."""
    malformed: float | None = None
    """Value of an answer that cannot be read (the policy's fault); default: what the kind gives itself."""
    on_failure: Literal["drop", "stop"] | float = "drop"
    """When the reward itself fails (never the policy's fault): drop the sample from training, stop the run, or give this value."""
    max_failure_rate: Fraction = 0.1
    """The run stops, with the cause, when a larger share of a step's samples fails."""

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def files(self) -> list[Path]:
        """What else its scores depend on: a run belongs to their content."""
        return []


def _of_its_kind(given: Any) -> Any:
    """An entry of `rewards:` as the class its kind names."""
    if not isinstance(given, dict):
        return given
    known, kind = plugins.kinds("rewards"), given.get("kind")
    if kind not in known:
        # pydantic's own words for this, so that a mistake in a list of sections is told like any other.
        tags = ", ".join(f"'{name}'" for name in known)
        if kind is None:
            raise PydanticCustomError("union_tag_not_found", "no kind", {"discriminator": "'kind'"})
        raise PydanticCustomError(
            "union_tag_invalid", "unknown kind", {"discriminator": "'kind'", "tag": str(kind), "expected_tags": tags}
        )
    return plugins.kind("rewards", kind).model_validate(given)


class Algorithm(Section):
    kind: Literal["grpo"] = "grpo"
    """How rewards become advantages. grpo: a sample against the mean of its group."""
    divide_by_std: bool = True
    """Divide them by the group's standard deviation (Dr.GRPO: false)."""
    loss: Literal["clipped"] = "clipped"
    """clipped: PPO's ratio, clipped."""
    clip: tuple[BelowOne, NonNegativeFloat] = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1 before it stops counting."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound of the ratio where the advantage is negative; null for none."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"  # fmt: skip
    """How token losses become one: over all tokens of an update, or first within each response. norm: by max_new_tokens."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the distance to the reference model (the model training starts from) in the loss; 0 loads no reference."""
    kl_kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Its estimate from one token: log-ratio, its absolute value, half its square, or the low-variance one."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["recomputed", "sampler"] = "recomputed"
    """What the ratio is taken against: the trainer's log-probs as the step began, or those the sampler had."""


class RLTrain(Section):
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
    def _updates_fit_into_steps(self) -> "RLTrain":
        if self.prompts_per_update is not None and self.prompts_per_update > self.prompts_per_step:
            raise ValueError(f"prompts_per_update is {self.prompts_per_update}, more than prompts_per_step {self.prompts_per_step}")
        return self


class RLOptim(Optim):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up. wsd stays at the peak and falls linearly over the last decay_ratio of the steps."""


class RLRecipe(Section):
    """Reinforcement learning against rewards."""

    stage: Literal["rl"] = "rl"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of prompts, sampling, dropout and new weights."""
    model: Model
    """What is trained."""
    data: RLData
    """What it is asked."""
    rollout: Rollout = Rollout()
    """How it is sampled."""
    validation: Validation = Validation()
    """How it is sampled when it is validated."""
    rewards: tuple[Annotated[SerializeAsAny[RewardSettings], BeforeValidator(_of_its_kind)], ...]
    """What it is paid for: a list, each with a kind."""
    algorithm: Algorithm = Algorithm()
    """How rewards become a loss."""
    train: RLTrain = RLTrain()
    """How much at a time."""
    optim: RLOptim = RLOptim()
    """How it moves."""
    run: Run
    """Where the run lives and how long it goes."""

    @field_validator("rewards")
    @classmethod
    def _names_of_their_own(cls, rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
        if not rewards:
            raise ValueError("has no reward, so there is nothing to learn from")
        labels = [reward.label for reward in rewards]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"two of them are called {twice}; give each a name of its own")
        return rewards

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        *HARMLESS, "run.validate_every", "validation.*", "rewards.*.max_failure_rate", "rewards.*.workers",
    )  # fmt: skip
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = (*ROUNDING, "rollout.max_sequences")


Recipe = SFTRecipe | RLRecipe
STAGES: dict[str, type[SFTRecipe] | type[RLRecipe]] = {"sft": SFTRecipe, "rl": RLRecipe}
