"""Counts of one step of scoring: groups scored, and each reward's failures, which end the step when there are too many."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from plaudit.errors import ServerGone, TrainingStopped
from plaudit.reward_models.backend import SERVER_DIED, UNAUTHORISED
from plaudit.rewards.reward import Reward
from plaudit.types import Failure, Group, Score


class StepCounts:
    """The groups that each reward has scored, and its failures."""

    def __init__(self, rewards: Sequence[Reward], expected: int | None, tolerant: bool):
        """`expected`: samples of the step, if that is known; this process may score a share of them."""
        self.samples = 0
        self._tolerant = tolerant
        self.all_sampled = False
        self.stopped = False
        """`check` has raised: nothing more of this step is needed."""
        self._expected = expected
        self._failures: list[tuple[Reward, list[Failure]]] = [(reward, []) for reward in rewards]
        self._failed: list[dict[str, Any]] = []
        self._groups_scored = dict.fromkeys((reward.label for reward in rewards), 0)

    @property
    def scored(self) -> int:
        """Groups that all rewards have scored."""
        return min(self._groups_scored.values(), default=0)

    def count(self, group: Group, by_label: Mapping[str, Sequence[Score]]) -> None:
        for reward, failures in self._failures:
            if reward.label not in by_label:
                continue
            self._groups_scored[reward.label] += 1
            for sample, score in zip(group.samples, by_label[reward.label], strict=True):
                if score.failure is not None:
                    failures.append(score.failure)
                    prompt = {"prompt_id": group.prompt.id, "prompt": group.prompt.messages, "response": sample.text}
                    why = {"reward": reward.label, "cause": score.failure.cause, "message": score.failure.message}
                    self._failed.append({**prompt, **why})

    def check(self) -> None:
        """Raise as soon as it is certain: at the first call whose key is rejected, at the first failure with on_failure: stop, else
        when the rate is sure to be exceeded."""
        try:
            self._check()
        except TrainingStopped:
            self.stopped = True
            raise

    def _check(self) -> None:
        for reward, failures in self._failures:
            if rejected := next((failure for failure in failures if failure.cause == UNAUTHORISED), None):
                message = f"reward '{reward.label}': {rejected.message} Then run the same command to resume."
                raise TrainingStopped(message, self._failed)
            if failures and reward.on_failure == "stop":
                raise self._error(reward, failures, "on_failure is stop")
            samples = self._expected or (self.samples if self.all_sampled else 0)
            if samples and reward.weight and not self._tolerant and len(failures) > reward.max_failure_rate * samples:
                raise self._error(reward, failures, f"max_failure_rate is {reward.max_failure_rate:g}")

    def _error(self, reward: Reward, failures: Sequence[Failure], limit: str) -> TrainingStopped:
        message = f"{self._describe(reward, failures)}; {limit}."
        if any(failure.cause == SERVER_DIED for failure in failures):  # it may live longer if the run is restarted
            return ServerGone(f"{message} If that happens again, fix the cause, then run the same command to resume.", self._failed)
        return TrainingStopped(f"{message} {_RESUME}", self._failed)

    def _describe(self, reward: Reward, failures: Sequence[Failure]) -> str:
        """37 of 64 samples (33 timeout: after 10 s, 4 exception: …): each cause with its commonest message."""
        causes = []
        for cause, count in Counter(failure.cause for failure in failures).most_common():
            [(message, _)] = Counter(failure.message for failure in failures if failure.cause == cause).most_common(1)
            causes.append(f"{count} {cause}: {' '.join(message.split())[:300]}")
        samples = self._expected or self.samples
        return f"reward '{reward.label}' failed on at least {len(failures)} of {samples} samples ({', '.join(causes)})"


_RESUME = "Fix it, then run the same command to resume."
