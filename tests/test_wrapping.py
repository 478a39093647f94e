"""Long lines are broken on a terminal only, at words, with an indent."""

import io

import pytest
import yaml

from plaudit import wrapping
from plaudit.wrapping import wrap, wrapped, wrapped_comments

LINE = "reward 'judge': nothing listens there. Is the server still running? If not, see its log."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")


def test_a_terminal_gets_lines_that_fit():
    lines = wrapped(LINE, Terminal()).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 50
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == LINE


def test_files_and_pipes_get_lines_whole():
    assert wrapped(LINE, io.StringIO()) == LINE
    assert wrapped_comments(f"a: 1  # {LINE}\n", io.StringIO()) == f"a: 1  # {LINE}\n"


def test_paths_stay_whole():
    path = "/very" * 20
    assert path in wrap(f"the file is {path} or so", 50).split()


def test_comments_are_continued_as_comments():
    text = wrapped_comments(f"a: 1  # {LINE}\n  #     {LINE}\nb: 2\n", Terminal())
    assert max(map(len, text.splitlines())) <= 50
    assert yaml.safe_load(text) == {"a": 1, "b": 2}


def test_a_very_narrow_terminal_breaks_lines_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped(LINE, Terminal()) == LINE
    assert wrapping.terminal_width(Terminal()) == 20
