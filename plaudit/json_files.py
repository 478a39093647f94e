"""Small JSON files that others may have written, or a disk damaged: an object, or one clear reason why not."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""The index of the largest models' weights has a few megabytes."""


class UnreadableJson(ValueError):
    """Why a file is not a JSON object, as a clause: 'it is empty'."""


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or UnreadableJson."""
    try:
        if file.exists() and not file.is_file():  # a named pipe would wait for a writer
            raise UnreadableJson("it is not a file")
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableJson(error.strerror or str(error)) from None
    if len(text) > MAX_BYTES:
        raise UnreadableJson(f"it has more than {MAX_BYTES >> 20} MiB")
    return parse_object(text)


def parse_object(text: bytes) -> dict[str, Any]:
    """The same for text that was read already."""
    if not text.strip():
        raise UnreadableJson("it is empty")
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise UnreadableJson("it is not UTF-8 text") from None
    except RecursionError:
        raise UnreadableJson("it is nested too deeply") from None
    except ValueError as error:
        raise UnreadableJson(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnreadableJson(f"it should be an object, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds[type(value)]
