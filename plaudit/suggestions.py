"""What to write instead of a setting that does not exist: its name in plaudit, or why there is none."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from plaudit.errors import nearest
from plaudit.recipe.other_names import OTHER_NAMES, OTHER_NAMES_IN_REWARDS, OTHER_SECTIONS, UNNEEDED

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
    if reward is not None and name in OTHER_NAMES_IN_REWARDS:
        options = [(*reward, *option.split(".")) for option in OTHER_NAMES_IN_REWARDS[name].split(" or ")]
    else:
        options = [tuple(option.split(".")) for option in OTHER_NAMES.get(name, "").split(" or ")]
    if options := [option for option in options if option in known]:
        options = [option for option in options if option[:-1] == place[:-1]] or options
        return f" Did you mean {' or '.join(map(dotted, options))}?"
    if name in UNNEEDED:
        return f" {UNNEEDED[name]}"
    siblings = [p for p in known if p[:-1] == place[:-1]]
    for candidates, cutoff in ((known, 1.0), (siblings, 0.6), (known, 0.6)):
        if near := nearest(name, [str(p[-1]) for p in candidates], cutoff=cutoff):
            return f" Did you mean {dotted(max((p for p in candidates if p[-1] == near), key=partial(_shared_sections, place)))}?"
    return ""


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
