"""Ways in which a file is damaged."""

import os
import random
from collections.abc import Callable
from pathlib import Path


def flip_bit(file: Path, byte: int, bit: int) -> int:
    """Twice restores it. Returns the bit."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        [value] = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([value ^ (1 << bit)]))
    return bit


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": _write(b""),
    "cut short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "random bytes": lambda file: file.write_bytes(random.Random(0).randbytes(file.stat().st_size)),
    "not UTF-8": _write(b'{"step": "\xff\xfe"}\n'),
    "a list": _write(b"[]\n"),
    "null": _write(b"null\n"),
    "a number": _write(b"1\n"),
    "an empty object": _write(b"{}\n"),
    "wrong types": _write(b'{"step": [], "files": 3, "recipe": 1, "inputs": null, "trackers": "x"}\n'),
    "nested": _write(b"[" * 100_000 + b"\n"),
}
