"""Jobs of ranks, which `plaudit.cluster.launch` runs in processes of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from plaudit.errors import Interrupted, TrainingStopped
from plaudit.world import World


def add(world: World, folder: Path) -> Path:
    """Leaves the sum over ranks in a file of each."""
    total = sum(world.gather(world.rank + 1, "sum"))
    print(f"printed by rank {world.rank}", flush=True)
    print(f"a warning of rank {world.rank}", file=sys.stderr, flush=True)
    (folder / f"{world.rank}").write_text(f"{total} {sys.argv[1:]} {os.getpid()}")
    return folder / f"{world.rank}"


def misbehave(world: World, folder: Path, how: str, rank: int) -> None:
    """One rank does, in step 3; the others wait for it. Each has a worker process and leaves both pids in a file."""
    worker = subprocess.Popen(["sleep", "600"])
    (folder / f"{world.rank}.tmp").write_text(f"{os.getpid()} {worker.pid}")
    (folder / f"{world.rank}.tmp").rename(folder / f"{world.rank}.pids")
    world.heartbeat.beat("step 3, sampling")
    world.wait("start of step 3")
    if rank in (world.rank, -1):
        _misbehave(how, world)
    world.heartbeat.beat("step 3, training")
    world.wait("scored groups")


def _misbehave(how: str, world: World) -> None:
    match how:
        case "raise":
            raise ZeroDivisionError("a bug")
        case "user error":
            raise TrainingStopped("step 3: reward 'judge' failed on 37 of 64 samples")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(0)
        case "hang":
            time.sleep(600)
        case "wait":
            world.heartbeat.beat("a message that nobody sends", waiting=True)
            threading.Event().wait()


def stop_when_asked(world: World, folder: Path) -> None:
    """Saves and stops at the first signal, as runs do; `stubborn` ranks ignore it."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    worker = subprocess.Popen(["sleep", "600"])
    (folder / f"{world.rank}.tmp").write_text(f"{os.getpid()} {worker.pid}")
    (folder / f"{world.rank}.tmp").rename(folder / f"{world.rank}.pids")
    while not world.any(asked.is_set(), "stop"):
        time.sleep(0.01)
    (folder / f"{world.rank}.saved").touch()
    raise Interrupted("stopped after step 3 of 5, saved. Resume with: plaudit rl r.yaml")
