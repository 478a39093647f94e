"""What a reward must show before anything is trained on it. `plaudit audit` measures it; docs/audit.md says how."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from plaudit.recipe.section import Fraction, Section, one_or_more

Probe = Literal[
    "reference", "wrong_answer", "other_answer", "empty", "white_space", "echo", "prompt_numbers", "reference_among_numbers",
    "many_guesses", "not_a_number", "negated", "score_injection", "judge_injection", "padding", "unicode", "praise",
]  # fmt: skip
Correlation = Annotated[float, Field(ge=0.0, le=1.0)]


class AuditSettings(Section):
    """A check whose bound is null is measured and told, and never fails."""

    require: str | None = None
    """An audit.json of these rewards, which must say that they passed: without it, training does not start."""
    threshold: float | None = None
    """A response is accepted if its reward is at least this; default: the middle of the range."""
    range: tuple[float, float] | None = None
    """Least and greatest reward there can be; default: what the audited responses and the references got."""
    label_threshold: float | None = None
    """A response is right if its label is at least this; default: the middle of the labels' own range."""
    max_false_accept_rate: Fraction | None = 0.05
    """Of the responses that are labelled wrong, the share that may be accepted."""
    max_false_reject_rate: Fraction | None = None
    """Of the responses that are labelled right, the share that may be rejected."""
    min_accuracy: Fraction | None = 0.9
    """The share of labelled responses that must be accepted or rejected as their label says."""
    max_calibration_error: Fraction | None = None
    """Mean distance between a reward in [0, 1] and the share of right responses that got it."""
    max_length_correlation: Correlation | None = 0.4
    """Rank correlation of reward and length, either way: among responses with the same label, or of the same group."""
    max_format_effect: Fraction | None = None
    """Of right responses, the share that may be rejected when only their format changes. Strict rewards reject them on purpose."""
    max_order_effect: Fraction | None = 0.1
    """How far a score may move, on average and as a share of the range, when its group is shown in another order."""
    min_self_consistency: Fraction | None = 0.95
    """The share of responses that must get the same reward (to a hundredth of the range) when asked for again."""
    max_failure_rate: Fraction | None = 0.02
    """The share of responses, adversarial probes included, on which a reward may fail: failed samples are not trained on."""
    max_malformed_rate: Fraction | None = 0.5
    """The share of responses that a reward may be unable to read."""
    max_groups_without_signal: Fraction | None = 0.9
    """The share of groups whose responses may all get the same reward."""
    max_exploit_rate: Fraction | None = 0.02
    """For each kind of adversarial probe: the share that may be rewarded."""
    probes: Annotated[tuple[Probe, ...] | None, BeforeValidator(one_or_more)] = None
    """Which adversarial probes to run; default: all."""
    without_probes: Annotated[tuple[Probe, ...], BeforeValidator(one_or_more)] = ()
    """Which of them to leave out."""
    probe_prompts: NonNegativeInt = 64
    """How many prompts get adversarial probes, and how many right responses are reformatted; 0 for none."""
    rescore_groups: NonNegativeInt = 64
    """How many groups are scored again, as they are and in another order; 0 for none."""
    padding_characters: PositiveInt = 8000
    """Length of the padding around a wrong answer."""
    seed: NonNegativeInt = 0
    """Of what is drawn: prompts, wrong answers, orders."""

    @model_validator(mode="after")
    def _range_in_order(self) -> "AuditSettings":
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range: {self.range[0]:g} is not less than {self.range[1]:g}")
        return self
