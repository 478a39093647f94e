"""Search over responses: text or a regular expression, and filters; from the newest step back."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.compute
import regex

from plaudit.errors import PlauditError
from plaudit.viewing.sources import NotThere, Source
from plaudit.viewing.steps import finite

compute: Any = pyarrow.compute  # its functions are made when it is imported, so no type checker knows them
MAX_HITS = 100
BUDGET_S = 1.5
"""Of a request; the next one continues from there."""
MATCH_TIMEOUT_S = 0.5
"""Of a regular expression on one response: some take for ever."""
REQUEST_TIMEOUT_S = 10.0
"""Of a regular expression on all responses of a request: each may take just less than its own limit."""
AROUND = 80
"""Characters shown on each side of a hit."""


@dataclass(frozen=True)
class Query:
    text: str = ""
    is_regex: bool = False
    split: str = "train"
    data_source: str = ""
    least: float | None = None
    greatest: float | None = None
    failure: str = ""
    """A cause of failure, `any`, `malformed` or `truncated`."""
    step: int | None = None
    before: int | None = None
    """Only steps before this one: where the previous request ended."""


def search(source: Source, query: Query) -> dict[str, Any]:
    find = _finder(query)
    hits: list[dict[str, Any]] = []
    ends, searched, next_before = time.monotonic() + BUDGET_S, 0, None
    steps = [
        s for s in reversed(source.steps()[query.split]) if (query.before is None or s < query.before) and query.step in (None, s)
    ]
    for step in steps:
        try:
            hits += _search_step(source, query, step, find)
        except (NotThere, KeyError):
            continue
        finally:
            searched += 1
        if (len(hits) >= MAX_HITS or time.monotonic() > ends) and step != steps[-1]:
            next_before = step
            break
    return {"hits": hits[: 2 * MAX_HITS], "searched": searched, "left": len(steps) - searched, "before": next_before}


def _finder(query: Query) -> Callable[[str], tuple[int, int] | None]:
    if not query.text:
        return lambda text: (0, 0)
    try:
        pattern = regex.compile(query.text if query.is_regex else regex.escape(query.text), regex.IGNORECASE)
    except regex.error as error:
        raise PlauditError(f"the regular expression cannot be read: {error}") from None

    ends = time.monotonic() + REQUEST_TIMEOUT_S

    def find(text: str) -> tuple[int, int] | None:
        if query.is_regex and time.monotonic() > ends:
            raise PlauditError(
                f"the regular expression takes more than {REQUEST_TIMEOUT_S:g} s on the responses of a step; simplify it"
            )
        try:
            found = pattern.search(text, timeout=MATCH_TIMEOUT_S)
        except TimeoutError:
            raise PlauditError(f"the regular expression takes more than {MATCH_TIMEOUT_S} s on one response; simplify it") from None
        return found.span() if found else None

    return find


def _search_step(source: Source, query: Query, step: int, find: Callable[[str], tuple[int, int] | None]) -> list[dict[str, Any]]:
    table = source.read(
        query.split, step, lambda name: not name.startswith(("view/", "trace/", "token/", "prompt")) and name != "tools"
    )
    if query.text and not query.is_regex:  # in Arrow: most steps have no hit
        found = compute.match_substring(table.column("response"), query.text, ignore_case=True)
        rows = [row for row, hit in enumerate(found.to_pylist()) if hit]
    else:
        rows = range(table.num_rows)
    if not rows:
        return []
    columns = {name: table.column(name) for name in table.column_names}
    causes = [name for name in columns if name == "failure" or name.startswith("failure/")]
    hits = []
    for row in rows:
        reward, status = finite(columns["reward"][row].as_py()), columns["status"][row].as_py()
        failures = [text for name in causes if (text := columns[name][row].as_py())]
        malformed = bool(columns["malformed"][row].as_py())
        if query.data_source and columns["data_source"][row].as_py() != query.data_source:
            continue
        if not _in_range(reward, query) or not _has_failed(query.failure, failures, malformed, status):
            continue
        text = columns["response"][row].as_py() or ""
        if (span := find(text)) is None:
            continue
        start, end = span
        hits.append(
            {
                "split": query.split,
                "step": step,
                "row": row,
                "reward": reward,
                "status": status,
                "malformed": malformed,
                "failure": failures[0] if failures else None,
                "data_source": columns["data_source"][row].as_py(),
                "before": ("…" if start > AROUND else "") + text[max(0, start - AROUND) : start],
                "found": text[start : min(end, start + 400)],
                "after": text[end : end + 2 * AROUND] + ("…" if len(text) > end + 2 * AROUND else ""),
            }
        )
    return hits


def _in_range(reward: float | None, query: Query) -> bool:
    if query.least is None and query.greatest is None:
        return True
    return (
        reward is not None
        and (query.least is None or reward >= query.least)
        and (query.greatest is None or reward <= query.greatest)
    )


def _has_failed(wanted: str, failures: list[str], malformed: bool, status: str | None) -> bool:
    if not wanted:
        return True
    if wanted == "any":
        return bool(failures)
    if wanted == "malformed":
        return malformed
    if wanted == "truncated":
        return status == "truncated"
    return any(failure.partition(":")[0] == wanted for failure in failures)
