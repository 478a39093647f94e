"""Jobs of ranks, which `plaudit.cluster` runs in processes of their own; and ranks that need no torch to run them."""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plaudit.cluster.launch import RankGroup
from plaudit.cluster.rank import Assignment, Lifeline, RankJob
from plaudit.cluster.restarts import run_ranks
from plaudit.cluster.status import StatusPipe
from plaudit.errors import Interrupted, PlauditError, TrainingStopped
from plaudit.recipe import SFTRecipe
from plaudit.report.progress import print_line, print_own_warning
from plaudit.run_progress import RunProgress


def recipe(**cluster: Any) -> SFTRecipe:
    sections = {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"dir": "r", "device": "cpu"}}
    return SFTRecipe.model_validate({**sections, "cluster": {"restarts": 0, **cluster}})


def launch(job: RankJob, count: int, recipe: SFTRecipe, folder: Path = Path("no run")) -> str | None:
    """Run the job in this number of processes, as a command does, but without pauses. `folder`: shows the run's progress."""
    start = partial(RankGroup, job, count, recipe)
    return run_ranks(start, recipe.cluster.restarts, RunProgress(folder, {}), sleep=lambda seconds: None)


# Jobs ----------------------------------------------------------------------------------------------------------------


def add(world: Any, folder: Path) -> Path:
    """Leaves the sum over ranks in a file of each."""
    total = sum(world.gather(world.rank + 1, "sum"))
    print(f"printed by rank {world.rank}", flush=True)
    print(f"a warning of rank {world.rank}", file=sys.stderr, flush=True)
    print_line("a warning of all ranks", "yellow")
    print_own_warning(f"scores of rank {world.rank} are damaged")
    (folder / f"{world.rank}").write_text(f"{total} {sys.argv[1:]}")
    return folder / f"{world.rank}"


def misbehave(world: Any, folder: Path, how: str) -> None:
    """Rank 1 does, in step 3; the others wait for it. `how` ending in "all": all of them."""
    _meet(world, folder)
    world.heartbeat.beat("step 3, sampling")
    if world.rank == 1 or how.endswith("all"):
        _misbehave(how.removesuffix(" all"), world)
    world.wait("scored groups")


def be_killed(world: Any, folder: Path, attempts: int) -> str:
    """Rank 1 is killed in this number of attempts, each time one step later, as metrics show; the others wait."""
    number = len(list(folder.glob(f"{world.rank}.attempt*")))
    (folder / f"{world.rank}.attempt{number}").write_text(str(os.getpid()))
    if number == attempts:
        return f"result of attempt {number + 1}"
    while len(list(folder.glob(f"*.attempt{number}"))) < world.size:
        time.sleep(0.01)
    world.heartbeat.beat(f"step {number + 1}, sampling")
    if world.rank == 1:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {number}}}\n')
        os.kill(os.getpid(), signal.SIGKILL)
    world.wait("scored groups")
    raise AssertionError("rank 1 is gone")


def stop_when_asked(world: Any, folder: Path, how: str) -> None:
    """Saves and stops at the first signal, as runs do; or only counts them (`ignore`); or is not ready for any (`loading`)."""
    asked, received = threading.Event(), folder / f"{world.rank}.signals"

    def handle(number: int, frame: object) -> None:
        if how != "ignore":
            asked.set()
        with received.open("a") as file:
            file.write(f"{number}\n")

    if how != "loading":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)
    _meet(world, folder)
    while not asked.is_set():
        time.sleep(0.01)
        world.heartbeat.beat("step 3, sampling")
    (folder / f"{world.rank}.saved").touch()
    raise Interrupted("stopped after step 3 of 5, saved. Resume with: plaudit rl r.yaml")


LAST_LINES = 500


def write_last(world: Any) -> None:
    """Rank 1's output is written when its job is done."""
    if world.rank == 1:
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False), 2**20))
        sys.stderr.write(("x" * 1000 + "\n") * LAST_LINES + "the end")


def _meet(world: Any, folder: Path) -> None:
    """Starts a worker process, leaves both pids in a file, and waits for those of the others."""
    worker = subprocess.Popen(["sleep", "600"])
    (folder / f"{world.rank}.tmp").write_text(f"{os.getpid()} {worker.pid}")
    (folder / f"{world.rank}.tmp").rename(folder / f"{world.rank}.pids")
    while len(list(folder.glob("*.pids"))) < world.size:
        time.sleep(0.01)


def _misbehave(how: str, world: Any) -> None:
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


# Ranks without torch ---------------------------------------------------------------------------------------------------

PLAIN = "import sys; sys.path[:] = sys.argv[2:]; from support.rank_jobs import main; main()"
"""In place of `process.PROGRAM`."""


@dataclass
class PlainWorld:
    """Ranks that never meet: whoever waits for another one waits for ever."""

    rank: int
    size: int
    heartbeat: Any

    def wait(self, what: str) -> None:
        self.heartbeat.beat(what, waiting=True)
        time.sleep(600)

    def gather(self, value: int, what: str) -> list[int]:
        return list(range(1, self.size + 1))


def main() -> None:
    """The program of a rank that joins nobody."""
    from plaudit.cluster import rank

    rank.main(work_alone)


def work_alone(given: Assignment, lifeline: Lifeline, status: StatusPipe) -> Any:
    def beat(doing: str, waiting: bool = False) -> None:
        status.beat(doing, waiting)

    return pickle.loads(given.job)(PlainWorld(given.ranks.rank, given.ranks.size, SimpleNamespace(beat=beat)))


def launch_and_exit(name: str, folder: str, how: str) -> None:
    """A command that runs a job in two plain ranks, with the command line's exit codes."""
    import plaudit.cluster.process

    plaudit.cluster.process.PROGRAM = PLAIN
    try:
        launch(partial(globals()[name], folder=Path(folder), how=how), 2, recipe())
    except PlauditError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
