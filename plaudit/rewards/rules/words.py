"""Words and n-grams of a text of any length.

Rules score long texts in a thread (`plaudit/turns.py`), and one call of `split` or `set` holds the interpreter lock until it
is done: for a response of a million characters, up to a second in which nothing else is answered. So both go piece by piece.
"""

from collections.abc import Iterable, Sequence

PIECE_CHARACTERS, PIECE_NGRAMS, BUCKETS = 2**16, 2**12, 64


def split_words(text: str) -> list[str]:
    """`text.split()`."""
    words: list[str] = []
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        found = piece.split()
        continued = start > 0 and not piece[0].isspace() and not text[start - 1].isspace()
        if continued:
            words[-1] += found[0]
        words += found[1:] if continued else found
    return words


def count_distinct_ngrams(items: Sequence[str], n: int) -> int:
    """`len(set(zip(items, items[1:], …)))`; of a text, its characters are the items."""
    total = len(items) - n + 1
    if total <= PIECE_NGRAMS:
        return len(set(_ngrams(items, n)))
    # By their hash into small sets: to free a large one is a single call as well.
    buckets: list[set[str | tuple[str, ...]]] = [set() for _ in range(BUCKETS)]
    for start in range(0, total, PIECE_NGRAMS):
        for ngram in _ngrams(items[start : start + PIECE_NGRAMS + n - 1], n):
            buckets[hash(ngram) % BUCKETS].add(ngram)
    distinct = 0
    while buckets:
        distinct += len(buckets.pop())
    return distinct


def _ngrams(items: Sequence[str], n: int) -> Iterable[str | tuple[str, ...]]:
    if isinstance(items, str):
        return [items[i : i + n] for i in range(len(items) - n + 1)]
    return zip(*(items[i:] for i in range(n)), strict=False)
