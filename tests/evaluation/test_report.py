"""What an evaluation looks like: in the terminal, as markdown, as a picture."""

import re
from pathlib import Path

import pytest

from plaudit.evaluation.pictures import draw_rewards
from plaudit.evaluation.results import markdown
from plaudit.evaluation.rewardbench import SECTIONS
from support.evaluation import LONGER, SHORTER, evaluate_rows, pairs
from support.recipes import write_recipe
from support.rows import write_jsonl

NAMES = ("short", "a_long_name_of_a_reward_model-7b-v2.1", "[bold]", "a|b", "two\nlines", "x", "y")


@pytest.fixture
def many(tmp_path, monkeypatch) -> list:
    """The arguments of an evaluation of seven rewards with awkward names."""
    monkeypatch.setattr("plaudit.evaluation.pictures.draw_rewards", lambda *_: None)
    recipe = write_recipe(tmp_path / "r.yaml", {"rewards": [LONGER]})
    file = write_jsonl(tmp_path / "mine.jsonl", pairs(*((5, 1) if k % 3 else (1, 5) for k in range(30))))
    named = [part for name in NAMES for part in ("--rewards", f"{name}={recipe}")]
    return ["eval", "rewards", file, *named, "--out", tmp_path / "out", "--resamples", 100]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_intervals_in_one_line(many, plaudit, monkeypatch, width):
    """Columns that do not fit go to a further table."""
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = plaudit(*many)
    assert code == 0
    assert max(map(len, out.splitlines()[:-4])) <= width  # the last lines are paths
    tables = out.partition("Differences")[0].split("Accuracy ")[1:]
    assert len(tables) == (4 if width == 80 else 2)
    shown = [re.findall(r"66\.7 \[[\d.]+, [\d.]+\]", table) for table in tables]
    assert sum(map(len, shown)) == len(NAMES)
    for name in ("short", "a_long_name_of_a_rew", "[bold]", "a|b", "lines"):
        assert name in out


def test_markdown_stays_a_table_whatever_names_are(many, plaudit):
    code, out, _ = plaudit(*many, "--markdown")
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("|")]
    first = rows[: next(i for i, row in enumerate(rows) if row.startswith("| items without"))]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in first] == [len(NAMES) + 2] * len(first)
    assert first[0] == f"|  | {' | '.join(NAMES)} |".replace("a|b", "a\\|b").replace("two\nlines", "two lines")
    assert all(line.startswith(("|", "**", "In per cent")) or not line for line in out.splitlines())


def test_markdown_indents_subsets(tmp_path):
    found = evaluate_rows(tmp_path, [*pairs((5, 1), subset="one"), *pairs((1, 5), (5, 1), subset="two")])
    lines = markdown(found).splitlines()
    assert [line.split(" | ")[0] for line in lines[4:7]] == ["| pairs", "| &emsp;&emsp;one", "| &emsp;&emsp;two"]
    assert lines[5] == "| &emsp;&emsp;one | 100.0 |"  # no interval: all of its items are equal


def test_the_picture(tmp_path):
    """All subsets of RewardBench and several rewards: of a size that can be looked at."""
    subsets = [subset for sizes in SECTIONS.values() for subset in sizes]
    rows = [row for i, subset in enumerate(subsets) for row in pairs((5 + i, 9), (9, 5 + i), (12, i + 1), subset=subset)]
    no_formula = "_$x^$_"
    found = evaluate_rows(tmp_path, rows, {"longer": LONGER, NAMES[1]: SHORTER, no_formula: {**LONGER, "bounds": [0.0, 0.01]}})
    picture = tmp_path / "eval.png"
    draw_rewards(found.figures, found.curves["length"], picture)
    width, height = _size(picture)
    assert 1000 <= width <= 1600
    assert 400 <= height <= 3000
    assert not list(tmp_path.glob(".*"))


def _size(picture: Path) -> tuple[int, int]:
    header = picture.read_bytes()[:24]
    assert header[1:4] == b"PNG"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
