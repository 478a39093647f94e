"""Soft pairwise accuracy of systems: does a reward tell systems apart as surely as the reference scores do?

Each interval takes SYSTEM_RESAMPLES resamples of the segments, fewer than those of other figures: every one needs permutation tests
of all pairs of systems. A resample repeats segments, which makes p-values more extreme: intervals reach further down than up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from plaudit.evaluation.compared import compared, difference_name
from plaudit.statistics.figures import Resampling, estimate_all
from plaudit.statistics.intervals import Estimate
from plaudit.statistics.ranking import soft_pairwise_accuracy

SYSTEM_RESAMPLES = 200


@dataclass(frozen=True)
class SystemScores:
    """Scores of segments (S) by system (K); NaN where a system has no candidate, or the reward no score."""

    human_SK: np.ndarray
    metrics: Mapping[str, Sequence[np.ndarray]]
    """Of each reward one table [S, K] per run."""

    def estimate(self, prompts: np.ndarray, resampling: Resampling) -> dict[str, Estimate]:
        """Of each reward, and of each difference, on the segments that both have scores for. `prompts`: the number of each
        segment's, from 0."""
        known = {name: self._known(name) for name in self.metrics}
        pairs = {difference_name(a, b): (a, b) for a, b in compared(list(self.metrics))}
        common = {name: known[a] & known[b] for name, (a, b) in pairs.items()}

        def statistic(weights_BS: np.ndarray) -> dict[str, np.ndarray]:
            found = {name: self._accuracy(name, weights_BS * kept_S) for name, kept_S in known.items()}

            def on_common(name: str, kept_S: np.ndarray) -> np.ndarray:
                return found[name] if np.array_equal(kept_S, known[name]) else self._accuracy(name, weights_BS * kept_S)

            differences = {name: on_common(a, common[name]) - on_common(b, common[name]) for name, (a, b) in pairs.items()}
            return found | differences

        counts = {name: int(kept_S.sum()) for name, kept_S in (known | common).items()}
        fewer = replace(resampling, resamples=min(resampling.resamples, SYSTEM_RESAMPLES))
        return {name: one for name, one in estimate_all(statistic, counts, prompts, fewer).items() if counts[name]}

    def _known(self, name: str) -> np.ndarray:
        """Segments with scores in some run."""
        return np.any([~np.isnan(metric_SK).all(axis=1) for metric_SK in self.metrics[name]], axis=0)

    def _accuracy(self, name: str, counts_BS: np.ndarray) -> np.ndarray:
        """The mean over runs, for each resample."""
        by_run = [
            [soft_pairwise_accuracy(self.human_SK, metric_SK, weights=counts_S) for counts_S in counts_BS]
            for metric_SK in self.metrics[name]
        ]
        return np.mean(by_run, axis=0)


def by_system(systems: Sequence[Sequence[str]], scores: Sequence[np.ndarray]) -> np.ndarray:
    """Scores of segments, in the order of their systems → a table [segments, systems]."""
    column = {system: k for k, system in enumerate(dict.fromkeys(name for names in systems for name in names))}
    table = np.full((len(systems), len(column)), np.nan)
    for s, (names, own) in enumerate(zip(systems, scores, strict=True)):
        table[s, [column[name] for name in names]] = own
    return table
