"""Sections that all stages share: the model, how it moves, where the run lives."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from plaudit.recipe.section import BelowOne, Fraction, Section, one_or_more


def _layers(value: Any) -> Any:
    known = isinstance(value, bool) or value == "auto" or (isinstance(value, int) and value > 0)
    if not known:  # (a union's own message names its first kind alone)
        raise ValueError(f"should be true, false, auto or a number of layers, not {json.dumps(value)}")
    return value


Checkpointing = Annotated[bool | PositiveInt | Literal["auto"], BeforeValidator(_layers)]
Placement = Literal["resident", "offload"]


class LoraSettings(Section):
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


class ModelSettings(Section):
    path: str
    """A folder in Hugging Face format, or a model's name on the hub."""
    tokenizer: str | None = None
    """Another folder or model whose tokenizer to use (a base model with its instruct tokenizer)."""
    chat_template: str | None = None
    """chatml, llama3, qwen or plain; a .jinja file; or another model's folder or name. Default: the tokenizer's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; bfloat16 has fp32 master weights in the optimiser. auto: bfloat16 on a GPU, else float32."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations in the backward pass, which saves much memory for up to a third more time: of all layers, of so many
    first ones, or (auto) of as few as leave the largest micro-batch room in the device's memory."""
    liger: bool = False
    """Compute norms and MLPs with Liger's kernels, which keep less for the backward pass than modules do (plaudit's own fused
    layers, of which they take the place, keep as little and are faster: docs/memory.md). Needs liger-kernel and a GPU."""
    lora: LoraSettings | None = None
    """Train a low-rank update instead of all weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""


class OptimSettings(Section):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay of the gradient's running mean and square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled; matrices only, never biases or norms."""
    offload: bool = False
    """AdamW's moments and fp32 master weights live in the host's memory and pass through the GPU in every update. The numbers are
    the same. On a CPU it changes nothing."""
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
    def _one_warmup(self) -> "OptimSettings":
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give warmup_steps or warmup_ratio, not both")
        return self

    def idle(self) -> dict[str, str]:
        idle = {}
        if self.schedule == "constant":
            idle["min_lr_ratio"] = "is where the rate falls to, and schedule constant does not fall"
        if self.schedule != "wsd":
            idle["decay_ratio"] = f"is for schedule wsd, not {self.schedule}"
        return idle


class RunSettings(Section):
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
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...], BeforeValidator(one_or_more)] = ()
    """Where else metrics go. Keys come from the environment; wandb also works with WANDB_MODE=offline."""
    project: str = "plaudit"
    """The trackers' project or experiment."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    deterministic: bool = True
    """The same bits when run again or resumed, on a GPU too, where the kernels that are sure of it are somewhat slower."""


HARMLESS = (
    "run.dir", "run.save_every", "run.save_every_minutes", "run.keep_last", "run.keep_best", "run.trackers", "run.project",
    "train.max_skipped_steps", "optim.offload",
)  # fmt: skip
"""Settings that cannot change the trained weights, so a resumed run may differ in them. `*` stands for anything."""
ROUNDING = (
    "train.tokens_per_micro_batch", "model.gradient_checkpointing", "model.liger", "run.validate_every", "run.device",
    "run.deterministic",
)  # fmt: skip
"""Settings that change results in the last bits at most (or when they are measured): allowed, and said."""
