"""Which failures restart a run, how often and after which pause: with ranks and a clock of the test's own."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit.cluster.restarts import PAUSE_S, run_ranks
from plaudit.errors import (
    DataError,
    Interrupted,
    OutOfMemory,
    PeerLost,
    PlauditError,
    ProcessFailed,
    RecipeError,
    RunError,
    ServerGone,
    TrainingStopped,
)
from plaudit.run_progress import RunProgress

Outcome = BaseException | str | Callable[[], BaseException | str]
KILLED = ProcessFailed("rank 1 (step 3, sampling) was killed by SIGKILL.")


class FakeRanks:
    """An attempt that ends with this outcome."""

    def __init__(self, outcome: Outcome, log: list[str]):
        self._outcome, self._log = outcome, log
        self.stop_requested = False

    def __enter__(self) -> "FakeRanks":
        self._log.append("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append("all gone")

    @contextlib.contextmanager
    def forwarded_signals(self) -> Iterator[None]:
        yield

    def wait(self) -> str:
        outcome = self._outcome() if callable(self._outcome) else self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class Attempts:
    """A run whose attempts end like this, one after the other."""

    def __init__(self, folder: Path, *outcomes: Outcome):
        self.progress = RunProgress(folder, {"seed": 1})
        self.log: list[Any] = []
        self._ranks = [FakeRanks(outcome, self.log) for outcome in outcomes]
        self._left = iter(self._ranks)

    def run(self, restarts: int = 3, sleep: Callable[[float], None] | None = None) -> str | None:
        return run_ranks(lambda: next(self._left), restarts, self.progress, sleep=sleep or self.log.append)

    def fails(self, restarts: int = 3) -> PlauditError:
        with pytest.raises(PlauditError) as raised:
            self.run(restarts)
        return raised.value

    @property
    def pauses(self) -> list[float]:
        return [entry for entry in self.log if not isinstance(entry, str)]

    @property
    def started(self) -> int:
        return self.log.count("start")


def complete(folder: Path, step: int) -> None:
    """A step is completed: the checkpoint of the one before is there."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    if step > 1:
        (folder / f"checkpoints/step_{step - 1:06d}").mkdir(parents=True, exist_ok=True)


def killed_after(folder: Path, step: int) -> Callable[[], ProcessFailed]:
    def fail() -> ProcessFailed:
        complete(folder, step)
        return ProcessFailed(f"rank 1 (step {step + 1}, sampling) was killed by SIGKILL.")

    return fail


def test_a_run_without_failures_starts_once(tmp_path):
    run = Attempts(tmp_path, "model")
    assert run.run() == "model"
    assert run.log == ["start", "all gone"]


@pytest.mark.parametrize(
    "error", [KILLED, PeerLost("rank 1 is gone"), ServerGone("its server is lost"), OutOfMemory("out of GPU memory")]
)
def test_what_is_lost_is_started_again(tmp_path, error, capfd):
    (tmp_path / "checkpoints/step_000040").mkdir(parents=True)
    run = Attempts(tmp_path, error, "model")
    assert run.run() == "model"
    assert run.log == ["start", "all gone", PAUSE_S, "start", "all gone"], "nothing runs during the pause"
    text = str(error).removesuffix(".")
    assert " ".join(capfd.readouterr().err.split()) == (
        f"{text}. All processes were stopped. Restart 1 of 3 (cluster.restarts) in 5 s, from the checkpoint of step 40"
    )


def test_without_a_checkpoint_a_run_starts_from_the_beginning(tmp_path, capfd):
    Attempts(tmp_path, KILLED, "model").run()
    assert "from the beginning, as there is no checkpoint yet" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    "error",
    [
        RecipeError("m"), DataError("m"), RunError("m"), PlauditError("m"), Interrupted("m"), KeyboardInterrupt(),
        TrainingStopped("reward 'judge' failed on 37 of 64 samples"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_the_user_has_to_fix_or_wanted_is_raised_as_it_is(tmp_path, error):
    run = Attempts(tmp_path, error, "model")
    with pytest.raises(type(error)) as raised:
        run.run()
    assert raised.value is error
    assert run.started == 1


def test_restarts_can_be_switched_off(tmp_path):
    run = Attempts(tmp_path, KILLED, "model")
    assert str(run.fails(restarts=0)) == f"{KILLED} All processes were stopped; start the run again to resume it."
    assert run.started == 1


def test_a_failure_after_ctrl_c_is_no_reason_to_start_again(tmp_path):
    run = Attempts(tmp_path, KILLED, "model")
    run._ranks[0].stop_requested = True
    assert isinstance(run.fails(), ProcessFailed)
    assert run.started == 1


def test_pauses_grow_until_no_restart_is_left(tmp_path):
    run = Attempts(tmp_path, *(killed_after(tmp_path, step) for step in (1, 2, 3, 4)), "model")
    assert str(run.fails()) == (
        "the run failed 4 times, and cluster.restarts is 3:\n"
        "  1. after step 1: rank 1 (step 2, sampling) was killed by SIGKILL.\n"
        "  2. after step 2: rank 1 (step 3, sampling) was killed by SIGKILL.\n"
        "  3. after step 3: rank 1 (step 4, sampling) was killed by SIGKILL.\n"
        "  4. after step 4: rank 1 (step 5, sampling) was killed by SIGKILL.\n"
        "All processes were stopped. Fix the cause, or raise cluster.restarts, then start the run again; it resumes from the "
        "checkpoint of step 3."
    )
    assert run.pauses == [5.0, 10.0, 20.0]
    assert run.started == 4


def test_the_same_failure_without_a_further_step_ends_the_run(tmp_path):
    complete(tmp_path, 2)
    run = Attempts(tmp_path, KILLED, KILLED, "model")
    assert str(run.fails()) == (
        f"{KILLED}\nThe run failed in the same way before it was restarted, and no further step was completed since, so another "
        "restart would not help. Fix the cause, then start the run again; it resumes from the checkpoint of step 1."
    )
    assert run.started == 2


def test_steps_that_are_repeated_are_no_progress(tmp_path):
    """A resumed run drops the metrics after its checkpoint and writes them again."""

    def fail_in_step_3() -> ProcessFailed:
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        complete(tmp_path, 1)
        complete(tmp_path, 2)
        return ProcessFailed("rank 0 (step 3, training) failed: ZeroDivisionError: a bug")

    run = Attempts(tmp_path, fail_in_step_3, fail_in_step_3, "model")
    assert "another restart would not help" in str(run.fails())


def test_the_same_failure_after_a_further_step_is_restarted(tmp_path):
    def fail_later() -> ProcessFailed:
        complete(tmp_path, 3)
        return KILLED

    assert Attempts(tmp_path, KILLED, fail_later, "model").run() == "model"


def test_another_failure_is_restarted_without_a_further_step(tmp_path):
    assert Attempts(tmp_path, KILLED, ProcessFailed("rank 0 (loading) was killed by SIGKILL."), "model").run() == "model"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_pause_at_once(tmp_path, number):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run, waits = Attempts(tmp_path, KILLED, "model"), threading.Event()

    def pause(seconds: float) -> None:
        os.kill(os.getpid(), number)
        waits.wait(60)

    with pytest.raises(Interrupted, match=r"stopped before restart 1 of 3\. Start the run again to resume it from the beginning"):
        run.run(sleep=pause)
    assert run.started == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_restarts_are_recorded(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"recipe": {"seed": 1}, "trackers": {"wandb": "x"}}))
    Attempts(tmp_path, killed_after(tmp_path, 1), killed_after(tmp_path, 2), "model").run()
    description = json.loads(file.read_text())
    assert description["trackers"] == {"wandb": "x"}
    assert [(restart["after_step"], restart["failure"]) for restart in description["restarts"]] == [
        (1, "rank 1 (step 2, sampling) was killed by SIGKILL."),
        (2, "rank 1 (step 3, sampling) was killed by SIGKILL."),
    ]
    assert all(restart["time"].endswith("+00:00") for restart in description["restarts"])


@pytest.mark.parametrize("content", ['{"recipe": {"seed": 2}}', "damaged"])
def test_another_run_s_folder_is_left_alone(tmp_path, content):
    """Ranks may die before they have found that out."""
    (tmp_path / "run.json").write_text(content)
    Attempts(tmp_path, KILLED, "model").run()
    assert (tmp_path / "run.json").read_text() == content
