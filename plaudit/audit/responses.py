"""Responses with what a reward said of them: the table that every measure reads."""

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from plaudit.audit.dumps import Rollout
from plaudit.types import Group, Prompt, SavedSample, Score, ScoredGroup

NOTHING = np.zeros(0)


class Asks(Protocol):
    """What an audit needs of the rewards' runner."""

    def collect(self, groups: Iterable[Group]) -> list[ScoredGroup]: ...


@dataclass(frozen=True)
class Response:
    """One response: what was known of it, and what it was paid."""

    group: int
    text: str
    length: float
    label: float | None
    saved: float | None
    score: Score
    by_reward: Mapping[str, Score]

    @property
    def value(self) -> float | None:
        return self.score.value

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Where rewards failed on it: (reward and cause, message), whatever the recipe then makes of it."""
        failed = [(name, score.failure) for name, score in self.by_reward.items() if score.failure is not None]
        return [(f"{name}: {failure.cause}", failure.message) for name, failure in failed]

    @property
    def causes(self) -> list[str]:
        return [cause for cause, _ in self.failures]


@dataclass
class Asked:
    """What asking cost so far."""

    responses: int = 0
    seconds: float = 0.0
    usage: Counter[str] = field(default_factory=Counter)


class Panel:
    """Asks the rewards, and keeps count of what that costs."""

    def __init__(self, rewards: Asks, *, compare: Collection[str] = (), tokens_per_character: float | None = None):
        """`compare`: the names of the rewards that see a whole group in one call."""
        self.rewards = rewards
        self.compare = compare
        self.tokens_per_character = tokens_per_character
        self.asked = Asked()

    def score(self, groups: Sequence[tuple[Prompt, Sequence[str], Sequence[int | None] | None]]) -> list[ScoredGroup]:
        """(prompt, responses, their tokens if they were counted) → scores, in the same order."""
        began = time.perf_counter()
        scored = self.rewards.collect(self._group(*group) for group in groups)
        self.asked.seconds += time.perf_counter() - began
        for group in scored:
            self.asked.responses += len(group.scores)
            for name, scores in group.by_reward.items():
                used = [find_usage(score) for score in scores]
                # A judge that sees the whole group leaves the same trace with every sample: it was one call.
                for usage in {json.dumps(usage): usage for usage in used}.values() if name in self.compare else used:
                    self.asked.usage.update(usage)
        return scored

    def _group(self, prompt: Prompt, texts: Sequence[str], tokens: Sequence[int | None] | None) -> Group:
        counted = tokens if tokens is not None else [self._estimate(text) for text in texts]
        samples = (
            SavedSample(prompt.id, i, NOTHING, text, "finished", NOTHING, NOTHING, 0, token_count=count)
            for i, (text, count) in enumerate(zip(texts, counted, strict=True))
        )
        return Group(prompt, NOTHING, tuple(samples))

    def _estimate(self, text: str) -> int | None:
        return None if self.tokens_per_character is None else max(1, round(len(text) * self.tokens_per_character))


def tokens_per_character(rollouts: Sequence[Rollout]) -> float | None:
    """So that rewards which count tokens can be asked about responses that no tokenizer has seen."""
    counted = [(t, len(r)) for rollout in rollouts for t, r in zip(rollout.tokens, rollout.responses, strict=True) if t is not None]
    characters = sum(length for _, length in counted)
    return sum(t for t, _ in counted) / characters if characters else None


def flatten(rollouts: Sequence[Rollout], scored: Sequence[ScoredGroup]) -> list[Response]:
    """A list of responses; lengths are in tokens where the file has them all, else in characters."""
    counted = all(count is not None for rollout in rollouts for count in rollout.tokens)
    return [
        Response(
            group=g,
            text=rollout.responses[i],
            length=float((rollout.tokens[i] if counted else None) or len(rollout.responses[i])),
            label=rollout.labels[i],
            saved=rollout.rewards[i],
            score=group.scores[i],
            by_reward={name: scores[i] for name, scores in group.by_reward.items()},
        )
        for g, (rollout, group) in enumerate(zip(rollouts, scored, strict=True))
        for i in range(len(rollout))
    ]


USAGE = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "completion_tokens": ("completion_tokens", "output_tokens"),
    "calls": ("calls", "attempts"),
    "cost": ("cost", "cost_usd", "dollars"),
}
"""What judges leave in a score's trace or parts, and the names they give it."""


def find_usage(score: Score) -> dict[str, float]:
    """Tokens, calls and cost of a score, wherever in its trace they stand; else in its parts."""
    found: Counter[str] = Counter()
    for name, number in _numbers(score.trace):
        found[name] += number
    for name, number in _numbers(score.parts):
        found.setdefault(name, number)
    return dict(found)


def _numbers(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = next((ours for ours, names in USAGE.items() if str(key).rsplit("/", 1)[-1] in names), None)
            if name is not None and isinstance(value, int | float) and not isinstance(value, bool):
                yield name, value
            else:
                yield from _numbers(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _numbers(value)
