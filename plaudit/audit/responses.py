"""Scored responses: the table that every measure reads."""

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


class Collector(Protocol):
    """The part of the reward runner that an audit needs."""

    def collect(self, groups: Iterable[Group]) -> list[ScoredGroup]: ...


@dataclass(frozen=True)
class Response:
    """One response: its saved data and its scores."""

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
        """(reward and cause, message) of every reward that failed on it, whatever the recipe's failure policy."""
        failed = [(name, score.failure) for name, score in self.by_reward.items() if score.failure is not None]
        return [(f"{name}: {failure.cause}", failure.message) for name, failure in failed]

    @property
    def causes(self) -> list[str]:
        return [cause for cause, _ in self.failures]


@dataclass
class Cost:
    """Cost of scoring so far."""

    responses: int = 0
    seconds: float = 0.0
    usage: Counter[str] = field(default_factory=Counter)


class Panel:
    """Scores responses and tracks the cost."""

    def __init__(self, rewards: Collector, *, comparative: Collection[str] = (), tokens_per_character: float | None = None):
        """`comparative`: names of the rewards that see a full group in one call."""
        self.rewards = rewards
        self.comparative = comparative
        self.tokens_per_character = tokens_per_character
        self.cost = Cost()

    def score(self, groups: Sequence[tuple[Prompt, Sequence[str], Sequence[int | None] | None]]) -> list[ScoredGroup]:
        """(prompt, responses, their token counts if known) → scores, in the same order."""
        began = time.perf_counter()
        scored = self.rewards.collect(self._group(*group) for group in groups)
        self.cost.seconds += time.perf_counter() - began
        for group in scored:
            self.cost.responses += len(group.scores)
            for name, scores in group.by_reward.items():
                used = [find_usage(score) for score in scores]
                # A judge that sees the full group leaves the same trace on every sample, for one call.
                for usage in {json.dumps(usage): usage for usage in used}.values() if name in self.comparative else used:
                    self.cost.usage.update(usage)
        return scored

    def _group(self, prompt: Prompt, texts: Sequence[str], tokens: Sequence[int | None] | None) -> Group:
        counts = tokens if tokens is not None else [self._estimate(text) for text in texts]
        samples = (
            SavedSample(prompt.id, i, NOTHING, text, "finished", NOTHING, NOTHING, 0, token_count=count)
            for i, (text, count) in enumerate(zip(texts, counts, strict=True))
        )
        return Group(prompt, NOTHING, tuple(samples))

    def _estimate(self, text: str) -> int | None:
        return None if self.tokens_per_character is None else max(1, round(len(text) * self.tokens_per_character))


def tokens_per_character(rollouts: Sequence[Rollout]) -> float | None:
    """Mean ratio, to estimate token counts of untokenised responses for rewards that need them."""
    counted = [(t, len(r)) for rollout in rollouts for t, r in zip(rollout.tokens, rollout.responses, strict=True) if t is not None]
    characters = sum(length for _, length in counted)
    return sum(t for t, _ in counted) / characters if characters else None


def flatten(rollouts: Sequence[Rollout], scored: Sequence[ScoredGroup]) -> list[Response]:
    """Responses as a flat list; lengths are in tokens if every response has a count, else in characters."""
    in_tokens = all(count is not None for rollout in rollouts for count in rollout.tokens)
    return [
        Response(
            group=g,
            text=rollout.responses[i],
            length=float((rollout.tokens[i] if in_tokens else None) or len(rollout.responses[i])),
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
"""Usage → the names under which judges report it in a score's trace or parts."""


def find_usage(score: Score) -> dict[str, float]:
    """Tokens, calls and cost of a score: from anywhere in its trace, else from its parts."""
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
