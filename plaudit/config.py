"""YAML + overrides (`a.b=value`, or sections from Python) → a frozen recipe, or a one-line message about each mistake.

The source of each value (file and line, command line, default) is recorded for messages and for `plaudit config`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from plaudit import plugins
from plaudit.errors import RecipeError, did_you_mean, nearest
from plaudit.recipe import STAGES, Recipe
from plaudit.recipe_file import COMMAND_LINE, build, compose, read_recipe_file, shown
from plaudit.redaction import SECRET_NAME, redact
from plaudit.shipped import find_shipped
from plaudit.suggestions import Place, dotted, show_form, suggest

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, and the source of every value that is not a default."""

    recipe: Recipe
    path: Path
    """The file; or, for a recipe from Python alone, the call: `plaudit.rl()`."""
    sources: dict[Place, str]
    overridden_by: str = COMMAND_LINE
    """Who may have replaced settings: the command line, or a call from Python."""


@dataclass
class Draft:
    """A recipe before it is checked: plain dicts and lists, and where each value comes from."""

    path: Path
    tree: dict[str, Any]
    sources: dict[Place, str]
    overridden_by: str = COMMAND_LINE

    def __post_init__(self) -> None:
        self._in_file = set(self.sources)

    def override(self, override: str) -> None:
        """Apply `section.name=value`."""
        _apply_override(self.tree, self.sources, override)

    def update(self, sections: Mapping[str, Any]) -> None:
        """Apply sections of settings: sections are merged, all other values replace the recipe's."""
        _merge(self.tree, sections, (), self.sources, self.overridden_by)

    def check(self, stage: str | None = None) -> LoadedRecipe:
        """The recipe for `stage` (default: the one it names)."""
        tree, sources, path = _with_shipped_files(self.tree), self.sources, self.path
        _refuse_secrets(tree, (), sources, path)
        is_named = stage is not None or tree.get("stage") is not None
        stage = _stage(tree, stage, sources, path)
        try:
            recipe = _validated(tree, STAGES[stage], sources, self._in_file, self.overridden_by)
        except ValidationError as error:
            lines = list(_explain(error, settings_of(tree, STAGES[stage]), sources, path, stage))
            if not is_named and any(f"is not a setting of {stage} recipes" in line for line in lines):
                lines[-1] += f" The recipe names no stage and was taken for {stage}; if it is another, add `stage: …`."
            raise RecipeError("\n".join(lines)) from None
        _refuse_secrets(tree, (), sources, path)  # again: now the variables that hold keys are known
        return LoadedRecipe(recipe, path, sources, self.overridden_by)


def load(path: str | Path, overrides: Sequence[str] = (), stage: str | None = None) -> LoadedRecipe:
    """Read a recipe for `stage` (default: the one it names)."""
    draft = read_draft(Path(path))
    for override in overrides:
        draft.override(override)
    return draft.check(stage)


def read_draft(path: Path, overridden_by: str = COMMAND_LINE) -> Draft:
    path = find_shipped(path)
    return Draft(path, *read_recipe_file(path), overridden_by)


def check_section(section: type[S], values: Mapping[str, Any], call: str, overrides: Sequence[str] = ()) -> S:
    """One section from Python, or from a command's options and `name=value` overrides. `call`: what gets it, for messages."""
    sources: dict[Place, str] = {}
    tree = _plain(values, (), sources, call)
    for override in overrides:
        _apply_override(tree, sources, override)
    _refuse_secrets(tree, (), sources, Path(call))
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(error, dict(settings(section)), sources, Path(call)))) from None


def _with_shipped_files(value: Any) -> Any:
    """Replace names of shipped files by where they were installed, unless the current folder has them."""
    if isinstance(value, dict):
        return {name: _with_shipped_files(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_shipped_files(inner) for inner in value]
    return str(find_shipped(Path(value))) if isinstance(value, str) and value.startswith("recipes/") else value


# Overrides -----------------------------------------------------------------------------------------------------------


def _apply_override(tree: dict[str, Any], sources: dict[Place, str], override: str) -> None:
    name, equals, text = override.partition("=")
    if equals and name.startswith("-") and name.strip("- "):
        raise RecipeError(f"{override!r} is not an override: write {override.lstrip('- ')}, without dashes")
    if not equals or not name.strip():
        dashes = ", without dashes and with =" if override.startswith("-") else ""
        raise RecipeError(f"{override!r} is not an override: write it as section.name=value{dashes}")
    *sections, last = name.strip().split(".")
    at: Any = tree
    place: Place = ()
    for part in sections:
        key = _key(at, part, name, place)
        place = (*place, key)
        if isinstance(at, dict) and not isinstance(at.get(key), dict | list):
            at[key] = {}  # a section that is absent, or null
            sources[place] = COMMAND_LINE
        at = at[key]
    key = _key(at, last, name, place)
    inside_list, place = isinstance(at, list), (*place, key)
    try:
        node = compose(text)
    except yaml.YAMLError:
        node = None if not text else yaml.ScalarNode("tag:yaml.org,2002:str", text)
    except RecursionError:
        raise RecipeError(f"command line: {name} is nested too deeply") from None
    given: dict[Place, str] = {}
    value = None if node is None else build(node, place, given, file="")
    at[key] = value
    _forget(place, sources)
    sources.update(given or {place: COMMAND_LINE})
    if inside_list and COMMAND_LINE not in sources[place[:-1]]:
        sources[place[:-1]] += f" and {COMMAND_LINE}"


def _merge(tree: dict[str, Any], sections: Mapping[str, Any], place: Place, sources: dict[Place, str], by: str) -> None:
    for name, value in sections.items():
        here = (*place, str(name))
        if isinstance(value, Mapping) and isinstance(tree.get(here[-1]), dict):
            _merge(tree[here[-1]], value, here, sources, by)
            continue
        _forget(here, sources)
        tree[here[-1]] = _plain(value, here, sources, by)


def _plain(value: Any, place: Place, sources: dict[Place, str], by: str) -> Any:
    """A value from Python as YAML would give it."""
    sources[place] = by
    if isinstance(value, Mapping):
        return {str(name): _plain(one, (*place, str(name)), sources, by) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, (*place, i), sources, by) for i, one in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def _forget(place: Place, sources: dict[Place, str]) -> None:
    """Drop the sources of a value that is replaced."""
    for old in [p for p in sources if p[: len(place)] == place]:
        del sources[old]


def _key(container: Any, part: str, name: str, place: Place) -> str | int:
    """One component of an override's name: the name of a setting, or the index of a list entry. `place`: of the container."""
    if isinstance(container, dict):
        return part
    if isinstance(container, list) and part.isdecimal() and int(part) < len(container):
        return int(part)
    entries = "what the recipe has there is no list"
    if isinstance(container, list):
        first, last = (f"{dotted(place)}.{i}" for i in (0, len(container) - 1))
        count = {0: "no entries", 1: f"1 entry, {first}"}.get(len(container), f"{len(container)} entries, {first} to {last}")
        entries = f"{dotted(place)} has {count}"
    raise RecipeError(f"command line: {name}: there is no entry {part}: {entries}")


# Checking ------------------------------------------------------------------------------------------------------------


def _validated(
    tree: dict[str, Any], recipe_class: type[Recipe], sources: dict[Place, str], in_file: set[Place], overridden_by: str
) -> Recipe:
    """Validate the recipe. `optim.lr=null` on the command line resets a setting that cannot be null to its default."""
    try:
        return recipe_class.model_validate(tree)
    except ValidationError as error:
        for place in {wrong["loc"] for wrong in error.errors() if wrong["input"] is None} & in_file:
            if sources[place] == overridden_by:
                del reduce(lambda at, key: at[key], place[:-1], tree)[place[-1]]  # pyright: ignore
        with suppress(ValidationError):
            return recipe_class.model_validate(tree)
        raise


def _stage(tree: dict[str, Any], wanted: str | None, sources: dict[Place, str], path: Path) -> str:
    named = tree.get("stage")
    if named is not None and str(named) not in STAGES:
        where = _where(("stage",), sources, path)
        raise RecipeError(f"{where} should be one of {', '.join(STAGES)}, not {shown(named)}.{did_you_mean(str(named), STAGES)}")
    if wanted and named and named != wanted:
        raise RecipeError(f"{path} is a recipe for `plaudit {named}`, not `plaudit {wanted}`")
    # Without a stage, choose the one that shares the most sections with the recipe; on a tie, the one with the fewest sections.
    fields = {stage: STAGES[stage].model_fields.keys() for stage in STAGES}
    return wanted or named or max(STAGES, key=lambda stage: (len(tree.keys() & fields[stage]), -len(fields[stage])))


def _refuse_secrets(tree: Any, place: Place, sources: dict[Place, str], path: Path) -> None:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        # `credential` is the name of an environment variable; a value that does not look like one may be the key itself.
        names_one = key == "credential" and isinstance(value, str) and re.fullmatch(r"[A-Z_][A-Z0-9_]*", value)
        if isinstance(value, str) and ((SECRET_NAME.search(str(key)) and not names_one) or redact(value) != value):
            advice = "Put it into the environment (such as WANDB_API_KEY) and delete it here."
            if place[:1] == ("rewards",) or key == "credential":
                advice = "Put it into the environment (export JUDGE_KEY=…), and name that variable here: credential: JUDGE_KEY."
            raise RecipeError(f"{_where((*place, key), sources, path)}: keys and passwords do not belong in a recipe. {advice}")
        _refuse_secrets(value, (*place, key), sources, path)


def _where(place: Place, sources: dict[Place, str], path: Path) -> str:
    """`R.yaml:7: optim.lr`; a missing setting is located by its section."""
    known = next((place[:n] for n in range(len(place), -1, -1) if place[:n] in sources), None)
    source = sources[known] if known else str(path)
    # A line of the recipe names its file; an override names what it overrides.
    return f"{source if source.startswith(str(path)) else f'{path} ({source})'}: {dotted(place)}"


def settings(section: type[BaseModel], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every setting below a section class, depth first, with its pydantic field."""
    for name, info in section.model_fields.items():
        yield (*place, name), info
        if inner := section_class(info.annotation):
            yield from settings(inner, (*place, name))


def settings_of(tree: dict[str, Any], recipe_class: type[BaseModel]) -> dict[Place, Any]:
    """Every setting this recipe may have; its rewards have the settings of their kinds."""
    known = dict(settings(recipe_class))
    entries = tree.get("rewards") if ("rewards",) in known else None
    for i, entry in enumerate(entries if isinstance(entries, list) else []):
        known |= _settings_of_reward(entry, ("rewards", i))
    return known


def _settings_of_reward(entry: Any, place: Place) -> dict[Place, Any]:
    if not isinstance(entry, dict) or entry.get("kind") not in plugins.kinds("rewards"):
        return {}
    known = dict(settings(plugins.kind("rewards", entry["kind"]), place))
    for name, inner in entry.items():  # rewards inside rewards
        known |= _settings_of_reward(inner, (*place, name))
    return known


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section class in `Lora` or `Lora | None`, if there is one."""
    for option in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def belongs_elsewhere(place: Place, stage: str, known: Sequence[Place]) -> str:
    """' of sft recipes, only of rl recipes.': what to say of a setting that only other stages' recipes have; '' if none has it.
    `known`: the settings that this recipe may have."""
    section = place if (place[0],) in known else place[:1]  # what is in it depends on the kind of a reward, for example
    stages = [other for other in STAGES if section in dict(settings(STAGES[other]))]
    if stage in stages or not stages:
        return ""
    others = " and ".join(part for part in (", ".join(stages[:-1]), stages[-1]) if part)
    siblings = [str(near[-1]) for near in known if near[:-1] == place[:-1]]
    near = nearest(str(place[-1]), siblings, cutoff=0.8)  # rows_per_step, pairs_per_step: each stage has its own
    hint = f" Did you mean {dotted((*place[:-1], near))}?" if near else ""
    return f" of {stage} recipes, only of {others} recipes.{hint}"


def _explain(
    error: ValidationError, fields: dict[Place, Any], sources: dict[Place, str], path: Path, stage: str | None = None
) -> Iterator[str]:
    """One line per mistake, in terms of the recipe rather than pydantic."""
    given_places = {place[:n] for place in sources for n in range(len(place) + 1)}
    seen: set[Place] = set()
    for item in error.errors():
        context = item.get("ctx", {})
        # pydantic adds the names of union members within and after the setting's path; the user only knows the setting.
        place: Place = ()
        for part in item["loc"][:-1]:
            place = (*place, part) if (*place, part) in given_places else place
        place = (*place, *item["loc"][-1:])
        inside = item["type"] == "missing" and isinstance(place[-1], int)
        absent = item["type"] in ("missing", "extra_forbidden") and not inside
        while place and place not in fields and place not in sources and not absent:
            place = place[:-1]
        if place in seen:
            continue
        seen.add(place)
        where = _where(place, sources, path) if place else str(path)
        described = f" ({' '.join((fields[place].description or '').split())})" if place in fields else ""
        match item["type"]:
            case "extra_forbidden":
                elsewhere = belongs_elsewhere(place, stage, list(fields)) if stage is not None else ""
                yield f"{where} is not a setting{elsewhere or '.' + suggest(place, item['input'], list(fields))}"
            case "missing" if inside:
                yield f"{where} has too few values{described}"
            case "missing":
                yield f"{where} is missing{described}"
            case "union_tag_not_found" | "union_tag_invalid" as kind:  # a list entry that can be one of several sections
                where = _where((*place, context["discriminator"].strip("'")), sources, path)
                if kind == "union_tag_not_found":
                    yield f"{where} is missing. It is one of {', '.join(plugins.kinds('rewards'))}."
                else:
                    options, tag = context["expected_tags"], str(context["tag"])
                    hint = did_you_mean(tag, re.findall(r"'([^']*)'", options), cutoff=0.4)
                    yield f"{where} should be one of {options}, not {shown(tag)}.{hint}"
            case "value_error":
                yield f"{where}: {context['error']}"
            case kind:
                given, hint = item["input"], ""
                if kind == "literal_error" and isinstance(given, str):
                    hint = did_you_mean(given, re.findall(r"'([^']*)'", context["expected"]), cutoff=0.4)
                elif kind in ("model_type", "model_attributes_type") or place == ("rewards",):
                    hint = show_form(place, given, list(fields))
                yield f"{where} should be {_wanted(item)}, not {shown(given)}.{hint}"


def _wanted(item: Any) -> str:
    """What pydantic expected, in terms of the recipe."""
    match item["type"]:
        case "model_type" | "model_attributes_type":
            return "a section"
        case "tuple_type" | "list_type":
            return "a list"
        case "too_long":
            return f"{item['ctx']['max_length']} values"
        case "bool_type" | "bool_parsing":
            return "true or false"
    return re.split(", (?:unable|got|exceeded)", item["msg"].removeprefix("Input should be "))[0]


def flatten(recipe: BaseModel) -> dict[str, Any]:
    """{'optim.lr': 1e-05, …}: for comparing two recipes and for trackers."""

    def walk(tree: Any, place: Place) -> Iterator[tuple[str, Any]]:
        if isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
            tree = dict(enumerate(tree))
        if isinstance(tree, dict) and tree:
            for key, value in tree.items():
                yield from walk(value, (*place, key))
        else:
            yield dotted(place), tree

    return dict(walk(recipe.model_dump(mode="json"), ()))
