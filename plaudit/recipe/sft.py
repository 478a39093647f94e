"""Supervised fine-tuning: its sections and its recipe."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from plaudit.recipe.section import Files, FilesOrNone, Section, names_a_file
from plaudit.recipe.training import HARMLESS, ROUNDING, ModelSettings, OptimSettings, RunSettings


class SFTDataSettings(Section):
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

    _some_files = field_validator("train")(names_a_file)


class SFTTrainSettings(Section):
    rows_per_step: PositiveInt = 64
    """Rows per optimiser step: the batch size."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass. Changes memory and speed, never the gradient. A longer row goes alone."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient are skipped; more of them than this stop the run."""


class SFTRecipe(Section):
    """Supervised fine-tuning on conversations."""

    stage: Literal["sft"] = "sft"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of rows, dropout and new weights."""
    model: ModelSettings
    """What is trained."""
    data: SFTDataSettings
    """What it is trained on."""
    train: SFTTrainSettings = SFTTrainSettings()
    """How much at a time."""
    optim: OptimSettings = OptimSettings()
    """How it moves."""
    run: RunSettings
    """Where the run lives and how long it goes."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = HARMLESS
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = ROUNDING
