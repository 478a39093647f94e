"""Findings of the doctor's checks and how they are printed, with API keys redacted."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from plaudit.config import LoadedRecipe
from plaudit.errors import PlauditError
from plaudit.redaction import redact
from plaudit.report.safe_text import safe_text
from plaudit.wrapping import wrap

Finding = tuple[str, str]
"""A mark (✓, ! or ✗) and the message."""
MAX_SHOWN_CHARS = 3000
"""Characters shown of a prompt or a row."""
COLOURS = {"✓": "green", "!": "yellow", "✗": "red"}
MARKED = "black on green"


class Excerpt(NamedTuple):
    """A text as a model reads it."""

    title: str
    text: Text
    """With spans that are marked."""
    marked: str = ""
    """What they are, if that has to be said."""


class Checks:
    """Runs checks, prints what they find and keeps it. A failing one does not prevent the others."""

    def __init__(self, console: Console):
        self.console, self.passed = console, True
        self.findings: list[tuple[str, str, str]] = []
        """A mark, the check's name and the message, as printed."""
        self.excerpts: list[Excerpt] = []
        self.measured: dict[str, list[dict[str, Any]]] = {"lengths": [], "memory": [], "shardings": []}
        """For pictures of it (page.py)."""

    def check(self, name: str, findings: Callable[[], Iterator[Finding]]) -> None:
        try:
            for mark, text in findings():
                self._report(mark, name, text)
        except PlauditError as error:
            self._report("✗", name, str(error))

    def _report(self, mark: str, name: str, text: str) -> None:
        self.passed &= mark != "✗"
        line = " ".join(redact(text).splitlines())
        self.findings.append((mark, name, line))
        print_finding(self.console, mark, name, line)

    def show(self, excerpts: Iterable[Excerpt]) -> None:
        for excerpt in map(_elide, map(_redacted, excerpts)):
            self.excerpts.append(excerpt)
            print_excerpt(self.console, excerpt)


def print_title(console: Console, loaded: LoadedRecipe) -> None:
    console.print(f"[bold]{escape(safe_text(str(loaded.path)))}[/] for plaudit {loaded.recipe.stage}")


def print_finding(console: Console, mark: str, name: str, line: str) -> None:
    start, line = f"  {mark} {name:<9}", safe_text(line)
    if console.is_terminal:
        line = wrap(start + line, console.width, indent=len(start))[len(start) :]
    console.print(Text.assemble((f"  {mark} ", COLOURS[mark]), (f"{name:<9}", "bold"), line), soft_wrap=True)


def print_excerpt(console: Console, excerpt: Excerpt) -> None:
    """Spans are green, or in brackets where there are no colours (in a file)."""
    title, text, marked = excerpt
    pieces = [(safe_text(piece), is_marked) for piece, is_marked in split_marked(text)]
    if marked and not (console.is_terminal and not console.no_color):
        text, how = Text("".join(f"⟦{piece}⟧" if is_marked else piece for piece, is_marked in pieces)), "in ⟦ ⟧"
    else:
        text, how = Text.assemble(*((piece, MARKED if is_marked else "") for piece, is_marked in pieces)), "green"
    console.print(f"\n{title}{f'; {marked} are {how}' if marked else ''}:", style="bold", markup=False, soft_wrap=True)
    console.print(text, soft_wrap=True)


def mark_spans(text: str, spans: Iterable[tuple[int, int]]) -> Text:
    marked = Text(text)
    for start, end in spans:
        marked.stylize(MARKED, start, end)
    return marked


def split_marked(text: Text) -> Iterator[tuple[str, bool]]:
    """Pieces, and whether each is marked."""
    marked = bytearray(len(text))
    for start, end, _ in text.spans:
        marked[start:end] = b"\1" * (min(end, len(text)) - start)
    for is_marked, piece in groupby(zip(text.plain, marked, strict=True), key=lambda pair: pair[1]):
        yield "".join(character for character, _ in piece), bool(is_marked)


def _redacted(excerpt: Excerpt) -> Excerpt:
    """A text with a secret has no marks: it would have to be found across them."""
    text = redact(excerpt.text.plain)
    return excerpt if text == excerpt.text.plain else excerpt._replace(text=Text(text))


def _elide(excerpt: Excerpt) -> Excerpt:
    """Without the middle of a long text."""
    text, half = excerpt.text, MAX_SHOWN_CHARS // 2
    return excerpt if len(text) <= MAX_SHOWN_CHARS else excerpt._replace(text=text[:half] + Text("\n … \n") + text[-half:])


def quoted(text: str, max_chars: int = 60) -> str:
    """In quotes, on one line, truncated to `max_chars`."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "·" for c in text).split())
    return f"'{line}'" if len(line) <= max_chars else f"'{line[: max_chars - 2]} …'"
