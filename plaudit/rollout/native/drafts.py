"""Drafts: likely next tokens of a sequence, each computed as a further row of the step that decides whether it was right.

The noise of a draw depends only on its key and position. So the row after a right draft draws the very token that the next step
would have drawn, and a wrong draft's row is ignored: drafts change no token and no log-prob, only the number of steps.

A draft is what followed the last occurrence of the sequence's newest tokens, in its prompt or response. How likely it is right
depends on how many tokens match, and is measured as tokens are drawn, whether they were drafted or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plaudit.rollout.native.scheduler import RunningSequence

STEP_ROWS = 8  # of a step with drafts, at most: with more, a step takes as long as they need, not as reading the weights does
READ_COST = 6  # rows that could be computed in the time it takes to read the weights (measured: 8 in bf16, 13 in fp32)
INDEXED, LONGEST = 4, 8  # tokens: the longest match that is looked up, and the longest that is counted as such
# By the number of matching tokens: how likely the next one is right, before any has been seen, and how many this counts for.
PRIOR, PRIOR_COUNT = (0.0, 0.1, 0.2, 0.35, 0.5, 0.6, 0.6, 0.7, 0.7), 4


@dataclass(frozen=True)
class Draft:
    sequence: RunningSequence
    token: int
    ahead: int
    """1: it is the token that the sequence's own row will draw, if it is right; 2: the one that the first draft's row will; …"""


class _Match(NamedTuple):
    length: int
    tokens: list[int]
    """What followed it."""


class _History:
    """The tokens of one sequence, indexed."""

    def __init__(self, sequence: RunningSequence):
        self.sequence = sequence
        self.tokens: list[int] = sequence.request.tokens.tolist()
        self._response_at = len(self.tokens)
        self._ends: dict[tuple[int, ...], int] = {}
        """The position after the last occurrence of some tokens."""
        self._indexed = 0
        self.match = _Match(0, [])

    def extend(self) -> list[int]:
        """Read the tokens that are new, and return them."""
        new = self.sequence.tokens[len(self.tokens) - self._response_at :]
        self.tokens += new
        for end in range(self._indexed + 1, len(self.tokens)):  # the newest token has nothing after it yet
            for length in range(1, min(INDEXED, end) + 1):
                self._ends[tuple(self.tokens[end - length : end])] = end
        self._indexed = max(len(self.tokens) - 1, 0)
        return new

    def find(self, most: int) -> _Match:
        tokens = self.tokens
        for length in range(min(INDEXED, len(tokens)), 0, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                while length < min(LONGEST, end) and tokens[end - length - 1] == tokens[-length - 1]:
                    length += 1
                following = tokens[end : end + most]
                while len(following) < most:  # the match reaches the newest token: what follows repeats
                    following.append(following[end - len(tokens)])
                return _Match(length, following)
        return _Match(0, [])


class Drafter:
    """Of one call of the engine."""

    def __init__(self):
        self._histories: dict[RunningSequence, _History] = {}
        self._right, self._seen = [PRIOR_COUNT * p for p in PRIOR], [PRIOR_COUNT] * len(PRIOR)

    def propose(self, sequences: Sequence[RunningSequence]) -> list[Draft]:
        """The drafts that are worth their rows, each after those that it follows.

        A step of R rows takes READ_COST + R and yields E tokens, on average. One more row, right with probability p, raises the
        tokens per time if p > E / (READ_COST + R).
        """
        if len(sequences) >= STEP_ROWS:
            return []
        candidates = [candidate for sequence in sequences for candidate in self._candidates(sequence)]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: no draft precedes the one before it
        chosen, tokens, rows = [], float(len(sequences)), len(sequences)
        for probability, draft in candidates:
            if rows == STEP_ROWS or probability * (READ_COST + rows) <= tokens:
                break
            chosen.append(draft)
            tokens, rows = tokens + probability, rows + 1
        return chosen

    def _candidates(self, sequence: RunningSequence) -> list[tuple[float, Draft]]:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History(sequence)
            history.extend()
        else:
            self._observe(history.match, history.extend())
        most = min(STEP_ROWS - 1, sequence.limit - len(sequence.tokens) - 1)
        history.match = history.find(max(most, 1))
        candidates, probability = [], 1.0
        for ahead, token in enumerate(history.match.tokens[:most], 1):
            probability *= self._probability(history.match.length + ahead - 1)
            candidates.append((probability, Draft(sequence, token, ahead)))
        return candidates

    def _probability(self, matching: int) -> float:
        at = min(matching, LONGEST)
        return self._right[at] / self._seen[at]

    def _observe(self, match: _Match, drawn: Sequence[int]) -> None:
        """Each right token makes the match longer by one."""
        for ahead, (token, actual) in enumerate(zip(match.tokens, drawn, strict=False)):
            at = min(match.length + ahead, LONGEST)
            self._seen[at] += 1
            self._right[at] += token == actual
            if token != actual:
                return
