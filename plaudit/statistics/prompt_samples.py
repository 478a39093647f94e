"""The samples of one prompt, and what k of them are worth: pass@k, majority vote, best of k."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from plaudit.statistics.best_of import best_of_k, majority_at_k, pass_at_k


@dataclass(frozen=True)
class PromptSamples:
    """Samples without a value are left out: figures are those of the others, and NaN if there are fewer than k."""

    values: np.ndarray
    """By the reward that counts; NaN where it failed."""
    answers: Sequence[Hashable | None]
    """None where a sample has none."""
    threshold: float
    """A sample passes if its value is at least this."""

    @property
    def mean(self) -> float:
        known = self.values[~np.isnan(self.values)]
        return float(known.mean()) if len(known) else np.nan

    def pass_at(self, k: int) -> float:
        known = self.values[~np.isnan(self.values)]
        return float(pass_at_k(len(known), int((known >= self.threshold).sum()), k))

    def majority_at(self, k: int) -> float:
        known = [
            (answer, float(value >= self.threshold))
            for answer, value in zip(self.answers, self.values, strict=True)
            if not np.isnan(value)
        ]
        return majority_at_k([answer for answer, _ in known], [passes for _, passes in known], k)

    def best_of(self, k: int, proxy: np.ndarray | None = None) -> float:
        """The value of the best of k by `proxy`, or by the value itself."""
        return best_of_k(self.values if proxy is None else proxy, self.values, k)
