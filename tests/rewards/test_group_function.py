"""User functions that score a group in one call."""

from pathlib import Path

import pytest

from plaudit.errors import RecipeError
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Score, ScoredGroup
from support.rewards import collect, function, group, values, write_function


def group_function(path: Path, timeout_s: float = 10.0, **settings):
    return function(path, scores="group", limits={"give_up_after": None, "timeout_s": timeout_s}, **settings)


def failures(scored: ScoredGroup) -> list[tuple[str, str] | None]:
    """Each sample's failure as (cause, message); None where it has none."""
    [scores] = scored.by_reward.values()
    return [None if score.failure is None else (score.failure.cause, score.failure.message) for score in scores]


def test_one_call_scores_the_group_in_order(tmp_path):
    path = write_function(
        tmp_path,
        """
        calls = 0
        def compute_scores(prompts, responses, ground_truths, extra_infos, data_sources, bonus):
            global calls
            calls += 1
            assert [prompt[0]["content"] for prompt in prompts] == ["2 + 2?"] * len(responses)
            assert data_sources == ["gsm8k"] * len(responses)
            return [
                {"score": len(r) + t + e["x"] + bonus, "calls": calls, "why": r, "malformed": r == "bb"}
                for r, t, e in zip(responses, ground_truths, extra_infos)
            ]
        """,
    )
    reward = group_function(path, arguments={"bonus": 0.5})
    one, other = collect(
        reward,
        group("a", "bb", truth=10, extra_info={"x": 100}, data_source="gsm8k"),
        group("ccc", truth=20, extra_info={"x": 200}, data_source="gsm8k"),
    )
    assert values(one) == [111.5, 112.5]
    assert values(other) == [223.5]
    scores: list[Score] = [*one.by_reward["function"], *other.by_reward["function"]]
    assert sorted(score.parts["calls"] for score in scores) == [1, 1, 2]
    assert [score.malformed for score in scores] == [False, True, False]
    assert [(score.view, score.trace["why"]) for score in scores] == [("a", "a"), ("bb", "bb"), ("ccc", "ccc")]


def test_any_ordered_iterable_of_numbers_is_accepted(tmp_path):
    path = write_function(
        tmp_path,
        """
        import numpy as np
        def array(responses): return np.arange(len(responses))
        def generator(responses): return (True for _ in responses)
        async def coroutine(responses): return tuple(0.5 for _ in responses)
        """,
    )
    for name, expected in (("array", [0.0, 1.0]), ("generator", [1.0, 1.0]), ("coroutine", [0.5, 0.5])):
        assert values(collect(group_function(path, function=name), group("a", "b"))[0]) == expected


@pytest.mark.parametrize(
    ("body", "cause", "message"),
    [
        ("return [1.0]", "bad_result", "it returned 1 scores for 3 responses"),
        ("return [1.0] * 4", "bad_result", "it returned 4 scores for 3 responses"),
        ("return 1.0", "bad_result", "it returned 1.0, not a list"),
        ("return None", "bad_result", "it returned None, not a list"),
        ("return 'abc'", "bad_result", "it returned abc, not a list"),
        ("return b'abc'", "bad_result", "not a list"),
        ("return {0.0, 1.0, 2.0}", "bad_result", "not a list"),
        ("return {'score': [0.0, 1.0, 2.0]}", "bad_result", "not a list"),
        ("return [int(response) for response in responses]", "exception", "ValueError"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
        ("import os; os._exit(7)", "died", "exit code 7"),
        ("while True: pass", "timeout", "after 2 s, at reward.py:3"),
    ],
)
def test_a_bad_call_fails_only_its_group(tmp_path, body, cause, message):
    path = write_function(
        tmp_path,
        f"""
        def bad(responses):
            {body}
        def compute_scores(responses): return bad(responses) if "b" in responses else [1.0 for _ in responses]
        """,
    )
    bad, good = collect(
        group_function(path, timeout_s=2 if cause == "timeout" else 60), group("1", "b", "3"), group("1", "2", id="q")
    )
    assert values(bad) == [None] * 3
    for found in failures(bad):
        assert found is not None
        assert found[0] == cause
        assert message in found[1]
    assert values(good) == [1.0, 1.0]


def test_a_bad_entry_fails_only_its_sample(tmp_path):
    path = write_function(tmp_path, "def compute_scores(responses): return [1.0, None, float('nan'), '2', {'x': 1}]")
    [scored] = collect(group_function(path), group(*"abcde"))
    assert values(scored) == [1.0, None, None, None, None]
    assert failures(scored) == [
        None,
        ("not_a_number", "entry 1 is None"),
        ("not_a_number", "entry 2 is nan"),
        ("not_a_number", "entry 3 is 2"),
        ("bad_result", "entry 4 is a dict without 'score' (it has: x)"),
    ]


def test_the_function_gets_only_the_samples_it_scores(tmp_path):
    """A closed gate, a missing extract and `when` exclude samples; a call may be left with a single response."""
    path = write_function(tmp_path, "def compute_scores(responses): return [len(responses) for _ in responses]")
    rewards = [
        function(write_function(tmp_path / "gate", "def compute_score(solution_str): return 'open' in solution_str"), name="gate"),
        group_function(path, gate="gate", view={"extract": "boxed"}, when={"data_source": "a"}),
    ]
    with RewardRunner(rewards, tolerant=True) as runner:
        texts = (r"open \boxed{1}", r"open \boxed{2}", r"\boxed{3}", "open")
        groups = [group(*texts, data_source="a"), group(*texts[1:], data_source="a"), group(*texts, data_source="b")]
        scored = [one.by_reward["function"] for one in runner.collect(groups)]
    assert [score.value for score in scored[0]] == [2.0, 2.0, None, 0.0]
    assert scored[0][3].malformed
    assert [score.value for score in scored[1]] == [1.0, None, 0.0]
    assert [score.value for score in scored[2]] == [None] * 4


def test_scores_are_cached_per_group(tmp_path):
    path = write_function(
        tmp_path,
        """
        calls = 0
        def compute_scores(responses):
            global calls
            calls += 1
            return [calls for _ in responses]
        """,
    )
    assert not group_function(path).scores_alone
    with RewardRunner([group_function(path)], cache=tmp_path / "c.sqlite") as runner:
        for texts, call in ((("a", "b"), 1), (("a", "b"), 1), (("a", "c"), 2), (("b", "a"), 3)):
            assert values(runner.collect([group(*texts)])[0]) == [call, call]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def compute_score(solution_str): ...", r"no function compute_scores .*Did you mean compute_score\?"),
        ("def compute_scores(solution_str): ...", "it does not take responses|missing a required argument"),
        ("def compute_scores(responses, labels): ...", r"missing a required argument: 'labels'.*prompts, responses, ground_truths"),
    ],
)
def test_a_function_that_cannot_score_groups_is_a_recipe_error(tmp_path, body, message):
    with pytest.raises(RecipeError, match=message):
        collect(group_function(write_function(tmp_path, body)), group("a"))
