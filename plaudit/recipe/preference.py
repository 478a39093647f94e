"""Stages that train on preference pairs, DPO and reward models: their sections and recipes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

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
    ReferenceSettings,
    RunSettings,
)


class PairDataSettings(Section):
    train: Files
    """Training files (.parquet, .jsonl, .json), save_to_disk folders, or names in dataset_info. Rows have `chosen` and `rejected`:
    full conversations, or answers to `prompt`."""
    val: OptionalFiles = ()
    """The same, for validation."""
    dataset_info: str | None = None
    """A LLaMA-Factory dataset_info.json, whose names train and val may then use (entries with `ranking`)."""
    max_tokens: PositiveInt = 4096
    """Longest sequence, prompt and answer together; the longer of the pair counts."""
    too_long: Literal["filter", "error", "cut_left", "cut_right"] = "filter"
    """What to do with longer pairs. filter: skip and count them; cut_left, cut_right: truncate that side of both sequences."""
    special_tokens: Literal["text", "control"] = "text"
    """What control tokens (`<|im_end|>`) inside messages are. text: characters like any other, so that no message can end its turn
    or speak for another role. control: control tokens."""
    equal: Literal["error", "filter"] = "error"
    """What to do with rows whose chosen and rejected are the same. filter: skip and count them."""

    _require_files = field_validator("train")(require_files)


class RewardModelDataSettings(PairDataSettings):
    margin_column: str | None = None
    """A numeric column: the margin by which the chosen answer's score should exceed the other's."""


class PairTrainSettings(Section):
    pairs_per_step: PositiveInt = 64
    """Pairs per optimiser step: the batch size."""
    last_batch: LastBatch = "keep"
    """What happens to the pairs that are left at the end of an epoch, fewer than pairs_per_step. keep: they and the first of the
    next epoch are a step; the run's last step may be short. drop: that epoch leaves them out (verl, TRL's GRPO)."""
    tokens_per_micro_batch: MicroBatch = "auto"
    """Tokens per forward pass, both answers included. Affects memory and speed, never the gradient. A longer pair is a micro-batch
    by itself. auto: on a GPU what should be fastest in the memory there is, up to 32,768, decided when a run starts; 16,384 on a
    CPU."""
    share_prompts: bool = True
    """Compute the tokens with which both answers of a pair begin once, instead of twice. The same scores and gradients (up to the
    order of sums) in less time; off, for comparison."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient are skipped; more of them than this stop the run."""


class DPOTrainSettings(PairTrainSettings):
    keep_logits: KeptLogits = "auto"
    """Keep a micro-batch's logits for the backward pass instead of computing them twice: 4 bytes × vocabulary for each token that
    is trained on, to save a product. The same bits either way. auto: on a GPU, if there is memory for them."""


class DPOLossSettings(Section):
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO. ipo: regress the difference of per-token log-ratios to 1 / (2 beta). hinge: SLiC."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference: the implicit reward is beta times the log-ratio to it."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """sigmoid only: assumed fraction of pairs with swapped labels (cDPO)."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Weight of an added SFT loss: the mean negative log-likelihood per token of the chosen answers."""

    def ineffective_settings(self) -> dict[str, str]:
        return {} if self.kind == "sigmoid" else {"label_smoothing": f"it applies to kind sigmoid, not {self.kind}"}


class RewardModelLossSettings(Section):
    centring_coefficient: NonNegativeFloat = 0.0
    """Weight of an added penalty, the mean of (chosen + rejected)²: keeps scores near zero, which pairs alone leave open."""


class DPORecipe(Section):
    """Direct preference optimisation on pairs of answers."""

    stage: Literal["dpo"] = "dpo"
    """The command this recipe is for."""
    seed: NonNegativeInt = 0
    """Seed of the pair order, dropout and new weights."""
    model: ModelSettings
    """The model to train."""
    reference: ReferenceSettings = ReferenceSettings()
    """The model that log-ratios are taken against."""
    data: PairDataSettings
    """Training and validation data."""
    loss: DPOLossSettings = DPOLossSettings()
    """The preference loss."""
    train: DPOTrainSettings = DPOTrainSettings()
    """Batch sizes."""
    optim: OptimSettings = OptimSettings(lr=1e-6)
    """Optimiser and learning-rate schedule."""
    run: RunSettings
    """Run folder, length, validation and checkpoints."""
    cluster: ClusterSettings = ClusterSettings()
    """GPUs and how they share the work."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = ANY_RESUME
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = (*ROUNDING, "train.share_prompts")


class RewardModelRecipe(Section):
    """A Bradley–Terry reward model from pairs of answers."""

    stage: Literal["reward-model"] = "reward-model"
    """The command this recipe is for."""
    seed: NonNegativeInt = 0
    """Seed of the pair order, dropout and new weights."""
    model: ModelSettings
    """The model to train: a causal model, which gets a new head, or a reward model, which keeps its own."""
    data: RewardModelDataSettings
    """Training and validation data."""
    loss: RewardModelLossSettings = RewardModelLossSettings()
    """Additions to the Bradley–Terry loss."""
    train: PairTrainSettings = PairTrainSettings()
    """Batch sizes."""
    optim: OptimSettings = OptimSettings()
    """Optimiser and learning-rate schedule."""
    run: RunSettings
    """Run folder, length, validation and checkpoints."""
    cluster: ClusterSettings = ClusterSettings()
    """GPUs and how they share the work."""

    RESUME_MAY_CHANGE: ClassVar[tuple[str, ...]] = ANY_RESUME
    RESUME_CHANGES_ROUNDING: ClassVar[tuple[str, ...]] = (*ROUNDING, "train.share_prompts")
