"""Long lines on a terminal: broken at words, with an indent. Files and pipes get each line whole, for `grep`."""

import re
import shutil
import sys
import textwrap
from typing import TextIO

NARROWEST = 30
"""Columns for text; with fewer, lines are left to the terminal."""


def terminal_width(stream: TextIO) -> int:
    """In columns; of what is no terminal, without limit."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrapped(text: str, stream: TextIO, *, indent: int = 2) -> str:
    """The text as it is printed to `stream`: on a terminal, what does not fit into a line continues on the next, indented."""
    return wrap(text, terminal_width(stream), indent=indent)


def wrapped_comments(text: str, stream: TextIO) -> str:
    """The same for YAML, whose comments are continued as comments."""
    width = terminal_width(stream)
    return "".join(f"{wrap_comment(line, width)}\n" for line in text.splitlines())


def wrap(text: str, width: int, *, indent: int = 2) -> str:
    return "\n".join(_fill(line, width, " " * indent) for line in text.split("\n"))


def _fill(line: str, width: int, indent: str) -> str:
    if len(line) <= width or width - len(indent) < NARROWEST:
        return line
    # Long words are paths and commands: whole, they can be copied.
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def wrap_comment(line: str, width: int) -> str:
    """A line of YAML whose comment is continued as a comment."""
    start = re.search(r"(?:^|\s)#\s+", line)
    if start is None:
        return line
    return _fill(line, width, " " * (start.end() - len(start[0].lstrip())) + start[0].lstrip())
