"""What an evaluation of the rewards must have shown before anything is trained on them. `plaudit eval` measures it."""

from typing import Literal

from pydantic import model_validator

from plaudit.recipe.section import Fraction, Section


class EvalSettings(Section):
    """Bounds on figures of an eval.json."""

    require: str | None = None
    """An eval.json that covers these rewards and is within the bounds; without it, training does not start."""
    at_least: dict[str, float] = {}  # noqa: RUF012 (pydantic copies it)
    """Smallest values: {accuracy: 0.7} for all of the data, {"LLMBar/natural: accuracy": 0.9} for a part of it."""
    at_most: dict[str, float] = {}  # noqa: RUF012
    """Largest values: {false_accept_rate: 0.05}."""
    by: Literal["value", "interval"] = "value"
    """What is compared with the bounds: the figure, or the end of its interval on the bad side."""
    max_failure_rate: Fraction = 0.02
    """Largest fraction of items without a value."""

    @model_validator(mode="after")
    def _require_file(self) -> "EvalSettings":
        if self.require is None and (self.at_least or self.at_most):
            raise ValueError("at_least and at_most are bounds on an evaluation: name its eval.json with require")
        return self
