"""What a reward is: settings that come from a recipe, and scores that go out, for whole groups at a time.

Whose fault it is decides. The policy's (no answer to be found, an answer that makes a rule run out of time) is a score: a stated
value and `malformed`. The reward's own (a timeout, an exception, garbage) is a `Failure`: the recipe says what becomes of it.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from plaudit.recipe import RewardSettings
from plaudit.types import Failure, Group, Prompt, Sample, Score


class Loadable(Protocol):
    """What is on the device only while it is needed."""

    async def load(self) -> None: ...

    async def unload(self) -> None: ...


class Reward(RewardSettings, ABC):
    """One file, one kind: the class is named after its file, and `kind:` in a recipe finds it there.

    The runner calls all of it on its own event loop. What takes long there is awaited, never slept through.
    """

    kind: Any
    """Which reward; each class has its own name here, as a Literal."""
    scores_alone: ClassVar[bool] = True
    """A sample's score does not depend on the others of its group."""
    cached: ClassVar[bool] = True
    """Scores are slow or cost something: worth keeping on disk."""

    @property
    def rounded_together(self) -> bool:
        """A score depends, in its last bits, on what is computed beside it: a model in this process takes samples in batches."""
        return False

    @abstractmethod
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """A score for each sample of each group, in their order. Never raises for a bad sample."""

    @property
    def waits_for_all(self) -> bool:
        """Asked when all groups of a step are sampled, not as they come: its model is on the device only while it scores."""
        return False

    async def load(self) -> None:
        """A reward that waits for all: bring its model to the device, before a step's groups are scored."""

    async def unload(self) -> None:
        """And take it off again."""

    @property
    def phases(self) -> list[Loadable | None]:
        """A reward that waits for all: what is on the device in each of its passes over a step's groups (None: nothing). The last
        pass is `score`, those before it are `prepare`. Known once it is open; rewards that share a model name the same."""
        return [self if self.waits_for_all else None]

    async def prepare(self, groups: Sequence[Group], phase: int) -> list[list[Score]]:
        """A pass before the last: what it finds out is kept for `score`. What it gives is PREPARED or a failure."""
        raise NotImplementedError

    def forget(self) -> None:
        """A step's groups are scored: what `prepare` kept is not needed any more."""

    @property
    def served_names(self) -> list[str]:
        """What servers call the models behind it, where the recipe does not name them. Known once it is open."""
        return []

    async def open(self) -> None:
        """Start what scoring needs (worker processes, connections). Called once, before the first score."""

    async def close(self) -> None:
        """Stop it again, also when `open` failed or was never called. Called on every exit."""


class Rule(Reward):
    """A reward that is a plain function of one sample: quick, and nothing that a policy writes can hang or crash it."""

    cached: ClassVar[bool] = False

    @abstractmethod
    def value(self, prompt: Prompt, sample: Sample) -> float | Score: ...

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return [[self._score(group.prompt, sample) for sample in group.samples] for group in groups]

    def _score(self, prompt: Prompt, sample: Sample) -> Score:
        try:
            value = self.value(prompt, sample)
        except Exception as error:
            return failed("exception", last_line(error), view=sample.text)
        return value if isinstance(value, Score) else Score(value, view=sample.text)


PREPARED = Score(0.0)
"""What `prepare` gives for a sample with which all is well."""


def failed(cause: str, message: str, view: str | None = None) -> Score:
    """The score of a sample for which a reward has no value."""
    return Score(None, failure=Failure(cause, message), view=view)


def last_line(error: BaseException) -> str:
    """'ValueError: no digits, at exact.py:31': what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
