"""What plaudit needs of the operating system, and how it makes do with less. Linux and macOS are supported."""

import signal
import sys
from contextlib import suppress

from plaudit.errors import PlauditError

OPEN_FILES = 10240
"""Judges and workers take a few files each. Linux starts at 1,024, macOS at 256, and macOS allows no more than this."""


def require_supported_system() -> None:
    if sys.platform == "win32":
        raise PlauditError(
            "plaudit runs on Linux and macOS. On Windows, install it in WSL: https://learn.microsoft.com/windows/wsl"
        )


def raise_open_file_limit() -> None:
    """As far as the system lets us, up to `OPEN_FILES`."""
    import resource  # Linux and macOS only

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # forbidden here: then the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_file_limit() -> int | None:
    """How many files this process may have open; None for any number."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def describe_exit(code: int) -> str:
    """A process's exit code in words: 'exit code 1', 'killed by SIGSEGV'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"killed by signal {-code}"
