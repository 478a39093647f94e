"""What a check finds, and how the page shows it. Nothing is printed that might hold a key."""

from rich.console import Console
from rich.text import Text

from plaudit.errors import redact

Finding = tuple[str, str]
"""✓, ! or ✗, and what was found."""
SHOWN = 3000
"""Characters of a prompt or a row."""
COLOURS = {"✓": "green", "!": "yellow", "✗": "red"}


def print_finding(console: Console, mark: str, name: str, text: str) -> None:
    line = " ".join(redact(text).splitlines())
    console.print(Text.assemble((f"  {mark} ", COLOURS[mark]), (f"{name:<9}", "bold"), line), soft_wrap=True)


def print_text(console: Console, title: str, text: Text) -> None:
    """A title and a text below it, without its middle if it is long."""
    if len(text) > SHOWN:
        text = text[: SHOWN // 2] + Text("\n … \n", "dim") + text[-(SHOWN // 2) :]
    console.print(f"\n{title}:", style="bold", markup=False, soft_wrap=True)
    console.print(text, soft_wrap=True)


def quoted(text: str, most: int = 60) -> str:
    """In quotes, on one line, without its end if it is long."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "·" for c in text).split())
    return f"'{line}'" if len(line) <= most else f"'{line[: most - 2]} …'"
