"""plaudit commands in separate processes that can be killed. They are forked from a process that has imported torch already, which
saves each of them ten seconds."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil

FORKS = multiprocessing.get_context("forkserver")
LOOPS = [f"plaudit.loops.{name}" for name in ("sft", "dpo", "reward_model", "rl", "sample")]
# pandas: pyarrow imports it when it makes its first table, a third of what a short RL run takes.
FORKS.set_forkserver_preload(["plaudit.cli", *LOOPS, "peft", "transformers.models.llama.modeling_llama", "pandas"])

MAIN = "from plaudit.cli import main; main()"
# A command that sends itself a signal at a given moment. A signal from outside may come too late on a busy machine, when the moment
# has passed or the run is over.
SIGNAL_ITSELF = """
import os, signal, sys
from plaudit.cli import main
from plaudit.run import Run

number, moment = signal.Signals[sys.argv[1]], sys.argv[2]
del sys.argv[1:3]
log = Run.log

def send_if(now):
    if moment == now:
        os.kill(os.getpid(), number)

def log_and_send(self, step, metrics):
    send_if(f"before line {step}")
    row = log(self, step, metrics)
    send_if(f"behind line {step}")
    return row

def send_before(event, arguments):
    if event in ("open", "os.rename"):
        send_if(f"{event} {'/'.join(str(arguments[0]).split('/')[-2:])}")

Run.log = log_and_send
sys.addaudithook(send_before)
main()
"""


class Command:
    """A running plaudit command that draws no curves. `script` runs in place of its `main`, with the arguments in sys.argv."""

    started: ClassVar[list["Command"]] = []

    def __init__(self, *arguments: object, script: str = MAIN, cwd: Path | None = None, **more: str):
        """`more`: environment variables in addition to ours."""
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 (lives as long as this object)
        self._process = FORKS.Process(
            target=_run,
            kwargs={
                "arguments": list(map(str, arguments)),
                "script": script,
                "cwd": str(cwd or Path.cwd()),
                "environment": {**os.environ, **more},
                "output": self._log.name,
            },
        )
        self._process.start()
        self.started.append(self)

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, condition: Callable[[], object], within_s: float = 250.0) -> None:
        """Wait for a condition that stays true once it holds: one that passes may be missed."""
        deadline = time.monotonic() + within_s
        while True:
            alive = self._process.is_alive()  # checked first, so that its last action is seen
            if condition():
                return
            assert alive, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def ended(self, within_s: float = 250.0) -> int | None:
        """How it ended: its exit code, or -9 if that signal ended it; None if it runs on."""
        self._process.join(within_s)
        return self._process.exitcode

    def wait(self, within_s: float = 250.0) -> int:
        code = self.ended(within_s)
        assert code is not None, f"does not end:\n{self.output}"
        return code

    def kill(self) -> int:
        self._process.kill()
        return self.wait()

    @classmethod
    def kill_all(cls) -> None:
        while cls.started:
            cls.started.pop().kill()


def signalled(
    number: signal.Signals, moment: str, *arguments: object, cwd: Path | None = None, forked: bool = True, within_s: float = 250.0
) -> str:
    """Run a command, end it by a signal and return its output. `moment`: `before line N` or `behind line N` of the metrics, or
    `open FOLDER/FILE` or `os.rename FOLDER/FILE`, just before it happens. Not `forked`: in a fresh interpreter, like a user's."""
    given = [number.name, moment, *map(str, arguments)]
    if forked:
        command = Command(*given, script=SIGNAL_ITSELF, cwd=cwd)
        code, output = command.wait(within_s), command.output
    else:
        fresh = [sys.executable, "-c", SIGNAL_ITSELF, *given]
        done = subprocess.run(fresh, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, timeout=within_s)
        code, output = done.returncode, done.stdout
    assert code == (-number if number == signal.SIGKILL else 130), output
    return output


def _run(arguments: list[str], script: str, cwd: str, environment: dict[str, str], output: str) -> None:
    gc.freeze()  # what was imported before is not searched for garbage
    file = os.open(output, os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["plaudit", *arguments]
    import plaudit.report.curves

    plaudit.report.curves.draw_curves = lambda *_: None  # a figure of twenty panels takes longer than these runs
    assert threading.active_count() == 1, "preloaded modules must not start threads: these would be missing here"
    exec(script, {"__name__": "__main__"})


def gone(*pids: int | None, within_s: float = 100.0) -> bool:
    """Whether these processes end in time. A zombie has ended once its last thread has; until then its files and ports are open."""

    def runs(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + within_s
    while any(pid is not None and runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
