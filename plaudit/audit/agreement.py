"""Agreement of rewards with labels.

A response is accepted if its reward is at least the threshold, and right if it is labelled right.

    accuracy               (true accepts + true rejects) / all
    false accept rate      false accepts / (false accepts + true rejects): share of wrong responses that are accepted
    false reject rate      false rejects / (false rejects + true accepts): share of right responses that are rejected
    calibration error      Σ_b (n_b / n) · |mean reward in bin b − share of right responses in bin b|, over ten equal bins of [0, 1]
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from plaudit.audit.correlation import spearman
from plaudit.statistics.ranking import kendall_tau_b

BINS = 10


def accept_table(rewards: Sequence[float], right: Sequence[bool], threshold: float) -> dict[str, Any]:
    """Counts and rates; None where a rate has no cases."""
    cells = {(accepted, truth): 0 for accepted in (True, False) for truth in (True, False)}
    for reward, truth in zip(rewards, right, strict=True):
        cells[reward >= threshold, truth] += 1
    true_accepts, false_accepts = cells[True, True], cells[True, False]
    false_rejects, true_rejects = cells[False, True], cells[False, False]
    return {
        "true_accepts": true_accepts,
        "false_accepts": false_accepts,
        "false_rejects": false_rejects,
        "true_rejects": true_rejects,
        "accuracy": share(true_accepts + true_rejects, len(rewards)),
        "false_accept_rate": share(false_accepts, false_accepts + true_rejects),
        "false_reject_rate": share(false_rejects, false_rejects + true_accepts),
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
