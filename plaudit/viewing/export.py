"""`plaudit view --out`: the pages and what they show in one file, for a colleague. It is limited by size: the newest steps and the
validations come first, then evenly spaced ones; what was left out is said on the page."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError
from plaudit.files import write_atomic
from plaudit.redaction import redact_all
from plaudit.report.pages import VIEWER, draw_file
from plaudit.viewing.steps import read_all_samples
from plaudit.viewing.viewer import Viewer, from_coarse_to_fine

MAX_TEXT = 20_000
"""Characters of a text in the file."""


def write_page(viewer: Viewer, file: Path, max_bytes: int) -> str:
    """Write the file; returns a line on what it has."""
    numbers = range(len(viewer.sources))
    runs, answers = viewer.runs(), {}
    for number in numbers:
        answers[f"runs/{number}/diagnostics"] = _all_diagnostics(viewer, number)
        answers[f"runs/{number}/metrics"] = viewer.metrics(number)  # of a dump, from its diagnostics
    answers = redact_all({"runs": runs, **answers})
    size = len(_draw("", answers, {}))
    steps: dict[int, dict[str, list[int]]] = {number: {"train": [], "val": []} for number in numbers}
    packed: dict[str, str] = {}
    offered, unreadable = _in_turn(viewer), 0
    for number, split, step in offered:
        place, found = f"runs/{number}/{split}/{step}", _pack_step(viewer, number, split, step)
        if found is None:
            unreadable += 1
        elif size + len(found) <= max_bytes:
            packed[place] = found
            steps[number][split].append(step)
            size += len(found) + len(place) + 6
    for number, of_run in steps.items():
        answers[f"runs/{number}/steps"] = {split: sorted(of_split) for split, of_split in of_run.items()}
        answers["runs"][number]["samples"] = {split: [min(s), max(s), len(s)] for split, s in of_run.items() if s}
    what = f"samples of {len(packed)} of {len(offered)} steps" if len(packed) < len(offered) else "all samples"
    try:
        write_atomic(file, _draw(f"A file made by plaudit view, with {what}.", answers, packed))
    except OSError as error:
        raise PlauditError(f"--out: {file} cannot be written: {error}") from None
    reasons = [f"{unreadable} cannot be read"] if unreadable else []
    if left := len(offered) - len(packed) - unreadable:
        reasons.append(f"{left} do not fit into --max-mb {max_bytes / 1e6:g}")
    why = f" ({', '.join(reasons)})" if reasons else ""
    return f"{file}: {file.stat().st_size / 1e6:.1f} MB, {what}{why}"


def _draw(note: str, answers: dict[str, Any], packed: dict[str, str]) -> str:
    return draw_file("plaudit view", VIEWER, {"note": note, "answers": answers, "packed": packed})


def _all_diagnostics(viewer: Viewer, number: int) -> dict[str, Any]:
    while (found := viewer.diagnostics(number))["done"] < found["of"]:
        pass
    return found


def _in_turn(viewer: Viewer) -> list[tuple[int, str, int]]:
    """Steps of all runs, the most telling first: of each run and split the last, the first, those in the middle."""
    queues = [
        [(number, split, step) for step in from_coarse_to_fine(steps)]
        for number in range(len(viewer.sources))
        for split, steps in viewer.steps(number).items()
    ]
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def _pack_step(viewer: Viewer, number: int, split: str, step: int) -> str | None:
    """A step and its samples, by their address, compressed; None if they cannot be read, as in a damaged file."""
    place = f"runs/{number}/{split}/{step}"
    try:
        shown = viewer.step(number, split, step)
        found = {place: shown}
        for sample in read_all_samples(viewer.source(number), split, step, len(shown["samples"])):
            found[f"{place}/{sample['row']}"] = _cut({**sample, "token_names": []})
    except PlauditError:
        return None
    text = json.dumps(redact_all(found), allow_nan=False, default=str, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _cut(value: Any) -> Any:
    """Without texts of unbounded length, and without what has no value."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}\n… ({len(value) - MAX_TEXT:,} more characters, not in this file)"
    if isinstance(value, dict):
        return {name: _cut(each) for name, each in value.items()}
    return [_cut(each) for each in value] if isinstance(value, list) else value
