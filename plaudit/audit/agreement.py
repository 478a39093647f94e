"""Agreement of rewards with labels.

A response is accepted if its reward is at least the threshold, and right if it is labelled right.

    accuracy, false accept rate, false reject rate      as in plaudit/statistics/verdicts.py
    calibration error      Σ_b (n_b / n) · |mean reward in bin b − share of right responses in bin b|, over ten equal bins of [0, 1]
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plaudit.audit.correlation import spearman
from plaudit.statistics.ranking import kendall_tau_b
from plaudit.statistics.verdicts import verdict_figures

BINS = 10


def accept_table(rewards: Sequence[float], right: Sequence[bool], threshold: float) -> dict[str, Any]:
    """Counts and rates; None where a rate has no cases."""
    truth = np.asarray(right, dtype=bool)
    figures = verdict_figures(np.asarray(rewards, dtype=np.float64), truth, threshold)
    false_accepts, false_rejects = (int(np.nansum(figures[name])) for name in ("false_accept_rate", "false_reject_rate"))
    wrong_answers, right_answers = int((~truth).sum()), int(truth.sum())
    return {
        "true_accepts": right_answers - false_rejects,
        "false_accepts": false_accepts,
        "false_rejects": false_rejects,
        "true_rejects": wrong_answers - false_accepts,
        "accuracy": share(float(np.nansum(figures["accuracy"])), len(rewards)),
        "false_accept_rate": share(false_accepts, wrong_answers),
        "false_reject_rate": share(false_rejects, right_answers),
    }


def reliability(rewards: Sequence[float], right: Sequence[bool]) -> dict[str, Any] | None:
    """Bins and calibration error; None unless all rewards are in [0, 1] and can be read as probabilities."""
    if not rewards or min(rewards) < 0.0 or max(rewards) > 1.0:
        return None
    members: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for reward, truth in zip(rewards, right, strict=True):
        members[min(int(reward * BINS), BINS - 1)].append((reward, truth))
    bins = [
        {
            "from": b / BINS,
            "count": len(inside),
            "mean_reward": sum(reward for reward, _ in inside) / len(inside),
            "share_right": sum(truth for _, truth in inside) / len(inside),
        }
        for b, inside in enumerate(members)
        if inside
    ]
    error = sum(b["count"] * abs(b["mean_reward"] - b["share_right"]) for b in bins) / len(rewards)
    return {"bins": bins, "calibration_error": error}


def rank_agreement(rewards: Sequence[float], labels: Sequence[float]) -> dict[str, Any]:
    """Rank correlations with the labels; None where rewards or labels do not vary."""
    tau_b = kendall_tau_b(np.asarray(rewards), np.asarray(labels))
    return {"spearman": spearman(rewards, labels), "kendall": None if math.isnan(tau_b) else tau_b}


def share(count: float, total: int) -> float | None:
    return count / total if total else None
