"""Recipes, chat templates and rewards that would take all time or memory: bounded, and reported in one line."""

import math
from itertools import pairwise

import pytest

from plaudit.config import MAX_BYTES, MAX_VALUES, load
from plaudit.errors import RecipeError
from support.damage import DAMAGES
from support.recipes import exact_metrics, rl_recipe, sft_recipe, write_recipe

LETTERS = "abcdefghij"


BOMBS = {
    "lists of lists": "\n".join([f"a: &a [{'x, ' * 10}]", *(f"{b}: &{b} [{f'*{a}, ' * 10}]" for a, b in pairwise(LETTERS))]),
    "sections of sections": "\n".join(
        ["a: &a {x: 1, y: 2}"]
        + [f"k{i}: &k{i} {{x: *{f'k{i - 1}' if i else 'a'}, y: *{f'k{i - 1}' if i else 'a'}}}" for i in range(18)]
    ),
    "an alias of itself": "a: &a [*a]",
    "a section in itself": "a: &a {b: *a}",
    "nested lists": "[" * 100_000,
    "nested sections": "{a: " * 10_000,
    "nested blocks": "".join(" " * i + "a:\n" for i in range(600)),
    "many values": "a: [" + "[]," * (MAX_BYTES // 3 - 9) + "]",
    "a huge file": "a: " + "x" * (1 << 24),
    "a huge whole number": "seed: 0x" + "f" * 9000,
    "more digits than Python reads": "seed: " + "9" * 9000,
    "an object of Python's": "a: !!python/object/apply:os.system [exit]",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_recipe_is_read_within_bounds(tmp_path, plaudit, kind):
    file = tmp_path / "r.yaml"
    file.write_text(BOMBS[kind])
    code, out, err = plaudit("config", file)
    assert code == 2
    assert "Traceback" not in err
    assert str(file) in err
    assert len(out + err) < 10_000


def test_an_alias_bomb_is_named(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(BOMBS["lists of lists"])
    with pytest.raises(RecipeError, match=rf"r.yaml:\d+: with its aliases .* more than {MAX_VALUES:,} values$"):
        load(file)


def test_aliases_still_work(tmp_path, tiny_model, rows_file):
    file = tmp_path / "r.yaml"
    file.write_text(
        f"model: {{path: {tiny_model}}}\ndata: {{train: &rows {rows_file}, val: *rows}}\nrun: {{dir: {tmp_path}/run}}\n"
    )
    recipe = load(file, stage="sft").recipe
    assert recipe.data.val == recipe.data.train


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_recipe_is_one_line(tmp_path, plaudit, tiny_model, rows_file, damage):
    file = write_recipe(tmp_path / "r.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run"))
    DAMAGES[damage](file)
    code, _, err = plaudit("sft", file)
    assert code == 2
    assert "Traceback" not in err


# Rewards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["1.7e308", "-1.7e308 if solution_str else 1.7e308", "10**400", "2e15", "{'score': 1.0, 'part': 1.7e308}"]
)
@pytest.mark.parametrize("normalise", ["none", "group", "running"])
@pytest.mark.grid(5)
def test_a_reward_beyond_all_bounds_neither_stops_nor_spoils_a_run(tmp_path, tiny_model, prompts_file, plaudit, value, normalise):
    """Every other sample's is fine; those are trained on."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        f"def compute_score(solution_str):\n    return {value} if len(solution_str) % 3 == 0 else len(solution_str) / 9\n"
    )
    settings = {"kind": "function", "path": str(reward), "workers": 1, "max_failure_rate": 1.0, "normalise": normalise}
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", settings, run={"max_steps": 2})
    code, _, err = plaudit("rl", write_recipe(tmp_path / "r.yaml", tree))
    assert code == 0, err
    rows = exact_metrics(tmp_path / "run")
    assert all(row["skipped_steps"] == 0 for row in rows if "loss" in row)
    assert all(number is not None and math.isfinite(number) and abs(number) < 1e30 for row in rows for number in row.values())
    if "part" not in value:
        cause = "not_a_number" if "10**" in value else "too_large"
        assert sum(row.get(f"failures/{cause}", 0) for row in rows) > 0
