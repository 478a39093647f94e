"""A reward in two halves: settings read from a recipe, and a live object that scores whole groups with them.

`Reward` is pure data: it can be compared, copied and pickled. `LiveReward`, which `Reward.build` makes from it, owns whatever
scoring needs: worker processes, connections, models.

Who is at fault decides what a bad sample gets. The policy's fault (no answer found, an answer that makes a rule time out) is a
score: a stated value and `malformed`. The reward's own fault (a timeout, an exception, an unreadable result) is a `Failure`, and
the recipe decides what happens to the sample.
"""

import secrets
import traceback
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from plaudit.recipe import RewardSettings
from plaudit.turns import turns
from plaudit.types import Failure, Group, Prompt, Sample, Score


class Loadable(Protocol):
    """Something that occupies the device only between `load` and `unload`."""

    async def load(self) -> None: ...

    async def unload(self) -> None: ...


class Reward(RewardSettings, ABC):
    """The settings of one kind. The class is named after its file, and `kind:` in a recipe finds it there."""

    kind: Any
    """Which reward; each class narrows this to its own name, as a Literal."""
    scores_alone: ClassVar[bool] = True
    """A sample's score does not depend on the other samples of its group."""
    checks_answer: ClassVar[bool] = False
    """It compares the answer with the row's ground truth: a right answer is rewarded once by each such reward."""
    cached: ClassVar[bool] = True
    """Scores are slow or cost money, so they are cached on disk by default."""

    @property
    def rounded_together(self) -> bool:
        """The last bits of a score depend on the rest of its batch, as they do for a model in this process."""
        return False

    @property
    def waits_for_all(self) -> bool:
        """Scored once all groups of a step are sampled, because its model is on the device only while it scores."""
        return False

    def read_answer(self, text: str) -> Hashable | None:
        """The answer in a response that it sees as `text`; None if there is none. Equal answers are one in a majority vote. Only
        for rewards that read answers (`reads_answers`)."""
        return text.strip() or None

    @abstractmethod
    def build(self) -> "LiveReward[Any]":
        """The reward that scores with these settings; it starts nothing until it is opened."""


S = TypeVar("S", bound=Reward)
_PROCESS_SECRET = secrets.token_hex(16)


class LiveReward(ABC, Generic[S]):
    """A reward that can score. `RewardRunner` calls every method on its own event loop, so nothing here may block: computing takes
    turns (`turns.py`)."""

    def __init__(self, settings: S):
        self.settings = settings
        self.seed: int | str = _PROCESS_SECRET
        """For what a reward draws at random: the run's seed; outside of runs, a secret of this process."""

    def use_seed(self, seed: int) -> None:
        """Draw from this seed from now on; so do the rewards it is composed of."""
        self.seed = seed
        for live in self.inner.values():
            live.use_seed(seed)

    @property
    def inner(self) -> "dict[str, LiveReward[Any]]":
        """The rewards this one is composed of, by the name of their setting."""
        return {}

    async def open(self) -> None:
        """Start what scoring needs. Called once, before the first score."""

    async def close(self) -> None:
        """Stop it. Called on every exit, also when `open` failed or was never called."""

    @abstractmethod
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """A score for each sample of each group, in order. Never raises for a bad sample."""

    @property
    def served_names(self) -> list[str]:
        """Names of the models behind it as their servers report them, where the recipe gives none. Known once it is open."""
        return []

    # Sharing the device: only for rewards that wait for all groups of a step ------------------------------------------

    async def load(self) -> None:
        """Move its model to the device, before a step's groups are scored."""

    async def unload(self) -> None:
        """Move its model off the device."""

    @property
    def phases(self) -> list[Loadable | None]:
        """What must be on the device in each pass over a step's groups (None: nothing). The last pass is `score`, the ones before
        it are `prepare`. Known once it is open; rewards that share a model return the same object."""
        return [self if self.settings.waits_for_all else None]

    async def prepare(self, groups: Sequence[Group], phase: int) -> list[list[Score]]:
        """A pass before the last; its results are kept for `score`. Returns PREPARED or a failure for each sample."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what `prepare` kept: the step's groups are scored."""


def build(settings: RewardSettings) -> LiveReward[Any]:
    """The live reward for an entry of a recipe's `rewards:`."""
    assert isinstance(settings, Reward), "reading a recipe turns entries into the class of their kind"
    return settings.build()


def read_answer(rewards: Sequence[RewardSettings], views: Mapping[str, str | None]) -> Hashable | None:
    """A sample's answer by the first reward that applies to it and reads answers. `views`: what each reward saw, by its name."""
    for reward in rewards:
        if isinstance(reward, Reward) and reward.reads_answers and (view := views.get(reward.label)) is not None:
            return reward.read_answer(view)
    return None


# Rules ---------------------------------------------------------------------------------------------------------------


class Rule(Reward):
    """A pure function of one sample: fast, and nothing a policy writes can hang or crash it. (One that may take longer than a few
    milliseconds on a short text needs its own live half, as `regex` has.)"""

    cached: ClassVar[bool] = False

    @abstractmethod
    def value(self, prompt: Prompt, sample: Sample) -> float | Score: ...

    def build(self) -> "LiveRule":
        return LiveRule(self)


class LiveRule(LiveReward[Rule]):
    """Any rule: an exception in `value` is a failure of that sample alone."""

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return [[await self._score(group.prompt, sample) for sample in group.samples] for group in groups]

    async def _score(self, prompt: Prompt, sample: Sample) -> Score:
        turn = turns()
        if turn.over:
            await turn.take()
        if len(sample.text) > LONG_TEXT:
            return await turn.in_thread(self.score_now, prompt, sample)
        return self.score_now(prompt, sample)

    def score_now(self, prompt: Prompt, sample: Sample) -> Score:
        try:
            value = self.settings.value(prompt, sample)
        except Exception as error:
            return failed("exception", last_line(error), view=sample.text)
        return value if isinstance(value, Score) else Score(value, view=sample.text)


LONG_TEXT = 2**16
"""Longer responses (in characters) are scored off the event loop: even a fast rule takes milliseconds for them."""
PREPARED = Score(0.0)
"""What `prepare` returns for a sample it could prepare."""


def failed(cause: str, message: str, view: str | None = None) -> Score:
    """The score of a sample on which the reward failed."""
    return Score(None, failure=Failure(cause, message), view=view)


def last_line(error: BaseException) -> str:
    """'ValueError: no digits, at exact.py:31': the exception and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
