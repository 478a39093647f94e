"""Combining rewards: `when`, scaling, combiners, gates, normalisation, cascades, and models that share the device."""

import asyncio
import math
import pickle
import statistics
from typing import ClassVar, Literal

import pytest
from pydantic import ValidationError

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.recipe import ScoreRecipe
from plaudit.rewards.combine import RunningMoments
from plaudit.rewards.judges.cascade import Cascade
from plaudit.rewards.reward import LiveRule, Reward, Rule
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Failure, Prompt, Sample, Score, ScoredGroup
from support.rewards import BROKEN, collect, group, values


class Number(Rule):
    """The number in the response, multiplied by `times`; `?` is malformed, `!` a failure."""

    kind: Literal["number"] = "number"
    times: float = 1.0
    calls: list[str] = []  # noqa: RUF012

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        self.calls.append(sample.text)
        if sample.text == "?":
            return Score(0.0, malformed=True)
        return BROKEN if sample.text == "!" else self.times * float(sample.text)


def scored(rewards: list[Reward], *texts: str, **prompt) -> ScoredGroup:
    with RewardRunner(rewards, tolerant=True) as runner:
        return runner.collect([group(*texts, **prompt)])[0]


def approx(numbers):
    if isinstance(numbers, float):
        return pytest.approx(numbers, rel=1e-9, abs=1e-12)
    return [None if number is None else approx(float(number)) for number in numbers]


# One reward's value --------------------------------------------------------------------------------------------------


def test_scale_and_bounds_do_not_apply_to_malformed_and_on_failure_values():
    reward = Number(scale=0.1, bounds=(-0.5, 0.6), malformed=-3.0, on_failure=7.0)
    assert values(scored([reward], "4", "9", "-9", "?", "!")) == approx([0.4, 0.6, -0.5, -3.0, 7.0])


def test_the_upper_bound_may_be_open():
    assert values(scored([Number(bounds=(0.0, None))], "-1", "99")) == [0.0, 99.0]


def test_a_response_without_an_extract_is_malformed_and_not_scored():
    reward = Number(view={"extract": "boxed"}, calls=[])
    got = scored([reward], r"so \boxed{3}", "3")
    assert values(got) == [3.0, 0.0]
    assert [score.malformed for score in got.scores] == [False, True]
    assert reward.calls == ["3"]
    assert got.by_reward["number"][0].view == "3"
    assert got.by_reward["number"][1].trace["malformed"] == "it has no \\boxed{…}"


def test_the_placeholder_is_scored_and_marked_malformed(tmp_path):
    (tmp_path / "c.json").write_text('{"longcot_delimiter": "</think>"}')

    class Length(Number):
        def value(self, prompt: Prompt, sample: Sample) -> float:
            return float(len(sample.text))

    view = {"longcot_config": str(tmp_path / "c.json"), "strict": True}
    got = scored([Length(view=view)], "t</think> 12345678", "none")
    assert values(got) == [8.0, float(len("[NULL]"))]
    assert [score.malformed for score in got.scores] == [False, True]
    assert values(scored([Length(view=view, malformed=-1.0)], "none")) == [-1.0]


# When ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "applies"),
    [
        ({}, True),
        ({"data_source": "openai/gsm8k"}, True),
        ({"data_source": "*GSM8K"}, True),
        ({"data_source": "gsm8k*"}, False),
        ({"data_source": ["math*", "*8k"]}, True),
        ({"data_source": "*8k", "extra_info.lang": "de"}, True),
        ({"data_source": "*8k", "extra_info.lang": "fr"}, False),
        ({"lang": "d?"}, True),
        ({"extra_info.deep.er": "7"}, True),
        ({"extra_info.absent": "*"}, True),
        ({"extra_info.absent": "?*"}, False),
        ({"ground_truth": "4"}, True),
        ({"reward_model.ground_truth": "5"}, False),
    ],
)
def test_when(when, applies):
    row = {"data_source": "openai/gsm8k", "extra_info": {"lang": "de", "deep": {"er": 7}}}
    got = scored([Number(name="a", when=when), Number(name="always", weight=0.5)], "4", **row)
    assert values(got) == [4.0 + 2.0 if applies else 2.0]
    assert got.by_reward["a"][0].applies == applies
    assert ("a" in got.scores[0].parts) == applies


def rewards_of(*entries: dict) -> tuple:
    return ScoreRecipe.model_validate({"rewards": [{"kind": "exact", **entry} for entry in entries]}).rewards


def applying(rewards: tuple, data_source: str) -> list[str]:
    return [reward.label for reward in rewards if reward.applies_to(Prompt("p", [], data_source=data_source))]


def test_otherwise_applies_where_no_reward_above_with_fields_and_a_weight_does():
    rewards = rewards_of(
        {"name": "a", "when": {"data_source": "a*"}},
        {"name": "always"},
        {"name": "measured", "when": {"data_source": "c"}, "weight": 0},
        {"name": "rest", "when": "otherwise"},
        {"name": "b", "when": {"data_source": "b"}},
        {"name": "last", "when": "otherwise"},
    )
    assert applying(rewards, "a1") == ["a", "always"]
    assert applying(rewards, "b") == ["always", "rest", "b"]  # rest: b is below it
    assert applying(rewards, "c") == ["always", "measured", "rest", "last"]
    assert applying(rewards, "") == ["always", "rest", "last"]
    again = ScoreRecipe.model_validate(ScoreRecipe(rewards=rewards).model_dump()).rewards
    assert again == rewards
    assert pickle.loads(pickle.dumps(rewards)) == rewards
    changed = rewards[3].model_copy(update={"weight": 2.0})
    assert applying((changed,), "a1") == []
    with RewardRunner(rewards) as runner:
        [scores] = runner.collect([group("4", data_source="a")])
    assert scores.scores[0].parts == {"a": 1.0, "always": 1.0}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"when": "otherwise"}], "exact has `when: otherwise`, so it needs a reward above it"),
        ([{"name": "a"}, {"when": "otherwise"}], "needs a reward above it with a weight and a `when` of fields"),
        (
            [{"name": "a", "when": {"x": "y"}, "weight": 0}, {"name": "b"}, {"when": "otherwise"}],
            "needs a reward above it with a weight",
        ),
        ([{"when": "otherwise"}, {"name": "a", "when": {"x": "y"}}], "needs a reward above it"),
        ([{"when": "gsm8k"}], "'gsm8k' is neither `otherwise` nor fields of a row"),
    ],
)
def test_otherwise_needs_something_above_it(entries, message):
    with pytest.raises(ValidationError, match=message):
        rewards_of(*entries)


def test_rows_that_match_no_reward_have_no_value_and_training_rejects_them():
    rewards = [Number(when={"data_source": "math"}), Number(name="seen", weight=0.0)]
    got = scored(rewards, "4", data_source="poetry")
    assert values(got) == [None]
    assert got.scores[0].failure is not None
    assert got.scores[0].failure.cause == "no_reward"
    with (
        RewardRunner(rewards) as runner,
        pytest.raises(RecipeError, match=r"for 1 rows no reward's `when` matches .*'poetry'.*`when: otherwise`"),
    ):
        runner.require_rewards([group("4", data_source="math").prompt, group("4", data_source="poetry").prompt])


# Combining -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combiners", "value"),
    [
        (("add", "add", "add"), 2 + 3 * 0.5 + 4),
        (("multiply", "multiply", "add"), 2 * (3 * 0.5) + 4),
        (("add", "add", "multiply"), (2 + 3 * 0.5) * 4),
        (("add", "min", "max"), 4),
        (("add", "max", "min"), 2),
        (("min", "min", "min"), 1.5),
    ],
)
def test_combiners_apply_in_recipe_order(combiners, value):
    weights, times = (1.0, 0.5, 1.0), (2.0, 3.0, 4.0)
    rewards = [
        Number(name=f"r{i}", combine=combiner, weight=weight, times=factor)
        for i, (combiner, weight, factor) in enumerate(zip(combiners, weights, times, strict=True))
    ]
    assert values(scored(rewards, "1")) == [value]


def test_a_reward_that_does_not_apply_is_ignored():
    rewards = [Number(name="a", when={"data_source": "x"}), Number(name="b", combine="multiply")]
    assert values(scored(rewards, "3")) == [3.0]


def test_a_gated_reward_scores_only_samples_that_pass_the_gate():
    gated = Number(name="style", gate="right", times=10.0, calls=[])
    got = scored([Number(name="right"), gated], "1", "0", "-1", "2", "!")
    assert values(got) == [11.0, 0.0, -1.0, 22.0, None]
    assert gated.calls == ["1", "2"]
    stricter = Number(name="style", gate={"reward": "right", "above": 1.5}, times=10.0)
    assert values(scored([Number(name="right", weight=0.0), stricter], "1", "2")) == [0.0, 20.0]


def test_a_failed_gate_is_a_failure_even_at_weight_zero():
    got = scored([Number(name="right", weight=0.0), Number(name="style", gate="right")], "1", "!")
    assert values(got) == [1.0, None]
    assert got.scores[1].failure is not None


def test_a_gate_that_does_not_apply_stays_closed():
    rewards = [Number(name="right", when={"data_source": "x"}), Number(name="style", gate="right")]
    got = scored(rewards, "4", data_source="y")
    assert got.scores[0].failure is not None
    assert got.scores[0].failure.cause == "no_reward"
    assert values(scored(rewards, "4", data_source="x")) == [8.0]


def test_a_gate_must_name_a_reward_above_it():
    for rewards in ([{"gate": "b"}, {"name": "b"}], [{"name": "b", "gate": "b"}], [{"gate": "none"}]):
        with pytest.raises(ValidationError, match="must name a reward above it"):
            ScoreRecipe.model_validate({"rewards": [{"kind": "exact"} | reward for reward in rewards]})


# Normalising ---------------------------------------------------------------------------------------------------------


def test_gdpo_normalises_each_reward_within_the_group_and_sums():
    """By hand: 1, 2, 3 and 30, 10, 20 have standard deviations 1 and 10, so both count equally though one is ten times larger."""

    class Second(Number):
        def value(self, prompt: Prompt, sample: Sample) -> float:
            return {"1": 30.0, "2": 10.0, "3": 20.0}[sample.text]

    got = scored([Number(name="a", normalise="group"), Second(name="b", normalise="group", weight=0.5)], "1", "2", "3")
    first = [(x - 2) / (1 + 1e-6) for x in (1, 2, 3)]
    second = [(x - 20) / (10 + 1e-6) for x in (30, 10, 20)]
    assert values(got) == approx([a + 0.5 * b for a, b in zip(first, second, strict=True)])
    assert got.scores[0].parts == {"a": 1.0, "b": 30.0, "unnormalised": 1.0 + 0.5 * 30.0}


def test_dropped_samples_are_excluded_from_group_normalisation():
    got = scored([Number(normalise="group"), Number(name="other", weight=0.0)], "1", "!", "3")
    spread = math.sqrt(2) + 1e-6
    assert values(got) == approx([-1 / spread, None, 1 / spread])

    class OtherFails(Number):
        def value(self, prompt: Prompt, sample: Sample) -> float | Score:
            return BROKEN if sample.text == "100" else 0.0

    got = scored([Number(normalise="group"), OtherFails(name="other")], "1", "100", "3")
    assert values(got) == approx([-1 / spread, None, 1 / spread])


@pytest.mark.parametrize("texts", [("5",), ("5", "!"), ("0.1",) * 7])
def test_a_group_without_variance_normalises_to_zero(texts):
    assert [value for value in values(scored([Number(normalise="group")], *texts)) if value is not None] == approx(
        [0.0] * (len(texts) - texts.count("!"))
    )


def test_running_normalisation_covers_all_values_so_far_and_survives_a_restart():
    seen: list[float] = []
    runner_state: dict = {}
    for step in ((1.0, 2.0), (10.0, 0.5), (4.0, 4.0)):
        with RewardRunner([Number(normalise="running")]) as runner:
            runner.load_state(runner_state)
            [got] = runner.collect([group(*map(str, step))])
            before = runner.state()
            runner.collect([group("1000")], training=False)  # validation
            runner_state = runner.state()
        assert runner_state == before
        seen += step
        mean, std = statistics.fmean(seen), statistics.stdev(seen)
        assert values(got) == approx([(x - mean) / (std + 1e-6) for x in step])


def test_validation_rewards_are_not_normalised():
    for normalise in ("group", "running"):
        with RewardRunner([Number(normalise=normalise)]) as runner:
            [got] = runner.collect([group("1", "3")], training=False)
        assert values(got) == [1.0, 3.0]


def test_running_moments_exclude_dropped_samples():
    class OtherFails(Number):
        def value(self, prompt: Prompt, sample: Sample) -> float | Score:
            return BROKEN if sample.text == "100" else 0.0

    with RewardRunner([Number(normalise="running"), OtherFails(name="other")], tolerant=True) as runner:
        runner.collect([group("1", "2", "100")])
        state = runner.state()["number"]
    assert (state["count"], state["mean"]) == (2, 1.5)


def test_a_value_that_overflows_is_a_failure():
    got = scored([Number(scale=1e300)], "1e10", "1e-300", "1")
    assert values(got) == [None, approx(1.0), None]
    assert [score.failure and score.failure.cause for score in got.scores] == ["too_large", None, "too_large"]


def test_running_moments_do_not_depend_on_batching():
    numbers = [3.0, -1.0, 4.5, 0.25, 9.0]
    at_once, batched = RunningMoments(), RunningMoments()
    at_once.add(numbers)
    batched.add(numbers[:2])
    batched.add(numbers[2:])
    assert at_once == batched
    assert at_once.normalised(9.0) == approx((9 - statistics.fmean(numbers)) / (statistics.stdev(numbers) + 1e-6))


# Cascades ------------------------------------------------------------------------------------------------------------


class Verdict(Number):
    """The judge: 0.5 for every response, `!!` is a failure."""

    kind: Literal["verdict"] = "verdict"

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        self.calls.append(sample.text)
        return BROKEN if sample.text == "!!" else 0.5


class Right(Number):
    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        return BROKEN if sample.text == "!" else float(sample.text == "4")


@pytest.mark.parametrize(
    ("mode", "weight", "expected", "calls"),
    [
        ("only", 1.0, [0.5, 0.5], ["4", "5"]),
        ("addon", 0.8, [1.0, 0.8 * 0.5], ["5"]),
        ("mixed", 0.8, [0.8 * 0.5 + 0.2 * 1, 0.8 * 0.5 + 0.2 * 0], ["4", "5"]),
    ],
)
def test_cascade_modes(mode, weight, expected, calls):
    judge = Verdict(calls=[])
    rule = None if mode == "only" else Right()
    [got] = collect(Cascade(kind="cascade", mode=mode, rule=rule, judge=judge, judge_weight=weight), group("4", "5"))
    assert values(got) == approx(expected)
    assert judge.calls == calls
    assert got.scores[1].parts["cascade/judge"] == 0.5


def test_a_failure_inside_a_cascade_fails_the_cascade():
    judge = Verdict(calls=[])
    reward = Cascade(kind="cascade", rule=Right(), judge=judge, max_failure_rate=1.0)
    [got] = collect(reward, group("4", "!", "!!"))
    assert values(got) == [1.0, None, None]
    assert [score.failure.message for score in got.by_reward["cascade"] if score.failure] == [
        "rule: after 60 s",
        "judge: after 60 s",
    ]
    assert judge.calls == ["!!"]


def test_a_rejected_key_inside_a_cascade_stops_whatever_on_failure_says():
    class Rejected(Number):
        def value(self, prompt: Prompt, sample: Sample) -> Score:
            return Score(None, failure=Failure("unauthorised", "HTTP 401."))

    for rule, judge in ((Right(), Rejected(on_failure=0.0)), (Rejected(on_failure=0.0), Verdict(calls=[]))):
        with pytest.raises(TrainingStopped, match=r"reward 'cascade': (judge|rule): HTTP 401"):
            collect(Cascade(kind="cascade", rule=rule, judge=judge, max_failure_rate=1.0), group("5"))


@pytest.mark.parametrize(("mode", "value"), [("addon", 0.8 * 0.5), ("mixed", 0.8 * 0.5 + 0.2 * 0.1)])
def test_a_rules_on_failure_value_does_not_count_as_a_pass(mode, value):
    judge = Verdict(calls=[])
    reward = Cascade(kind="cascade", mode=mode, rule=Right(on_failure=0.1), judge=judge, judge_weight=0.8)
    [got] = collect(reward, group("!"))
    assert values(got) == approx([value])
    assert judge.calls == ["!"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": {"kind": "exact"}}, "addon and mixed need one"),
        ({"mode": "only", "rule": {"kind": "exact"}, "judge": {"kind": "exact"}}, "mode: only has no rule"),
        ({"mode": "mixed", "judge_weight": 2.0, "rule": {"kind": "exact"}, "judge": {"kind": "exact"}}, "judge_weight is 2"),
        (
            {"rule": {"kind": "exact", "weight": 2.0}, "judge": {"kind": "exact"}},
            "weight: set this on the cascade",
        ),
        (
            {"rule": {"kind": "exact", "on_failure": "stop"}, "judge": {"kind": "exact"}},
            "on_failure: stop: set this on the cascade",
        ),
        ({"rule": {"kind": "exact"}, "judge": {"kind": "exat"}}, "unknown kind"),
    ],
)
def test_invalid_cascades_are_rejected(settings, message):
    with pytest.raises(ValidationError, match=message):
        ScoreRecipe.model_validate({"rewards": [{"kind": "cascade", **settings}]})


# Models that share the device ----------------------------------------------------------------------------------------


class Offloaded(Number):
    """Its model is on the device between load and unload."""

    kind: Literal["offloaded"] = "offloaded"
    log: ClassVar[list[str]] = []

    @property
    def waits_for_all(self) -> bool:
        return True

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        assert self.log[-1] == f"load {self.label}"
        return super().value(prompt, sample)

    def build(self) -> LiveRule:
        return LiveOffloaded(self)


class LiveOffloaded(LiveRule):
    async def load(self) -> None:
        Offloaded.log.append(f"load {self.settings.label}")

    async def unload(self) -> None:
        Offloaded.log.append(f"unload {self.settings.label}")


def test_models_that_share_the_device_score_one_after_another_once_sampling_is_done():
    log = Offloaded.log
    log.clear()

    def groups():
        for i in range(3):
            log.append(f"sampled {i}")
            yield group("1", "2", id=str(i))

    rewards = [
        Offloaded(name="a"),
        Number(name="after", gate={"reward": "a", "above": 1.5}, times=10.0),
        Offloaded(name="b", weight=0.5),
    ]
    with RewardRunner(rewards) as runner:
        scored = runner.collect(groups())
    assert log == ["sampled 0", "sampled 1", "sampled 2", "load a", "unload a", "load b", "unload b"]
    assert [values(one) for one in scored] == [[1.5, 2 + 20 + 1]] * 3


def test_a_model_is_unloaded_when_scoring_fails():
    Offloaded.log.clear()
    with RewardRunner([Offloaded(on_failure="stop")]) as runner, pytest.raises(TrainingStopped):
        runner.collect([group("!")])
    assert Offloaded.log == ["load offloaded", "unload offloaded"]


# Single groups, as the server scores them ----------------------------------------------------------------------------


def test_a_single_group_is_not_normalised_and_failures_do_not_stop_it():
    rewards = [Number(normalise="group"), Number(name="other", normalise="running", on_failure="stop")]
    with RewardRunner(rewards, tolerant=True) as runner:
        got = runner.run(runner.score(group("1", "3", "!"))).result()
        assert values(got) == [2.0, 6.0, None]
        assert runner.state()["other"]["count"] == 0


class Patient(Offloaded):
    """Stays in `load` until `release` is set."""

    kind: Literal["patient"] = "patient"
    release: ClassVar[asyncio.Event]

    def build(self) -> LiveRule:
        return LivePatient(self)


class LivePatient(LiveOffloaded):
    async def load(self) -> None:
        await super().load()
        await Patient.release.wait()


def test_groups_that_arrive_while_the_device_is_busy_are_scored_together_next():
    async def score_and_cancel(runner: RewardRunner) -> list[list[float | None]]:
        Patient.release = asyncio.Event()
        first = asyncio.create_task(runner.score(group("1")))
        while not Patient.log:
            await asyncio.sleep(0)
        others = [asyncio.create_task(runner.score(group(str(i)))) for i in range(2, 6)]
        while len(runner._queue._waiting) < 4:
            await asyncio.sleep(0)
        first.cancel()  # cancelling the group on the device loses no other group
        others[1].cancel()
        Patient.release.set()
        found = await asyncio.gather(*others, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError)
        return [values(one) for one in found if isinstance(one, ScoredGroup)]

    Patient.log.clear()
    with RewardRunner([Patient()], tolerant=True) as runner:
        assert runner.run(score_and_cancel(runner)).result() == [[2.0], [4.0], [5.0]]
        assert not runner._queue._waiting
    assert Patient.log == ["load patient", "unload patient"] * 2


def test_a_sum_that_overflows_is_a_failure():
    got = scored([Number(times=1e15), Number(name="other", times=1e15)], "1", "0.1")
    assert values(got) == [None, approx(2e14)]
    assert got.scores[0].failure.cause == "too_large"
