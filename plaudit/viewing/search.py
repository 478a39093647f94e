"""Search over responses: text or a regular expression, and filters; from the newest step back."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute
import regex

from plaudit.errors import PlauditError
from plaudit.viewing.sources import NotThere, Source
from plaudit.viewing.step_summary import outcomes
from plaudit.viewing.steps import finite

compute: Any = pyarrow.compute  # its functions are made when it is imported, so no type checker knows them
MAX_HITS = 200
"""Of a request; the next one continues from there, too."""
BUDGET_S = 1.5
"""Of a request."""
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
    until: int | None = None
    """The newest step to search, from this row on: where the previous request ended."""
    row: int = 0


def search(source: Source, query: Query) -> dict[str, Any]:
    """Up to MAX_HITS samples. `more`: further ones in the last step that was read. `next`: where to continue, if there is more."""
    find = _finder(query)
    hits: list[dict[str, Any]] = []
    ends, unreadable = time.monotonic() + BUDGET_S, 0
    steps = [
        s for s in reversed(source.steps()[query.split]) if (query.until is None or s <= query.until) and query.step in (None, s)
    ]
    for number, step in enumerate(steps, 1):
        try:
            found = _search_step(source, query, step, find, query.row if step == query.until else 0)
        except (NotThere, KeyError):
            unreadable, found = unreadable + 1, []
        room = MAX_HITS - len(hits)
        if len(found) > room:
            start = {"until": step, "row": found[room]["row"]}
            return _answer(hits + found[:room], number - 1, steps, unreadable, start, len(found) - room)
        hits += found
        if (len(hits) >= MAX_HITS or time.monotonic() > ends) and number < len(steps):
            return _answer(hits, number, steps, unreadable, {"until": steps[number], "row": 0}, 0)
    return _answer(hits, len(steps), steps, unreadable, None, 0)


def _answer(
    hits: list[dict[str, Any]], searched: int, steps: list[int], unreadable: int, start: dict[str, int] | None, more: int
) -> dict[str, Any]:
    left = len(steps) - searched - (more > 0)
    return {"hits": hits, "searched": searched, "left": left, "more": more, "unreadable": unreadable, "next": start}


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


def _search_step(
    source: Source, query: Query, step: int, find: Callable[[str], tuple[int, int] | None], first_row: int
) -> list[dict[str, Any]]:
    table = source.read(
        query.split, step, lambda name: not name.startswith(("view/", "trace/", "token/", "prompt")) and name != "tools"
    )
    if query.text and not query.is_regex:  # in Arrow: most steps have no hit
        found = compute.match_substring(table.column("response"), query.text, ignore_case=True)
        rows = [row for row, hit in enumerate(found.to_pylist()) if hit and row >= first_row]
    else:
        rows = range(first_row, table.num_rows)
    if not rows:
        return []
    _require_recorded(source, query, table)
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


def _require_recorded(source: Source, query: Query, table: pa.Table) -> None:
    what = query.failure if query.failure in ("malformed", "truncated") else "failed"
    if query.failure and outcomes(table)[what] is None:
        raise PlauditError(f"{source.path} does not say which samples are {what}: whatever saved them did not record it")


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
