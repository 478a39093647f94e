"""Files of a model folder that say how its responses are written, and that every stage of training carries along:

    longcot_config.json   where thoughts end: {"longcot_delimiter": "</think>", "end_delimiter": null, …}
    stop.txt              strings that end a response, one per line

Both come from systems that train thinking models. A LoRA adapter without such a file has its base's.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from plaudit.errors import RecipeError
from plaudit.hub import model_folder
from plaudit.json_files import UnreadableJson, read_object
from plaudit.lora_folder import read_lora_folder

LONGCOT, STOP = "longcot_config.json", "stop.txt"
OPEN, CLOSE, OPEN_RESPONSE, CLOSE_RESPONSE = TAGS = ("<think>", "</think>", "<response>", "</response>")
"""Around thoughts, and around the response that follows them: other modules import these."""
MAX_STOP_BYTES = 64 << 10


@dataclass(frozen=True)
class Longcot:
    """The answer is the text between these; without a start, the whole response."""

    start: str | None
    end: str | None
    marker: str | None = None
    """start_think_marker: what `plaudit sample` begins a response with."""

    def split(self, text: str) -> tuple[str, str] | None:
        """Thought and answer, without the tags around them; None if a delimiter is missing."""
        if self.start is None:
            return "", text.strip()
        thought, found_start, answer = text.partition(self.start)
        found_end: str | bool = True
        if self.end is not None:
            answer, found_end, _ = answer.partition(self.end)
        if not (found_start and found_end):
            return None
        return thought.strip().removeprefix(OPEN).removesuffix(CLOSE).strip(), answer.strip()


def response_file(model: str, name: str) -> Path:
    """Where a model's file is, or would be."""
    own = model_folder(model, weights=False) / name
    lora = None if own.is_file() else read_lora_folder(model)
    return own if lora is None else model_folder(lora.base, weights=False) / name


def read_response_files(model: str) -> dict[str, bytes]:
    """The contents of those that a model has, checked, by name."""
    files = {name: file for name in (LONGCOT, STOP) if (file := response_file(model, name)).is_file()}
    if LONGCOT in files:
        read_longcot_config(files[LONGCOT])
    if STOP in files:
        stop_strings(model, None)
    return {name: file.read_bytes() for name, file in files.items()}


def join_thought(thought: str, answer: str) -> str:
    """A response as SFT on thoughts writes it."""
    return f"{OPEN}\n{thought.strip()}\n{CLOSE}\n\n{answer}"


# longcot_config.json -------------------------------------------------------------------------------------------------


def longcot_of_think_tags() -> bytes:
    """The file of a model whose responses are `<think>` thoughts `</think>` and the answer."""
    config = {
        "longcot": True, "longcot_delimiter": CLOSE, "end_delimiter": None, "start_think_marker": OPEN,
    }  # fmt: skip
    return (json.dumps(config, indent=2) + "\n").encode()


def have_thoughts(texts: Iterable[str]) -> bool:
    """Whether most of these responses end their thoughts with `</think>`. (The opening tag may be in the prompt.)"""
    closed = [CLOSE in text for text in texts]
    return 2 * sum(closed) > len(closed)


def read_longcot_config(file: Path) -> Longcot:
    """Delimiters and marker of a longcot_config.json; `<response>` implies `</response>`."""
    try:
        written = file.stat().st_mtime_ns
    except OSError as error:
        raise RecipeError(f"longcot_config: {file} cannot be read: {error}") from None
    return _read_longcot_config(file, written)


@lru_cache(maxsize=64)
def _read_longcot_config(file: Path, written: int) -> Longcot:
    """Once for each version of the file: an edited one is read again."""
    try:
        config = read_object(file)
    except UnreadableJson as error:
        raise RecipeError(f"longcot_config: {file} cannot be read: {error}. Correct or delete it") from None
    if "longcot_delimiter" not in config:
        raise RecipeError(f"longcot_config: {file} has no longcot_delimiter: add the text that ends thoughts, or null for none")
    names = ("longcot_delimiter", "end_delimiter", "start_think_marker")
    start, end, marker = (config.get(name) for name in names)
    for name, value in zip(names, (start, end, marker), strict=True):
        if value is not None and (not isinstance(value, str) or not value):
            raise RecipeError(f"longcot_config: {file}: {name} should be text or null, not {value!r:.80}")
    return Longcot(start, end or (CLOSE_RESPONSE if start == OPEN_RESPONSE else None), marker)


# stop.txt ------------------------------------------------------------------------------------------------------------


def stop_strings(model: str, setting: tuple[str, ...] | None) -> tuple[str, ...]:
    """What ends a response besides the end token: what the setting says; if it says nothing, the lines of the model's stop.txt."""
    if setting is not None:
        return setting
    file = response_file(model, STOP)
    if not file.is_file():
        return ()
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_STOP_BYTES + 1)
        if len(text) > MAX_STOP_BYTES:
            raise RecipeError(f"{file} should be short, a stop string on each line: it has more than {MAX_STOP_BYTES >> 10} KiB")
        lines = text.decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} should be text, a stop string on each line: {error}. Correct or delete it") from None
    return tuple(dict.fromkeys(line.removesuffix("\r") for line in lines if line.strip()))
