"""The candidates of a group, for judges that compare them: duplicates merged, in a random but reproducible order.

The order depends only on the candidates' texts, not on the order of sampling or the name of their row. So a group that is scored
again, in any order, leads to the same requests. `order: given` shows them in the order of the samples instead, so that an
evaluation can measure what the position does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plaudit.seeding import stable_seed
from plaudit.types import Group, Score

CandidateOrder = Literal["shuffled", "given"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Candidate:
    """A text and the samples of its group that have it."""

    text: str
    samples: tuple[int, ...]


def group_candidates(group: Group, *, shared: bool) -> list[Candidate]:
    """Sorted by text; `shared`: samples with the same text (apart from surrounding white space) are one candidate."""
    places: dict[str, list[int]] = {}
    for i, sample in enumerate(group.samples):
        places.setdefault(sample.text.strip(), []).append(i)
    if shared:
        return [Candidate(text, tuple(places[text])) for text in sorted(places)]
    return [Candidate(text, (i,)) for text in sorted(places) for i in places[text]]


def ordered(candidates: Sequence[Candidate], order: CandidateOrder, *key: int | str) -> list[Candidate]:
    """Shuffled, in an order determined by the key and their texts; or in the order of the samples."""
    if order == "given":
        return sorted(candidates, key=lambda candidate: candidate.samples)
    return shuffled(candidates, *key)


def shuffled(candidates: Sequence[Candidate], *key: int | str) -> list[Candidate]:
    """In an order determined by the key and their texts."""
    order = list(candidates)
    random.Random(stable_seed(*key, *(candidate.text for candidate in candidates))).shuffle(order)
    return order


def unjudged(value: float | None, text: str) -> Score:
    """The score of a sample whose group has fewer than two candidates: the given value, else that of a malformed response.

    It is not malformed itself, but being the only readable response must not be rewarded. (The value of `malformed` is not scaled.)
    """
    trace = {"not judged": "its group has fewer than two candidates"}
    return Score(0.0 if value is None else value, {"judged": 0.0}, view=text, trace=trace, unjudged=value is None)
