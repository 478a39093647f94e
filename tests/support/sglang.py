"""The stand-in for SGLang as the server of an engine."""

import sys
from typing import Any

import psutil

from support.paths import TESTS

STAND_IN = TESTS / "support" / "sglang_server.py"


def stand_in(*arguments: str, **settings: Any) -> dict[str, Any]:
    """`rollout.server` of a recipe."""
    return {"program": f"{sys.executable} {STAND_IN}", "arguments": ["--enable-deterministic-inference", *arguments], **settings}


def stand_ins() -> list[psutil.Process]:
    """Those that run for this process."""
    return [process for process in psutil.Process().children(recursive=True) if str(STAND_IN) in process.cmdline()]
