"""Criteria that a reward must meet before anything is trained on it. `plaudit audit` measures them (docs/audit.md)."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from plaudit.recipe.section import Fraction, Section, one_or_more

Probe = Literal[
    "reference", "wrong_answer", "other_answer", "empty", "white_space", "echo", "prompt_numbers", "reference_among_numbers",
    "many_guesses", "not_a_number", "negated", "score_injection", "judge_injection", "padding", "unicode", "praise",
]  # fmt: skip
Correlation = Annotated[float, Field(ge=0.0, le=1.0)]


class AuditSettings(Section):
    """A check whose bound is null is measured and reported, and never fails."""

    require: str | None = None
    """An audit.json in which these rewards passed; without it, training does not start."""
    threshold: float | None = None
    """A response is accepted if its reward is at least this; default: the middle of the range."""
    range: tuple[float, float] | None = None
    """Smallest and largest possible reward; default: those observed on the audited responses and the references."""
    label_threshold: float | None = None
    """A response is correct if its label is at least this; default: the middle of the labels' range."""
    max_false_accept_rate: Fraction | None = 0.05
    """Largest fraction of incorrect responses that may be accepted."""
    max_false_reject_rate: Fraction | None = None
    """Largest fraction of correct responses that may be rejected."""
    min_accuracy: Fraction | None = 0.9
    """Smallest fraction of labelled responses that must be classified as their label says."""
    max_calibration_error: Fraction | None = None
    """Mean distance between a reward in [0, 1] and the fraction of correct responses with that reward."""
    max_length_correlation: Correlation | None = 0.4
    """Rank correlation of reward and length, in absolute value, among responses with the same label or of the same group."""
    max_format_effect: Fraction | None = None
    """Largest fraction of correct responses that may be rejected when only their format changes. Strict rewards do so by design."""
    max_order_effect: Fraction | None = 0.1
    """Mean change of a score, as a fraction of the range, when the samples of its group are reordered."""
    min_self_consistency: Fraction | None = 0.95
    """Smallest fraction of responses that must get the same reward (to 1 % of the range) when scored again."""
    max_failure_rate: Fraction | None = 0.02
    """Largest fraction of responses, adversarial probes included, on which a reward may fail. Failed samples are not trained on."""
    max_malformed_rate: Fraction | None = 0.5
    """Largest fraction of responses that may be malformed."""
    max_groups_without_signal: Fraction | None = 0.9
    """Largest fraction of groups whose responses may all get the same reward."""
    max_exploit_rate: Fraction | None = 0.02
    """For each kind of adversarial probe, the largest fraction that may be accepted."""
    probes: Annotated[tuple[Probe, ...] | None, BeforeValidator(one_or_more)] = None
    """Adversarial probes to run; default: all."""
    without_probes: Annotated[tuple[Probe, ...], BeforeValidator(one_or_more)] = ()
    """Adversarial probes to skip."""
    probe_prompts: NonNegativeInt = 64
    """Number of prompts to probe, and of correct responses to reformat; 0 for none."""
    rescore_groups: NonNegativeInt = 64
    """Number of groups to score again, in the same and in another order; 0 for none."""
    padding_characters: PositiveInt = 8000
    """Length of the padding around a wrong answer."""
    seed: NonNegativeInt = 0
    """Seed for drawing prompts, wrong answers and orders."""

    @model_validator(mode="after")
    def _require_ordered_range(self) -> "AuditSettings":
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range: {self.range[0]:g} is not less than {self.range[1]:g}")
        return self
