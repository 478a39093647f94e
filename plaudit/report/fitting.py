"""Lines that fit a terminal: cut to its width, and safe to print whatever text they quote."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

FOLDED_LINES = 3
"""Of a text that is folded."""


class Part(NamedTuple):
    """A part of a line."""

    text: str
    importance: int
    """Parts with the highest numbers are left out first."""


def fit(parts: Sequence[Part], width: int) -> str:
    """As many of the parts as fit, in order; the most important ones stay even if they do not."""
    parts = list(parts)
    while len(line := "  ".join(part.text for part in parts)) > width and any(part.importance for part in parts):
        parts.remove(max(reversed(parts), key=lambda part: part.importance))
    return line


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def printable(text: str) -> str:
    """On one line, with everything that a terminal would act on (escape sequences, changes of direction) written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in " ".join(text.split()))


def cut(text: str, width: int) -> str:
    """At most `width` columns: its beginning and its end, where an answer usually is."""
    if cell_len(text) <= width:
        return text
    head = (width - 3) * 2 // 5
    return f"{_first_cells(text, head)} … {_first_cells(text[::-1], width - 3 - head)[::-1]}"


def folded(text: str, width: int, indent: str, lines: int = FOLDED_LINES) -> list[str]:
    """The text on at most `lines` lines of a terminal: of a longer one its beginning and its end."""
    room = max(width - len(indent), 20)
    pieces = chop_cells(cut(printable(text), lines * room), room) or ["(empty)"]
    return [f"{indent if i == 0 else ' ' * len(indent)}{piece}" for i, piece in enumerate(pieces)]


def _first_cells(text: str, width: int) -> str:
    return next(iter(chop_cells(text[: 4 * width], width)), "") if width > 0 else ""
