"""Every setting a recipe may have, with what it means: one class per section, one recipe class per stage.

`plaudit config R.yaml --explain` prints these descriptions; `plaudit.config` reads the files. Nothing here imports torch:
a wrong recipe is told in well under a second.
"""

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
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails


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

    @field_validator("train")
    @classmethod
    def _some_files(cls, train: tuple[str, ...]) -> tuple[str, ...]:
        if not train:
            raise ValueError("names no file")
        return train


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

    RESUME_MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {
            "run.dir", "run.save_every", "run.save_every_minutes", "run.keep_last", "run.keep_best", "run.trackers", "run.project",
            "train.max_skipped_steps",
        }
    )  # fmt: skip
    """Settings that cannot change the trained weights, so a resumed run may differ in them."""
    RESUME_CHANGES_ROUNDING: ClassVar[frozenset[str]] = frozenset(
        {"train.tokens_per_micro_batch", "model.gradient_checkpointing", "run.validate_every", "run.device", "run.repeatable"}
    )
    """Settings that change results in the last bits at most (or when they are measured): allowed, and said."""


Recipe = SFTRecipe
STAGES: dict[str, type[Recipe]] = {"sft": SFTRecipe}
