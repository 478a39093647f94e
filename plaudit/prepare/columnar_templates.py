"""A judge's prompts for many rows at once: the template is rendered once, and the rows' texts are put in by joining columns.

This gives the same prompts as rendering row by row only if the template does nothing with a row's texts but write them: no filter,
no condition, no loop over them. `_Syntax` reads the template's syntax to find out; any other template is rendered for each row,
which takes about 16 times as long. What does not depend on texts, such as the number of candidates, may be used in any way.

    Source text: {{ extra_info.src_text }}       →     "Source text: ", column src_text, "\\n", …
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import jinja2
import numpy as np
import pyarrow as pa
from jinja2 import nodes

from plaudit.errors import RecipeError
from plaudit.prepare.tables import TEXT, Pieces, Table
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.templates import JudgeTemplate, Unrenderable, format_value
from plaudit.types import Prompt

ROW, TEXTS, CANDIDATES = "extra_info", ("question", "task", "ground_truth", "response"), "candidates"
_HOLE = re.compile("\ue000([^\ue001]+)\ue001")


def _hole(name: str) -> str:
    """Stands for a column's text in what the template writes."""
    return f"\ue000{name}\ue001"


@dataclass(frozen=True)
class Shown:
    """Some rows that a template is filled in for. All have the same number of candidates."""

    rows: np.ndarray
    """Their numbers in the table."""
    response: pa.Array | None = None
    candidates: Sequence[pa.Array] = ()
    """The first candidate of each row, the second, …"""
    task: pa.Array | None = None
    """Where it differs from the table's."""
    fields: Mapping[str, pa.Array] = field(default_factory=dict)
    """Fields of `extra_info` that differ from the table's."""


@dataclass
class ColumnarTemplate:
    """A judge's template for the rows of a table."""

    file: Path
    table: Table
    make_task: Callable[[], pa.Array]
    """Returns what the policy is given, for each row of the table. Few templates show it."""
    constants: Mapping[str, Any]
    """Variables that are the same for all rows."""
    added: Mapping[str, pa.Array]
    """Fields of `extra_info` that are no columns of the table."""
    own: Sequence[str]
    """Variables of the judge's kind."""
    ground_truth: pa.Array | None = None
    """For each row of the table."""
    _columns: dict[str, pa.Array] = field(default_factory=dict)
    _split: dict[tuple[int, bool], list[str]] = field(default_factory=dict)
    """The rendered template, by what is shown: text and the names of columns in turn."""

    def __post_init__(self) -> None:
        self._template = JudgeTemplate(self.file, self.own, "prepare")
        source = self.file.read_text(encoding="utf-8")
        self._names = [*dict.fromkeys([*self.table.names, *self.added])]
        syntax = _Syntax(source)
        for name in sorted(syntax.fields - syntax.tested):
            self._require(name)
        partly = any(name in self._names and self._column(name).null_count for name in syntax.tested)
        own_question = "question" in self._names and not self.table.is_filled_text("question")  # else the task takes its place
        self.is_plain = syntax.is_plain and not partly and not own_question and "\ue000" not in source

    def _require(self, name: str) -> None:
        """Reject rows without a field that the template writes."""
        if name not in self._names:
            found = ", ".join(self._names)
            raise RecipeError(
                f"prepare: template: {self.file.name} needs extra_info.{name}; the rows have no such column (found: {found})"
            )
        self.table.reject(
            self._column(name).is_null(), f"without {name}", lambda _: f"column {name!r} is empty, but {self.file.name} needs it"
        )

    @cached_property
    def task(self) -> pa.Array:
        return self.make_task()

    def fill(self, shown: Shown) -> Pieces:
        """The prompts."""
        return self._pieces(shown) if self.is_plain else [self._rendered(shown)]

    # Columns to join -------------------------------------------------------------------------------------------------

    def _pieces(self, shown: Shown) -> Pieces:
        key = (len(shown.candidates), shown.response is not None)
        if key not in self._split:
            variables: dict[str, Any] = dict(self.constants)
            if shown.response is not None:
                variables["response"] = _hole("response")
            if shown.candidates:
                variables[CANDIDATES] = [{"letter": LETTERS[i], "text": _hole(f"candidate {i}")} for i in range(key[0])]
            task = [{"role": "user", "content": _hole("task")}]
            truth = None if self.ground_truth is None else _hole("ground_truth")
            row = Prompt("1", task, "", truth, {name: _hole(f"column {name}") for name in self._names})
            self._split[key] = _HOLE.split(self._render(row, variables))
        rows, pieces = pa.array(shown.rows), list[str | pa.Array]()
        for i, piece in enumerate(self._split[key]):
            kind, _, name = piece.partition(" ")
            if i % 2 == 0:
                pieces += [piece] if piece else []
            elif kind == "response":
                assert shown.response is not None
                pieces.append(shown.response)
            elif kind == "ground_truth":
                assert self.ground_truth is not None
                pieces.append(self.ground_truth.take(rows))
            elif kind == "candidate":
                pieces.append(shown.candidates[int(name)])
            elif kind == "task":
                pieces.append(self.task.take(rows) if shown.task is None else shown.task)
            else:
                pieces.append(shown.fields[name] if name in shown.fields else self._column(name).take(rows))
        if all(isinstance(piece, str) for piece in pieces):
            pieces.append(pa.repeat(pa.scalar("", TEXT), len(rows)))  # for the number of rows
        return pieces

    def _column(self, name: str) -> pa.Array:
        if name not in self._columns:
            column = self.added[name] if name in self.added else self.table.printed(name, format_value)
            self._columns[name] = column
        return self._columns[name]

    # Row by row ------------------------------------------------------------------------------------------------------

    def _rendered(self, shown: Shown) -> pa.Array:
        prompts = []
        for place, i in enumerate(shown.rows.tolist()):
            row = {name: value for name, value in self.table.row(i).items() if value is not None}
            extra = {**row, **{name: column[i].as_py() for name, column in self.added.items()}}
            extra |= {name: column[place].as_py() for name, column in shown.fields.items()}
            variables: dict[str, Any] = dict(self.constants)
            if shown.response is not None:
                variables["response"] = shown.response[place].as_py()
            if shown.candidates:
                texts = [column[place].as_py() for column in shown.candidates]
                variables[CANDIDATES] = [{"letter": letter, "text": text} for letter, text in zip(LETTERS, texts, strict=False)]
            task = [{"role": "user", "content": (self.task[i] if shown.task is None else shown.task[place]).as_py()}]
            truth = None if self.ground_truth is None else self.ground_truth[i].as_py()
            prompts.append(self._render(Prompt(self.table.where(i), task, "", truth, extra), variables))
        return pa.array(prompts, TEXT)

    def _render(self, prompt: Prompt, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(prompt, variables)
        except Unrenderable as error:
            raise RecipeError(f"prepare: template: {error}") from None


# Syntax --------------------------------------------------------------------------------------------------------------


class _Syntax:
    """What a template does with the texts of a row."""

    def __init__(self, source: str):
        self.is_plain = True
        """It writes them, and does nothing else with them."""
        self.fields = set[str]()
        """Fields of `extra_info` that it uses by name."""
        self.tested = set[str]()
        """Fields that it tests for with `is defined`."""
        tree = jinja2.Environment().parse(source)
        loops = [
            node for node in tree.find_all(nodes.For) if _name(node.iter) == CANDIDATES and isinstance(node.target, nodes.Name)
        ]
        self._candidate = {_name(node.target) for node in loops}
        self._visit(tree)

    def _visit(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                if not self._is_text(child):
                    self._visit(child)
        elif isinstance(node, nodes.For) and _name(node.target) in self._candidate and not node.recursive:
            for child in (*node.body, *node.else_, *([node.test] if node.test else [])):
                self._visit(child)
            self.is_plain &= _name(node.iter) == CANDIDATES
        elif (
            isinstance(node, nodes.Test) and node.name in ("defined", "undefined") and (_name(node.node) or self._field(node.node))
        ):
            self.tested |= {self._field(node.node) or ""} - {""}
        elif not self._is_independent(node):
            self.is_plain &= isinstance(node, (*_PLAIN_STATEMENTS, nodes.Expr))
            self.is_plain &= _name(node) not in {*TEXTS, ROW, CANDIDATES, "prompt", *self._candidate}
            self.is_plain &= _attribute(node)[1] not in ("previtem", "nextitem", "changed")
            self._field(node)
            for child in node.iter_child_nodes():
                self._visit(child)

    def _is_text(self, node: nodes.Node) -> bool:
        """Whether this is a row's text, as it is."""
        owner, attribute = _attribute(node)
        return _name(node) in TEXTS or (owner in self._candidate and attribute == "text") or self._field(node) is not None

    def _is_independent(self, node: nodes.Node) -> bool:
        """Whether this is about candidates, but not about their texts."""
        if isinstance(node, nodes.Filter) and node.node is not None and _name(node.node) == CANDIDATES:
            letters = any(one.key == "attribute" and _constant(one.value) == "letter" for one in node.kwargs)
            return node.name in ("length", "count") or (node.name == "map" and letters and not node.args)
        owner, attribute = _attribute(node)
        return owner in self._candidate and attribute == "letter"

    def _field(self, node: nodes.Node) -> str | None:
        owner, attribute = _attribute(node)
        if owner != ROW or attribute is None:
            return None
        self.fields.add(attribute)
        return attribute


_PLAIN_STATEMENTS = (nodes.Template, nodes.TemplateData, nodes.For, nodes.If, nodes.Assign, nodes.Helper)
"""Others may capture what is written, and change it."""


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _is_test_for_existence(node: nodes.Node) -> TypeGuard[nodes.Test]:
    """`x is defined`, where x is a variable or a field of one."""
    if not isinstance(node, nodes.Test) or node.name not in ("defined", "undefined"):
        return False
    return bool(_name(node.node) or _attribute(node.node)[0])


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


def _attribute(node: nodes.Node) -> tuple[str | None, str | None]:
    """`owner.attribute`, or `owner["attribute"]`."""
    if isinstance(node, nodes.Getattr):
        return _name(node.node), node.attr
    if isinstance(node, nodes.Getitem) and isinstance(_constant(node.arg), str):
        return _name(node.node), _constant(node.arg)
    return None, None
