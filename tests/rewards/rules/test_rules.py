"""Rules: the reward of each, worked out by hand, and the contract that all of them keep for any response."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from plaudit import plugins
from plaudit.rewards.judges.parsing import read_total_score
from plaudit.rewards.reward import Reward, Rule, read_answer
from plaudit.rewards.rules.grade import read_total
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, Prompt, Sample, SavedSample, Score

NONE = np.zeros(0)


def rule(kind: str, **settings) -> Rule:
    return plugins.kind("rewards", kind).model_validate({"kind": kind, **settings})


def sample_of(text: str, tokens: int = 0) -> Sample:
    return Sample("p", 0, np.zeros(tokens), text, "finished", NONE, NONE, 0)


def scored(reward: Rule, sample: Sample, truth: object = None) -> Score:
    """As the runner scores it."""
    group = Group(Prompt("p", [{"role": "user", "content": "?"}], ground_truth=truth), NONE, (sample,))
    with RewardRunner([reward]) as rewards:
        [one] = rewards.collect([group])
    return one.by_reward[reward.label][0]


def score(kind: str, response: str, truth: object = None, *, tokens: int = 0, **settings) -> Score:
    value = rule(kind, **settings).value(Prompt("p", [], ground_truth=truth), sample_of(response, tokens))
    return value if isinstance(value, Score) else Score(value)


def value(kind: str, response: str, truth: object = None, **settings) -> float | None:
    return score(kind, response, truth, **settings).value


def is_ground_truth_failure(got: Score) -> bool:
    return got.value is None and got.failure is not None and got.failure.cause == "no_ground_truth"


# Pointwise score -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected", "error"), [(7, 1.0, 0), (8, 0.8, 1), (6, 0.8, 1), (9, 0.4, 2), (4, 0.2, 3), (3, 0, 4), (-7, 0, 14)]
)
@pytest.mark.parametrize("truth", [7, "7", " 7\n", 7.0, "7.0", np.int64(7)])
def test_pointwise_score_depends_on_the_error(truth, written, expected, error):
    got = score("pointwise_score", f"Fluent, one slip.\n\n {written} \n\n", truth)
    assert (got.value, got.parts, got.malformed) == (expected, {"error": error}, False)


@pytest.mark.parametrize("text", ["10", "10\n", "Good.\n10", "Good.\r\n10\r\n"])
def test_pointwise_score_reads_the_last_line(text):
    assert value("pointwise_score", text, 10) == 1.0


@pytest.mark.parametrize(
    "text", ["", " \n", "7\nThat is all.", "Score: 7", "7/10", "7.5", "7.0", "**7**", "seven", "²", "٧", "1_0", "nan", "9" * 5000]
)
def test_pointwise_score_is_malformed_if_the_last_line_is_not_an_integer(text):
    got = score("pointwise_score", text, 7)
    assert (got.value, got.parts, got.malformed) == (0.0, {}, True)


@pytest.mark.parametrize("truth", [None, "", "seven", 7.5, "7.5", True, math.nan, math.inf, "1e999", [7], {"score": 7}])
def test_pointwise_score_needs_an_integer_truth(truth):
    assert is_ground_truth_failure(score("pointwise_score", "7", truth))


# Grade ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "s"),
    [
        pytest.param("Total Score: 8", 8, id="colon"),
        pytest.param("Total Score: 8/10", 8, id="up to the first /"),
        pytest.param("Total Score: 8 / 10 points / 3", 8, id="up to the first of two /"),
        pytest.param("**Total Score:** [8 points]/10", None, id="] is not stripped"),
        pytest.param("**Total Score:** [8/10 points]", 8, id="* and ["),
        pytest.param("| 'Total Score' | 8 |", 8, id="| and '"),
        pytest.param("Total Score: 1 point", 1, id="point"),
        pytest.param("Total Score: 8 points\n", 8, id="points"),
        pytest.param("Total Score: 2\nNo.\nTotal Score: 7.5", 7.5, id="the last Total Score"),
        pytest.param("Total Score: .5", 0.5, id="no digit before the point"),
        pytest.param("Total Score: 1e1", 10, id="an exponent"),
        pytest.param("Total Score: 1e308", 10, id="min(10, s)"),
        pytest.param("Total Score: 35/40", 10, id="min(10, s), whatever the maximum"),
        pytest.param("Total Score: +3", 3, id="a sign"),
        pytest.param("Total Score: 0", 0, id="zero"),
        pytest.param("Total Score: -0.0", 0, id="minus zero"),
        pytest.param("Total Score: -100", None, id="negative: stricter than the source"),
        pytest.param("Total Score: nan", None, id="nan"),
        pytest.param("Total Score: inf", None, id="inf"),
        pytest.param("Total Score: 1e999", None, id="overflows to inf"),
        pytest.param("Total Score: 8 out of 10", None, id="more than a number"),
        pytest.param("Total Score: 8\nWell done.", None, id="text after it"),
        pytest.param("Total Score:", None, id="no number"),
        pytest.param("Total Score: /10", None, id="no number before the /"),
        pytest.param("total score: 8", None, id="lowercase"),
        pytest.param("8/10", None, id="no Total Score"),
        pytest.param("", None, id="empty"),
        pytest.param("Total Score: ٨", None, id="an Arabic digit, which float() does take"),
        pytest.param("Total Score: ²", None, id="a superscript"),
        pytest.param("Total Score: 1_0", None, id="an underscore, which float() does take"),
        pytest.param("Total Score: " + "9" * 1000, None, id="1000 digits"),
    ],
)
@pytest.mark.parametrize("truth", [0.0, 0.3, 1.0])
def test_grade_reads_the_total_score(text, s, truth):
    got = score("grade", text, truth)
    if s is None:
        assert (got.value, got.malformed, got.parts) == (0.0, True, {})
    else:
        assert got.value == pytest.approx((1 - abs(s / 10 - truth)) ** 2, abs=1e-12)
        assert not got.malformed


@pytest.mark.parametrize(
    ("stated", "by_grade", "by_judge"),
    [
        ("8/10", 0.8, 0.8),
        ("8", 0.8, 0.8),
        ("4/5", 0.4, 0.8),
        ("85/100", 1.0, 0.85),
        ("12/10", 1.0, None),
        ("80 %", None, 0.8),
        ("4 out of 5", None, 0.8),
    ],
)
def test_grade_and_the_judges_parser_agree_on_scores_out_of_10(stated, by_grade, by_judge):
    """The table in docs/rewards.md: grade's scale is always 10, the parser reads the stated one."""
    total, found = read_total(f"Total Score: {stated}"), read_total_score(f"Total Score: {stated}")
    assert (None if total is None else min(total, 10.0) / 10) == by_grade
    assert (None if found is None else found.value) == by_judge


@pytest.mark.parametrize(
    ("truth", "expected"), [(0.8, 1.0), (0.5, 0.49), (0, 0.04), (1, 0.64), ("0.5", 0.49), (np.float64(0.5), 0.49)]
)
def test_grade_is_the_square_of_one_minus_the_error(truth, expected):
    got = score("grade", "Total Score: 8/10", truth)
    assert got.value == pytest.approx(expected, abs=1e-12)
    assert got.parts == pytest.approx({"error": 1 - math.sqrt(expected)}, abs=1e-12)


@pytest.mark.parametrize("truth", [None, "", "good", -0.1, 1.1, 8, "8/10", True, math.nan, [0.5]])
def test_grade_needs_a_truth_from_0_to_1(truth):
    assert is_ground_truth_failure(score("grade", "Total Score: 8/10", truth))


# Contains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("the answer is Paris.", {"text": "Paris"}, 1.0),
        ("the answer is PARIS.", {"text": "Paris"}, 0.0),
        ("the answer is PARIS.", {"text": "Paris", "ignore_case": True}, 1.0),
        ("GROSSE STRASSE", {"text": "große Straße", "ignore_case": True}, 1.0),
        ("Paris", {"text": ["Paris", "Lyon"]}, 1.0),
        ("Paris", {"text": ["Paris", "Lyon"], "need": "all"}, 0.0),
        ("Lyon, then Paris", {"text": ["Paris", "Lyon"], "need": "all"}, 1.0),
        ("Nice", {"text": ["Paris", "Lyon"]}, 0.0),
        ("", {"text": "Paris"}, 0.0),
        ("a.b", {"text": "."}, 1.0),
        ("ab", {"text": "."}, 0.0),
    ],
)
def test_contains_looks_for_its_text(text, settings, expected):
    assert value("contains", text, "another truth", **settings) == expected


@pytest.mark.parametrize(
    ("text", "truth", "need", "expected"),
    [
        ("It is 72.", "72", "any", 1.0),
        ("It is 72.", 72.0, "all", 1.0),
        ("It is 71.", 72, "any", 0.0),
        ("red and blue", ["red", "blue"], "all", 1.0),
        ("red", ["red", "blue"], "all", 0.0),
        ("red", np.array(["red", "blue"]), "any", 1.0),
        ("3 of 4", [3.0, 4.0], "all", 1.0),
    ],
)
def test_contains_looks_for_the_ground_truth_if_it_has_no_text(text, truth, need, expected):
    assert value("contains", text, truth, need=need) == expected


@pytest.mark.parametrize("truth", [None, "", "  ", [], ["red", ""], {"a": 1}])
def test_contains_needs_a_text_or_a_truth(truth):
    assert is_ground_truth_failure(score("contains", "red", truth))
    assert value("contains", "red", truth, text="red") == 1.0


def test_contains_rejects_an_empty_text():
    with pytest.raises(ValidationError, match="an empty text is in every response"):
        rule("contains", text=["red", ""])


# Regex ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "full", "expected"),
    [
        (r"\d+", "It is 72.", False, 1.0),
        (r"\d+", "It is 72.", True, 0.0),
        (r"\d+", " 72\n", True, 1.0),
        (r"^B", "A\nB", False, 0.0),
        (r"(?m)^B", "A\nB", False, 1.0),
        (r"(?i)paris", "PARIS", False, 1.0),
        (r"A.B", "A\nB", True, 0.0),
        (r"(?s)A.B", "A\nB", True, 1.0),
        (r"x?", "", True, 1.0),
        (r"\ud800", "\ud800", True, 1.0),
    ],
)
def test_regex(pattern, text, full, expected):
    got = score("regex", text, pattern=pattern, full=full)
    assert (got.value, got.malformed, got.parts) == (expected, False, {"timed_out": 0.0})


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?P<x", "*", "(" * 5000 + ")" * 5000], ids=lambda pattern: pattern[:8])
def test_an_invalid_pattern_is_reported_when_the_recipe_is_read(pattern):
    with pytest.raises(ValidationError, match="is not a regular expression"):
        rule("regex", pattern=pattern)


@pytest.mark.parametrize("full", [False, True])
def test_a_search_that_times_out_is_malformed(full):
    got = score("regex", "a" * 50_000, pattern=r"(a|aa)+(?=b)c", full=full, limits={"timeout_s": 0.05})
    assert (got.value, got.malformed, got.parts) == (0.0, True, {"timed_out": 1.0})


# Thoughts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unknown", "prefilled", "written"),
    [
        # Whether it is well-formed with prefilled null, true and false.
        pytest.param("<think>Two.</think>4", 1, 0, 1, id="thoughts and an answer"),
        pytest.param(" \n<think>\nTwo.\n</think>\n\n4\n", 1, 0, 1, id="extra white space"),
        pytest.param("Two.</think>4", 1, 1, 0, id="the template wrote the opening tag"),
        pytest.param("\nTwo.\n</think>\n4", 1, 1, 0, id="the same, with white space"),
        pytest.param("4", 0, 0, 0, id="no thoughts"),
        pytest.param("", 0, 0, 0, id="empty"),
        pytest.param("<think>Two.", 0, 0, 0, id="unclosed thoughts"),
        pytest.param("<think>Two.</think>", 0, 0, 0, id="no answer"),
        pytest.param("<think>Two.</think> \n", 0, 0, 0, id="a blank answer"),
        pytest.param("Two.</think>\n", 0, 0, 0, id="prefilled, no answer"),
        pytest.param("<think></think>4", 0, 0, 0, id="no thoughts between the tags"),
        pytest.param("<think> \n</think>4", 0, 0, 0, id="blank thoughts"),
        pytest.param("</think>4", 0, 0, 0, id="prefilled, no thoughts"),
        pytest.param("Well. <think>Two.</think>4", 0, 0, 0, id="not at the beginning"),
        pytest.param("<think>a</think><think>b</think>4", 0, 0, 0, id="two blocks"),
        pytest.param("<think>a<think>b</think>4", 0, 0, 0, id="a stray opening tag in the thoughts"),
        pytest.param("<think>a</think>b</think>4", 0, 0, 0, id="a stray closing tag"),
        pytest.param("<think>a</think>4<think>", 0, 0, 0, id="a stray opening tag in the answer"),
        pytest.param("a</think>4<think>", 0, 0, 0, id="the tags the wrong way round"),
        pytest.param("<THINK>a</THINK>4", 0, 0, 0, id="uppercase tags"),
    ],
)
def test_think_format(text, unknown, prefilled, written):
    for setting, expected in ((None, unknown), (True, prefilled), (False, written)):
        got = score("think_format", text, prefilled=setting)
        assert (got.value, got.malformed) == (expected, not expected), setting


def test_think_format_with_other_tags_and_empty_thoughts():
    assert value("think_format", "<think>\n\n</think>\n\n4", empty_thoughts=True) == 1.0
    assert value("think_format", "[T]a[/T]4", opening="[T]", closing="[/T]") == 1.0
    assert value("think_format", "<think>a</think>4", opening="[T]", closing="[/T]") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> a </think> <response> 4 </response>", 1),
        ("<think>a</think><response>4</response>\n", 1),
        ("a</think> <response> 4 </response>", 1),
        ("<think> a </think> 4", 0),
        ("<think> a </think> <response> 4", 0),
        ("<think> a </think> <response> </response>", 0),
        ("<think> a </think> So: <response> 4 </response>", 0),
        ("<think> a </think> <response> 4 </response> Done.", 0),
        ("<think> a </think> <response> 4 </response> <response> 5 </response>", 0),
        ("<think> <response> a </think> <response> 4 </response>", 0),
        ("<think> a </response> </think> <response> 4 </response>", 0),
        ("<response> 4 </response> <think> a </think>", 0),
        ("<think> a <response> 4 </response> </think>", 0),
        ("<think> a </think> </response> 4 <response>", 0),
    ],
)
def test_think_format_with_an_answer_tag(text, expected):
    assert value("think_format", text, answer_tag="response") == expected


@pytest.mark.parametrize(
    "tags",
    [
        {"opening": "#", "closing": "#"},
        {"opening": "<t", "closing": "<t>"},
        {"answer_tag": "think"},
        {"answer_tag": "<a>"},
        {"closing": ""},
    ],
)
def test_invalid_tags_are_rejected(tags):
    with pytest.raises(ValidationError):
        rule("think_format", **tags)


# Length --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (60, 0.0), (70, 0.25), (90, 0.75), (100, 1.0), (150, 1.0), (200, 1.0), (210, 0.75), (240, 0.0), (999, 0.0)],
)
def test_length_falls_linearly_outside_its_bounds(tokens, expected):
    got = score("length", "", tokens=tokens, at_least=100, at_most=200, slack=40)
    assert (got.value, got.parts, got.malformed) == (expected, {"length": tokens}, False)


@pytest.mark.parametrize(
    ("unit", "settings", "expected"),
    [
        ("words", {"at_most": 3}, 1.0),
        ("words", {"at_most": 2}, 0.0),
        ("words", {"at_most": 1, "slack": 4}, 0.5),
        ("characters", {"at_least": 13}, 1.0),
        ("characters", {"at_least": 14}, 0.0),
        ("characters", {"at_least": 15, "slack": 10}, 0.8),
        ("characters", {"at_most": 0, "slack": 13}, 0.0),
    ],
)
def test_length_in_words_and_characters(unit, settings, expected):
    assert value("length", "one two\nthree", unit=unit, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings", [{}, {"at_least": 2, "at_most": 1}, {"at_least": -1}, {"at_most": 1, "slack": -1}, {"unit": "lines", "at_most": 1}]
)
def test_invalid_length_settings_are_rejected(settings):
    with pytest.raises(ValidationError):
        rule("length", **settings)


@pytest.mark.parametrize(("kind", "settings"), [("length", {"at_most": 9}), ("overlong", {"max_tokens": 9, "buffer_tokens": 3})])
def test_a_missing_token_count_is_a_failure(kind, settings):
    reward = rule(kind, **settings, max_failure_rate=1.0)
    read = SavedSample("p", 0, NONE, "one two", "finished", NONE, NONE, 0)
    got = scored(reward, read)
    assert got.value is None
    assert got.failure is not None
    assert got.failure.cause == "no_tokens"
    assert got.failure.message == f"{kind} needs the number of tokens: give rows with `tokens`, or a tokenizer"
    assert scored(reward, SavedSample("p", 0, NONE, "one two", "finished", NONE, NONE, 0, token_count=6)).value is not None


# Overlong ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cost", "uncapped_cost"),
    [(0, 0.0, 0.0), (2176, 0.0, 0.0), (2432, 0.25, 0.25), (2688, 0.5, 0.5), (3200, 1.0, 1.0), (3712, 1.0, 1.5), (4224, 1.0, 2.0)],
)
@pytest.mark.parametrize("penalty", [1.0, 0.04, 0.0])
def test_overlong_penalty_grows_over_the_buffer(tokens, cost, uncapped_cost, penalty):
    # L = 3200, B = 1024: the penalty begins at 2176.
    settings = {"max_tokens": 3200, "buffer_tokens": 1024, "penalty": penalty}
    assert value("overlong", "", tokens=tokens, **settings) == pytest.approx(-penalty * cost, abs=1e-15)
    assert value("overlong", "", tokens=tokens, capped=True, **settings) == pytest.approx(-penalty * cost, abs=1e-15)
    assert value("overlong", "", tokens=tokens, capped=False, **settings) == pytest.approx(-penalty * uncapped_cost, abs=1e-15)


def test_overlong_without_a_penalty_is_plus_zero_and_the_buffer_may_cover_everything():
    assert str(value("overlong", "", tokens=1, max_tokens=8, buffer_tokens=4)) == "0.0"
    assert value("overlong", "", tokens=2, max_tokens=8, buffer_tokens=8) == -0.25


def test_overlong_settings():
    with pytest.raises(ValidationError, match=r"buffer_tokens \(9\) is greater than max_tokens \(8\)"):
        rule("overlong", max_tokens=8, buffer_tokens=9)
    for wrong in ({"buffer_tokens": 0}, {"penalty": -1.0}, {"max_tokens": 0}, {"capped": "somewhat"}):
        with pytest.raises(ValidationError):
            rule("overlong", **{"max_tokens": 8, "buffer_tokens": 4} | wrong)
    uncapped = rule("overlong", max_tokens=8, buffer_tokens=4, capped=False)
    assert rule("overlong", **{k: v for k, v in uncapped.model_dump().items() if k != "kind"}) == uncapped
    assert rule("overlong", max_tokens=8, buffer_tokens=4, bounds=[-0.5, None]).bounds == (-0.5, None)


# Repetition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "share"),
    [
        pytest.param("", {}, 0, id="empty"),
        pytest.param("a a a", {}, 0, id="shorter than n"),
        pytest.param("a a a a", {}, 0, id="one n-gram"),
        pytest.param("a a a a a", {}, 1 / 2, id="two, one distinct"),
        pytest.param("a b c d a b c d a b c d", {}, 5 / 9, id="nine, four distinct"),
        pytest.param("the cat saw the cat", {"n": 2}, 1 / 4, id="one of four repeated"),
        pytest.param("the cat\n saw\tthe  cat", {"n": 2}, 1 / 4, id="any white space"),
        pytest.param("The cat saw the cat", {"n": 2}, 0, id="case-sensitive"),
        pytest.param("a b a", {"n": 1}, 1 / 3, id="single words"),
        pytest.param("今天很好今天很好", {}, 0, id="Chinese is one word"),
        pytest.param("今天很好今天很好", {"unit": "characters"}, 1 / 5, id="Chinese by characters"),
        pytest.param("今天很好\n今天很好", {"unit": "characters", "n": 2}, 3 / 7, id="white space is not a character"),
    ],
)
@pytest.mark.parametrize("penalty", [1.0, 0.5])
def test_repetition_penalises_the_share_of_repeated_ngrams(text, settings, share, penalty):
    got = score("repetition", text, penalty=penalty, **settings)
    assert got.value == pytest.approx(-penalty * share, abs=1e-12)
    assert got.parts == pytest.approx({"repeated": share}, abs=1e-12)
    assert str(value("repetition", "a b c d e")) == "0.0"


# Every rule ----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "bleu": [{}, {"tokenizer": "zh"}],
    "chrf": [{"word_order": 2}],
    "contains": [{}, {"text": ["a", "B"], "need": "all", "ignore_case": True}],
    "length": [{"at_most": 100, "slack": 50}, {"unit": "words", "at_least": 3}, {"unit": "characters", "at_least": 3}],
    "overlong": [{"max_tokens": 100, "buffer_tokens": 50}, {"max_tokens": 9, "buffer_tokens": 9, "capped": False}],
    "ranking": [{"format": format} for format in ("ranking_score", "ranking", "zero", "no_analysis")],
    "regex": [{"pattern": r"(\w+\s?)+$", "limits": {"timeout_s": 0.05}}, {"pattern": ".*a", "full": True}],
    "repetition": [{}, {"unit": "characters", "n": 1}],
    "think_format": [{}, {"prefilled": True}, {"answer_tag": "response", "prefilled": False, "empty_thoughts": True}],
}
"""For kinds with required settings or several modes."""
TRUTHS = [
    None,
    "",
    "4",
    4,
    0.5,
    math.nan,
    1e308,
    True,
    ["4", None],
    '{"A": 9, "B": 7}',
    {"A": 9, "B": 7},
    "A > B",
    "\x00",
    "\ud800",
    b"4",
    object(),
]
LONG = 200_000
TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "²",
    "٣",
    "NaN",
    "-inf",
    "1e308",
    "1e999",
    "9" * 5000,
    "Total Score: 1e999",
    "x\nR\nA > B\nS\nA: ٣, B: ²",
]
REPEATED = [
    "{",
    "}",
    "[",
    "(",
    "<think>",
    "</think>",
    "<",
    ">",
    "A > B",
    "A > ",
    "A: 1,",
    "\n",
    " ",
    "\x00",
    "9",
    "a",
    "aB ",
    "\\boxed{",
    "$",
    "/",
    "'",
]
REPEATED += [
    "Total Score",
    "points",
    "point:",
    "</think>\n",
    "x\n",
    "\r",
    "\u2028",
    "\ud800",
    "٣",
    "-",
    ".",
    "1.",
    "####",
    "\\",
    "\\frac{1}{",
]
OPTIONAL = set() if find_spec("sacrebleu") else {"bleu", "chrf"}
"""Kinds whose package is not installed: plaudit[translation]."""
KINDS = [kind for kind in plugins.kinds("rewards") if issubclass(plugins.kind("rewards", kind), Rule) and kind not in OPTIONAL]
CASES = [(kind, settings) for kind in KINDS for settings in SETTINGS.get(kind, [{}])]
each_rule = pytest.mark.parametrize(("kind", "given_settings"), CASES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(CASES)])

pieces = st.sampled_from([*TEXTS, *REPEATED, "A: 7, B: 9", "B > A", "Total Score: 8/10", "</think>", "4"])
any_text = st.one_of(st.text(), st.lists(pieces, max_size=8).map("\n".join), st.lists(pieces, max_size=8).map("".join))


def check_contract(reward: Rule, text: str, truth: object) -> None:
    sample = sample_of(text, tokens=len(text))
    got = reward.value(Prompt("p", [], ground_truth=truth), sample)  # not through the runner, which turns exceptions into failures
    got = got if isinstance(got, Score) else Score(got)
    if got.failure is None:
        assert got.value is not None
        assert math.isfinite(got.value)
    else:
        assert got.value is None
        assert got.failure.cause
        assert got.failure.message
    assert all(math.isfinite(part) for part in got.parts.values())
    assert got.view is None or isinstance(got.view, str)


@each_rule
def test_any_response_gives_a_finite_value_or_a_failure(kind, given_settings):
    reward = rule(kind, **given_settings)

    @settings(max_examples=60, deadline=None)
    @given(any_text, st.sampled_from(TRUTHS))
    def check(text, truth):
        check_contract(reward, text, truth)

    check()


@each_rule
def test_rules_in_the_runner_fail_only_for_missing_data(kind, given_settings):
    reward: Reward = rule(
        kind, **{**given_settings, "limits": {**given_settings.get("limits", {}), "give_up_after": None}}, max_failure_rate=1.0
    )
    samples = tuple(sample_of(text, tokens=len(text)) for text in TEXTS)
    groups = [Group(Prompt(f"p{i}", [], ground_truth=truth), NONE, samples) for i, truth in enumerate(TRUTHS)]
    with RewardRunner([reward]) as rewards:
        for one in rewards.collect(groups):
            for score in one.by_reward[reward.label]:
                assert score.failure is None or score.failure.cause in ("no_ground_truth", "no_tokens"), score.failure


@each_rule
@pytest.mark.grid(8)
def test_long_texts_are_scored_in_linear_time(kind, given_settings):
    # Quadratic time would exceed pytest's timeout.
    reward = rule(kind, **given_settings)
    for piece in REPEATED:
        for text in (piece * (LONG // len(piece)), "x\nTotal Score: " + piece * (LONG // len(piece)) + "\n4"):
            check_contract(reward, text, {"A": 9, "B": 7} if kind == "ranking" else 1)


# Answers, for majority votes -----------------------------------------------------------------------------------------


BY_GSM8K = {"kind": "cascade", "rule": {"kind": "gsm8k"}, "judge": {"kind": "length", "at_most": 5}}


@pytest.mark.parametrize(
    ("reward", "same", "other", "none"),
    [
        ({"kind": "math"}, [r"\boxed{1/2}", "The answer is 0.5.", r"\frac{1}{2}"], r"\boxed{1/3}", ""),
        ({"kind": "math"}, [r"\boxed{x + 1}", "#### x+1"], r"\boxed{x}", " "),
        ({"kind": "gsm8k"}, ["#### 1,000", "so #### 1000.0"], "#### 100", "1000"),
        ({"kind": "gsm8k", "method": "flexible"}, ["1000", "it costs $1,000"], "1001", "nothing"),
        ({"kind": "exact"}, ["four", " four\n"], "Four", " "),
        ({"kind": "exact", "ignore_case": True}, ["four", "FOUR"], "for", ""),
        ({"kind": "contains", "view": {"extract": "line"}}, ["a", "a "], "b", " "),
        (BY_GSM8K, ["#### 4", "4 #### 4"], "#### 5", "4"),
    ],
)  # fmt: skip
def test_equal_answers_are_one_in_a_majority_vote(reward, same, other, none):
    reads = rule(**reward)
    assert reads.reads_answers
    assert len({reads.read_answer(text) for text in same}) == 1
    assert reads.read_answer(other) not in (reads.read_answer(same[0]), None)
    assert reads.read_answer(none) is None


def test_an_answer_is_that_of_the_first_reward_that_applies_and_reads_one():
    rewards = [rule("length", at_most=5), rule("gsm8k", when={"data_source": "a"}), rule("exact")]
    assert read_answer(rewards, {"length": "#### 4", "gsm8k": "#### 4", "exact": "x"}) == 4
    assert read_answer(rewards, {"length": "#### 4", "gsm8k": None, "exact": "#### 4"}) == "#### 4"
    assert read_answer(rewards[:1], {"length": "#### 4"}) is None
