"""What plaudit needs of the operating system, and how it makes do with less. Linux and macOS are supported."""

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from plaudit.errors import PlauditError

OPEN_FILES = 10240
"""Judges and workers take a few files each. Linux starts at 1,024, macOS at 256, and macOS allows no more than this."""
RETURNED_BYTES = 2**21
"""Tensors of this size and more are returned to the system when they are freed. Most processors have huge pages of this size."""
CONTAINER_MEMORY = [
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
]
"""Limit, use and statistics, in version 2 and version 1 of Linux's control groups."""
M_MMAP_THRESHOLD = -3
"""In glibc's malloc.h."""


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


def address_towards(host: str) -> str:
    """This machine's address on the network that leads to the host."""
    family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: the system only chooses the interface
        return probe.getsockname()[0]


def use_huge_pages() -> None:
    """Let torch ask Linux for huge pages, unless the user has chosen: memory that is taken anew for each tensor costs a page fault
    for every page. torch reads this when it allocates its first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def return_freed_memory() -> None:
    """Make a freed tensor's memory the system's again, unless the user has chosen otherwise.

    glibc keeps blocks of up to 32 MB in its heap, where they cannot be used again for tensors of the same size (these have to be
    aligned): a process took up to three times the memory of its tensors, so that no plan of it could be right. Measured with and
    without in bench/README.md, "memory_plan.py". Other C libraries have no such setting."""
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, RETURNED_BYTES)


def available_memory() -> int:
    """Bytes that processes can still take: of the machine, or of this container if it has less."""
    import psutil

    available = [psutil.virtual_memory().available]
    for limit, used, inactive in CONTAINER_MEMORY:
        with suppress(OSError, ValueError, StopIteration):  # "max" means none
            stat = (line.split() for line in Path("/sys/fs/cgroup", inactive).read_text().splitlines())
            # Cached files that the system would drop count as used.
            dropped = next(int(size) for name, size in stat if name in ("inactive_file", "total_inactive_file"))
            in_use = int(Path("/sys/fs/cgroup", used).read_text()) - dropped
            available.append(int(Path("/sys/fs/cgroup", limit).read_text()) - in_use)
    return max(0, min(available))


def describe_exit(code: int) -> str:
    """A process's exit code in words: 'exit code 1', 'killed by SIGSEGV'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"killed by signal {-code}"
