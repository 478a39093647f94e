"""One scorer per process and recipe, for trainers that ask about one sample at a time and from many threads.

What comes in while the scorer is busy waits and is scored together next, so a judge sees many calls at once although each caller
waits for its own. The scorer starts with the first question and lives as long as the process does; its workers end with it.
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
Asked = tuple[Sequence[Row], Future[list[Result]]]


class SharedScorer:
    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="shared scorer", daemon=True).start()

    def submit(self, rows: Sequence[Row]) -> Future[list[Result]]:
        """Their results, in order, when they are scored."""
        future: Future[list[Result]] = Future()
        self._asked.put((rows, future))
        return future

    def _serve(self) -> None:
        while True:
            together = [self._asked.get()]
            while not self._asked.empty():
                together.append(self._asked.get())
            # One that is marked as running can no longer be cancelled, so it can be answered.
            self._answer([(rows, future) for rows, future in together if future.set_running_or_notify_cancel()])

    def _answer(self, together: Sequence[Asked]) -> None:
        try:
            results = iter(self.scorer.score([row for rows, _ in together for row in rows]))
            answers = [[next(results) for _ in rows] for rows, _ in together]
        except Exception as error:
            if len(together) == 1:
                together[0][1].set_exception(error)
            else:  # one caller's bad row is not the others' fault
                for asked in together:
                    self._answer([asked])
        else:
            for (_, future), answer in zip(together, answers, strict=True):
                future.set_result(answer)


_shared: dict[tuple[int, str], SharedScorer] = {}
_lock = threading.Lock()


def shared_scorer(rewards: str | os.PathLike[str]) -> SharedScorer:
    """This process's scorer for a recipe's rewards. (A forked child has none of its parent's threads, so it gets its own.)"""
    key = (os.getpid(), os.path.abspath(rewards))
    with _lock:
        if key not in _shared:
            _shared[key] = SharedScorer(Scorer(key[1]))
        return _shared[key]


class ScoreMissing(PlauditError):
    """A sample has no value, and the trainer that asks has no way to leave it out."""


def value_of(result: Result, trainer: str) -> float:
    """A result's value. What failed has none, and a trainer that cannot leave a sample out must hear of it: 0 would be a lie."""
    if result["reward"] is None:
        failure = result["failure"] or {}
        whose = f"reward '{failure['reward']}' failed" if failure.get("reward") else "a sample has no reward"
        raise ScoreMissing(
            f"{whose} ({failure.get('cause')}: {failure.get('message')}), and {trainer} cannot leave a sample out. "
            "Mend the reward, or state a value for such samples in its settings (on_failure: -1.0)."
        )
    return result["reward"]


def refuse_groups(scorer: Scorer, trainer: str) -> None:
    """Rewards that compare the samples of a prompt, where they come one by one."""
    for reward in scorer.rewards:
        if reward.normalise == "group":
            raise PlauditError(
                f"reward '{reward.label}': normalise is group, but {trainer} asks about one sample at a time, so there is none. "
                "Set normalise to none or running."
            )
