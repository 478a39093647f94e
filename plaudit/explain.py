"""The resolved recipe as YAML, with where each value comes from or what each setting means (`plaudit config`)."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from plaudit import plugins
from plaudit.config import LoadedRecipe, Place, belongs_elsewhere, dotted, section_class
from plaudit.errors import RecipeError, nearest
from plaudit.recipe.rewards import RewardSettings
from plaudit.recipe.section import Section
from plaudit.recipe_file import CoreLoader
from plaudit.suggestions import suggest
from plaudit.wrapping import wrap_comment

WIDTH = 110
"""Of descriptions, in columns."""
DESCRIPTION = "#     "
"""How the description of a setting starts, below it."""
COLUMN = 40
"""Where the allowed values start."""


# Values and their sources --------------------------------------------------------------------------------------------


def to_yaml(loaded: LoadedRecipe) -> str:
    """The resolved recipe; a comment behind each value says where it comes from."""
    lines = list(_values(loaded.recipe, (), loaded.sources))
    width = min(max((len(text) for text, comment in lines if comment), default=0), 60)
    return "".join(f"{text:<{width}}  # {comment}\n" if comment else f"{text}\n" for text, comment in lines)


def _values(section: BaseModel, place: Place, sources: dict[Place, str]) -> Iterator[tuple[str, str]]:
    indent = "  " * len(place)
    for name, info in type(section).model_fields.items():
        value, here = getattr(section, name), (*place, name)
        if name in _ineffective(section) and value is not None:
            yield f"{indent}# {name}: {one_line(_plain(value))}", "no effect here"
        elif isinstance(value, BaseModel):
            yield f"{indent}{name}:", ""
            yield from _values(value, here, sources)
        elif _is_list_of_sections(value):
            yield f"{indent}{name}:", ""
            for i, entry in enumerate(value):
                for number, (text, comment) in enumerate(_values(entry, (*here, i), sources)):
                    yield (f"{indent}  - {text.lstrip()}" if number == 0 else text), comment
        else:
            yield f"{indent}{name}: {one_line(value)}", _source(here, info, sources)


def _source(place: Place, info: Any, sources: dict[Place, str]) -> str:
    given = next((sources[p] for p in sources if p[: len(place)] == place), None)
    return given or ("default" if info.default is not PydanticUndefined else "")


def _ineffective(section: Any) -> dict[str, str]:
    return section.ineffective_settings() if isinstance(section, Section) else {}


def _is_list_of_sections(value: Any) -> TypeGuard[tuple[BaseModel, ...]]:
    return isinstance(value, tuple) and bool(value) and all(isinstance(entry, BaseModel) for entry in value)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


# Explanations --------------------------------------------------------------------------------------------------------


def explain(loaded: LoadedRecipe, only: Sequence[str] = (), width: int = WIDTH) -> str:
    """Every setting with its meaning, allowed values, value and source; sections that are not set, as comments.

    `only`: dotted names (critic, optim.lr, rewards.0, rewards.judge.model) to print instead of the whole recipe. `width`: of
    descriptions.
    """
    wanted = [tuple(int(part) if part.isdecimal() else part for part in name.split(".")) for name in only]
    blocks = list(_settings(type(loaded.recipe), loaded.recipe, (), loaded.sources))
    if hasattr(loaded.recipe, "rewards"):  # rewards.KIND: the settings of a kind, whether or not the recipe uses it
        after = next(i for i, (block, _) in enumerate(blocks) if block == ("rewards",)) + 1
        for kind in reversed(plugins.kinds("rewards")):
            if any(place[:2] == ("rewards", kind) for place in wanted):
                blocks[after:after] = _settings(plugins.kind("rewards", kind), None, ("rewards", kind), {}, commented=True)
    for place in wanted:
        if not any(block[: len(place)] == place for block, _ in blocks):
            known, stage = [block for block, _ in blocks], loaded.recipe.stage
            rest = belongs_elsewhere(place, stage, known) or f" of {stage} recipes.{_hint(place, loaded.recipe, known)}"
            raise RecipeError(f"--explain: {dotted(place)} is not a setting{rest}")
    lines = []
    for place, text in blocks:
        if not wanted or any(place[: len(one)] == one for one in wanted):
            lines += ["", *text] if len(place) == 1 and lines else text
        elif any(one[: len(place)] == place for one in wanted):
            lines.append(text[0])  # the section that it is in
    return "\n".join(wrap_comment(line, width) if line.lstrip().startswith(DESCRIPTION) else line for line in lines) + "\n"


def _hint(place: Place, recipe: BaseModel, known: Sequence[Place]) -> str:
    """What a setting that does not exist may have meant; without any idea, which sections there are."""
    rewards = getattr(recipe, "rewards", None)
    kinds = plugins.kinds("rewards") if rewards is not None else []
    if rewards is not None and place[0] == "rewards" and len(place) > 1 and isinstance(place[1], int) and place[1] >= len(rewards):
        return f" Its rewards are {', '.join(f'rewards.{i} ({reward.label})' for i, reward in enumerate(rewards))}."
    places = [*known, *(("rewards", kind) for kind in kinds)]
    parents, name = list(place)[:-1], list(place)[-1]
    section: Place = ()
    for part in parents:  # correct the sections on the way first
        options = {str(one[len(section)]): one[len(section)] for one in places if len(one) > len(section) and _within(one, section)}
        near = str(part) if str(part) in options else nearest(str(part), options)
        if near is None:
            section = tuple(parents)
            break
        section = (*section, options[near])
        if section[0] == "rewards" and len(section) == 2 and section[1] in kinds:
            reward = plugins.kind("rewards", str(section[1]))
            places += [here for here, _ in _settings(reward, None, section, {}, commented=True)]
    meant = (*section, name)
    if meant in places:
        return f" Did you mean {dotted(meant)}?"
    sections = ", ".join(dict.fromkeys(str(one[0]) for one in known))
    return suggest(meant, None, sorted(places, key=len)) or f" Its sections are {sections}."


def _within(place: Place, section: Place) -> bool:
    return place[: len(section)] == section


def _settings(
    kind: type[BaseModel], section: Any, place: Place, sources: dict[Place, str], *, commented: bool = False, entry: bool = False
) -> Iterator[tuple[Place, list[str]]]:
    """Each setting of a section class (depth first): where it is, and the lines that explain it. `section`: None if it is not set;
    its settings are then shown as comments with their defaults. `entry`: of a list, so the first line starts with a dash."""
    indent, mark = "  " * len(place), "# " if commented else ""
    for number, (name, info) in enumerate(kind.model_fields.items()):
        here = (*place, name)
        start = f"{indent[:-2]}{mark}- " if entry and number == 0 else f"{indent}{mark}"
        value = info.get_default(call_default_factory=True) if section is None else getattr(section, name)
        inner = section_class(info.annotation)
        reason = _ineffective(section).get(name) if value is not None else None
        description = f"{info.description or ''}{f' No effect here: {reason}.' if reason else ''}"
        text = [f"{indent}{DESCRIPTION}{' '.join(description.split())}"] if description else []
        if reason is not None:
            yield here, [f"{indent}# {name}: {one_line(_plain(value))}", *text]
            if isinstance(value, BaseModel):
                yield from _settings(type(value), None, here, sources, commented=True)
        elif isinstance(value, BaseModel):
            yield here, _headed(f"{start}{name}:", info, text)
            yield from _settings(type(value), value if section is not None else None, here, sources, commented=commented)
        elif _is_list_of_sections(value):
            yield here, _headed(f"{start}{name}:", info, text)
            for i, one in enumerate(value):
                yield from _settings(type(one), one, (*here, i), sources, entry=True)
        else:
            shown = "…" if value is PydanticUndefined else one_line(value)
            source = "required" if value is PydanticUndefined else "default" if section is None else _source(here, info, sources)
            comment = f"{allowed_values(info.annotation, info.metadata)}{f' [{source}]' if source else ''}"
            yield here, [f"{f'{start}{name}: {shown}':<{COLUMN}}  # {comment}", *text]
            if inner not in (None, RewardSettings):
                is_list = get_origin(info.annotation) is tuple
                yield from _settings(inner, None, (*here, 0) if is_list else here, sources, commented=True, entry=is_list)


def _headed(name: str, info: Any, text: list[str]) -> list[str]:
    """A section's name with its description behind it, or below it if it is long."""
    short = info.description and len(info.description) <= WIDTH - COLUMN
    return [f"{name:<{COLUMN}}  # {info.description}"] if short else [name, *text]


def allowed_values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a type allows, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed_values(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(allowed_values(option) for option in arguments))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is tuple and arguments[1:] != (...,):
        return f"[{', '.join(allowed_values(one) for one in arguments)}]"
    if origin is tuple:
        one, plural = allowed_values(arguments[0]), {"section": "sections", "a reward of any kind": "rewards of any kind"}
        return f"list of {plural.get(one, one)}"
    if origin is dict:
        return "names and values"
    if annotation in (int, float):
        return ("integer" if annotation is int else "number") + _bounds(metadata)
    if section_class(annotation) is not None:
        return "a reward of any kind" if annotation is RewardSettings else "section"
    return {NoneType: "null", str: "text", bool: "true | false"}.get(annotation, "")


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    constraints = [one for item in metadata for one in (getattr(item, "metadata", None) or [item])]
    bounds = [f"{sign} {getattr(one, name):g}" for one in constraints for name, sign in signs.items() if hasattr(one, name)]
    return f" {' and '.join(bounds)}" if bounds else ""


# YAML ----------------------------------------------------------------------------------------------------------------


class CoreDumper(yaml.SafeDumper):
    """Quotes what `CoreLoader` would not read back as a string, and keeps each value on one line."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers


CoreDumper.add_representer(float, lambda dumper, number: dumper.represent_scalar("tag:yaml.org,2002:float", repr(number)))
CoreDumper.add_representer(tuple, lambda dumper, items: dumper.represent_list(items))
CoreDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.splitlines() == [text] else '"'),
)


def one_line(value: Any) -> str:
    return _scalar(value) if isinstance(value, bool | int | float | str | None) else _dumped(value)


@lru_cache(typed=True)  # most values of a recipe are a few words and numbers
def _scalar(value: bool | int | float | str | None) -> str:
    return _dumped(value)


def _dumped(value: Any) -> str:
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
