"""The guard of a worker process: its parent, which ends it with everything it started, and watches its memory.

plaudit starts the guard, and the guard forks the worker before anything else is loaded, so that it is small. It ends the worker
and all its descendants when plaudit closes the control connection, when plaudit dies (kill -9 included), when the worker ends, and
when the worker exceeds its memory limit; then it reports how the worker ended. A thread in the worker could not do this: a function
stuck in C code lets no other thread run.

**Descendants.** On Linux the guard is a child subreaper: a descendant whose parent ends becomes the guard's child, whatever session
and process group it has joined, so that no daemon gets away. If the guard itself is killed, the kernel kills the worker, and
plaudit looks for processes with the worker's mark in their environment. macOS has no subreapers: there the guard remembers the
descendants it has seen and looks for the mark. A daemon that emptied its environment gets away if the guard was killed or, on
macOS, if it was started between two looks.

**Memory** is what the worker and its descendants hold in RAM. Not RLIMIT_AS or RLIMIT_DATA: these count memory that is reserved
and never used, of which torch, CUDA and the JVM take a lot, and macOS does not enforce them. Their resident sets are summed, which
is quick; if the sum exceeds the limit, Linux's proportional sets decide, in which a page that n processes share counts 1/n for each
of them. Forked children share most of their pages. macOS has no proportional sets: there, shared pages count once per process. The
guard looks again before the rest could be used up, so that the limit is exceeded by a fraction of a GB at most.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

MARK = "PLAUDIT_WORKER"
"""Environment variable with the worker's own random text."""
GROWTH_PER_S = 8e9
"""Bytes of memory that a process can fill in a second, at most."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.01, 1.0
SEARCH_EVERY_S = 1.0
"""Without a subreaper, children are searched for among all processes of the system, which takes milliseconds: while the known ones
are idle, only this often."""
ENDING_S = 2.0
"""How long processes may take to end after SIGKILL."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(channel: int, control: int, memory_limit: int) -> None:
    """Fork the worker and guard it; in the worker, this returns when there are no more calls. `memory_limit`: bytes; 0 for none."""
    is_subreaper = prctl(PR_SET_CHILD_SUBREAPER, 1) and os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    child_ended, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (control, child_ended, write_end):
            os.close(descriptor)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(0)
        os.setpgid(0, 0)  # `kill 0` in the user's code must not reach the guard

        from plaudit.rewards.functions.worker import work

        return work(channel)
    with suppress(OSError):  # it has done so itself
        os.setpgid(worker, worker)
    os.close(channel)
    tree = SubreaperTree() if is_subreaper else SearchedTree(os.environ.get(MARK, ""))
    report = _watch(worker, control, child_ended, tree, memory_limit)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    end_all(tree)
    with suppress(OSError):
        os.write(control, json.dumps(report).encode())
    os._exit(0)


def prctl(option: int, value: int) -> bool:
    """Linux's prctl; False where there is none."""
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) == 0
    except (OSError, AttributeError):
        return False


def _watch(worker: int, control: int, child_ended: int, tree: "Tree", memory_limit: int) -> dict[str, Any]:
    """Until the worker has ended, or must: its exit code, and its memory if that is why."""
    parent = os.getppid()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(child_ended, select.POLLIN)
    while True:
        wait_s = LONGEST_WAIT_S
        if memory_limit:
            used = memory_used(tree, memory_limit)
            if used > memory_limit:
                os.kill(worker, signal.SIGUSR1)  # it prints the line that it is executing
                time.sleep(0.02)
                return {"code": -signal.SIGKILL, "memory": used}
            wait_s = min(max((memory_limit - used) / GROWTH_PER_S, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
        if control in ready:
            if not os.read(control, 64):
                return {"code": -signal.SIGKILL}
            os.kill(worker, signal.SIGUSR1)
        if child_ended in ready:
            os.read(child_ended, 4096)
        if (code := _exit_code(worker)) is not None:
            return {"code": code}
        if os.getppid() != parent:  # it is dead, but one of its forks still holds the control connection
            return {"code": -signal.SIGKILL}


def _exit_code(worker: int) -> int | None:
    """None while it runs. Orphans that have ended are reaped on the way; the worker is not, so that the id of its process group is
    not reused before the group is killed."""
    if not hasattr(os, "waitid"):  # macOS: no orphans either
        ended, status = os.waitpid(worker, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if info.si_pid == worker:
            return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        os.waitpid(info.si_pid, 0)
    return None


# The descendants of this process -------------------------------------------------------------------------------------


MEMORY_FILE = "/proc/{}/smaps_rollup"
"""Linux: a process's memory, with its part of what it shares."""


class Tree(Protocol):
    def members(self) -> list[int]:
        """Every process below this one."""
        ...

    def resident(self) -> dict[int, int]:
        """The resident set of each, in bytes."""
        ...


def memory_used(tree: Tree, limit: int) -> int:
    """Bytes of RAM that the members of a tree hold. Below the limit this may be too high: shared pages count for each process."""
    resident = tree.resident()
    used = sum(resident.values())
    return used if used <= limit else sum(_proportional(pid, size) for pid, size in resident.items())


def _proportional(pid: int, resident: int) -> int:
    """A process's memory, with its part of what it shares; its resident set, which is larger, where the system does not say."""
    try:
        with open(MEMORY_FILE.format(pid)) as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists(MEMORY_FILE.format("self")):
            return 0  # it has ended since its resident set was read
    except OSError:
        pass
    return resident


class SubreaperTree:
    """Linux: everything below a subreaper stays below it."""

    def members(self) -> list[int]:
        found, unexplored = [], [os.getpid()]
        while unexplored:
            children = _children(unexplored.pop())
            found += children
            unexplored += children
        return found

    def resident(self) -> dict[int, int]:
        sizes, page_bytes = {}, os.sysconf("SC_PAGE_SIZE")
        for pid in self.members():
            with suppress(OSError), open(f"/proc/{pid}/statm") as file:
                sizes[pid] = int(file.read().split()[1]) * page_bytes
        return sizes


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


class SearchedTree:
    """Elsewhere: children as far as they can be traced, those seen before, and in `members` all that have the mark."""

    def __init__(self, mark: str):
        self._mark, self._seen = mark, set()
        self._next_search, self._activity_at_search = 0.0, (0.0, 0)

    def members(self) -> list[int]:
        self._search()
        return [*{process.pid for process in self._seen if process.is_running()} | set(marked(self._mark))]

    def resident(self) -> dict[int, int]:
        import psutil

        if time.monotonic() >= self._next_search or self._activity() != self._activity_at_search:
            self._search()
        sizes = {}
        for process in self._seen:
            with suppress(psutil.Error):
                sizes[process.pid] = process.memory_info().rss
        return sizes

    def _search(self) -> None:
        import psutil

        self._next_search, self._activity_at_search = time.monotonic() + SEARCH_EVERY_S, self._activity()
        self._seen |= set(psutil.Process().children(recursive=True))
        self._seen = {process for process in self._seen if process.is_running()}

    def _activity(self) -> tuple[float, int]:
        """CPU time and context switches of those seen: who starts a process has been woken for it, or computes."""
        import psutil

        cpu_s, switches = 0.0, 0
        for process in self._seen:
            with suppress(psutil.Error):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                switches += sum(process.num_ctx_switches())
        return cpu_s, switches


def marked(mark: str) -> list[int]:
    """Processes with this mark in their environment, but for this one."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def end_all(tree: Tree) -> None:
    """Kill the members of a tree until there are none left."""
    deadline = time.monotonic() + ENDING_S
    while (members := tree.members()) and time.monotonic() < deadline:
        kill(members)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
