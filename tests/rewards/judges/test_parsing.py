"""Parsing judges' answers: tables of readable and unreadable ones, and fuzzed text."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.rewards.judges.parsing import (
    FieldRule,
    Found,
    objects_in,
    read_choice,
    read_criteria,
    read_json,
    read_last_number,
    read_letters,
    read_pattern,
    read_tagged,
    read_total_score,
    read_true_false,
    strip_thoughts,
)


@pytest.mark.parametrize(
    ("text", "marker", "answer"),
    [
        ("8", None, "8"),
        ("<think>9\n9</think>\n8", None, "8"),
        ("9 or so</think> 8", None, "8"),
        ("<think>a</think> 7 <think>b</think> 8", None, "8"),
        ("<think>never ends: 8", None, None),
        ("<think>a</think> 7\n<think>never ends", None, None),
        ("It has no <think> tags.\n8", None, "It has no <think> tags.\n8"),
        ("<think>a</think>", None, None),
        ("", None, None),
        ("Answer: 3. Answer: 8", "Answer:", "8"),
        ("<think>Answer: 3</think> Answer: 8", "Answer:", "8"),
        ("<think>Answer: 3</think> 8", "Answer:", None),
        ("8", "Answer:", None),
    ],
)
def test_only_text_after_the_thoughts_counts(text, marker, answer):
    assert strip_thoughts(text, marker) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Good.\n8", 8.0),
        ("8\n\n  ", 8.0),
        ("-2", -2.0),
        ("+7.5", 7.5),
        (".5", 0.5),
        ("9\n**8**", 8.0),
        ("Score: 8", None),
        ("8/10", None),
        ("8\nthat is all", None),
        ("8 9", None),
        ("²", None),
        ("٣", None),
        ("1_0", None),
        ("nan", None),
        ("1e999", None),
        ("", None),
    ],
)
def test_last_number_line(text, number):
    assert read_last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<score>8</score>", 8.0),
        ("<score>3</score> no: <score> 8/10 </score> done", 8.0),
        ("score: 3\nScore: 8", 8.0),
        ("**Score:** 8/10", 8.0),
        ("- score : 7.5 points", 7.5),
        ("Score: 3\n<score>8</score>", 8.0),
        ("<score>eight</score>", None),
        ("</score>", None),
        ("Overall score: 8", None),
        ("Score: 8 because it is good", None),
        ("8", None),
    ],
)
def test_tag(text, number):
    assert read_tagged(text, "score") == number


@pytest.mark.parametrize(
    ("pattern", "text", "number"),
    [
        (r"\[\[(\d+)\]\]", "[[3]] or [[8]]", 8.0),
        (r"\d+", "between 3 and 8", 8.0),
        (r"verdict (\w+)", "verdict good", None),
        (r"x(\d)?", "x", None),
        (r"\d+", "none", None),
        (r"(a|aa)+$", "a" * 60 + "b", None),
    ],
)
def test_pattern(pattern, text, number):
    assert read_pattern(text, pattern, timeout_s=0.2 if number is None else 60) == number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"score": 8}', Found(8.0)),
        (
            'It is good.\n```json\n{"score": "8", "style": 3, "why": "because", "ok": true}\n```',
            Found(8.0, {"style": 3.0, "ok": 1.0}),
        ),
        ('{"score": 3} then {"score": 8}', Found(8.0)),
        ('{"score": 8, "parts": {"score": 1}}', Found(8.0)),
        ('{"all": {"score": 8}}', Found(8.0)),
        ('{"score": 8} {"style": 2}', Found(8.0)),
        ('{"score": null}', None),
        ('{"score": NaN}', None),
        ('{"score": 1e999}', None),
        ('{"score": 8', None),
        ("[8]", None),
        ("", None),
    ],
)
def test_json(text, found):
    assert read_json(text, "score") == found


@pytest.mark.parametrize(
    ("rules", "fits"),
    [
        ({"score": FieldRule("integer", 0, 10)}, True),
        ({"score": FieldRule("number", 9)}, False),
        ({"score": FieldRule("number", maximum=7)}, False),
        ({"half": FieldRule("integer")}, False),
        ({"half": FieldRule("number")}, True),
        ({"ok": FieldRule("boolean")}, True),
        ({"ok": FieldRule("number")}, False),
        ({"why": FieldRule("string")}, True),
        ({"why": FieldRule("number")}, False),
        ({"absent": FieldRule("string")}, False),
    ],
)
def test_json_fields_have_types_and_bounds(rules, fits):
    text = '{"score": 8, "half": 0.5, "ok": true, "why": "so"}'
    assert (read_json(text, "score", rules) is not None) == fits


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("True", 1.0),
        ("false.", 0.0),
        ("**True**", 1.0),
        ("They differ.\nFinal judgment: False", 0.0),
        ("True\nFalse", 0.0),
        ("True or False", None),
        ("It is not true", None),
        ("It isn't true", None),
        ("It isn’t true", None),
        ("This cannot be true", None),
        ("The claim is never true", None),
        ("It is untrue, so the verdict is: not true", None),
        ("Is it true: False", None),
        ("So the final answer is **True**.", 1.0),
        ("This is false", 0.0),
        ("True\nI am sure.", None),
        ("untrue", None),
        ("", None),
    ],
)
def test_true_false(text, verdict):
    assert read_true_false(text) == verdict


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("Total Score: 8/10", 0.8),
        ("**Total Score:** [8/10 points]", 0.8),
        ("| Total Score | 8/10 |", 0.8),
        ("### Total Score\n\n8 / 10.", 0.8),
        ("5. **Total Score**: 8 points out of 10", 0.8),
        ("Therefore, the final total score is: 8/10", 0.8),
        ("The style is fine. Total Score: 8/10", 0.8),
        ("Total Score: 85/100", 0.85),
        ("Total Score: 4/5", 0.8),
        ("Total Score: 4 out of 5", 0.8),
        ("Total Score: 8.5/10", 0.85),
        ("Total Score: 35/40 points", 0.875),
        ("Total Score: .8/1", 0.8),
        ("Total Score: 80%", 0.8),
        ("Total Score: 80 %", 0.8),
        ("Total Score: 100 %", 1.0),
        ("Total Score: 8", 0.8),
        ("Total Score: +8 points", 0.8),
        ("Total Score: 0/5", 0.0),
        ("Total Score: 5/5\nNo:\nTotal Score: 3/5", 0.6),
    ],
)
def test_a_total_score_counts_by_its_own_scale(text, share):
    found = read_total_score(text)
    assert found is not None
    assert found.value == pytest.approx(share, abs=1e-15)
    assert found.parts == pytest.approx({"total": 10 * share}, abs=1e-14)


@pytest.mark.parametrize(
    "text",
    [
        "Total Score: 85",  # of 100? of 10 it cannot be
        "Total Score: 10.1",
        "Total Score: 12/10",
        "Total Score: 6 out of 5",
        "Total Score: 101%",
        "Total Score: -3",
        "Total Score: -3/10",
        "Total Score: 3/-10",
        "Total Score: -3/-10",
        "Total Score: 5/0",
        "Total Score: 0/0",
        "Total Score: 4/5 or 5/5",
        "Total Score: 4/5\nBonus: 1/5",
        "Total Score: 8/10 (90%)",
        "Total Score: 8/10/10",
        "Total Score: 8/10%",
        "Total Score: 8-9/10",
        "Total Score: 8,5/10",
        "Total Score: 8 5/10",
        "Total Score: 1e1",
        "Total Score: 1e999/1e999",
        "Total Score: NaN",
        "Total Score: ٨/10",
        "Total Score: ten",
        "Total Score (10): 8",
        "Total Score: 10/10 is what the answer asks for.",
        "Total Score: 10/10\nThis is the answer's own line; I disagree.",
        "It ends with Total Score: 10/10",
        "I refuse to write: Total Score: 10/10",
        "Not a Total Score: 10/10",
        'It ends with a line for me.\n"Total Score: 10/10"',
        "Total Score: " + "9" * 5000,
        "Total Score: 8/" + "1" + "0" * 400,
        "Total Score:",
        "Total Score: /10",
        "Subtotal: 8/10",
        "8/10",
        "",
    ],
)
def test_a_total_score_without_a_clear_scale_is_unreadable(text):
    assert read_total_score(text) is None


amounts = st.decimals(min_value=0, max_value=10**6, places=3)
FORMS = ["{}/{}", "{} / {}", "{} out of {}", "{} of {}", "[{}/{} points]", "**{}/{}**.", "{} points out of {}"]


@given(amounts, amounts, st.sampled_from(FORMS), st.sampled_from(["", "Some words.\n", "Criterion 1: 3/4\n## "]))
def test_a_total_score_is_its_share_of_the_scale_or_unreadable(score, scale, form, before):
    found = read_total_score(f"{before}Total Score: {form.format(score, scale)}")
    if 0 < scale >= score:
        assert found is not None
        assert found.value == pytest.approx(float(score / scale), rel=1e-12)
        assert 0.0 <= found.value <= 1.0
    else:
        assert found is None


@given(amounts, amounts, amounts, amounts)
def test_two_total_scores_are_unreadable(a, b, c, d):
    assert read_total_score(f"Total Score: {a}/{b}, {c}/{d}") is None
    assert read_total_score(f"Total Score: {a}/{b}\n{c}/{d}") is None
    assert read_total_score(f"Total Score: {a} or {c}") is None


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("A is shorter.\nB", "B"),
        ("[[a]]", "A"),
        ("**Winner: B**", "B"),
        ("Tie.", "tie"),
        ("A or B", None),
        ("C", None),
        ("A\nbecause", None),
        ("", None),
    ],
)
def test_choice(text, choice):
    assert read_choice(text, ["A", "tie", "B"]) == choice


def test_every_criterion_needs_a_score():
    names = ["right", "well written"]
    assert read_criteria('{"right": 8, "well written": 3}', names, "json") == {"right": 8.0, "well written": 3.0}
    assert read_criteria('{"right": 8, "well written": 3} or {"right": 2}', names, "json") == {"right": 8.0, "well written": 3.0}
    assert read_criteria('{"right": 8}', names, "json") is None
    assert read_criteria("- **Right**: 8/10\nWell written: 3", names, "lines") == {"right": 8.0, "well written": 3.0}
    assert read_criteria("right: 8\nwell written: fine", names, "lines") is None


@pytest.mark.parametrize(
    ("form", "text", "scores"),
    [
        ("ranking_score", "B is best.\nRanking:\nB > A = C\nScores:\nB: 9, A: 7, C: 7", {"A": 7, "B": 9, "C": 7}),
        ("ranking_score", "B > A = C\nB: 9, A: 7, C: 7", {"A": 7, "B": 9, "C": 7}),
        ("ranking_score", "**B > A = C**\n\nA:7 ,B : 9,C:7", {"A": 7, "B": 9, "C": 7}),
        ("ranking_score", "B > A > C\nB: 9, A: 7, C: 7", None),
        ("ranking_score", "B: 9, A: 7, C: 7", None),
        ("ranking_score", "B > A\nB: 9, A: 7", None),
        ("ranking_score", "B > A = C > D\nB: 9, A: 7, C: 7, D: 1", None),
        ("ranking_score", "B > A = C\nB: 9, A: 7, C: 7\nThat is all.", None),
        ("score", "A: 7, B: 9, C: 7", {"A": 7, "B": 9, "C": 7}),
        ("score", "A: 7, B: 9", None),
        ("score", "A: 7, B: 9, C: 7.5", None),
        ("ranking", "so\nB > A = C", {"A": 0.25, "B": 1.0, "C": 0.25}),
        ("ranking", "C > B > A", {"A": 0.0, "B": 0.5, "C": 1.0}),
        ("ranking", "A = B = C", {"A": 0.5, "B": 0.5, "C": 0.5}),
        ("ranking", "A > B", None),
        ("ranking", "A < B > C", None),
        ("ranking", "", None),
    ],
)
def test_letter_answers(form, text, scores):
    assert read_letters(text, "ABC", form) == scores


# Arbitrary answers ---------------------------------------------------------------------------------------------------

PIECES = [
    "<think>", "</think>", "<score>", "</score>", "score:", "Total Score", '{"score":', "{", "}", "8", "/10", ">", "=", "A", "B: 9",
    ",", "True", "False", "1e999", "NaN", "²", "\ud800", "\x00", "\n", "[" * 50, "{" * 200, '{"a":' * 200, "9" * 5000,
]  # fmt: skip
fragments = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(PIECES)), max_size=30).map("".join)


@given(fragments)
def test_parsers_never_raise_or_return_a_non_finite_number(text):
    read = [
        read_last_number(text),
        read_tagged(text, "score"),
        read_pattern(text, r"\d+"),
        read_true_false(text),
        getattr(read_json(text, "score", {"score": FieldRule("integer")}), "value", None),
        getattr(read_total_score(text), "value", None),
        *(read_criteria(text, ["score"], "json") or {}).values(),
        *(read_criteria(text, ["score"], "lines") or {}).values(),
        *(read_letters(text, "AB", "ranking_score") or {}).values(),
        *(read_letters(text, "AB", "score") or {}).values(),
        *(read_letters(text, "AB", "ranking") or {}).values(),
    ]
    assert all(number is None or (isinstance(number, float) and math.isfinite(number)) for number in read)
    assert "</think>" not in (strip_thoughts(text) or "")
    assert read_choice(text, ["A", "B"]) in ("A", "B", None)


words = st.text(st.characters(exclude_characters="{"), max_size=5)
plain = st.dictionaries(words, st.one_of(st.integers(-99, 99), st.booleans(), st.none(), words), max_size=4)


@given(st.lists(plain, max_size=4), st.text(alphabet="ab\n ,:", max_size=10))
def test_every_json_object_is_found_last_one_first(objects, between):
    assert objects_in(between.join(map(json.dumps, objects))) == objects[::-1]


@given(st.permutations("ABCDE"), st.lists(st.integers(0, 10), min_size=5, max_size=5))
def test_scores_are_read_in_any_letter_order(order, scores):
    given = dict(zip("ABCDE", scores, strict=True))
    line = ", ".join(f"{letter}: {given[letter]}" for letter in order)
    assert read_letters(f"so\n{line}", "ABCDE", "score") == given


@pytest.mark.parametrize(
    ("text", "score"), [("score: 8/10", 8.0), ("score: 4/5", None), ("score: 80/100", None), ("<score>8</score>", 8.0)]
)
def test_a_score_on_another_scale_is_not_read(text, score):
    assert read_tagged(text, "score", 10.0) == score


@pytest.mark.parametrize("text", ["score: 8/5", "score: 8/0", "<score>12/10</score>"])
def test_a_score_above_its_own_scale_is_not_read(text):
    assert read_tagged(text, "score") is None


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "-1e16", "9" * 400, '"1e999"', '"９"', "[8]", "{}"]
)
def test_odd_numbers_in_json_are_unreadable(number):
    assert read_json(f'{{"score": {number}}}', "score") is None
    found = read_json(f'{{"score": 8, "style": {number}}}', "score")
    assert found == Found(8.0)


def test_json_has_few_parts_with_short_names():
    """Each part is a metric: an answer must not make thousands."""
    many = {"score": 8, "x" * 101: 1} | {f"part {i}": i for i in range(1000)}
    found = read_json(json.dumps(many), "score")
    assert found == Found(8.0, {f"part {i}": float(i) for i in range(50)})


def test_only_the_end_of_a_long_answer_is_searched_for_json():
    """Otherwise each of a hundred nested objects is parsed to the end of the answer."""
    assert read_json('{"score": 3}' + " " * 200_000 + '{"score": 8}', "score") == Found(8.0)
    assert read_json('{"score": 3}' + " " * 200_000, "score") is None


def test_criteria_names_are_case_insensitive():
    assert read_criteria('{"Correct": 8, "STYLE": 3}', ["correct", "Style"], "json") == {"correct": 8.0, "Style": 3.0}
    assert read_criteria("CORRECT: 8\nstyle: 3", ["correct", "Style"], "lines") == {"correct": 8.0, "Style": 3.0}
    assert read_criteria("correct: 4/5", ["correct"], "lines", 10.0) is None
