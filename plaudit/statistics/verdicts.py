"""Verdicts on answers that are known to be right or wrong.

An answer is accepted if its reward is at least the threshold. Of each answer, NaN where a figure does not apply, so that means are:

    accuracy             share of answers that are accepted and right, or rejected and wrong
    false_accept_rate    share of the wrong answers that are accepted
    false_reject_rate    share of the right answers that are rejected
    accepted             share of all answers that are accepted
"""

import numpy as np


def verdict_figures(rewards: np.ndarray, right: np.ndarray, threshold: float) -> dict[str, np.ndarray]:
    """Figures of each answer; all are NaN where its reward is."""
    rewards, right = np.asarray(rewards, dtype=np.float64), np.asarray(right, dtype=bool)
    accepted = np.where(np.isnan(rewards), np.nan, rewards >= threshold)
    return {
        "accuracy": np.where(right, accepted, 1 - accepted),
        "false_accept_rate": np.where(right, np.nan, accepted),
        "false_reject_rate": np.where(right, 1 - accepted, np.nan),
        "accepted": accepted,
    }
