"""What to write instead: of a setting that does not exist, of a value in place of a section, of a file that is no recipe."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from plaudit import plugins
from plaudit.errors import nearest
from plaudit.other_systems.other_words import NOTES, OTHER_SECTIONS, OTHER_WORDS, OTHER_WORDS_IN_REWARDS

Place = tuple[str | int, ...]
"""Path of a setting in the recipe: ('optim', 'lr')."""


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


def suggest(place: Place, given: Any, known: Sequence[Place]) -> str:
    """' Did you mean …?': what another trainer's setting is called here; the same name in another section; else a similar one in
    this section, or anywhere. `given`: its value; `known`: all settings that this recipe may have."""
    name = str(place[-1])
    if tuple(name.split(".")) in known:
        return f" In a file, sections are nested: {': {'.join(name.split('.'))}: …{'}' * name.count('.')}."
    if name in OTHER_SECTIONS and len(place) == 1 and isinstance(given, dict):
        return _suggest_for_section(name, given, known)
    reward = next((place[:n] for n in range(len(place), 0, -1) if place[0] == "rewards" and (*place[:n], "kind") in known), None)
    if reward is not None:
        words = OTHER_WORDS_IN_REWARDS.get(name, "")
        options, advice = [(*reward, *option.split(".")) for option in words.split(" or ") if option], ""
    else:
        # A setting of ours in the wrong section is more likely than another system's of that name.
        options, advice = _in_other_systems(place, own_name=any(p[-1] == name for p in known))
    if options := [option for option in options if option in known]:
        options = [option for option in options if option[:-1] == place[:-1]] or options
        return f" Did you mean {' or '.join(map(dotted, options))}?{' ' * (name in NOTES)}{NOTES.get(name, '')}"
    if advice:
        return f" {advice}"
    siblings = [p for p in known if p[:-1] == place[:-1]]
    for candidates, cutoff in ((known, 1.0), (siblings, 0.6), (known, 0.6)):
        if near := nearest(name, [str(p[-1]) for p in candidates], cutoff=cutoff):
            return f" Did you mean {dotted(max((p for p in candidates if p[-1] == near), key=partial(_shared_sections, place)))}?"
    longer = [p for p in siblings if str(p[-1]).startswith(f"{name}_")]
    return f" Did you mean {dotted(longer[0])}?" if len(longer) == 1 else ""


def _in_other_systems(place: Place, own_name: bool) -> tuple[list[Place], str]:
    """What a name of another system, or of an earlier version, is called here; what to do if it is called nothing."""
    from plaudit.other_systems.lookup import advise, counterparts, find_entries  # only for messages: the tables are large

    entries = find_entries(dotted(place), by_last_part=not own_name)
    words = OTHER_WORDS.get(str(place[-1]))
    return [tuple(one.split(".")) for one in (words.split(" or ") if words else counterparts(entries))], advise(entries)


def _suggest_for_section(name: str, given: dict[str, Any], known: Sequence[Place]) -> str:
    """For a section of another trainer: a hint for each setting in it."""
    hints = [f"{dotted(leaf)}:{hint}" for leaf in _leaves(given, (name,)) if (hint := suggest(leaf, None, known))]
    return " ".join([f" It is a section of {OTHER_SECTIONS[name]}.", *hints])


def _leaves(tree: dict[str, Any], place: Place) -> Iterator[Place]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*place, key))
        else:
            yield (*place, key)


def _shared_sections(one: Place, other: Place) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


MAIN_SETTINGS = {"model": "path", "reference": "path", "critic": "path", "data": "train", "run": "dir", "optim": "lr"}
"""What a single value in place of a section probably is."""


def show_form(place: Place, given: Any, known: Sequence[Place]) -> str:
    """' Write …': the form of a section, or of the list of rewards, in whose place another value is given."""
    if place[0] == "rewards" and len(place) <= 2:
        rewards = given if isinstance(given, list) else [given]
        return f" Write rewards: [{', '.join(_reward_form(reward) for reward in rewards if not isinstance(reward, list))}]."
    name, inside = str(place[-1]), [str(p[-1]) for p in known if p[:-1] == place]
    main = MAIN_SETTINGS.get(name, "kind" if "kind" in inside else None)
    if main in inside:
        return f" Write {name}: {{{main}: {_scalar_form(given)}}}."
    return f" Write {name}: {{{inside[0]}: …}}." if inside else ""


def _reward_form(given: Any) -> str:
    if isinstance(given, str) and given.endswith(".py"):
        return f"{{kind: function, path: {given}}}"
    kind = given.get("kind") if isinstance(given, dict) else given
    named = kind if isinstance(kind, str) and kind in plugins.kinds("rewards") else "…"
    return f"{{kind: {named}, …}}" if isinstance(given, dict) else f"{{kind: {named}}}"


def _scalar_form(given: Any) -> str:
    return str(given) if isinstance(given, str | int | float) and len(str(given)) <= 80 else "…"


def describe_other_file(path: Path) -> str | None:
    """What a file is that was given in place of a recipe, by its name, and where it belongs; None if it may be a recipe."""
    match path.suffix.lower():
        case ".jsonl" | ".parquet" | ".arrow" | ".csv":
            return (
                f"{path} is a data file, not a recipe. A recipe is a YAML file that names it (data: {{train: {path}}}); `plaudit "
                "score` and `audit` take a recipe first, then data files. `plaudit recipes` lists recipes to start from."
            )
        case ".py":
            return (
                f"{path} is a Python file, not a recipe. A reward function in it is named in a recipe: rewards: [{{kind: function, "
                f"path: {path}}}]. `plaudit recipes` lists recipes to start from."
            )
        case ".safetensors" | ".gguf" | ".bin" | ".pt":
            return f"{path} has weights; it is not a recipe. A recipe is a YAML file that names the folder: model: {{path: …}}."
    return None
