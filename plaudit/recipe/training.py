"""Sections that all training stages share: the model, the optimiser, the run."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from plaudit.recipe.section import BelowOne, Fraction, Section, one_or_more


def _require_layers(value: Any) -> Any:
    valid = isinstance(value, bool) or value == "auto" or (isinstance(value, int) and value > 0)
    if not valid:  # (pydantic's message for a union names its first member only)
        raise ValueError(f"should be true, false, auto or a number of layers, not {json.dumps(value)}")
    return value


def _require_tokens(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"should be a number of tokens, or auto, not {json.dumps(value)}")
    return value


def _require_switch(value: Any) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"should be true, false or auto, not {json.dumps(value)}")
    return value


def _require_count(value: Any) -> Any:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"should be a number of GPUs, or all, not {json.dumps(value)}")
    return value


def _require_number_or_all(value: Any) -> Any:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"should be a number of checkpoints, or all, not {json.dumps(value)}")
    return value


def _require_number_of_steps(value: Any) -> Any:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"should be a number of steps, or all, not {json.dumps(value)}")
    return value


Checkpointing = Annotated[bool | PositiveInt | Literal["auto"], BeforeValidator(_require_layers)]
KeptLogits = Annotated[bool | Literal["auto"], BeforeValidator(_require_switch)]
MicroBatch = Annotated[PositiveInt | Literal["auto"], BeforeValidator(_require_tokens)]
Placement = Literal["resident", "offload"]
LastBatch = Literal["keep", "drop"]


USUAL_MICRO_BATCH = 16384
"""Tokens: what `auto` stands for on a CPU."""


def micro_batch_tokens(setting: int | Literal["auto"]) -> int:
    """Tokens per micro-batch. `auto` is resolved before training (train/auto.py)."""
    return USUAL_MICRO_BATCH if setting == "auto" else setting


class LoraSettings(Section):
    rank: PositiveInt = 16
    """Rank of the update."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on the adapter's input."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the modules to adapt. all-linear: every linear layer except the output head."""
    merge_on_save: bool = True
    """Save full models with the update merged in; if false, only the adapter, which plaudit reads like any other model."""

    base_bits: Literal[4, 8] | None = None
    """8 (int8) or 4 (NF4): bits per weight of the frozen linear layers (QLoRA), for models that do not fit otherwise. Passes
    take more time. null: as in model.dtype, which embeddings, norms and head always are."""

    @model_validator(mode="after")
    def _require_merged_weights(self) -> "LoraSettings":
        if self.base_bits is not None and self.dropout:
            raise ValueError("base_bits merges the adapters into the weights of every product, which dropout rules out: remove one")
        return self

    def refuse_liger(self, liger: bool) -> None:
        if liger and self.base_bits is not None:
            raise ValueError("liger replaces the layers that compute with lora.base_bits: remove liger, which saves no more memory")

    @field_validator("targets")
    @classmethod
    def _refuse_output_head(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if "lm_head" in targets:
            raise ValueError("lm_head cannot be adapted: log-probs are computed from its plain weight")
        return targets


class ModelSettings(Section):
    path: str
    """A folder in Hugging Face format, or a model name on the hub. A LoRA adapter's folder stands for its base with the adapter
    merged in; with `lora`, a new update of that is trained."""
    tokenizer: str | None = None
    """Another folder or model to take the tokenizer from (a base model with its instruct tokenizer)."""
    chat_template: str | None = None
    """chatml, llama3, qwen or plain; a .jinja file; or another model's folder or name. Default: the tokenizer's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations. With bfloat16 the optimiser keeps fp32 master weights. auto: bfloat16 on a GPU, else float32."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations in the backward pass: much less memory for up to a third more time. true: all layers; a number: the
    first n layers; auto: as few layers as needed for the largest micro-batch to fit in device memory."""
    liger: bool = False
    """Use Liger's kernels for norms and MLPs, which save fewer activations than the plain modules. They replace plaudit's own fused
    layers, which save as much and are faster (docs/memory.md). Needs liger-kernel and a GPU."""
    lora: LoraSettings | None = None
    """Train a low-rank update instead of all weights."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Leave it off unless you have read that code."""

    @model_validator(mode="after")
    def _require_own_layers(self) -> "ModelSettings":
        (self.lora or LoraSettings()).refuse_liger(self.liger)
        return self


class ReferenceSettings(Section):
    path: str | None = None
    """Another model to use as the reference, with the policy's tokenizer. Default: model.path, as it is before training."""


class OptimSettings(Section):
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the gradient's running mean and mean square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only (never on biases or norms)."""
    placement: Placement = "resident"
    """Where AdamW's moments and fp32 master weights live. offload: in host memory, streamed through the GPU in every update, with
    the same results. No difference on a CPU."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Scale gradients down to this norm; null for no clipping."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then a linear decay over the last decay_ratio of all steps."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up; alternatively, set warmup_ratio."""
    warmup_ratio: Fraction | None = None
    """Warm-up as a fraction of all steps."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a fraction of lr."""
    decay_ratio: Fraction = 0.1
    """wsd only: fraction of all steps over which the rate decays; at most what the warm-up leaves."""

    @model_validator(mode="after")
    def _require_one_warmup(self) -> "OptimSettings":
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("set warmup_steps or warmup_ratio, not both")
        return self

    def ineffective_settings(self) -> dict[str, str]:
        ineffective = {}
        if self.schedule == "constant":
            ineffective["min_lr_ratio"] = "schedule constant does not decay"
        if self.schedule != "wsd":
            ineffective["decay_ratio"] = f"it applies to schedule wsd, not {self.schedule}"
        return ineffective


class RunSettings(Section):
    dir: str
    """The run folder: recipe, metrics, curves, checkpoints, the trained model. The same command resumes a run that stopped."""
    epochs: PositiveFloat = 1.0
    """Passes over the training rows."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps, if that comes before the last epoch ends; the schedule takes it into account."""
    validate_every: PositiveInt | None = None
    """Steps between validations, in addition to one before the first step and one after the last."""
    validate_first: bool = True
    """Validate before the first step: where the curve starts."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; the last step always saves one."""
    save_every_minutes: PositiveFloat | None = 30.0
    """Also save a checkpoint when the last one is this old; null for never. Does not affect the result."""
    save_in_background: bool = True
    """Write checkpoints while training continues, from a copy in host memory; if there is not enough of it, training waits. Does
    not affect the result."""
    keep_last: Annotated[PositiveInt | Literal["all"], BeforeValidator(_require_number_or_all)] = 2
    """Number of recent checkpoints to keep. all: none is deleted, also none of save_every_minutes."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation result."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab"], ...], BeforeValidator(one_or_more)] = ()
    """Where else to log metrics. API keys come from the environment; wandb also works with WANDB_MODE=offline."""
    project: str = "plaudit"
    """Project or experiment name for the trackers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    deterministic: bool = True
    """Bitwise the same results when repeated or resumed, also on a GPU, where deterministic kernels are slightly slower."""


class RLRunSettings(RunSettings):
    keep_samples: Annotated[PositiveInt | Literal["all"], BeforeValidator(_require_number_of_steps)] = "all"
    """Steps whose training samples stay in samples/: half of them the newest ones, the others spread over the run. all: every step.
    Those of validations stay."""
    keep_tokens: NonNegativeInt = 0
    """Groups of each step whose samples are written token by token too, for `plaudit view`: text, log-prob, advantage, and where
    known entropy, the mismatch of sampler and trainer, and the KL from the reference."""


class ClusterSettings(Section):
    gpus: Annotated[PositiveInt | Literal["all"], BeforeValidator(_require_count)] = 1
    """GPUs of each machine to train on, with a process for each; all: every one. On a CPU: processes. Several compute what one
    would, up to the order of additions."""
    nodes: PositiveInt = 1
    """Machines to train on. Two or more: of a Ray cluster."""
    address: str = "auto"
    """Of the Ray cluster (HOST:PORT). auto: RAY_ADDRESS, or the one that this machine belongs to, or one that is started here and
    that the other machines join. Without effect for one machine."""
    sharding: Literal["auto", "none", "optimiser", "full"] = "auto"
    """What the processes divide among themselves. none: nothing. optimiser: AdamW's moments and fp32 master weights. full: the
    weights too (FSDP). auto: optimiser if that fits into a GPU's memory, else full."""
    timeout_s: PositiveFloat = 600.0
    """Stop all processes when one has made no progress for this long. Also how long missing machines are waited for."""
    restarts: NonNegativeInt = 3
    """How often all processes are started again, from the newest checkpoint, after one of them was lost: killed, silent for
    timeout_s, out of memory, or a server of its own gone. 0: never. Not with one process, nor under torchrun and srun."""


ANY_RESUME = (
    "run.dir", "run.validate_first", "run.save_every", "run.save_every_minutes", "run.save_in_background", "run.keep_last",
    "run.keep_best", "run.trackers", "run.project", "train.max_skipped_steps", "train.keep_logits", "optim.placement", "cluster.*",
)  # fmt: skip
"""Settings that cannot change the trained weights, so a resumed run may change them. `*` matches anything. (How many processes
there are, and what they divide, changes rounding: a run records and reports what it finds, which may not be in the recipe.)"""
ROUNDING = (
    "train.tokens_per_micro_batch", "model.gradient_checkpointing", "model.liger", "run.validate_every",
    "run.device", "run.deterministic",
)  # fmt: skip
"""Settings that change results at most by rounding (or only when they are measured): allowed on resume, and reported."""
