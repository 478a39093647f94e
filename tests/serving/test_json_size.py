"""Counting the values of a JSON body while it arrives."""

import json

from hypothesis import given
from hypothesis import strategies as st

from plaudit.serving.json_size import ValueCounter

TEXTS = st.text(alphabet='a,[{"\\é\n', max_size=8)
DOCUMENTS = st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)


def values_of(document) -> int:
    """Commas and opening brackets that `json.dumps` writes outside of strings."""
    if isinstance(document, dict):
        return 1 + max(len(document) - 1, 0) + sum(map(values_of, document.values()))
    if isinstance(document, list):
        return 1 + max(len(document) - 1, 0) + sum(map(values_of, document))
    return 0


@given(DOCUMENTS, st.integers(1, 9), st.booleans())
def test_text_is_not_counted_however_the_body_is_cut(document, size, ascii_only):
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    counter = ValueCounter()
    for start in range(0, len(body), size):
        counter.add(body[start : start + size])
    assert counter.count == values_of(document)
