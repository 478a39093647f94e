"""A file of another system → a recipe with comments, and a report of what became of every key."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.convert.conversion import HEADINGS, NEEDS_YOU, NO_MEANING, Conversion, Line
from plaudit.convert.reading import Source, read_source
from plaudit.convert.systems import CONVERTERS
from plaudit.convert.values import is_unresolved
from plaudit.explain import one_line
from plaudit.redaction import SECRET_NAME, redact
from plaudit.report.safe_text import safe_text

WIDTH = 110
COMMENT_COLUMN = 52


@dataclass(frozen=True)
class Converted:
    recipe: str
    """YAML with comments."""
    lines: list[Line]
    tree: dict[str, Any]

    def under(self, heading: str) -> list[Line]:
        return [line for line in self.lines if line.heading == heading]

    @property
    def report(self) -> str:
        return "\n".join(_report(self))


def convert(path: Path, system: str = "auto", *, gpus: int | None = None, defaults: str = "auto") -> Converted:
    """`gpus`: of the source's run, where its batch size depends on them. `defaults`: of which fork of verl."""
    source = read_source(path, system)
    if gpus is not None:
        source.processes = gpus
    conversion = CONVERTERS[source.system](source, defaults)
    tree = conversion.finish()
    _list_open_ends(conversion)
    return Converted(_recipe(source, tree, conversion), conversion.lines, tree)


def _list_open_ends(conversion: Conversion) -> None:
    """What the file leaves open."""
    source = conversion.source
    for note in source.notes:
        conversion.remark(note)
    for command in dict.fromkeys(source.not_run):
        if any(command in str(value) for value in source.settings.values()):
            conversion.remark(f"{command} was not run: write its result where the recipe has it")
    if source.server is not None and not conversion.uses_server:
        conversion.remark(
            f"the script also starts a vLLM server ({source.server.get('model', 'its model')}): a reward with placement: launch "
            "starts it for you (docs/reward_models/host_a_judge.md)"
        )
    variables = {name for setting in conversion.settings.values() if not setting.chosen for name in _variables(setting.value)}
    for name in sorted(variables | set(_variables(conversion.rewards))):
        conversion.remark(f"${{{name}}} is not in the file: write its value where the recipe has it")


def _variables(value: Any) -> Iterator[str]:
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _variables(one)
    elif isinstance(value, str):
        yield from re.findall(r"\$\{([\w.:]+)\}", value)


# The recipe as text ---------------------------------------------------------------------------------------------------


def _recipe(source: Source, tree: dict[str, Any], conversion: Conversion) -> str:
    needed = [line for line in conversion.lines if line.heading == NEEDS_YOU]
    origin = f"{_on_one_line(source.path.name)} ({_whose(conversion)})"
    head = [f"# Converted from {origin} by `plaudit convert`; check it with `plaudit doctor`."]
    if needed:
        head.append("# It needs you:")
        head += [f"# - {_entry(line)}" for line in needed]
    return "\n".join([*head, *_section(tree, (), conversion)]) + "\n"


def _whose(conversion: Conversion) -> str:
    system = conversion.source.system
    return system if conversion.whose == system else f"{system}, with the defaults of {conversion.whose}"


def _section(tree: dict[str, Any], place: tuple[str, ...], conversion: Conversion) -> Iterator[str]:
    indent = "  " * len(place)
    for name, value in tree.items():
        dotted = ".".join((*place, name))
        if name == "rewards" and not place:
            yield "rewards:"
            for reward in value:
                yield from _reward(reward)
        elif isinstance(value, dict) and value and dotted not in conversion.settings:
            yield f"{indent}{name}:"
            yield from _section(value, (*place, name), conversion)
        else:
            yield _commented(f"{indent}{name}: {_value(value)}", _origin(dotted, conversion))


def _origin(dotted: str, conversion: Conversion) -> str:
    setting = conversion.settings.get(dotted)
    if setting is None:
        return ""
    keys = ", ".join(list(conversion.spelled[key])[-1] for key in setting.keys)
    keys = keys or ("" if setting.chosen else f"{conversion.whose}'s default")
    return f"{keys}{': ' if keys and setting.text else ''}{setting.text}"


def _value(value: Any) -> str:
    """As YAML on one line: text with line breaks or control characters is in double quotes, as in JSON."""
    return one_line(value) if one_line(value).isprintable() else json.dumps(value)


def _commented(text: str, comment: str) -> str:
    return redact(f"{text:<{COMMENT_COLUMN}}  # {_on_one_line(comment)}" if comment else text)


def _reward(reward: dict[str, Any]) -> Iterator[str]:
    lines = list(_block(reward, "    "))
    yield f"  - {lines[0].lstrip()}"
    yield from lines[1:]


def _block(section: dict[str, Any], indent: str) -> Iterator[str]:
    """One setting per line; a section without sections on one line."""
    for name, value in section.items():
        if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
            yield f"{indent}{name}:"
            yield from _block(value, f"{indent}  ")
        else:
            yield redact(f"{indent}{name}: {_flow(value) if isinstance(value, dict) else _value(value)}")


def _flow(section: dict[str, Any]) -> str:
    """`{a: 1, b: 2}` in the section's own order."""
    return "{" + ", ".join(f"{name}: {_value([value])[1:-1]}" for name, value in section.items()) + "}"


# The report ----------------------------------------------------------------------------------------------------------


def _report(converted: Converted) -> Iterator[str]:
    for heading in HEADINGS:
        lines = converted.under(heading)
        if not lines:
            continue
        yield f"{heading} ({len(lines)})"
        if heading == NO_MEANING:
            reasons: dict[str, list[Line]] = {}
            for line in lines:
                reasons.setdefault(line.text, []).append(line)
            for reason, same in reasons.items():
                yield f"  because {reason}:"
                yield from (f"    {_key(line) if line.key else 'a default, which is not in the file'}" for line in same)
        else:
            yield from (f"  {_entry(line)}" for line in lines)
        yield ""


def _entry(line: Line) -> str:
    arrow = ": " if line.heading == NEEDS_YOU else " → "
    return f"{_key(line)}{arrow}{_on_one_line(line.text)}" if line.key else _on_one_line(line.text)


SECRET_KEY = re.compile(r"hub_token$|wandb\.key$|^use_wandb$")


def _key(line: Line) -> str:
    secret = SECRET_NAME.search(line.key) or SECRET_KEY.search(line.key)
    if secret and isinstance(line.value, str) and not is_unresolved(line.value):
        return _on_one_line(f"{line.key}=[secret]")
    value = _on_one_line(line.value if isinstance(line.value, str) else one_line(line.value))
    return f"{_on_one_line(line.key)}={value if len(value) <= WIDTH else value[: WIDTH - 1] + '…'}"


def _on_one_line(text: str) -> str:
    """Text of a file for a comment or a terminal: no secrets, and nothing that would end the line or move the cursor."""
    return safe_text(" ".join(redact(text).split()))
