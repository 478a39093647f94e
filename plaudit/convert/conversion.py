"""Settings of another system on their way to a recipe: what each key became, under one of four headings.

    carried over              the setting here, in the recipe
    default here already      the setting here has this value without being written
    has no meaning here       and why
    needs you                 and what to do

Every key that is given ends under a heading. A setting that would have no effect here, or that a recipe refuses, is left out of the
recipe and moves to the heading that says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from plaudit.config import section_class
from plaudit.convert.reading import Source
from plaudit.convert.values import is_unresolved, resolve
from plaudit.explain import one_line
from plaudit.other_systems.entries import UNSET, Entry, Table, Unfit
from plaudit.recipe import STAGES

CARRIED, DEFAULT, NO_MEANING, NEEDS_YOU = "carried over", "default here already", "has no meaning here", "needs you"
HEADINGS = (CARRIED, DEFAULT, NO_MEANING, NEEDS_YOU)
MAX_ROUNDS = 1000
REQUIRED = {"model.path": "${MODEL}", "data.train": "${TRAIN_FILE}"}
"""Settings that every recipe for training needs, and what stands for them if the file does not have them."""


@dataclass(frozen=True)
class Line:
    """One line of the report. Without a key it is about the file as a whole, or about a default of the other system."""

    heading: str
    key: str
    value: Any
    text: str


@dataclass
class Setting:
    value: Any
    keys: tuple[str, ...]
    """The keys it comes from; none: it is a default, or our choice."""
    text: str = ""
    chosen: bool = False
    """Neither given nor a default of the other system."""


@dataclass
class Conversion:
    source: Source
    table: Table
    stage: str
    fork: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from the table's."""
    whose: str = ""
    """Whose defaults they are; default: the system's."""

    def __post_init__(self) -> None:
        self.whose = self.whose or self.table.name
        self.given: dict[str, Any] = {}
        self.spelled: dict[str, dict[str, Any]] = {}
        """Of a key: its spellings in the file, each with its value."""
        settings = {self.table.canonical(key): value for key, value in self.source.settings.items()}
        for key, value in self.source.settings.items():
            canonical = self.table.canonical(key)
            self.given[canonical] = self.spelled.setdefault(canonical, {})[key] = resolve(canonical, value, settings)
        self.settings: dict[str, Setting] = {}
        self.rewards: list[dict[str, Any]] = []
        self.lines: list[Line] = []
        self._handled: set[str] = set()
        self._absent: dict[str, str] = {}
        self.uses_server = False
        """Whether a reward's model is the server that the script starts."""

    # For the rules of a system -------------------------------------------------

    def value(self, key: str) -> Any:
        """As given; else the other system's default, None if it has none."""
        if key in self.given:
            return self.given[key]
        default = self.default(key)
        return None if default is UNSET else resolve(key, default, self.given)

    def is_on(self, key: str) -> bool:
        """A switch; one whose value is not in the file counts as off, and is listed."""
        if is_unresolved(self.value(key)):
            self.needs("its value is not in the file", key)
        return self.value(key) is True

    def default(self, key: str) -> Any:
        if key in self.fork:
            return self.fork[key]
        entry = self.table.keys.get(key)
        return UNSET if entry is None else entry.default

    def has(self, *keys: str) -> bool:
        return any(key in self.given for key in keys)

    def set(self, setting: str, value: Any, *keys: str, text: str = "") -> None:
        """A setting of the recipe, and the keys it comes from (those that are not given are left out)."""
        named = tuple(key for key in keys if key in self.given)
        self._handled.update(named)
        if reason := next((reason for section, reason in self._absent.items() if f"{setting}.".startswith(f"{section}.")), None):
            for key in named:
                self.line(NO_MEANING, key, reason)
        elif value is UNSET:
            for key in named:
                self.line(DEFAULT, key, text or f"it is off, as it is here without {setting}")
        elif is_unresolved(value) and not self._is_text(setting):
            for key in named:
                self.line(NEEDS_YOU, key, f"set {setting}: its value is not in the file")
        else:
            before = self.settings[setting].keys if setting in self.settings else ()  # two keys for one setting: the later counts
            self.settings[setting] = Setting(value, (*before, *named), text)

    def without(self, section: str, reason: str) -> None:
        """The recipe has no such section; its settings have no meaning."""
        self._absent[section] = reason

    def line(self, heading: str, key: str, text: str) -> None:
        self._handled.add(key)
        if key in self.given:
            self.lines += [Line(heading, spelled, value, text) for spelled, value in self.spelled[key].items()]
        else:
            self.lines.append(Line(heading, "", None, text))

    def no_meaning(self, text: str, *keys: str) -> None:
        for key in keys:
            if key in self.given and key not in self._handled:
                self.line(NO_MEANING, key, text)

    def needs(self, text: str, *keys: str) -> None:
        for key in keys:
            if key in self.given and key not in self._handled:
                self.line(NEEDS_YOU, key, self._open_value(key) or text)

    def _open_value(self, key: str) -> str:
        """What to say of a key whose value is not in the file; empty if it is."""
        entry = self.table.find(key)
        settings = f"set {' or '.join(entry.to)}: " if entry is not None and entry.to else ""
        return f"{settings}its value is not in the file" if is_unresolved(self.given[key]) else ""

    def remark(self, text: str) -> None:
        """Something that a person has to decide, and that no single key says."""
        self.lines.append(Line(NEEDS_YOU, "", None, text))

    def reward(self, reward: dict[str, Any], *keys: str) -> None:
        """Append to the recipe's rewards; these keys describe it."""
        self.rewards.append(reward)
        self.reward_keys([len(self.rewards) - 1], *keys)

    def reward_keys(self, numbers: Sequence[int], *keys: str) -> None:
        """Keys that describe rewards of the recipe."""
        names = ", ".join(f"rewards.{n} ({self.rewards[n].get('name') or self.rewards[n]['kind']})" for n in numbers)
        for key in keys:
            if key in self.given and key not in self._handled:
                self.line(CARRIED, key, names)

    # The table ---------------------------------------------------------------

    def apply_table(self) -> None:
        """Everything that the system's own rules have not handled."""
        for key, value in self.given.items():
            if key in self._handled:
                continue
            entry = self.table.find(key)
            if entry is None:
                self.line(NEEDS_YOU, key, "unknown key: look it up in the other system's documentation")
            else:
                self._apply(key, value, entry)
        for key, entry in self.table.keys.items():
            default = self.default(key)
            if entry.way == "copy" and default is not UNSET and key not in self.given and self._exists(entry):
                setting = next(name for name in entry.to if self._place_exists(name))
                if setting not in self.settings:
                    self._copy(key, default, entry, setting)

    def _apply(self, key: str, value: Any, entry: Entry) -> None:
        match entry.way:
            case "no meaning":
                self.line(NO_MEANING, key, entry.text)
            case "advice":
                if value in [*entry.off] or (entry.switch is not None and self.value(entry.switch) in entry.off):
                    self.line(NO_MEANING, key, entry.when_off or f"it is off ({entry.text})")
                elif is_unresolved(value):
                    self.line(NEEDS_YOU, key, f"its value is not in the file; if it is on: {entry.text}")
                else:
                    unnamed = entry.to and not any(one in entry.text for one in entry.to)
                    self.line(NEEDS_YOU, key, f"{entry.text}{f' ({entry.to[0]})' if unnamed else ''}")
            case "copy":
                setting = next((name for name in entry.to if self._place_exists(name)), None)
                if setting is None:
                    self.line(NO_MEANING, key, f"a {self.stage} recipe has no {' or '.join(entry.to)}")
                else:
                    self._copy(key, value, entry, setting)
            case "composed":
                options = [name for name in entry.to if self._place_exists(name.split(".")[0])]
                if options:
                    self.line(NEEDS_YOU, key, self._open_value(key) or f"set {' or '.join(options)}: it depends on other keys too")
                else:
                    self.line(NO_MEANING, key, f"a {self.stage} recipe has no {' or '.join(entry.to)}")

    def _copy(self, key: str, value: Any, entry: Entry, setting: str) -> None:
        try:
            if entry.values is not None and not is_unresolved(value):
                known = {repr(theirs): ours for theirs, ours in entry.values.items()}
                if repr(value) not in known:
                    options = ", ".join(map(str, entry.values.values()))
                    raise Unfit(f"{value!r} has no counterpart: {setting} is one of {options}")
                value = known[repr(value)]
            elif entry.read is not None and not is_unresolved(value):
                value = entry.read(value)
        except Unfit as error:
            self.line(NEEDS_YOU, key, str(error))
            return
        except (TypeError, AttributeError):  # a list where a word should be
            self.line(NEEDS_YOU, key, f"set {setting}: its value has an unexpected form")
            return
        self.set(setting, value, key, text=entry.text)

    # The recipe --------------------------------------------------------------

    @property
    def recipe_class(self) -> type[BaseModel]:
        return STAGES[self.stage]

    def _exists(self, entry: Entry) -> bool:
        return any(map(self._place_exists, entry.to))

    def _place_exists(self, setting: str) -> bool:
        return _field(self.recipe_class, setting) is not None

    def _is_text(self, setting: str) -> bool:
        info = _field(self.recipe_class, setting)
        return info is not None and "str" in str(info.annotation) and "Literal" not in str(info.annotation)

    def finish(self) -> dict[str, Any]:
        """The recipe as plain values: only what differs from the defaults, without settings that have no effect or are refused."""
        self._drop_ineffective()
        self._drop_defaults()
        for _ in range(MAX_ROUNDS):
            if not self._drop_refused():
                break
            self._drop_ineffective()
        for name, setting in self.settings.items():
            for key in setting.keys:
                self.line(CARRIED, key, _described(name, setting))
            if not setting.keys and not setting.chosen:
                self.lines.append(Line(CARRIED, "", None, _described(name, setting, self.whose)))
        return self.tree()

    def _drop_defaults(self) -> None:
        """Leave out what the recipe has anyway. A section that is there only if it is named keeps one setting."""
        by_section: dict[str, list[str]] = {}
        for name in self.settings:
            for section in _optional_sections(self.recipe_class, name):
                by_section.setdefault(section, []).append(name)
        default = {name: _plain(setting.value) == _default(self.recipe_class, name) for name, setting in self.settings.items()}
        kept = {names[0] for names in by_section.values() if all(default[name] for name in names)}
        for name, setting in list(self.settings.items()):
            if default[name] and name not in kept and not setting.chosen:
                for key in setting.keys:
                    self.line(DEFAULT, key, _described(name, setting))
                del self.settings[name]

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"stage": self.stage}
        for name, setting in self.settings.items():
            *sections, last = name.split(".")
            at = reduce(lambda at, section: at.setdefault(section, {}), sections, tree)
            at[last] = setting.value
        if self.rewards:
            tree["rewards"] = self.rewards
        return _in_order(tree, self.recipe_class)

    def _drop_ineffective(self) -> None:
        for name, reason in self._ineffective():
            for key in self.settings[name].keys:
                self.line(NO_MEANING, key, reason)
            del self.settings[name]

    def _ineffective(self) -> Iterator[tuple[str, str]]:
        """Settings without effect in combination with the others, and the reason."""
        recipe = _constructed(self.recipe_class, self.tree())
        for name in list(self.settings):
            parts = name.split(".")
            section: Any = recipe
            for depth, part in enumerate(parts):
                reason = section.ineffective_settings().get(part) if hasattr(section, "ineffective_settings") else None
                if reason is not None:
                    yield name, f"{'.'.join(parts[: depth + 1])} has no effect here: {reason}"
                    break
                section = getattr(section, part, None)

    def _drop_refused(self) -> bool:
        """Take one setting that the recipe refuses out of it, and say why; False if there is none."""
        try:
            self.recipe_class.model_validate(self.tree())
        except ValidationError as error:
            errors = error.errors()
            if all(one["type"] == "missing" for one in errors):
                number = next((one["loc"][1] for one in errors if one["loc"][0] == "rewards" and len(one["loc"]) > 2), None)
                return self._stand_in() if number is None else self._drop_reward(number, errors[0]["loc"][-1])
            wrong = next(one for one in errors if one["type"] != "missing")
            problem = wrong["msg"].removeprefix("Value error, ")
            if wrong["loc"][:1] == ("rewards",) and len(wrong["loc"]) > 1:
                return self._drop_from_rewards(wrong["loc"][1:], problem)
            name = self._blamed([str(part) for part in wrong["loc"]], problem)
            if name is None:
                self.remark(f"the recipe does not load yet: {problem}")
                return False
            for key in self.settings[name].keys or (name,):
                self.line(NEEDS_YOU, key, f"{name} was refused: {problem}")
            del self.settings[name]
            return True
        return False

    def _stand_in(self) -> bool:
        """Fill in a setting that every recipe needs and that the file does not have; False if they are all there."""
        for setting, value in {**REQUIRED, "run.dir": f"runs/{self.source.path.stem}"}.items():
            if setting not in self.settings and self._place_exists(setting):
                self.settings[setting] = Setting(value, (), "not in the file", chosen=True)
                if setting in REQUIRED:
                    self.remark(f"{setting} is not in the file: write it into the recipe, or add {setting}=… to the command")
                return True
        return False

    def _blamed(self, place: Sequence[str], problem: str) -> str | None:
        """The setting at the place of a mistake; of a section, one that the message names."""
        for n in range(len(place), -1, -1):
            section = ".".join(place[:n])
            inside = [name for name in self.settings if name == section or f"{name}.".startswith(f"{section}." if n else "")]
            if inside:
                named = (name for name in inside if name in problem or name.rpartition(".")[2] in problem.split())
                return next(named, inside[-1] if n else None)
        return None

    def _drop_reward(self, number: Any, missing: Any) -> bool:
        """A reward without something that it needs; the last one is replaced by a function to write."""
        self.remark(f"rewards.{number} ({self.rewards[number]['kind']}) was left out: its {missing} is missing")
        del self.rewards[number]
        if not self.rewards:
            self.rewards.append({"kind": "function", "path": "rewards.py"})
        return True

    def _drop_from_rewards(self, place: Sequence[Any], problem: str) -> bool:
        """The deepest part of a reward at the place of a mistake."""
        at: Any = self.rewards
        found: list[tuple[Any, Any]] = []
        for part in place:  # pydantic adds names of classes in between
            if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
                found.append((at, part))
                at = at[part]
        while found and (found[-1][1] == "kind" or isinstance(found[-1][0], list)):
            found.pop()
        name = f"rewards.{'.'.join(str(part) for _, part in [(None, place[0]), *found[1:]])}" if found else "rewards"
        self.remark(f"{name} was refused: {problem}" if found else f"the recipe does not load yet: {name}: {problem}")
        if found:
            del found[-1][0][found[-1][1]]
        return bool(found)


def _described(name: str, setting: Setting, whose: str = "") -> str:
    remarks = "; ".join(text for text in (whose and f"{whose}'s default", setting.text) if text)
    return f"{name}: {one_line(_plain(setting.value))}{f' ({remarks})' if remarks else ''}"


def _field(section: type[BaseModel], setting: str) -> Any:
    """The pydantic field of a dotted setting, None if there is none."""
    first, _, rest = setting.partition(".")
    info = section.model_fields.get(first)
    if info is None or not rest:
        return info
    inner = section_class(info.annotation)
    return None if inner is None else _field(inner, rest)


def _optional_sections(recipe_class: type[BaseModel], setting: str) -> list[str]:
    """The sections around a setting that a recipe has only if it names them."""
    parts = setting.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts))]
    return [name for name in names if (info := _field(recipe_class, name)) is not None and info.default is None]


def _default(section: Any, setting: str) -> Any:
    """A setting's value if it is not written; of a section that is null by default, that of the section once it is there."""
    first, _, rest = setting.partition(".")
    info = (section if isinstance(section, type) else type(section)).model_fields[first]
    value = info.get_default(call_default_factory=True) if isinstance(section, type) else getattr(section, first)
    if not rest:
        return PydanticUndefined if value is PydanticUndefined else _plain(value)
    return _default(value if isinstance(value, BaseModel) else section_class(info.annotation), rest)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _in_order(tree: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Sections and settings in the order in which they are documented."""
    ordered = {name: tree[name] for name in section.model_fields if name in tree}
    for name, value in ordered.items():
        inner = section_class(section.model_fields[name].annotation)
        if inner is not None and isinstance(value, dict):
            ordered[name] = _in_order(value, inner)
    return ordered


def _constructed(section: type[BaseModel], tree: Mapping[str, Any]) -> BaseModel:
    """The section without any checks, so that one setting that has no effect does not hide the next."""
    values = {}
    for name, value in tree.items():
        info = section.model_fields.get(name)
        inner = section_class(info.annotation) if info is not None else None
        values[name] = _constructed(inner, value) if inner is not None and isinstance(value, dict) else value
    return section.model_construct(**values)
