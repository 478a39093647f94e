"""Rows of tokens to train on."""

from collections.abc import Sequence

import numpy as np

from plaudit.types import Example

LENGTHS = (5, 33, 2, 17, 48, 9, 21, 40)


def make_examples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Example]:
    """Random tokens; about half of them are trained on, the last of each row always, the first never."""
    random = np.random.RandomState(seed)
    examples = []
    for length in lengths:
        mask = random.rand(length) < 0.5
        mask[0], mask[-1] = False, True
        examples.append(Example(random.randint(3, 300, length).astype(np.int32), mask))
    return examples
