"""All ranks are started again, from the newest checkpoint, after one of them was lost. Imports no torch.

    ranks fail ──▶ may a fresh start help? ── no: the recipe, the data, a failing reward; Ctrl-C ─────────────▶ raise
                     │ yes: a rank died, fell silent or had a bug, a server is gone
                     ├── the same failure twice, and no further step in between; or no restart is left ────────▶ raise
                     ▼
                   a line says what failed and where the run resumes ──▶ pause ──▶ all ranks start again

Errors say by their class whether a fresh start may help (`PlauditError.restart_helps`). One lost rank cannot be replaced alone: no
process can join a process group later. Resuming is exact, so a restarted run ends with the bits of an undisturbed one.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Protocol, Self

from plaudit.errors import Interrupted, PlauditError, ProcessFailed
from plaudit.report.progress import print_line
from plaudit.run_progress import RunProgress

PAUSE_S = 5.0
"""Before the first restart; twice as long before each further one, up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 300.0
STOPPED = "All processes were stopped; start the run again to resume it."


class Ranks(Protocol):
    """The processes of one attempt: they start when the block is entered, and all are gone when it is left."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C or SIGTERM has come."""
        ...

    def forwarded_signals(self) -> AbstractContextManager[None]:
        """Ctrl-C and SIGTERM reach all ranks within the block."""
        ...

    def wait(self) -> str | None:
        """Until all ranks are done; returns rank 0's result as text. Raises what a rank raised, or why it failed."""
        ...


@dataclass(frozen=True)
class FailedAttempt:
    error: PlauditError
    steps_done: int
    """The most that the run had ever completed by then."""

    @property
    def text(self) -> str:
        return " ".join(str(self.error).split())


def run_ranks(
    start: Callable[[], Ranks], restarts: int, progress: RunProgress, *, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """Run the ranks that `start` makes, again after failures that this may cure, at most `restarts` times; returns rank 0's result.
    Raises what a rank raised, or why it failed."""
    failed: list[FailedAttempt] = []
    furthest = progress.steps_done()
    while True:
        ranks = start()
        try:
            with ranks, ranks.forwarded_signals():
                return ranks.wait()
        except PlauditError as error:
            furthest = max(furthest, progress.steps_done())
            failed.append(FailedAttempt(error, furthest))
            if not error.restart_helps:
                raise
            if ranks.stop_requested or not restarts:
                _raise_alone(error)
        _require_hope(failed, restarts, progress)
        _announce_and_pause(failed, restarts, progress, sleep)


def _raise_alone(error: PlauditError) -> NoReturn:
    if not isinstance(error, ProcessFailed):  # the others say themselves what to do
        raise error
    text = str(error)
    raise type(error)(f"{text}{' ' if text.endswith('.') else chr(10)}{STOPPED}") from None


def _require_hope(failed: list[FailedAttempt], restarts: int, progress: RunProgress) -> None:
    """Raise an error if another restart is not allowed, or would not help."""
    last = failed[-1]
    if len(failed) > 1 and (failed[-2].text, failed[-2].steps_done) == (last.text, last.steps_done):
        raise type(last.error)(
            f"{last.text}\nThe run failed in the same way before it was restarted, and no further step was completed since, so "
            f"another restart would not help. Fix the cause, then start the run again; it resumes {_origin(progress)}."
        ) from None
    if len(failed) > restarts:
        attempts = [f"  {number}. after step {one.steps_done}: {one.text}" for number, one in enumerate(failed, 1)]
        advice = (
            f"All processes were stopped. Fix the cause, or raise cluster.restarts, then start the run again; it resumes "
            f"{_origin(progress)}."
        )
        header = f"the run failed {len(failed)} times, and cluster.restarts is {restarts}:"
        raise type(last.error)("\n".join([header, *attempts, advice])) from None


def _announce_and_pause(failed: list[FailedAttempt], restarts: int, progress: RunProgress, sleep: Callable[[float], None]) -> None:
    number, last = len(failed), failed[-1]
    pause_s = min(PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
    print_line(
        f"{last.text.removesuffix('.')}. All processes were stopped. Restart {number} of {restarts} (cluster.restarts) in "
        f"{pause_s:g} s, {_origin(progress)}",
        "yellow",
    )
    try:
        progress.record_restart(last.steps_done, last.text)
    except OSError as error:
        print_line(f"the restart could not be recorded in run.json: {error}", "yellow")
    try:
        with _stopped_at_once():
            sleep(pause_s)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped before restart {number} of {restarts}. Start the run again to resume it {_origin(progress)}."
        ) from None


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """SIGTERM, like Ctrl-C, raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # Python allows no others to handle signals
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _origin(progress: RunProgress) -> str:
    step = progress.newest_checkpoint()
    return "from the beginning, as there is no checkpoint yet" if step is None else f"from the checkpoint of step {step}"
