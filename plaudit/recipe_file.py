"""A recipe's YAML as plain values, with the file and line of each.

It is the 1.2 core schema: `1e-5` is a number, `on` and `no` are strings. A key given twice is an error. Files and their aliases are
read within bounds.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from plaudit.errors import RecipeError, nearest_path
from plaudit.redaction import redact
from plaudit.suggestions import Place, describe_other_file, dotted

COMMAND_LINE = "command line"
MAX_DEPTH = 20
"""Of sections and lists in each other."""
MAX_BYTES, MAX_VALUES = 256_000, 10_000
"""Of a recipe. A few lines of aliases of aliases could stand for billions of values."""


class CoreLoader(yaml.SafeLoader):
    """PyYAML with the YAML 1.2 core schema instead of 1.1's."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own class attribute)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), [*_first, ""] if _tag == "null" else list(_first)
    )


def _scalar(text: str, kind: str) -> Any:
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def compose(text: str) -> yaml.Node | None:
    """The text as nodes, or a RecursionError: raised before the stack is full, since code that runs then (the garbage collector's)
    can fail anywhere."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=CoreLoader)):
        if number > 4 * MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecursionError
    return yaml.compose(text, Loader=CoreLoader)


def build(node: yaml.Node, place: Place, sources: dict[Place, str], file: str) -> Any:
    def at(node: yaml.Node) -> str:
        return f"{file}:{node.start_mark.line + 1}" if file else COMMAND_LINE

    sources[place] = at(node)
    if len(sources) > MAX_VALUES:
        raise RecipeError(f"{at(node)}: with its aliases (`*name`) written out, this recipe has more than {MAX_VALUES:,} values")
    kind = node.tag.rsplit(":", 1)[-1]
    if kind not in ("null", "bool", "int", "float", "str", "map", "seq"):
        raise RecipeError(f"{at(node)}: {dotted(place)}: the YAML tag {kind} has no meaning in a recipe")
    if len(place) > MAX_DEPTH:  # an anchor that contains itself
        raise RecipeError(f"{at(node)}: {dotted(place[:2])} is nested too deeply")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{at(key_node)}: the name of a setting should be a word, not a list or a section")
            key = key_node.value
            if key in mapping:
                raise RecipeError(f"{at(key_node)}: {dotted((*place, key))} is given twice")
            mapping[key] = build(value_node, (*place, key), sources, file)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [build(child, (*place, i), sources, file) for i, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    try:
        return _scalar(node.value, kind)
    except ValueError:
        raise RecipeError(f"{at(node)}: {dotted(place)}: {shown(node.value)} is not of YAML's type {kind}") from None


def read_recipe_file(path: Path) -> tuple[dict[str, Any], dict[Place, str]]:
    if path.is_file() and (other := describe_other_file(path)):
        raise RecipeError(other)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8") if len(content) <= MAX_BYTES else ""
    except FileNotFoundError:
        raise RecipeError(f"{path} does not exist.{nearest_path(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{path} is not a recipe: it has more than {MAX_BYTES // 1000} kB")
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(f"{where}: not valid YAML: {problem.removeprefix('but ')}") from None
    except RecursionError:
        raise RecipeError(f"{path} is not a recipe: it is nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(
            f"{path} is not a recipe: it should be sections of settings, such as `model: {{path: …}}` or `rewards: [{{kind: …}}]`"
        )
    sources: dict[Place, str] = {}
    return build(node, (), sources, str(path)), sources


def shown(value: Any) -> str:
    # Redact before cutting: half a secret would not look like one.
    return "a section" if isinstance(value, dict) else redact(json.dumps(value, ensure_ascii=False, default=repr))[:80]
