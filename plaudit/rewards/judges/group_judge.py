"""A judge that sees all responses to a prompt at once (GRRM): it compares all candidates, then ranks and scores them.

Candidates are shown as A, B, C … in an order that is shuffled for each call; the letters in the answer are mapped back to the
samples. A response without an extract is malformed and not shown (`view`); identical candidates share a letter; a group with fewer
than two candidates is not judged. The end of the answer is parsed (`plaudit/rewards/rules/ranking_lines.py`):

    ranking_score   B > A = D > C, then B: 9, A: 7, D: 7, C: 2     value: the scores; the ranking must be the one they imply
    score           A: 7, B: 9, C: 2, D: 7                         value: the scores
    ranking         B > A = D > C                                  value: the share of the others it beats, ties half

With several `votes` the value is the mean over the readable calls; every second one reverses the order of the one before it,
because judges have a position bias. A group with more candidates than `max_candidates` is split: the first `overlap` of the
shuffled order (the anchors) are in every call, the others in one each. Calls differ in strictness, so with s(c, i) the score of
candidate i in call c, a(c) the mean of the anchors in call c, and a the mean of all a(c):

    value(i) = mean over the calls c that show i of s(c, i) − (a(c) − a)

which may slightly leave the scale of the scores (`bounds` limits it). A call that fails, or is unreadable after all retries, fails
the samples that no other call has judged. A call that is too long for the judge makes the entire group malformed.

Differs from GRRM, which shows the samples in their order, does not split groups, and does not retry in training.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from plaudit.reward_models.backend import GenerationRequest
from plaudit.rewards.judges.candidates import LETTERS, Candidate, CandidateOrder, group_candidates, ordered, shuffled, unjudged
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply
from plaudit.rewards.judges.parsing import read_letters, within
from plaudit.rewards.judges.templates import Unrenderable
from plaudit.types import Group, Prompt, Score


@dataclass(frozen=True)
class Call:
    """One request about several candidates: LETTERS[i] is the i-th."""

    vote: int
    shown: tuple[Candidate, ...]
    anchors: frozenset[Candidate]


Judged = tuple[Call, Reply[dict[str, float]]]


class GroupJudge(JudgeReward):
    kind: Literal["group_judge"]
    """A judge that compares all responses to a prompt."""
    answer: Literal["ranking_score", "score", "ranking"] = "ranking_score"
    """What its answer ends with: ranking and scores, only scores, or only a ranking."""
    lowest: int = 0
    """An answer with a lower score is unreadable."""
    highest: int = 10
    """An answer with a higher score is unreadable."""
    votes: PositiveInt = 1
    """Calls per group, each in a different order; the value is their mean."""
    order: CandidateOrder = "shuffled"
    """In which order the first call shows the candidates: drawn at random; or as they were sampled, as evaluations need it."""
    share_letters: bool = True
    """Identical candidates are shown once and get the same value."""
    max_candidates: Annotated[int, Field(ge=3, le=len(LETTERS))] = 8
    """Maximum candidates per call; a larger group is split."""
    overlap: PositiveInt = 2
    """Candidates shown in every call of a split group, to bring their scores to one scale."""
    not_judged: float | None = None
    """Value (before scale) in a group with fewer than two candidates; default: the value of `malformed`, else 0."""

    scores_alone: ClassVar[bool] = False
    variables: ClassVar[frozenset[str]] = frozenset({"candidates", "answer", "lowest", "highest"})

    @model_validator(mode="after")
    def _check_bounds(self) -> "GroupJudge":
        if self.lowest >= self.highest:
            raise ValueError(f"lowest ({self.lowest}) should be less than highest ({self.highest})")
        if self.overlap >= self.max_candidates:
            raise ValueError(f"overlap ({self.overlap}) should be less than max_candidates ({self.max_candidates})")
        return self

    @property
    def default_template(self) -> str:
        return "group"

    def calls(self, candidates: Sequence[Candidate], vote: int) -> list[Call]:
        """One call for all candidates, or several that share the anchors; each shuffled separately."""
        order = ordered(candidates, self.order if vote < 2 else "shuffled", self.sampling.seed, vote // 2)
        if vote % 2:
            order.reverse()
        if len(order) <= self.max_candidates:
            return [Call(vote, tuple(order), frozenset())]
        anchors, rest = order[: self.overlap], order[self.overlap :]
        count = -(-len(rest) // (self.max_candidates - self.overlap))
        calls = []
        for c in range(count):
            shown = [*anchors, *rest[c::count]]
            calls.append(Call(vote, tuple(shuffled(shown, self.sampling.seed, vote, c)), frozenset(anchors)))
        return calls

    def build(self) -> "LiveGroupJudge":
        return LiveGroupJudge(self)


class LiveGroupJudge(LiveJudgeReward[GroupJudge]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        candidates = group_candidates(group, shared=self.settings.share_letters)
        if len(candidates) < 2:
            return [unjudged(self.settings.not_judged, sample.text) for sample in group.samples]
        calls = [call for vote in range(self.settings.votes) for call in self.settings.calls(candidates, vote)]
        try:
            questions = [await self._question(group.prompt, call) for call in calls]
        except Unrenderable as error:
            return [Score(None, failure=error.failure, view=sample.text) for sample in group.samples]
        replies = await self.query(questions, lambda i, text: self._read(text, len(calls[i].shown)))
        too_long = next((reply for reply in replies if reply.too_long), None)
        if too_long is not None:  # for all of them: which candidates share a call with a long one is chance
            return [too_long.failed_score(sample.text) for sample in group.samples]
        scores: dict[int, Score] = {}
        for candidate in candidates:
            own = [(call, reply) for call, reply in zip(calls, replies, strict=True) if candidate in call.shown]
            score = self._candidate_score(candidate, own, list(zip(calls, replies, strict=True)))
            scores |= dict.fromkeys(candidate.samples, score)
        return [scores[i] for i in range(len(group.samples))]

    async def _question(self, prompt: Prompt, call: Call) -> GenerationRequest:
        shown = [{"letter": letter, "text": candidate.text} for letter, candidate in zip(LETTERS, call.shown, strict=False)]
        own = {"answer": self.settings.answer, "lowest": self.settings.lowest, "highest": self.settings.highest}
        return await self.build_request(prompt, call.vote, candidates=shown, **own)

    def _read(self, text: str, count: int) -> dict[str, float] | None:
        scores = read_letters(text, LETTERS[:count], self.settings.answer)
        if scores is None or (
            self.settings.answer != "ranking"
            and not all(within(x, self.settings.lowest, self.settings.highest) for x in scores.values())
        ):
            return None
        return scores

    def _candidate_score(self, candidate: Candidate, own: Sequence[Judged], judged: Sequence[Judged]) -> Score:
        read = [(call, reply, reply.value) for call, reply in own if reply.value is not None]
        if not read:
            failed = next((reply for _, reply in own if reply.failure is not None), own[-1][1])
            return failed.failed_score(candidate.text)
        offsets = {vote: _offsets([one for one in judged if one[0].vote == vote]) for vote in {call.vote for call, _, _ in read}}
        values: dict[int, list[float]] = {}
        for call, _, found in read:
            values.setdefault(call.vote, []).append(found[_letter(call, candidate)] - offsets[call.vote][call])
        votes = [fmean(some) for some in values.values()]
        call, reply, _ = read[0]
        trace = {**reply.trace, "letter": _letter(call, candidate)}
        parts = {"judged": 1.0} | ({"votes": float(len(votes))} if self.settings.votes > 1 else {})
        return Score(fmean(votes), parts, view=candidate.text, trace=trace)


def _letter(call: Call, candidate: Candidate) -> str:
    return LETTERS[call.shown.index(candidate)]


def _offsets(judged: Sequence[Judged]) -> Mapping[Call, float]:
    """How much higher than the others each call of a vote scored the anchors: a(c) − a."""
    anchor_means = {
        call: fmean(reply.value[_letter(call, anchor)] for anchor in call.anchors) if call.anchors else 0.0
        for call, reply in judged
        if reply.value is not None
    }
    mean = fmean(anchor_means.values()) if anchor_means else 0.0
    return {call: anchor_mean - mean for call, anchor_mean in anchor_means.items()}
