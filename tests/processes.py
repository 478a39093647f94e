"""plaudit's commands in processes of their own, to be killed, without the ten seconds each would take to import torch: they are
forked from one that has."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
LOOPS = [f"plaudit.loops.{name}" for name in ("sft", "dpo", "reward_model", "rl", "sample")]
FORKS.set_forkserver_preload(["plaudit.cli", *LOOPS, "peft", "transformers.models.llama.modeling_llama"])

# What a command does that gets a signal at a moment: it sends it itself. Whoever watches from outside may look too late on a busy
# machine, when the moment is past or the run over.
SENDS_ITSELF_A_SIGNAL = """
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
    """A plaudit command that runs. `script`: what is run instead of its `main`, with the arguments in sys.argv."""

    def __init__(self, *arguments: object, script: str | None = None, cwd: Path | None = None, **environment: str):
        self._said = Path(tempfile.mkstemp(suffix=".log")[1])
        todo = script or "from plaudit.cli import main; main()"
        given = (list(map(str, arguments)), todo, str(cwd or Path.cwd()), environment, str(self._said))
        self._process = FORKS.Process(target=_run, args=given)
        self._process.start()

    @property
    def output(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def wait_for(self, condition: Callable[[], object], within_s: float = 200.0) -> None:
        """Until something is so, and stays so: what is gone again may never be seen."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert self._process.is_alive(), f"ended early:\n{self.output}"
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, within_s: float = 300.0) -> int:
        """How it ended: its exit code, or -9 if that signal ended it."""
        self._process.join(within_s)
        code = self._process.exitcode
        assert code is not None, f"does not end:\n{self.output}"
        return code

    def kill(self) -> None:
        self._process.kill()
        self.wait()


def signalled(number: signal.Signals, moment: str, *arguments: object, cwd: Path | None = None) -> str:
    """Runs a command and ends it by a signal: `before line N` or `behind line N` of the metrics, or when it is about to `open` or
    `os.rename` FOLDER/FILE. What it said."""
    command = Command(number.name, moment, *arguments, script=SENDS_ITSELF_A_SIGNAL, cwd=cwd)
    assert command.wait() == (-number if number == signal.SIGKILL else 130), command.output
    return command.output


def _run(arguments: list[str], script: str, cwd: str, environment: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["plaudit", *arguments]
    import plaudit.run

    plaudit.run.draw_curves = lambda *_: None  # a picture of twenty panels takes longer than these runs
    exec(script, {"__name__": "__main__"})
