"""A name that is no setting, looked up in the tables of all systems: for the hints in messages."""

from collections.abc import Iterator, Sequence

from plaudit.other_systems import llamafactory, openrlhf, trl, verl
from plaudit.other_systems.entries import Entry
from plaudit.other_systems.other_words import SYNONYMS

TABLES = (verl.TABLE, trl.TABLE, llamafactory.TABLE, openrlhf.TABLE)


def find_entries(name: str, *, by_last_part: bool = True) -> list[Entry]:
    """The entries of a dotted name: of the full name if a system has it, else of its last part; else of keys that end with that, or
    of patterns that match it."""
    if (found := _exact(name)) or not by_last_part:
        return found
    last = name.rpartition(".")[2]
    last = SYNONYMS.get(last, last)
    ending = [entry for key, entry in _keys() if key.rpartition(".")[2] == last and not key.startswith("critic.")]
    return _exact(last) or ending or [entry for key in (name, last) for table in TABLES if (entry := table.find(key)) is not None]


def _exact(name: str) -> list[Entry]:
    return [table.keys[key] for table in TABLES if (key := table.canonical(name)) in table.keys]


def _keys() -> Iterator[tuple[str, Entry]]:
    for table in TABLES:
        yield from ((key, entry) for key, entry in table.keys.items() if "*" not in key)
        yield from ((key, table.keys[other]) for key, other in table.aliases.items() if other in table.keys)


def counterparts(entries: Sequence[Entry]) -> list[str]:
    """Settings here that the entries stand for."""
    return list(dict.fromkeys(setting for entry in entries if entry.way in ("copy", "composed") for setting in entry.to))


def advise(entries: Sequence[Entry]) -> str:
    """What to do with a key that has no counterpart, as a sentence; empty if there is nothing to say."""
    entry = next((entry for entry in entries if entry.way in ("no meaning", "advice")), None)
    if entry is None:
        return ""
    text = entry.text
    first = text.split()[0]
    sentence = text if "." in first or first == "plaudit" else f"{text[:1].upper()}{text[1:]}"
    return f"{sentence}{': remove it' * (entry.way == 'no meaning')}."
