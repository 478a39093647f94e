"""The numbers of a step that its own page and the diagnostics both show: one definition for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Outcomes = dict[str, list[bool] | None]
"""For each sample whether it is malformed, failed or truncated; None: not recorded."""


def group_starts(ids: Sequence[Any], indices: Sequence[int | None]) -> list[int]:
    """The first row of each group: samples of a prompt stand together, numbered from 0."""
    return [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] or (indices[i] or 0) <= (indices[i - 1] or 0)]


def groups_of(table: pa.Table) -> tuple[list[int], np.ndarray]:
    """The first row of each group, and each row's group."""
    starts = group_starts(table.column("prompt_id").to_pylist(), table.column("index").to_pylist())
    return starts, np.repeat(np.arange(len(starts)), np.diff([*starts, table.num_rows]))


def outcomes(table: pa.Table) -> Outcomes:
    """malformed: the policy's fault. failed: any reward's fault, also that of one which is only measured or was given a value
    instead. truncated: the length limit's. Dumps of other programs have none of the three."""
    malformed, status = table.column("malformed").to_pylist(), table.column("status").to_pylist()
    causes = [table.column(name) for name in table.column_names if name == "failure" or name.startswith("failure/")]
    is_scored = any(value is not None for value in malformed)  # by plaudit, which writes both
    failed = np.any([column.is_valid().to_numpy() for column in causes], axis=0)
    return {
        "malformed": [bool(value) for value in malformed] if is_scored else None,
        "failed": failed.tolist() if is_scored or failed.any() else None,
        "truncated": [value == "truncated" for value in status] if any(status) else None,
    }


def summarise(table: pa.Table) -> dict[str, float | None]:
    """Means and shares over all samples of a step; None: nothing is known of it."""
    rewards, lengths = numbers(table, "reward"), lengths_of(table)
    return {
        "reward": mean(rewards),
        "reward_std": float(np.std(known)) if len(known := rewards[np.isfinite(rewards)]) else None,
        "length": mean(lengths),
        "groups without signal": _share_without_signal(rewards, groups_of(table)[1]),
        **{name: None if found is None else float(np.mean(found)) for name, found in outcomes(table).items()},
    }


def lengths_of(table: pa.Table) -> np.ndarray:
    """In tokens, or in characters where tokens are not recorded."""
    tokens = numbers(table, "tokens")
    if not np.isnan(tokens).all():
        return tokens
    return np.array([len(text or "") for text in table.column("response").to_pylist()], dtype=float)


def numbers(table: pa.Table, name: str) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in table.column(name).to_pylist()], dtype=float)


def mean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _share_without_signal(rewards: np.ndarray, groups: np.ndarray) -> float | None:
    """Of the groups with two samples or more, as in a run's metrics. One whose rewards have all failed has no signal either."""
    known, several = np.isfinite(rewards), np.bincount(groups) > 1
    if not known.any() or not several.any():
        return None
    lows, highs = np.full(len(several), np.inf), np.full(len(several), -np.inf)
    np.minimum.at(lows, groups[known], rewards[known])
    np.maximum.at(highs, groups[known], rewards[known])
    return float(np.mean(lows[several] >= highs[several]))
