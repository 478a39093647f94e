"""A judge that compares two responses at a time. A response's value is the share of its comparisons that it wins, ties half.

    all          every pair of the group's candidates
    tournament   `rounds` rounds (default: ⌈log₂ candidates⌉) of a Swiss tournament: candidates with similar results meet, if
                 possible not twice; with an odd number one sits out

Each pair is shown in both orders (`both_orders`), because judges have a position bias; a pair counts only if both answers are
readable. Part `consistent`: the share of a response's pairs in which both orders have the same winner. Identical candidates count
as one. A response is malformed if none of its pairs fits into the judge's prompt, and has failed if none of them could be judged.
"""

import asyncio
import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from plaudit.rewards.judges.candidates import Candidate, CandidateOrder, group_candidates, ordered, unjudged
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply
from plaudit.rewards.judges.parsing import read_choice
from plaudit.rewards.judges.templates import Unrenderable
from plaudit.types import Group, Score

POINTS = {"A": 1.0, "tie": 0.5, "B": 0.0}
"""Points for the candidate that is shown first, by answer."""
Pair = tuple[int, int]


class PairwiseJudge(JudgeReward):
    kind: Literal["pairwise_judge"]
    """A judge of pairs of responses."""
    pairs: Literal["all", "tournament"] = "all"
    """Which pairs are compared."""
    rounds: PositiveInt | None = None
    """pairs: tournament. Number of rounds; default: ⌈log₂ candidates⌉."""
    both_orders: bool = True
    """Each pair is judged in both orders."""
    order: CandidateOrder = "shuffled"
    """Which candidate of a pair is first: drawn at random; or the one that was sampled first, as evaluations need it."""
    ties: bool = True
    """The judge may answer that neither is better."""
    not_judged: float | None = None
    """Value (before scale) in a group with fewer than two candidates; default: the value of `malformed`, else 0."""

    scores_alone: ClassVar[bool] = False
    variables: ClassVar[frozenset[str]] = frozenset({"first", "second", "ties"})

    @model_validator(mode="after")
    def _check_rounds(self) -> "PairwiseJudge":
        if self.rounds is not None and self.pairs != "tournament":
            raise ValueError("rounds belong to pairs: tournament")
        return self

    @property
    def default_template(self) -> str:
        return "pairwise"

    def build(self) -> "LivePairwiseJudge":
        return LivePairwiseJudge(self)


class LivePairwiseJudge(LiveJudgeReward[PairwiseJudge]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        candidates = ordered(group_candidates(group, shared=True), self.settings.order, self.settings.sampling.seed)
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
        # With a single order, which one is first is decided by `order`.
        shown = [order for x, y in pairs for order in ([(x, y), (y, x)] if self.settings.both_orders else [(x, y)])]
        ties = self.settings.ties
        questions = [
            await self.build_request(group.prompt, first=candidates[x].text, second=candidates[y].text, ties=ties) for x, y in shown
        ]
        choices = [choice for choice in POINTS if ties or choice != "tie"]
        replies = await self.query(questions, lambda _, text: read_choice(text, choices))
        each = 2 if self.settings.both_orders else 1
        for i, pair in enumerate(pairs):
            games.add(pair, replies[i * each : (i + 1) * each])


class _Games:
    """Results so far, by candidate."""

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
        if any(reply.value is None for reply in replies):
            return
        points = [POINTS[reply.value or ""] for reply in replies]
        for_x = [points[0], *(1.0 - point for point in points[1:])]  # in the second order, x is shown second
        for player, results in ((x, for_x), (y, [1.0 - point for point in for_x])):
            self._results[player].append(fmean(results))
            self._consistent[player].append(float(len(set(results)) == 1))

    def next_round(self) -> list[Pair]:
        """Neighbours in the table of wins; candidates that have met already only if no other is left."""
        table = sorted(range(len(self._results)), key=lambda player: -sum(self._results[player]))
        if len(table) % 2:
            # The lowest of those that have sat out least often.
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
            return (failed or next(reply for reply in replies if reply.too_long)).failed_score(text)
        parts = {"judged": 1.0, "pairs": float(len(self._results[player])), "consistent": fmean(self._consistent[player])}
        trace = next(reply.trace for reply in replies if reply.value is not None)
        return Score(fmean(self._results[player]), parts, view=text, trace=trace)
