"""Measurements of a reward on saved responses. What cannot be measured is None.

Each function reads the table of responses (`responses.py`) and only measures; `checks.py` compares with bounds.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from plaudit.audit.agreement import accept_table, rank_agreement, reliability, share
from plaudit.audit.correlation import pearson, spearman, spearman_partial, spearman_within
from plaudit.audit.responses import Response
from plaudit.recipe.audit import AuditSettings
from plaudit.types import ScoredGroup

EQUAL = 0.01
"""Two rewards count as equal if they differ by at most this share of the range."""
GRADES = 20
"""Labels with more distinct values than this are on a scale, not classes."""


def measure_scale(values: Sequence[float], settings: AuditSettings) -> dict[str, Any]:
    """Range and threshold; the threshold is None if all values are equal and the settings have none."""
    low, high = settings.range or ((min(values), max(values)) if values else (0.0, 0.0))
    middle = (low + high) / 2 if high > low else None
    return {
        "low": low,
        "high": high,
        "threshold": settings.threshold if settings.threshold is not None else middle,
        "stated": settings.threshold is not None or settings.range is not None,
    }


def measure_agreement(responses: Sequence[Response], threshold: float | None, settings: AuditSettings) -> dict[str, Any] | None:
    """Agreement with the labels; None without labels."""
    labelled = [(r.value, r.label) for r in responses if r.value is not None and r.label is not None]
    if not labelled:
        return None
    values, labels = [value for value, _ in labelled], [label for _, label in labelled]
    right = right_labels(labels, settings)
    result = {"labelled": len(labelled), "right": sum(right), **rank_agreement(values, labels)}
    if threshold is not None:
        result |= accept_table(values, right, threshold)
    return result | {"reliability": reliability(values, right)}


def right_labels(labels: Sequence[float], settings: AuditSettings) -> list[bool]:
    """Which labels mean right: at least the configured threshold, or the middle of the labels' range (true and false: 0.5)."""
    bound = settings.label_threshold
    if bound is None:
        truth_values = set(labels) <= {0.0, 1.0}
        bound = 0.5 if truth_values else (min(labels) + max(labels)) / 2
    return [label >= bound for label in labels]


def measure_length(responses: Sequence[Response], unit: str) -> dict[str, Any]:
    """Correlations of reward and length, and the mean reward by decile of length, shortest first.

    `given_label` is among responses with the same label, where a correlation with length is not explained by quality.
    """
    known = [r for r in responses if r.value is not None]
    values, lengths = [float(r.value or 0.0) for r in known], [r.length for r in known]
    return {
        "unit": unit,
        "pearson": pearson(values, lengths),
        "spearman": spearman(values, lengths),
        "within_groups": spearman_within(values, lengths, [r.group for r in known]),
        "labelled": (labelled := _mostly_labelled(known)),
        "given_label": _given_label([r for r in known if r.label is not None]) if labelled else None,
        "deciles": _deciles(values, lengths),
    }


def _mostly_labelled(responses: Sequence[Response]) -> bool:
    return 2 * sum(r.label is not None for r in responses) >= len(responses) > 0


def _given_label(labelled: Sequence[Response]) -> float | None:
    """0 if the label determines the reward: length explains nothing. None if the label determines the length: undecidable."""
    values, lengths = [float(r.value or 0.0) for r in labelled], [r.length for r in labelled]
    labels = [float(r.label or 0.0) for r in labelled]
    if len(set(labels)) <= min(GRADES, len(labels) // 2):
        if len(set(zip(labels, lengths, strict=True))) == len(set(labels)):
            return None
        return spearman_within(values, lengths, labels) or 0.0
    together = spearman(lengths, labels)
    if together is None or abs(together) > 1 - 1e-9:
        return None
    return spearman_partial(values, lengths, labels) or 0.0


def _deciles(values: Sequence[float], lengths: Sequence[float]) -> list[dict[str, float]]:
    order = sorted(range(len(values)), key=lambda i: lengths[i])
    tenths = min(10, len(order))
    bounds = [len(order) * t // tenths for t in range(tenths + 1)] if tenths else []
    return [
        {
            "from": lengths[order[start]],
            "to": lengths[order[end - 1]],
            "count": end - start,
            "mean_reward": statistics.fmean(values[i] for i in order[start:end]),
        }
        for start, end in pairwise(bounds)
    ]


def measure_signal(responses: Sequence[Response]) -> dict[str, Any]:
    """Groups of two or more with identical rewards carry no training signal."""
    groups: dict[int, list[float]] = defaultdict(list)
    for response in responses:
        if response.value is not None:
            groups[response.group].append(response.value)
    several = [values for values in groups.values() if len(values) > 1]
    silent = sum(len(set(values)) == 1 for values in several)
    return {"groups": len(several), "without_signal": silent, "rate": share(silent, len(several))}


def measure_failures(responses: Sequence[Response]) -> dict[str, Any]:
    """Failures (the reward's fault) by cause, and malformed answers (the policy's fault) by reward."""
    causes = Counter(cause for r in responses for cause in r.causes)
    malformed = Counter(name for r in responses for name, score in r.by_reward.items() if score.malformed)
    return {
        "failed": (failed := sum(bool(r.causes) for r in responses)),
        "failure_rate": share(failed, len(responses)),
        "causes": dict(causes.most_common()),
        "messages": {cause: message[:300] for r in reversed(responses) for cause, message in r.failures},
        "malformed": (malformed_total := sum(r.score.malformed for r in responses)),
        "malformed_rate": share(malformed_total, len(responses)),
        "malformed_by_reward": dict(malformed.most_common()),
    }


def measure_rewards(responses: Sequence[Response]) -> dict[str, Any]:
    """For each reward by name: its values, and their correlation with length."""
    result = {}
    for name in dict.fromkeys(name for r in responses for name in r.by_reward):
        scored = [r for r in responses if r.by_reward[name].applies]
        valued = [(value, r.length) for r in scored if (value := r.by_reward[name].value) is not None]
        values, lengths = [value for value, _ in valued], [length for _, length in valued]
        result[name] = {
            "responses": len(scored),
            "mean": statistics.fmean(values) if values else None,
            "least": min(values, default=None),
            "greatest": max(values, default=None),
            "length_spearman": spearman(values, lengths),
        }
    return result


def measure_saved(responses: Sequence[Response], span: float) -> dict[str, Any] | None:
    """The current reward compared with the one saved with the response."""
    pairs = [(r.value, r.saved) for r in responses if r.value is not None and r.saved is not None]
    return compare([v for v, _ in pairs], [s for _, s in pairs], span) if pairs else None


def measure_again(first: Sequence[ScoredGroup], second: Sequence[ScoredGroup], orders: Sequence[Sequence[int]], span: float) -> Any:
    """The same responses scored twice; `orders[g][j]` is the index of group g's response at position j the second time.

    A response with a value only once counts as different; one without a value both times is ignored.
    """
    before: list[float | None] = []
    after: list[float | None] = []
    for group, again, order in zip(first, second, orders, strict=True):
        before += [group.scores[i].value for i in order]
        after += [score.value for score in again.scores]
    scored = [(a, b) for a, b in zip(before, after, strict=True) if a is not None or b is not None]
    both = [(a, b) for a, b in scored if a is not None and b is not None]
    if not scored:
        return None
    result = compare([a for a, _ in both], [b for _, b in both], span)
    result["share_equal"] = result["share_equal"] * len(both) / len(scored)
    return result | {"responses": len(scored), "value_once_only": len(scored) - len(both)}


def compare(before: Sequence[float], after: Sequence[float], span: float) -> dict[str, Any]:
    moved = [abs(a - b) for a, b in zip(before, after, strict=True)]
    mean = statistics.fmean(moved) if moved else 0.0
    return {
        "responses": len(moved),
        "share_equal": statistics.fmean(m <= EQUAL * span for m in moved) if moved else 0.0,
        "mean_difference": mean,
        "greatest_difference": max(moved, default=0.0),
        "effect": mean / span if span else (0.0 if not mean else None),
    }
