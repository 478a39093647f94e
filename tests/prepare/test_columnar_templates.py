"""Templates filled in by joining columns give what they give when rendered row by row."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from plaudit.errors import DataError
from plaudit.prepare.columnar_templates import ColumnarTemplate, Shown
from plaudit.prepare.tables import TEXT, Table, join_text
from plaudit.rewards.judges.templates import BUILT_IN
from support.paths import REPOSITORY
from support.rows import write_jsonl

ROWS = [
    {"src_text": "Good {{ morning }}.", "level": 3, "share": 2.0, "note": "n1", "tags": ["a"]},
    {"src_text": "ä\n\n```x```", "level": None, "share": 0.25, "note": None, "tags": []},
]
PLAIN = [
    "{{ task }}",
    "{{ extra_info.src_text }}|{{ extra_info['src_text'] }}|{{ question }}",
    "{{ extra_info.share }} of {{ highest }}",
    "{% for c in candidates %}{{ loop.index }} {{ c.letter | lower }}: {{ c.text }}{{ ', ' if not loop.last }}{% endfor %}",
    "{{ candidates | length }} {{ candidates | map(attribute='letter') | join(' > ') }}",
    "{% if answer == 'score' %}{{ task }}{% else %}no{% endif %}{% set x = answer | upper %}{{ x }}",
    "{% if ground_truth is defined %}{{ ground_truth }}{% endif %}{% if extra_info.absent is defined %}x{% endif %}{{ task }}",
    "```\n{{ task }}\n```\n\n",
]
COMPUTED = [
    "{{ task | upper }}",
    "{{ task[:3] }}",
    "{% if extra_info.src_text == 'x' %}a{% else %}b{% endif %}",
    "{% for c in candidates %}{{ c.text | length }}{% endfor %}",
    "{% for c in candidates %}{{ loop.previtem.text if not loop.first }}{% endfor %}",
    "{% for c in candidates if 'u' in c.text %}{{ c.letter }}{% endfor %}",
    "{{ candidates[0].text }}",
    "{{ candidates | map(attribute='text') | join }}",
    "{% filter upper %}{{ task }}{% endfilter %}",
    "{% set kept %}{{ task }}{% endset %}{{ kept | upper }}",
    "{% set task = task | upper %}{{ task }}",
    "{% macro m(x) %}{{ x | upper }}{% endmacro %}{{ m(task) }}",
    "{% for m in prompt %}{{ m.content | upper }}{% endfor %}",
    "{% for c in candidates %}{% endfor %}{% for c in 'xy' %}{{ c }}{% endfor %}",
    "{% for key in extra_info %}{{ key }}{% endfor %}",
    "{% with t = task %}{{ t | upper }}{% endwith %}",
    "{% if extra_info.note is defined %}{{ extra_info.note }}{% else %}none{% endif %}",
    "{{ extra_info.tags | join }}",
]


def template_of(folder: Path, source: str, rows: list[dict] = ROWS) -> ColumnarTemplate:
    (folder / "t.jinja").write_text(source)
    table = Table([write_jsonl(folder / "rows.jsonl", rows)], skip_bad=True, report=lambda _: None)
    task = pa.array([f"task {i} \ue001" for i in range(len(rows))], TEXT)
    constants = {"answer": "score", "lowest": 0, "highest": 10}
    return ColumnarTemplate(folder / "t.jinja", table, lambda: task, constants, {}, ("candidates", *constants))


def fill_both_ways(template: ColumnarTemplate) -> tuple[list[str], list[str]]:
    rows = np.array([1, 0, 1])
    shown = Shown(rows, candidates=[pa.array(texts, TEXT) for texts in (["a", "b", "c"], ["übel", "v", ""])])
    filled = join_text(*template.fill(shown)).to_pylist()
    template.is_plain = False
    return filled, join_text(*template.fill(shown)).to_pylist()


@pytest.mark.parametrize("source", PLAIN)
def test_a_template_that_only_writes_texts_is_rendered_once(tmp_path, source):
    template = template_of(tmp_path, source)
    assert template.is_plain
    joined, rendered = fill_both_ways(template)
    assert joined == rendered


@pytest.mark.parametrize("source", COMPUTED)
def test_a_template_that_computes_with_texts_is_rendered_row_by_row(tmp_path, source):
    assert not template_of(tmp_path, source).is_plain


@pytest.mark.parametrize("file", [*BUILT_IN.glob("group.jinja"), *(REPOSITORY / "recipes/grrm").glob("mini.jinja")], ids=str)
def test_shipped_templates_are_rendered_once(tmp_path, file):
    template = template_of(tmp_path, file.read_text())
    assert template.is_plain
    joined, rendered = fill_both_ways(template)
    assert joined == rendered


def test_texts_that_look_like_a_template_or_a_placeholder_are_only_texts(tmp_path):
    rows = [{"src_text": "{{ task }} \ue000task\ue001"}, {"src_text": "\ue000column src_text\ue001"}]
    joined, rendered = fill_both_ways(template_of(tmp_path, "{{ extra_info.src_text }}", rows))
    assert joined == rendered == [rows[1]["src_text"], rows[0]["src_text"], rows[1]["src_text"]]


def test_a_row_without_a_field_that_the_template_writes_is_bad(tmp_path):
    template = template_of(tmp_path, "{{ extra_info.level }}")
    assert template.table.usable.tolist() == [True, False]
    (tmp_path / "t.jinja").write_text("{{ extra_info.note }}")
    with pytest.raises(DataError, match=r"rows.jsonl: row 2: column 'note' is empty, but t.jinja needs it"):
        ColumnarTemplate(tmp_path / "t.jinja", Table([tmp_path / "rows.jsonl"]), template.task, {}, {}, ())
