"""Supervised fine-tuning: its sections and recipe."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from plaudit.recipe.section import Files, OptionalFiles, Section, require_files
from plaudit.recipe.training import (
    ANY_RESUME,
    ROUNDING,
    ClusterSettings,
    KeptLogits,
    LastBatch,
    MicroBatch,
    ModelSettings,
    OptimSettings,
    RunSettings,
)


class SFTDataSettings(Section):
    train: Files
    """Training files (.parquet, .jsonl, .json), save_to_disk folders, or names in dataset_info."""
    val: OptionalFiles = ()
    """The same, for the validation loss."""
    dataset_info: str | None = None
    """A LLaMA-Factory dataset_info.json, whose names train and val may then use."""
    max_tokens: PositiveInt = 4096
    """Longest sequence, prompt and answer together."""
    too_long: Literal["filter", "error", "cut_left", "cut_right"] = "filter"
    """What to do with longer sequences. filter: skip and count them; cut_left, cut_right: truncate that side."""
    special_tokens: Literal["text", "control"] = "text"
    """What control tokens (`<|im_end|>`) inside messages are. text: characters like any other, so that no message can end its turn
    or speak for another role. control: control tokens."""
    train_on: Literal["all", "last"] = "all"
    """Train on every assistant turn, or on the last one only (for templates that hide earlier thoughts)."""

    _require_files = field_validator("train")(require_files)


class SFTTrainSettings(Section):
    rows_per_step: PositiveInt = 64
    """Rows per optimiser step: the batch size."""
    last_batch: LastBatch = "keep"
    """What happens to the rows that are left at the end of an epoch, fewer than rows_per_step. keep: they and the first of the
    next epoch are a step; the run's last step may be short. drop: that epoch leaves them out (verl, TRL's GRPO)."""
    tokens_per_micro_batch: MicroBatch = "auto"
    """Tokens per forward pass. Affects memory and speed, never the gradient. A longer row is a micro-batch by itself. auto: on a
    GPU what should be fastest in the memory there is, up to 32,768, decided when a run starts; 16,384 on a CPU."""
    keep_logits: KeptLogits = "auto"
    """Keep a micro-batch's logits for the backward pass instead of computing them twice: 4 bytes × vocabulary for each token that
    is trained on, to save a product. The same bits either way. auto: on a GPU, if there is memory for them."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient are skipped; more of them than this stop the run."""


class SFTRecipe(Section):
    """Supervised fine-tuning on conversations."""

    stage: Literal["sft"] = "sft"
    """The command this recipe is for."""
    seed: NonNegativeInt = 0
    """Seed of the row order, dropout and new weights."""
    model: ModelSettings
    """The model to train."""
    data: SFTDataSettings
    """Training and validation data."""
    train: SFTTrainSettings = SFTTrainSettings()
    """Batch sizes."""
    optim: OptimSettings = OptimSettings()
    """Optimiser and learning-rate schedule."""
    run: RunSettings
    """Run folder, length, validation and checkpoints."""
    cluster: ClusterSettings = ClusterSettings()
    """GPUs and how they share the work."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = ANY_RESUME
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = ROUNDING
