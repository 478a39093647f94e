"""Recipes, chat templates and rewards that would take all time or memory: bounded, and reported in one line."""

import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import load
from plaudit.data.bounded_jinja import OutOfBounds
from plaudit.data.rendering import render_chat
from plaudit.data.templates import RENDER_ERRORS, load_tokenizer
from plaudit.errors import RecipeError
from plaudit.recipe_file import MAX_BYTES, MAX_VALUES
from plaudit.rewards.judges.templates import JudgeTemplate, Unrenderable
from plaudit.types import Prompt
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
    recipe: Any = load(file, stage="sft").recipe
    assert recipe.data.val == recipe.data.train


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_recipe_is_one_line(tmp_path, plaudit, tiny_model, rows_file, damage):
    file = write_recipe(tmp_path / "r.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run"))
    DAMAGES[damage](file)
    code, _, err = plaudit("sft", file)
    assert code == 2
    assert "Traceback" not in err


# Chat templates ------------------------------------------------------------------------------------------------------

GREETING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = XX %}{% endfor %}{{ ns.x }}"
TEMPLATES = {
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long text, the other way round": "{{ 10**10 * 'a' }}",
    "a long list": "{{ ([0] * 10**10)|length }}",
    "a power": "{{ 10**(10**10) }}",
    "a product": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by +": DOUBLE.replace("XX", "ns.x + ns.x"),
    "doubling by ~": DOUBLE.replace("XX", "ns.x ~ ns.x"),
    "doubling by a list": DOUBLE.replace("XX", "[ns.x, ns.x]"),
    "doubling by a section": DOUBLE.replace("XX", "{'a': ns.x, 'b': ns.x}"),
    "doubling by a list, as JSON": DOUBLE.replace("XX", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x|tojson }}"),
    "doubling by a list, joined": DOUBLE.replace("XX", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x|join }}"),
    "doubling by a list, concatenated": DOUBLE.replace("XX", "[ns.x, ns.x]").replace("{{ ns.x }}", "{% if ns.x ~ '' %}{% endif %}"),
    "doubling by join": DOUBLE.replace("XX", "[ns.x, ns.x]|join"),
    "doubling by the join method": DOUBLE.replace("XX", "''.join([ns.x, ns.x])"),
    "doubling by replace": DOUBLE.replace("XX", "ns.x|replace('a', 'aa')|replace('b', 'bb')"),
    "doubling by the replace method": DOUBLE.replace("XX", "ns.x.replace('a', 'aa').replace('b', 'bb')"),
    "doubling by format": DOUBLE.replace("XX", "'{0}{0}'.format(ns.x)"),
    "doubling by format_map": DOUBLE.replace("XX", "'{a}{a}'.format_map({'a': ns.x})"),
    "doubling by the format filter": DOUBLE.replace("XX", "'%s%s'|format(ns.x, ns.x)"),
    "doubling by %": DOUBLE.replace("XX", "'%s%s' % (ns.x, ns.x)"),
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.replace("XX", "m(ns.x)"),
    "doubling by a block": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubling by translate": DOUBLE.replace("XX", "ns.x.translate({97: ns.x})"),
    "doubling by sum": DOUBLE.replace("'ab'", "[1]").replace("XX", "[ns.x, ns.x]|sum(start=[])"),
    "a wide column": "{{ 'a'.ljust(10**10) }}{{ 'a'|center(10**10) }}",
    "a wide number": "{{ '%010000000000d' % 1 }}",
    "a width from a value": "{{ '%*d' % (10**10, 1) }}",
    "a wide format": "{{ '{:>10000000000}'.format(1) }}",
    "a wide format from a value": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "wide zeros": "{{ '1'.zfill(10**10) }}",
    "wide tabs": "{{ '\t'.expandtabs(10**10) }}",
    "a wide indent": "{{ 'a\nb'|indent(10**10) }}",
    "wide JSON": "{{ [1]|tojson(indent=10**10) }}",
    "bytes of a number": "{{ (5).to_bytes(10**10, 'little') }}",
    "batches": "{{ [1]|batch(10**10, 0)|list }}",
    "slices": "{{ [1]|slice(10**10)|list }}",
    "a long template": "{# " + "x" * 1_100_000 + " #}",
    "only for some messages": "{% if 'secret' in messages[0].content %}{{ 'a' * 10**10 }}{% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.grid(24)
def test_a_template_is_rendered_within_bounds(tiny_model, kind):
    tokenizer = load_tokenizer(str(tiny_model))
    with pytest.raises((OutOfBounds, RecursionError, TypeError, ValueError)) as caught:
        render_chat(tokenizer, TEMPLATES[kind] + GREETING, [{"role": "user", "content": "a secret"}])
    assert isinstance(caught.value, RENDER_ERRORS)
    if isinstance(caught.value, OutOfBounds):
        assert str(tiny_model) in str(caught.value)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.grid(24)
def test_a_judges_template_is_rendered_within_bounds(tmp_path, kind):
    file = tmp_path / "judge.jinja"
    file.write_text(TEMPLATES[kind].replace("messages", "prompt"))
    prompt = Prompt("p", [{"role": "user", "content": "a secret"}])
    with pytest.raises((Unrenderable, RecipeError)) as caught:
        JudgeTemplate(file, (), "reward 'judge'").render(prompt, {})
    assert "judge.jinja" in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["{{ 1 / 0 }}", "{{ [][0].x.y }}", "{{ 'a'.index('b') }}", "{{ {}['a']['b'] }}", "{{ '%d' % 'a' }}", "{{ {[]: 1} }}"]
)
def test_a_wrong_expression_is_an_error_of_the_template(tiny_model, wrong):
    with pytest.raises(RENDER_ERRORS):
        render_chat(load_tokenizer(str(tiny_model)), wrong, [{"role": "user", "content": "?"}])


@pytest.mark.parametrize("kind", ["a long text", "loops in loops", "a recursive macro"])
def test_a_command_reports_such_a_template_in_one_line(tmp_path, tiny_model, rows_file, plaudit, kind):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATES[kind] + GREETING)
    code, _, err = plaudit("sft", write_recipe(tmp_path / "r.yaml", sft_recipe(model, rows_file, tmp_path / "run")))
    assert code == 2
    assert "Traceback" not in err
    assert "the chat template cannot render" in err.strip().splitlines()[-1]


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
