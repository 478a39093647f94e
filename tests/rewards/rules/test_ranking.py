"""Ranking accuracy: every sentence of its definition, worked out by hand, and properties that hold for any answer."""

import json
import math
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plaudit.rewards.rules.ranking import Ranking
from plaudit.rewards.rules.ranking_lines import (
    pairwise_share,
    rank,
    read_integer,
    read_ranked,
    read_ranked_scores,
    read_ranking,
    read_scores,
    relation,
    score_part,
    write_ranking,
)
from plaudit.types import Prompt, Sample, Score

NONE = np.zeros(0)
TRUTH = {"A": 7, "B": 9, "C": 2, "D": 7}  # B > A = D > C
LONG = "x" * 200  # 50 characters for each of four candidates


def score(text: str, truth: object = None, **rule) -> Score:
    truth = json.dumps(TRUTH) if truth is None else truth
    sample = Sample("p", 0, NONE, text, "finished", NONE, NONE, 0)
    return Ranking(kind="ranking", **rule).value(Prompt("p", [], ground_truth=truth), sample)


def answer(ranking: str = "B > A = D > C", scores: str = "B: 9, A: 7, D: 7, C: 2", analysis: str = "B is best.") -> str:
    return f"{analysis}\n\nRanking:\n{ranking}\n\nScores:\n{scores}"


def is_invalid(got: Score) -> bool:
    return (got.value, got.parts["valid"], got.parts["ranking"], got.malformed, got.failure) == (0.0, 0.0, 0.0, True, None)


# Analysis, ranking and scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranking", "scores", "ranking_part", "score_part"),
    [
        pytest.param("B > A = D > C", "B: 9, A: 7, D: 7, C: 2", 1.0, 1.0, id="all correct"),
        pytest.param("B > A = D > C", "B: 10, A: 8, D: 8, C: 3", 1.0, 1.0, id="only score differences count"),
        # A and D tie in the truth; in the next three cases A−D, B−D and C−D are off by 1, 2 and 3.
        pytest.param(
            "B > A > D > C", "B: 9, A: 7, D: 6, C: 2", 5 / 6, (3 + 3 * 0.6) / 6, id="a non-tie against a tie is wrong, f(1)=0.6"
        ),
        pytest.param("B > A > D > C", "B: 9, A: 7, D: 5, C: 2", 5 / 6, (3 + 3 * 0.2) / 6, id="f(2)=0.2"),
        pytest.param("B > A > D > C", "B: 9, A: 7, D: 4, C: 2", 5 / 6, 3 / 6, id="else 0"),
        # B ties with A and D here: 4 of 6 relations hold; B−A, B−D and B−C are off by 2.
        pytest.param("A = B = D > C", "A: 7, B: 7, D: 7, C: 2", 4 / 6, (3 + 3 * 0.2) / 6, id="a tie against a non-tie is wrong"),
        pytest.param("C > A = D > B", "C: 9, A: 7, D: 7, B: 2", 1 / 6, 1 / 6, id="reversed, except for the tie"),
        pytest.param("A = B = C = D", "A: 5, B: 5, C: 5, D: 5", 1 / 6, (1 + 2 * 0.2) / 6, id="all tied"),
    ],
)
def test_reward_is_ranking_part_plus_score_part(ranking, scores, ranking_part, score_part):
    got = score(answer(ranking, scores))
    assert got.value == pytest.approx(ranking_part + score_part, abs=1e-12)
    assert got.parts == pytest.approx({"ranking": ranking_part, "score": score_part, "valid": 1.0}, abs=1e-12)
    assert (got.malformed, got.failure, got.view) == (False, None, answer(ranking, scores))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("B is best.\nRanking:\nB > A = D > C\nScores:\nB: 9, A: 7, D: 7, C: 2", id="no blank lines"),
        pytest.param(
            "\n\nB is best.\n \nRanking:\n\t\n B > A = D > C \n\n\nScores:\n\nB: 9, A: 7, D: 7, C: 2\n\n \n", id="blank lines"
        ),
        pytest.param(answer().replace("\n", "\r\n"), id="Windows line endings"),
        pytest.param(answer(scores="B:9,A :7 , D :  7,C:2"), id="any spaces around : and ,"),
        pytest.param(answer(scores="A: 7, B: 9, C: 2, D: 7"), id="scores in any order"),
        pytest.param(answer(scores="B: 09, A: +7, D: 7, C: 2"), id="signs and leading zeros"),
        pytest.param(answer(ranking="B > D = A > C"), id="tied candidates in any order"),
        pytest.param("1\n2\n" + answer(analysis="B > A = D > C"), id="the ranking in the analysis too"),
        pytest.param(answer().replace("Ranking:", "#").replace("Scores:", "…"), id="any heading"),
    ],
)
def test_valid_answers(text):
    assert score(text).value == 2.0


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("\n \n", id="blank"),
        pytest.param(answer(analysis=""), id="the analysis is empty"),
        pytest.param(answer(analysis=" \n\t"), id="the analysis is blank"),
        pytest.param("B is best.\nB > A = D > C\nScores:\nB: 9, A: 7, D: 7, C: 2", id="no ranking heading, so no analysis"),
        pytest.param("Long.\nB is best.\nRanking:\nB > A = D > C\nB: 9, A: 7, D: 7, C: 2", id="no scores heading"),
        pytest.param(answer() + "\nThat is all.", id="text after the scores"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7"), id="a candidate without a score"),
        pytest.param(answer("B > A = D", "B: 9, A: 7, D: 7"), id="not all candidates of the truth"),
        pytest.param(answer("B > A = D > C > E", "B: 9, A: 7, D: 7, C: 2, E: 1"), id="more candidates than the truth has"),
        pytest.param(answer("B > A = D > E", "B: 9, A: 7, D: 7, E: 2"), id="other candidates than the truth's"),
        pytest.param(answer("A > B", "A: 1, B: 0"), id="a subset"),
        pytest.param(answer("B > A > D > C"), id="the scores imply another ranking: a tie"),
        pytest.param(answer("A = D > B > C"), id="the scores imply another ranking: the order"),
        pytest.param(answer("B > A = D > C = C"), id="a candidate twice in the ranking"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: 2, C: 2"), id="a candidate twice in the scores"),
        pytest.param(answer("C < D = A < B"), id="<"),
        pytest.param(answer("B>A=D>C"), id="no spaces in the ranking"),
        pytest.param(answer("B  > A = D > C"), id="two spaces in the ranking"),
        pytest.param(answer("B > A == D > C"), id="=="),
        pytest.param(answer("B > A =D > C"), id="one space missing"),
        pytest.param(answer("B > A = D > C."), id="a full stop after the ranking"),
        pytest.param(answer("**B > A = D > C**"), id="bold"),
        pytest.param(answer("b > a = d > c", "b: 9, a: 7, d: 7, c: 2"), id="lowercase"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: 2,"), id="an empty item"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: 2.0"), id="a decimal"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: 2/10"), id="a fraction"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: two"), id="a word"),
        pytest.param(answer(scores="B: 9; A: 7; D: 7; C: 2"), id="semicolons"),
        pytest.param(answer(scores="B = 9, A = 7, D = 7, C = 2"), id="no colon"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: ²"), id="a superscript digit, which int() does not take"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: ٢"), id="an Arabic digit, which int() does take"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: 0_2"), id="an underscore, which int() does take"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: " + "9" * 5000), id="more digits than int() takes"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: nan"), id="nan"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C: - 2"), id="a space after the sign"),
        pytest.param(answer(scores="B: 9, A: 7, D: 7, C:\x002"), id="a null byte"),
    ],
)
def test_invalid_answers(text):
    got = score(text)
    assert is_invalid(got)
    assert got.parts["score"] == 0.0


def test_a_single_candidate_is_invalid():
    assert is_invalid(score(answer("A", "A: 5"), truth={"A": 5}))
    assert is_invalid(score("Good.\nA", truth="A", format="ranking"))
    assert is_invalid(score("A", truth={"A": 5}, format="no_analysis"))


def test_score_scale_multiplies_the_total_but_not_the_parts():
    got = score(answer(), score_scale=0.5)
    assert (got.value, got.parts) == (1.0, {"ranking": 1.0, "score": 1.0, "valid": 1.0})
    assert score("B is best.\nB > A = D > C", format="ranking", score_scale=3.0).value == 3.0
    with pytest.raises(ValidationError):
        Ranking(kind="ranking", score_scale=0.0)


# Other formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth", [TRUTH, json.dumps(TRUTH), "B > A = D > C", "B > D = A > C\n"], ids=["dict", "json", "ranking", "ties"]
)
@pytest.mark.parametrize(
    ("last_line", "share"),
    [("B > A = D > C", 1.0), ("B > D = A > C", 1.0), ("B > A > D > C", 5 / 6), ("C > A = D > B", 1 / 6), ("A > D > C > B", 2 / 6)],
)
def test_ranking_is_the_pairwise_share_of_the_last_line(truth, last_line, share):
    # A > D > C > B: only the pairs A–C and D–C are right.
    got = score(f"B is best.\nRanking:\n{last_line}\n \n", truth, format="ranking")
    assert got.value == pytest.approx(share, abs=1e-12)
    assert got.parts == pytest.approx({"ranking": share, "valid": 1.0}, abs=1e-12)
    assert not got.malformed


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("B > A = D > C", id="no analysis"),
        pytest.param("\n \nB > A = D > C\n", id="blank analysis"),
        pytest.param("B > A = D > C, I think.\nB > A = D > C", id="the ranking occurs twice"),
        pytest.param("Best first:\nB > A = D > C\nScores:\nB: 9, A: 7, D: 7, C: 2", id="not on the last line"),
        pytest.param("Best first: B > A = D > C", id="not alone on its line"),
        pytest.param("Best first:\nB > A = D", id="not all candidates"),
        pytest.param("Best first:\nB > A = D > C > E", id="more candidates"),
        pytest.param("Best first:\nC < A = D < B", id="<"),
        pytest.param("Best first:\nB>A=D>C", id="no spaces"),
        pytest.param("Best first:\nA > B > A > C", id="a candidate twice"),
        pytest.param("", id="empty"),
    ],
)
@pytest.mark.parametrize("format", ["ranking", "zero"])
def test_invalid_answers_for_ranking_and_zero(format, text):
    got = score(text if format == "ranking" else text.replace("Best first", LONG), "B > A = D > C", format=format)
    assert is_invalid(got)
    assert "score" not in got.parts


@pytest.mark.parametrize(
    ("analysis", "valid"),
    [("x" * 199, False), (" \n" + "x" * 199 + " \n", False), ("x" * 200, True), ("x" * 100 + "\n" + "x" * 99, True), ("", False)],
)
def test_zero_requires_fifty_characters_of_analysis_per_candidate(analysis, valid):
    got = score(f"{analysis}\nB > A = D > C", format="zero")
    assert got.value == float(valid)
    assert got.malformed != valid
    assert is_invalid(got) != valid


@pytest.mark.parametrize(
    ("text", "truth", "parts"),
    [
        pytest.param("B > A = D > C", "B > A = D > C", {"ranking": 1.0, "valid": 1.0}, id="only the ranking line"),
        pytest.param("\nB > A > D > C\n", "B > A = D > C", {"ranking": 5 / 6, "valid": 1.0}, id="white space around it"),
        pytest.param(
            "B > A = D > C", TRUTH, {"ranking": 1.0, "score": 0.0, "valid": 1.0}, id="the ranking line where scores are known"
        ),
        pytest.param(
            "B > A = D > C\nB: 9, A: 7, D: 7, C: 2", TRUTH, {"ranking": 1.0, "score": 1.0, "valid": 1.0}, id="exactly the two lines"
        ),
        pytest.param(
            "B > A > D > C\n\nB: 9, A: 7, D: 5, C: 2",
            TRUTH,
            {"ranking": 5 / 6, "score": 0.6, "valid": 1.0},
            id="a blank line between",
        ),
    ],
)
def test_no_analysis(text, truth, parts):
    got = score(text, truth, format="no_analysis")
    assert got.parts == pytest.approx(parts, abs=1e-12)
    assert got.value == pytest.approx(parts["ranking"] + parts.get("score", 0.0), abs=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Best first:\nB > A = D > C", id="a heading"),
        pytest.param(answer(), id="analysis"),
        pytest.param("B > A = D > C\nScores:\nB: 9, A: 7, D: 7, C: 2", id="a heading between"),
        pytest.param("B: 9, A: 7, D: 7, C: 2\nB > A = D > C", id="scores before the ranking"),
        pytest.param("B > A > D > C\nB: 9, A: 7, D: 7, C: 2", id="the scores imply another ranking"),
        pytest.param("B: 9, A: 7, D: 7, C: 2", id="only scores"),
    ],
)
def test_invalid_answers_for_no_analysis(text):
    got = score(text, format="no_analysis")
    assert is_invalid(got)
    assert got.parts["score"] == 0.0


def test_no_analysis_rejects_a_scores_line_if_the_truth_has_no_scores():
    assert is_invalid(score("B > A = D > C\nB: 9, A: 7, D: 7, C: 2", "B > A = D > C", format="no_analysis"))


# The ground truth ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        json.dumps(TRUTH),
        {letter: float(points) for letter, points in TRUTH.items()},
        {letter: np.int64(points) for letter, points in TRUTH.items()},
        TRUTH | {"E": None, "F": None},
    ],
    ids=[
        "dict",
        "json",
        "floats, as parquet reads a column with nulls",
        "numpy",
        "null for letters of other rows, as parquet fills a struct",
    ],
)
def test_accepted_forms_of_scores_as_truth(truth):
    assert score(answer(), truth).value == 2.0


INVALID_TRUTHS = [
    "",
    "{}",
    "not json",
    "[9, 7]",
    '{"A": 9, "B": "7"}',
    '{"A": 9, "B": 7.5}',
    '{"A": 9, "B": NaN}',
    '{"A": true, "B": 7}',
    '{"A": 1e999}',
]
INVALID_TRUTHS += [
    '{"A": 9, "B": null}',
    '{"AB": 9, "C": 7}',
    '{"a": 9, "b": 7}',
    "[" * 100_000,
    7,
    1.5,
    [9, 7],
    {},
    {"A": None},
    {1: 9, 2: 7},
]


@pytest.mark.parametrize("format", ["ranking_score", "ranking", "zero", "no_analysis"])
@pytest.mark.parametrize("truth", INVALID_TRUTHS, ids=lambda truth: repr(truth)[:20])
def test_an_unreadable_truth_is_a_failure_not_a_zero(truth, format):
    got = score(answer(), truth, format=format)
    assert got.value is None
    assert got.failure is not None
    assert got.failure.cause == "no_ground_truth"
    assert "row p has the ground truth" in got.failure.message


def test_a_missing_truth_or_one_without_scores_is_a_failure():
    sample = Sample("p", 0, NONE, answer(), "finished", NONE, NONE, 0)
    got = Ranking(kind="ranking").value(Prompt("p", []), sample)
    assert got.failure is not None
    assert got.failure.message == (
        "row p has no ground truth; ranking needs (in `reward_model.ground_truth`) the score of each candidate, "
        'as JSON: {"A": 9, "B": 7}'
    )
    assert score(answer(), "B > A = D > C").failure is not None
    assert score(answer(), "B > A > A", format="ranking").failure is not None


# The lines -----------------------------------------------------------------------------------------------------------


def test_reading_and_writing_lines():
    tiers = read_ranking(" B > D = A > C\n")
    assert tiers == ({"B"}, {"A", "D"}, {"C"}) == rank(TRUTH)
    assert write_ranking(tiers) == "B > A = D > C"
    assert len(write_ranking(tiers)) == 4 * 4 - 3
    assert [relation(tiers, *pair) for pair in ("BA", "AB", "AD", "DC")] == [1, -1, 0, 1]
    assert read_scores("B: 9, A:-7") == {"B": 9, "A": -7}
    assert [read_integer(text) for text in (" 7\n", "-3", "+3", "²", "٣", "7.0", "", "1_0", "1" * 10)] == [7, -3, 3] + [None] * 6
    assert pairwise_share(tiers, rank({"A": 1, "B": 1, "C": 1, "D": 1})) == 1 / 6
    assert score_part({"A": 3, "B": 1}, {"A": 9, "B": 6}) == 0.6


def test_reading_full_answers():
    read = read_ranked_scores(answer(analysis="One.\n\nTwo."))
    assert read is not None
    assert (read.analysis, read.tiers, read.scores) == ("One.\nTwo.", rank(TRUTH), TRUTH)
    ranked = read_ranked("One.\n\nTwo.\nA > B")
    assert ranked is not None
    assert (ranked.analysis, ranked.tiers, ranked.scores) == ("One.\n\nTwo.", ({"A"}, {"B"}), None)


# Any answer ----------------------------------------------------------------------------------------------------------

candidates = st.dictionaries(st.sampled_from(string.ascii_uppercase), st.integers(0, 10), min_size=2, max_size=8)
format_like_text = st.text("AB>=<:, \n\r0129-²٣\x00", max_size=60)


def shuffled(tiers, draw) -> str:
    return " > ".join(" = ".join(draw(st.permutations(sorted(tier)))) for tier in tiers)


@settings(max_examples=200, deadline=None)
@given(st.data(), candidates, st.integers(-5, 5), st.sampled_from([0.01, 1.0, 2.5]))
def test_a_correct_answer_scores_twice_the_scale(data, truth, shift, scale):
    ranking = shuffled(rank(truth), data.draw)
    order = data.draw(st.permutations(sorted(truth)))
    scores = ",".join(f"{letter}: {truth[letter] + shift}" for letter in order)
    got = score(answer(ranking, scores), truth, score_scale=scale)
    assert got.value == pytest.approx(2 * scale)
    assert not got.malformed


@settings(max_examples=200, deadline=None)
@given(st.data(), candidates)
def test_candidate_names_and_the_order_of_ties_do_not_matter(data, truth):
    guess = {letter: data.draw(st.integers(0, 10)) for letter in truth}
    before = score(answer(write_ranking(rank(guess)), ", ".join(f"{x}: {s}" for x, s in guess.items())), truth)
    renamed = dict(zip(truth, data.draw(st.permutations(sorted(truth))), strict=True))
    new_truth, new_guess = ({renamed[x]: s for x, s in scores.items()} for scores in (truth, guess))
    scores = ", ".join(f"{x}: {new_guess[x]}" for x in data.draw(st.permutations(sorted(new_guess))))
    after = score(answer(shuffled(rank(new_guess), data.draw), scores), json.dumps(new_truth))
    assert after.value == pytest.approx(before.value, abs=1e-12)
    assert after.parts == pytest.approx(before.parts, abs=1e-12)
    assert before.value is not None
    assert 0 <= before.value <= 2
    assert before.parts["valid"] == 1


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.text(), format_like_text, st.builds(answer, format_like_text, format_like_text, format_like_text)),
    st.sampled_from(["ranking_score", "ranking", "zero", "no_analysis"]),
    st.sampled_from([TRUTH, {"A": 1, "B": 0}]),
)
def test_any_answer_has_a_value_within_bounds(text, format, truth):
    got = score(text, truth, format=format)
    assert got.value is not None
    assert math.isfinite(got.value)
    assert 0 <= got.value <= (2 if format in ("ranking_score", "no_analysis") else 1)
    assert got.malformed == (got.parts["valid"] == 0)
    if got.malformed:
        assert got.value == 0


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.none(),
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda x: st.lists(x) | st.dictionaries(st.sampled_from("ABab1"), x),
        ),
    )
)
def test_any_truth_gives_a_value_or_a_failure(truth):
    for form in (truth, json.dumps(truth)):
        got = score(answer(), form if form is not None else "")
        assert (got.value is None) == (got.failure is not None)
