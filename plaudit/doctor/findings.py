"""Findings of the doctor's checks and how they are printed, with API keys redacted."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from plaudit.config import LoadedRecipe
from plaudit.errors import PlauditError
from plaudit.redaction import redact
from plaudit.wrapping import wrap

Finding = tuple[str, str]
"""A mark (✓, ! or ✗) and the message."""
MAX_SHOWN_CHARS = 3000
"""Characters shown of a prompt or a row."""
COLOURS = {"✓": "green", "!": "yellow", "✗": "red"}


class Checks:
    """Runs checks and prints what they find. A failing one does not prevent the others."""

    def __init__(self, console: Console):
        self.console, self.passed = console, True

    def check(self, name: str, findings: Callable[[], Iterator[Finding]]) -> None:
        try:
            for mark, text in findings():
                self.passed &= mark != "✗"
                print_finding(self.console, mark, name, text)
        except PlauditError as error:
            self.passed = False
            print_finding(self.console, "✗", name, str(error))


def print_title(console: Console, loaded: LoadedRecipe) -> None:
    console.print(f"[bold]{escape(str(loaded.path))}[/] for plaudit {loaded.recipe.stage}")


def print_finding(console: Console, mark: str, name: str, text: str) -> None:
    start, line = f"  {mark} {name:<9}", " ".join(redact(text).splitlines())
    if console.is_terminal:
        line = wrap(start + line, console.width, indent=len(start))[len(start) :]
    console.print(Text.assemble((f"  {mark} ", COLOURS[mark]), (f"{name:<9}", "bold"), line), soft_wrap=True)


def print_text(console: Console, title: str, text: Text) -> None:
    """A title with a text below it; the middle of a long text is elided."""
    if len(text) > MAX_SHOWN_CHARS:
        text = text[: MAX_SHOWN_CHARS // 2] + Text("\n … \n", "dim") + text[-(MAX_SHOWN_CHARS // 2) :]
    console.print(f"\n{title}:", style="bold", markup=False, soft_wrap=True)
    console.print(text, soft_wrap=True)


def mark_spans(console: Console, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Text, str]:
    """A text with some of its spans marked, and how they are: "green", or in brackets where there are no colours (in a file)."""
    if console.is_terminal and not console.no_color:
        shown = Text(text)
        for start, end in spans:
            shown.stylize("black on green", start, end)
        return shown, "green"
    for start, end in sorted(spans, reverse=True):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return Text(text), "in ⟦ ⟧"


def quoted(text: str, max_chars: int = 60) -> str:
    """In quotes, on one line, truncated to `max_chars`."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "·" for c in text).split())
    return f"'{line}'" if len(line) <= max_chars else f"'{line[: max_chars - 2]} …'"
