"""A judge that compares two responses at a time: a response is worth the share of its comparisons that it wins, ties half.

    all          every pair of the group's candidates
    tournament   `rounds` rounds (default: ⌈log₂ candidates⌉); in each, candidates that have won alike meet (Swiss system), none
                 twice while there are others; one of an odd number sits out

Each pair is shown in both orders (`both_orders`), for judges favour a place; a pair counts only if both answers could be read. Part
`consistent`: the share of a response's pairs in which both orders have the same winner. Identical candidates are one. A response
none of whose pairs fits into the judge's prompt is malformed; one of whose pairs none could be judged has failed.
"""

import asyncio
import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from plaudit.rewards.judges.candidates import Candidate, candidates_of, shuffled, unjudged
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply
from plaudit.rewards.judges.parsing import read_choice
from plaudit.rewards.judges.templates import Unrenderable
from plaudit.types import Group, Score

WORTH = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""What the answer is worth to the candidate that is shown first."""
Pair = tuple[int, int]


class PairwiseJudge(JudgeReward):
    kind: Literal["pairwise_judge"]
    """A judge of pairs of responses."""
    pairs: Literal["all", "tournament"] = "all"
    """Which pairs are compared."""
    rounds: PositiveInt | None = None
    """pairs: tournament. How many rounds; default: as many as halve the group down to one."""
    both_orders: bool = True
    """Each pair is shown twice, in either order."""
    ties: bool = True
    """The judge may say that neither is better."""
    not_judged: float | None = None
    """Value (before scale) in a group with fewer than two candidates; default: what `malformed` states, else 0."""

    scores_alone: ClassVar[bool] = False
    variables: ClassVar[frozenset[str]] = frozenset({"first", "second", "ties"})

    @model_validator(mode="after")
    def _fits_together(self) -> "PairwiseJudge":
        if self.rounds is not None and self.pairs != "tournament":
            raise ValueError("rounds belong to pairs: tournament")
        return self

    @property
    def own_template(self) -> str:
        return "pairwise"

    def build(self) -> "LivePairwiseJudge":
        return LivePairwiseJudge(self)


class LivePairwiseJudge(LiveJudgeReward[PairwiseJudge]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        candidates = shuffled(candidates_of(group, shared=True), self.settings.sampling.seed)
        if len(candidates) < 2:
            return [unjudged(self.settings.not_judged, sample.text) for sample in group.samples]
        games = _Games(len(candidates))
        try:
            if self.settings.pairs == "all":
                await self._play(group, candidates, list(combinations(range(len(candidates)), 2)), games)
            else:
                for _ in range(self.settings.rounds or math.ceil(math.log2(len(candidates)))):
                    await self._play(group, candidates, games.next_round(), games)
        except Unrenderable as error:
            return [Score(None, failure=error.failure, view=sample.text) for sample in group.samples]
        scores = {i: games.score(c, candidate.text) for c, candidate in enumerate(candidates) for i in candidate.samples}
        return [scores[i] for i in range(len(group.samples))]

    async def _play(self, group: Group, candidates: Sequence[Candidate], pairs: Sequence[Pair], games: "_Games") -> None:
        # With one order only, who is shown first has been shuffled with the candidates.
        shown = [order for x, y in pairs for order in ([(x, y), (y, x)] if self.settings.both_orders else [(x, y)])]
        ties = self.settings.ties
        questions = [self.question(group.prompt, first=candidates[x].text, second=candidates[y].text, ties=ties) for x, y in shown]
        choices = [choice for choice in WORTH if ties or choice != "tie"]
        replies = await self.ask(questions, lambda _, text: read_choice(text, choices))
        each = 2 if self.settings.both_orders else 1
        for i, pair in enumerate(pairs):
            games.add(pair, replies[i * each : (i + 1) * each])


class _Games:
    """What was played so far, by candidate."""

    def __init__(self, count: int):
        self._results: list[list[float]] = [[] for _ in range(count)]
        self._consistent: list[list[float]] = [[] for _ in range(count)]
        self._replies: list[list[Reply[str]]] = [[] for _ in range(count)]
        self._met: set[frozenset[int]] = set()

    def add(self, pair: Pair, replies: Sequence[Reply[str]]) -> None:
        x, y = pair
        self._met.add(frozenset(pair))
        for player in pair:
            self._replies[player] += replies
        if any(reply.found is None for reply in replies):
            return
        worths = [WORTH[reply.found or ""] for reply in replies]
        for_x = [worths[0], *(1.0 - worth for worth in worths[1:])]  # in the second order, x is shown second
        for player, results in ((x, for_x), (y, [1.0 - worth for worth in for_x])):
            self._results[player].append(fmean(results))
            self._consistent[player].append(float(len(set(results)) == 1))

    def next_round(self) -> list[Pair]:
        """Neighbours in the table of wins so far; candidates that met already only if no other is left."""
        table = sorted(range(len(self._results)), key=lambda player: -sum(self._results[player]))
        if len(table) % 2:
            # The one that has sat out least often so far, from the bottom.
            table.remove(max(reversed(table), key=lambda player: len(self._replies[player])))
        pairs = []
        while table:
            first = table.pop(0)
            second = next((player for player in table if frozenset((first, player)) not in self._met), table[0])
            table.remove(second)
            pairs.append((first, second))
        return pairs

    def score(self, player: int, text: str) -> Score:
        replies = self._replies[player]
        if not self._results[player]:
            failed = next((reply for reply in replies if reply.failure is not None), None)
            if not replies:
                return Score(0.5, {"judged": 0.0}, view=text, trace={"not judged": "it sat out"})
            return (failed or next(reply for reply in replies if reply.too_long)).unfit(text)
        parts = {"judged": 1.0, "pairs": float(len(self._results[player])), "consistent": fmean(self._consistent[player])}
        trace = next(reply.trace for reply in replies if reply.found is not None)
        return Score(fmean(self._results[player]), parts, view=text, trace=trace)
