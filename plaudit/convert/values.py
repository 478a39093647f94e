"""Values as other systems write them: `FALSE`, `[console,wandb]`, `1e-5`, `{}`, and Hydra's `${data.max_prompt_length}`."""

import json
import re
from collections.abc import Mapping
from typing import Any

WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None, "": None}
INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH, MAX_REFERENCES, MAX_TEXT = 10, 1000, 10_000
"""Of lists and references in each other; of references in a value; of characters. A few lines of references to references could
stand for billions of values."""


def parse_value(text: str, depth: int = 0) -> Any:
    """A value of a Hydra override or a flag. What is nothing else is text."""
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text):
        return float(text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if depth < MAX_DEPTH and text[:1] in "[(" and text[-1:] in "])":
        return [parse_value(one, depth + 1) for one in _split(text[1:-1])]
    if text[:1] == "{" and text[-1:] == "}":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pairs = [one.partition(":") for one in _split(text[1:-1])] if depth < MAX_DEPTH else [("", "", "")]
            if all(colon for _, colon, _ in pairs):
                return {key.strip(" '\""): parse_value(value, depth + 1) for key, _, value in pairs}
    return text


def _split(text: str) -> list[str]:
    """At commas outside of quotes and brackets."""
    parts, depth, quote, start = [], 0, "", 0
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    last = text[start:]
    return [*parts, last] if last.strip() or parts else []


def resolve(key: str, value: Any, settings: Mapping[str, Any]) -> Any:
    """Replace Hydra's references to other settings: `${a.b}`, `${.b}`, `${oc.select:a.b,default}`. Others stay as they are."""
    return _Resolver(key, settings).resolve(value, 0)


class _Resolver:
    def __init__(self, key: str, settings: Mapping[str, Any]):
        self._key, self._settings, self._left = key, settings, MAX_REFERENCES

    def resolve(self, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [self.resolve(one, depth) for one in value]
        if isinstance(value, dict):
            return {name: self.resolve(one, depth) for name, one in value.items()}
        if not isinstance(value, str) or "${" not in value or depth > MAX_DEPTH or len(value) > MAX_TEXT:
            return value
        if match := REFERENCE.fullmatch(value):
            return self._replacement(match, depth)
        return REFERENCE.sub(lambda match: self._as_text(match, depth), value)

    def _replacement(self, match: re.Match, depth: int) -> Any:
        self._left -= 1
        found = _look_up(self._key, match[1], self._settings) if self._left > 0 else _MISSING
        return match[0] if found is _MISSING else self.resolve(found, depth + 1)

    def _as_text(self, match: re.Match, depth: int) -> str:
        found = self._replacement(match, depth)
        return match[0] if found is None or len(str(found)) > MAX_TEXT else str(found)


_MISSING: Any = object()


def _look_up(key: str, reference: str, settings: Mapping[str, Any]) -> Any:
    name, _, default = reference.partition(",")
    selects = name.startswith(("oc.select:", "oc.env:"))
    name = name.removeprefix("oc.select:").strip()
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}"
    if name in settings:
        return settings[name]
    return parse_value(default) if selects and default.strip() else _MISSING


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A YAML file's settings by dotted names; empty sections and lists stay values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_unresolved(value: Any) -> bool:
    """Whether a value still depends on something outside the file."""
    if isinstance(value, list):
        return any(map(is_unresolved, value))
    return isinstance(value, str) and bool(re.search(r"\$\{|\$\(|`|\$@|\$[A-Za-z0-9_]", value))
