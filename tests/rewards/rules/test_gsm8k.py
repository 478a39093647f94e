"""The GSM8K rule: which number is the final answer, and its reward."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.rewards.rules.gsm8k import Gsm8k
from plaudit.types import Prompt, Sample, Score

NONE = np.zeros(0)


def score_of(text: str, truth: object, **settings) -> Score:
    reward = Gsm8k(kind="gsm8k", **settings).build()
    return reward.score_now(Prompt("p", [], ground_truth=truth), Sample("p", 0, NONE, text, "finished", NONE, NONE, 0))


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("so 40 + 32 = 72\n#### 72", "72"),
        ("#### 72", 72),
        ("#### 72", 72.0),
        ("#### 72.0", "72"),
        ("#### 72.", "72"),
        ("#### 1,000", "1000"),
        ("#### 1000", "1,000"),
        ("#### $18", "18"),
        ("#### \\$18", "18"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("####72 dollars", "72"),
        ("#### 5\nno: #### 72", "72"),
        ("#### 72\n####", "72"),
        ("#### .5", "0.5"),
        ("#### 72", "He had 40 and got 32.\n#### 72"),
        ("#### 72", np.int64(72)),
        ("#### 72", ["72"]),
        ("#### 10000000000000000", 1e16),
    ],
)
def test_strict_rewards_the_number_after_the_last_marker(text, truth):
    assert score_of(text, truth).value == 1.0


@pytest.mark.parametrize("text", ["#### 7", "#### 720", "#### 72 or 73\n#### 73", "#### -72", "#### 72.5", "#### 7 2"])
def test_wrong_numbers_get_the_format_score(text):
    score = score_of(text, "72", format_score=0.1)
    assert (score.value, score.malformed) == (0.1, False)


@pytest.mark.parametrize("text", ["", "72", "the answer is 72", "####", "#### seventy-two", "### 72", "#### " + "9" * 100_000])
def test_no_number_after_a_marker_is_malformed(text):
    score = score_of(text, "72", format_score=0.1)
    assert (score.value, score.malformed, score.view) == (0.0, True, text)


def test_flexible_takes_the_last_number():
    assert score_of("first 5, then 72 apples.", "72", method="flexible").value == 1.0
    assert score_of("it is $1,072.00!", "1072", method="flexible").value == 1.0
    assert score_of("72, then 5", "72", method="flexible").value == 0.0
    assert score_of("no digits", "72", method="flexible").malformed


@pytest.mark.parametrize(
    "truth", [None, "", "  ", "no number", "3 apples and 5 pears", "#### none", [], ["1", "2"], {"a": 1}, True, float("nan")]
)
def test_a_ground_truth_without_a_number_is_a_failure(truth):
    score = score_of("#### 72", truth)
    assert score.value is None
    assert score.failure is not None
    assert score.failure.cause == "no_ground_truth"
    assert "row p" in score.failure.message


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from(["strict", "flexible"]))
def test_any_text_has_a_finite_value(text, method):
    for response in (text, f"#### {text}", f"#### 7{text}"):
        score = score_of(response, "72", method=method)
        assert score.value is not None
        assert math.isfinite(score.value)


def test_the_datasets_own_answers_are_correct(real_data):
    rows = [json.loads(line) for line in (real_data / "gsm8k_test.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert len(answers) == 1319
    assert all(score_of(answer, answer).value == 1.0 for answer in answers)
    assert all(score_of(answer, answer.split("####")[1], method="flexible").value == 1.0 for answer in answers)
    wrong = [score_of(other, answer).value for answer, other in itertools.pairwise(answers)]
    assert sum(wrong) < 40  # neighbouring rows that happen to have the same answer
