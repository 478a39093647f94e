"""Stages that learn from pairs, of which one answer is better: DPO and reward models. Their sections and recipes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from plaudit.recipe.section import Files, FilesOrNone, Section, names_a_file
from plaudit.recipe.training import HARMLESS, ROUNDING, ModelSettings, OptimSettings, RunSettings


class PairDataSettings(Section):
    train: Files
    """Files (.parquet, .jsonl, .json), save_to_disk folders, or names in dataset_info. Rows have `chosen` and `rejected`: whole
    conversations, or answers to `prompt`."""
    val: FilesOrNone = ()
    """The same, for validation."""
    dataset_info: str | None = None
    """A LLaMA-Factory dataset_info.json; train and val may then be names in it, of entries with `ranking`."""
    max_tokens: PositiveInt = 4096
    """Longest sequence, prompt and answer together; of a pair, the longer one counts."""
    too_long: Literal["filter", "error", "cut_left", "cut_right"] = "filter"
    """What happens to longer ones: left out and counted, an error, or both of the pair cut at that end."""
    equal: Literal["error", "filter"] = "error"
    """What happens to rows whose chosen and rejected are the same: an error, or left out and counted."""

    _some_files = field_validator("train")(names_a_file)


class RewardModelDataSettings(PairDataSettings):
    margin_column: str | None = None
    """A column of numbers: by how much the chosen answer's score should at least exceed the other's."""


class PairTrainSettings(Section):
    pairs_per_step: PositiveInt = 64
    """Pairs per optimiser step: the batch size."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Tokens per forward pass, of both answers. Changes memory and speed, never the gradient. A longer pair goes alone."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient are skipped; more of them than this stop the run."""


class DPOLossSettings(Section):
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: the log-ratios' difference per token is drawn to 1 / (2 beta). hinge: SLiC."""
    beta: PositiveFloat = 0.1
    """How closely the policy is held to the reference: the implicit reward is beta times the log-ratio of the two."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid only: the share of pairs thought to be labelled the wrong way round (cDPO)."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Times the chosen answers' mean loss per token (SFT's), added to the loss."""
    reference: str | None = None
    """Another model to measure log-ratios against, with the same tokenizer. Default: model.path, as training begins."""

    def idle(self) -> dict[str, str]:
        return {} if self.kind == "sigmoid" else {"label_smoothing": f"belongs to kind sigmoid; {self.kind} has none"}


class RewardModelLossSettings(Section):
    centring_coefficient: NonNegativeFloat = 0.0
    """Times the mean of (chosen + rejected)², added to the loss: holds scores near zero, which pairs alone leave open."""


class DPORecipe(Section):
    """Direct preference optimisation on pairs of answers."""

    stage: Literal["dpo"] = "dpo"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of pairs, dropout and new weights."""
    model: ModelSettings
    """What is trained."""
    data: PairDataSettings
    """What it is trained on."""
    loss: DPOLossSettings = DPOLossSettings()
    """What it is drawn to."""
    train: PairTrainSettings = PairTrainSettings()
    """How much at a time."""
    optim: OptimSettings = OptimSettings(lr=1e-6)
    """How it moves."""
    run: RunSettings
    """Where the run lives and how long it goes."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = HARMLESS
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = ROUNDING


class RewardModelRecipe(Section):
    """A Bradley–Terry reward model from pairs of answers."""

    stage: Literal["reward-model"] = "reward-model"
    """Which verb this recipe is for."""
    seed: NonNegativeInt = 0
    """Of the order of pairs, dropout and new weights."""
    model: ModelSettings
    """What is trained: a causal model, which gets a new head, or a reward model, which goes on with its own."""
    data: RewardModelDataSettings
    """What it is trained on."""
    loss: RewardModelLossSettings = RewardModelLossSettings()
    """What it is drawn to."""
    train: PairTrainSettings = PairTrainSettings()
    """How much at a time."""
    optim: OptimSettings = OptimSettings()
    """How it moves."""
    run: RunSettings
    """Where the run lives and how long it goes."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = HARMLESS
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = ROUNDING
