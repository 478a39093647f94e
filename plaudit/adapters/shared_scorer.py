"""One scorer per process and recipe, for trainers that request one sample at a time from many threads.

Requests that arrive while the scorer is busy are batched, so a judge gets many concurrent calls although each caller waits for its
own. The scorer starts with the first request and lives as long as the process; its workers end with it.
"""

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from plaudit.errors import PlauditError
from plaudit.scoring import Scorer

Row = Mapping[str, Any]
Result = dict[str, Any]
Request = tuple[Sequence[Row], Future[list[Result]]]


class SharedScorer:
    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="shared scorer", daemon=True).start()

    def submit(self, rows: Sequence[Row]) -> Future[list[Result]]:
        """Queue rows for scoring; the future holds their results in order."""
        future: Future[list[Result]] = Future()
        self._requests.put((rows, future))
        return future

    def _serve(self) -> None:
        while True:
            batch = [self._requests.get()]
            while not self._requests.empty():
                batch.append(self._requests.get())
            # A future marked as running can no longer be cancelled, so setting its result is safe.
            self._score([(rows, future) for rows, future in batch if future.set_running_or_notify_cancel()])

    def _score(self, batch: Sequence[Request]) -> None:
        try:
            results = iter(self.scorer.score([row for rows, _ in batch for row in rows]))
            by_request = [[next(results) for _ in rows] for rows, _ in batch]
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:  # a bad row should fail its own request only
                for request in batch:
                    self._score([request])
        else:
            for (_, future), request_results in zip(batch, by_request, strict=True):
                future.set_result(request_results)


_shared: dict[tuple[int, str], SharedScorer] = {}
_lock = threading.Lock()


def shared_scorer(rewards: str | os.PathLike[str]) -> SharedScorer:
    """This process's scorer for a recipe. (A forked child inherits no threads, so it gets its own.)"""
    key = (os.getpid(), os.path.abspath(rewards))
    with _lock:
        if key not in _shared:
            # The trainer trains on these values, so they are normalised as the recipe says. That leaves `group`: the values of a
            # group depend on nothing else, however requests are batched.
            scorer = Scorer(key[1], normalise=True)
            _refuse_running(scorer)
            _shared[key] = SharedScorer(scorer)
        return _shared[key]


class ScoreMissing(PlauditError):
    """A sample has no value, and the trainer cannot skip it."""


def value_of(result: Result, trainer: str) -> float:
    """A result's value; raises ScoreMissing if a reward failed, because 0 would be a false score."""
    if result["reward"] is None:
        failure = result["failure"] or {}
        subject = f"reward '{failure['reward']}' failed" if failure.get("reward") else "a sample has no reward"
        raise ScoreMissing(
            f"{subject} ({failure.get('cause')}: {failure.get('message')}), and {trainer} cannot skip a sample. "
            "Fix the reward, or set a value for failed samples (on_failure: -1.0)."
        )
    return result["reward"]


def _refuse_running(scorer: Scorer) -> None:
    """Refuse means over all values so far: they would depend on the order of requests, and count those of validations."""
    for reward in scorer.settings:
        if reward.normalise == "running":
            scorer.close()
            raise PlauditError(
                f"reward '{reward.label}': normalise is running, but requests of another trainer come in any order, those of "
                "validations among them, and each of its processes would have its own mean. Set normalise to none."
            )


def refuse_groups(scorer: Scorer, trainer: str) -> None:
    """Refuse rewards that compare the samples of a prompt, for trainers that request samples one by one."""
    for reward in scorer.rewards:
        if reward.normalise == "group":
            raise PlauditError(
                f"reward '{reward.label}': normalise is group, but {trainer} requests one sample at a time, so there is no group. "
                "Set normalise to none."
            )
        # A function for TRL cannot rely on groups: there it is called with responses to several prompts.
        if not reward.scores_alone and getattr(reward, "scores", None) != "trl":
            raise PlauditError(
                f"reward '{reward.label}' compares the responses to a prompt, but {trainer} requests one at a time. "
                "Use a reward that scores each response by itself."
            )
