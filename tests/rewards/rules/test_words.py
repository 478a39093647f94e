"""Words and n-grams, counted piece by piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.rewards.rules import words
from plaudit.rewards.rules.words import count_distinct_ngrams, split_words

TEXTS = st.text(alphabet="ab \n\u2003\x1c\u00df", max_size=60)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    patch = pytest.MonkeyPatch()
    patch.setattr(words, "PIECE_CHARACTERS", 7)
    patch.setattr(words, "PIECE_NGRAMS", 5)
    yield
    patch.undo()


@given(TEXTS)
def test_words_are_those_of_split(text):
    assert split_words(text) == text.split()


@given(TEXTS, st.integers(1, 9))
def test_distinct_ngrams_are_those_of_a_set(text, n):
    for items in (text, text.split()):
        assert count_distinct_ngrams(items, n) == len(set(zip(*(items[i:] for i in range(n)), strict=False)))
