"""Large bodies: parsed and written one value after the other, with the same results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.serving import schemas
from plaudit.serving.schemas import MAX_VALUES, InvalidFields, ScoreRequest, dump, dump_by_value, parse

TEXTS = st.text(max_size=8)
LEAVES = TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
DOCUMENTS = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    patch = pytest.MonkeyPatch()
    patch.setattr(schemas, "DECODED_AT_ONCE", 3)
    patch.setattr(schemas, "PAIRS_AT_ONCE", 2)
    yield
    patch.undo()


@given(DOCUMENTS, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_parsed_by_value_is_parsed_the_same(document, ascii_only, encoding):
    body = json.dumps(document, ensure_ascii=ascii_only).encode(encoding)
    assert parse(body, by_value=True) == parse(body) == document
    assert b"".join(dump_by_value(document)) == dump(document)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"a" 1}', "Expecting ':'"),
        (b"[NaN]", "NaN is not a number"),
        (b"[1e999]", "1e999 is too large"),
        (b'["\xff"]', "can't decode byte"),
        (b'["\n"]', "Invalid control character"),
        (b"1 2", "Extra data"),
        (b"[" * 90 + b"]" * 90, "nested deeper than 64"),
        (b"[" * 9000 + b"]" * 9000, "nested deeper than 64"),
    ],
    ids=range(10),
)
def test_what_is_no_json_is_rejected_either_way(body, problem):
    for by_value in (False, True):
        with pytest.raises(ValueError, match=problem):
            parse(body, by_value=by_value)


def test_the_last_of_equal_fields_counts():
    assert parse(b'{"a": 1, "b": 2, "a": 3}', by_value=True) == {"a": 3, "b": 2}


def problems(request, most=20) -> list[dict]:
    with pytest.raises(InvalidFields) as invalid:
        ScoreRequest.validate_items(request, most)
    return invalid.value.problems


def test_problems_are_listed_up_to_a_number():
    many = problems({"items": [{"responses": ["a"], "x": 1}] * 1000, "y": 2})
    assert [one["loc"] for one in many[:3]] == [("y",), ("items", 0, "x"), ("items", 1, "x")]
    assert len(many) == 20


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({f"field {i}": i for i in range(65)}, "too_many_fields"),
        ({"prompt": [{"role": "user", "content": "a"}] * 4097}, "too_long"),
        ({"prompt": [{"role": "user", "content": "a", **{f"field {i}": i for i in range(65)}}]}, "too_many_fields"),
        ({"extra_info": {"lists": [[[]]] * (MAX_VALUES // 2)}}, "too_many_values"),
        ({"ground_truth": {str(i): i for i in range(MAX_VALUES)}}, "too_many_values"),
        ({"tools": [{}] * MAX_VALUES}, "too_many_values"),
    ],
    ids=["fields", "messages", "fields of a message", "extra_info", "ground_truth", "tools"],
)
def test_items_are_limited(fields, kind):
    found = problems({"items": [{"responses": ["a"], **fields}]})
    assert [one["type"] for one in found] == [kind]


def test_an_item_may_have_many_values():
    info = {str(i): [i] for i in range(MAX_VALUES // 2 - 1)}
    [item] = ScoreRequest.validate_items({"items": [{"responses": ["a"], "extra_info": info}]}, 20).items
    assert item.extra_info == info
