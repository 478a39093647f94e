"""The candidates of a group, for judges that compare them: identical ones as one, in an order that says nothing.

The order in which candidates are shown depends on what they are and on nothing else: neither on which was sampled first nor on what
their row is called. So a group scored again, in any order, is asked the same questions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from plaudit.seeding import stable_seed
from plaudit.types import Group, Score

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Candidate:
    """A text, and which samples of its group it is."""

    text: str
    samples: tuple[int, ...]


def candidates_of(group: Group, *, shared: bool) -> list[Candidate]:
    """By text; `shared`: samples with the same text (white space around it aside) are one candidate."""
    places: dict[str, list[int]] = {}
    for i, sample in enumerate(group.samples):
        places.setdefault(sample.text.strip(), []).append(i)
    if shared:
        return [Candidate(text, tuple(places[text])) for text in sorted(places)]
    return [Candidate(text, (i,)) for text in sorted(places) for i in places[text]]


def shuffled(candidates: Sequence[Candidate], *key: int | str) -> list[Candidate]:
    """In an order that the key and their texts decide."""
    order = list(candidates)
    random.Random(stable_seed(*key, *(candidate.text for candidate in candidates))).shuffle(order)
    return order


def unjudged(value: float | None, text: str) -> Score:
    """The score of a sample whose group has fewer than two candidates: the stated value, else what a malformed response is worth.

    It is not malformed itself, but being the only one that can be read must not pay. (What `malformed` states is not scaled.)
    """
    trace = {"not judged": "its group has fewer than two candidates"}
    return Score(0.0 if value is None else value, {"judged": 0.0}, view=text, trace=trace, unjudged=value is None)
