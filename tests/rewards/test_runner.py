"""The reward runner: values, failures, and misbehaving user functions."""

import asyncio
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from plaudit import plugins
from plaudit.errors import RecipeError, ServerGone, StopRequested, TrainingStopped
from plaudit.recipe import RLRecipe, ScoreRecipe
from plaudit.rewards.combine import combine
from plaudit.rewards.functions.function import Function, FunctionLimits
from plaudit.rewards.metrics import metrics, metrics_by_source, metrics_of_k, rewards_by_source
from plaudit.rewards.reward import LiveReward, Reward, Rule
from plaudit.rewards.rules.exact import Exact
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Failure, Group, Prompt, Sample, Score, ScoredGroup
from support.paths import REPOSITORY, TESTS
from support.processes import gone
from support.rewards import BROKEN, collect, function, group, values, write_function

# Exact match ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("4", " 4\n", "four"),
        (" Paris ", "Paris", "paris"),
        (4, "4", "4.0"),
        (72.0, "72", "7"),
        (0.5, "0.5", ".5"),
        (True, "true", "1"),
        (["4", "four"], "four", "['4', 'four']"),
        (np.array(["4", "four"]), "4", "five"),
    ],
)
def test_exact_rewards_only_the_ground_truth(truth, right, wrong):
    [scored] = collect(Exact(kind="exact"), group(right, wrong, "", truth=truth))
    assert values(scored) == [1.0, 0.0, 0.0]
    assert scored.by_reward["exact"][0].view == right


def test_exact_can_ignore_case():
    [scored] = collect(Exact(kind="exact", ignore_case=True), group("PARIS", "Lyon", truth="Paris"))
    assert values(scored) == [1.0, 0.0]


@pytest.mark.parametrize("truth", [None, "", "  ", [], {"answer": "4"}])
def test_exact_without_a_ground_truth_is_a_failure_not_a_zero(truth):
    [scored] = collect(Exact(kind="exact", max_failure_rate=1.0), group("4", truth=truth))
    [score] = scored.scores
    assert score.value is None
    assert score.failure is not None
    assert score.failure.cause == "no_ground_truth"


# A user's function ---------------------------------------------------------------------------------------------------

MISBEHAVING = dedent("""
    import asyncio, ctypes, os, re, signal, sys, threading, time

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        act = globals().get("act_" + solution_str)
        return act() if act else float(solution_str == ground_truth)

    def act_raise(): raise ValueError("no digits")
    def act_exit(): sys.exit(3)
    def act_interrupt(): raise KeyboardInterrupt
    def act_recursion(): return act_recursion()
    def act_unprintable():
        class Odd(Exception):
            def __str__(self): raise TypeError
        raise Odd
    def act_nan(): return float("nan")
    def act_inf(): return float("-inf")
    def act_none(): return None
    def act_text(): return "1.0"
    def act_huge(): return 10 ** 400
    def act_list(): return [1.0]
    def act_unpicklable(): return lambda: 1
    def act_no_score(): return {"accuracy": 1.0}
    def act_nan_score(): return {"score": float("nan")}
    def act_memory(): return bytearray(1 << 60)
    def act_os_exit(): os._exit(7)
    def act_os_exit_quietly(): os._exit(0)
    def act_segfault(): ctypes.string_at(8)
    def act_killed(): os.kill(os.getpid(), signal.SIGKILL)
    def act_kills_its_group(): os.killpg(0, signal.SIGKILL)
    def act_closes_everything(): os.closerange(0, 10000)
    def act_loop():
        while True: pass
    def act_sleep(): time.sleep(1000)
    def act_c_code(): return re.match(r"(a+)+$", "a" * 60 + "b")
    def act_deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    def act_prints_for_ever():
        while True: print("y" * 1000)
    def act_dies_and_leaves_a_child():
        if os.fork() == 0: time.sleep(1000)
        os._exit(9)
""")

# Each with its expected cause and a pattern for the message.
BAD = {
    "raise": ("exception", r"ValueError: no digits, at hostile\.py:8"),
    "exit": ("exception", "SystemExit: 3"),
    "interrupt": ("exception", "KeyboardInterrupt"),
    "recursion": ("exception", "RecursionError"),
    "unprintable": ("exception", "Odd"),
    "memory": ("exception", "MemoryError"),
    "nan": ("not_a_number", "nan"),
    "inf": ("not_a_number", "-inf"),
    "none": ("not_a_number", "None"),
    "text": ("not_a_number", "1.0"),
    "huge": ("not_a_number", "1000"),
    "list": ("not_a_number", r"\[1.0\]"),
    "unpicklable": ("not_a_number", "lambda"),
    "nan_score": ("not_a_number", "'score' is nan"),
    "no_score": ("bad_result", "without 'score' .*accuracy"),
    "os_exit": ("died", "exit code 7"),
    "os_exit_quietly": ("died", "exit code 0"),
    "segfault": ("died", r"SIGSEGV, at hostile\.py:\d+"),
    "killed": ("died", "SIGKILL"),
    "kills_its_group": ("died", "SIGKILL"),
    "closes_everything": ("died", "connection to plaudit was closed"),
    "dies_and_leaves_a_child": ("died", "exit code 9"),
}
AT = r"at hostile\.py:\d+"
HANGS = {"loop": AT, "sleep": AT, "c_code": AT, "deaf": "", "prints_for_ever": ""}


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "hostile.py"
    path.write_text(MISBEHAVING)
    return path


def check_only_the_bad_sample_fails(scored: ScoredGroup, cause: str, message: str) -> None:
    assert values(scored) == [1.0, 0.0, None, 1.0, 0.0]
    failure = scored.scores[2].failure
    assert failure is not None
    assert failure.cause == cause
    assert re.search(message, failure.message), failure.message


def test_a_function_that_misbehaves_fails_only_its_sample(misbehaving):
    """All run through one pool in turn: none breaks it for the next."""
    groups = [group("4", "5", act, "4", "5", id=act) for act in BAD]
    for scored in collect(function(misbehaving), *groups):
        check_only_the_bad_sample_fails(scored, *BAD[scored.group.prompt.id])


def test_a_function_that_hangs_is_killed_and_fails_only_its_sample(misbehaving):
    groups = [group("4", "5", act, "4", "5", id=act) for act in HANGS]
    for scored in collect(function(misbehaving, limits=FunctionLimits(timeout_s=2.0), workers=len(HANGS)), *groups):
        check_only_the_bad_sample_fails(scored, "timeout", f"after 2 s.*{HANGS[scored.group.prompt.id]}")


def test_the_timeout_covers_running_and_not_queueing(tmp_path):
    path = write_function(
        tmp_path,
        """
        import time
        def compute_score(solution_str):
            time.sleep(0.5)
            return 1
        """,
    )
    [scored] = collect(function(path, limits=FunctionLimits(timeout_s=3.0)), group(*"abcdefgh"))
    assert values(scored) == [1.0] * 8


def test_printed_output_neither_blocks_nor_appears(tmp_path, capfd):
    path = write_function(
        tmp_path,
        """
        import os, sys
        print("x" * 2**20)
        def compute_score(solution_str):
            print("x" * 2**20)
            sys.stderr.write("y" * 2**20)
            os.write(1, b"z" * 2**20)
            assert sys.stdin.read() == ""
            return 1
        """,
    )
    [scored] = collect(function(path), group("a", "b"))
    assert values(scored) == [1.0, 1.0]
    assert capfd.readouterr() == ("", "")


def test_forked_children_return_no_score_and_die_with_the_worker(tmp_path):
    path = write_function(
        tmp_path,
        """
        import os, time
        from pathlib import Path
        def compute_score(solution_str, pids):
            if solution_str == "comes back":
                return 0.5 if os.fork() else 0.1
            if (child := os.fork()) == 0:
                time.sleep(1000)
            Path(pids).write_text(str(child))
            return 1
        """,
    )
    pids = tmp_path / "pids"
    [scored] = collect(function(path, arguments={"pids": str(pids)}), group("comes back", "stays", "comes back"))
    assert values(scored) == [0.5, 1.0, 0.5]
    assert gone(int(pids.read_text()))


def test_a_worker_that_dies_between_calls_is_replaced(tmp_path):
    path = write_function(
        tmp_path,
        """
        import os, threading, time
        def exit_once_file_exists(exit_file):
            while not os.path.exists(exit_file):
                time.sleep(0.01)
            os._exit(5)
        def compute_score(solution_str, exit_file):
            if solution_str == "later":
                threading.Thread(target=exit_once_file_exists, args=[exit_file]).start()
            return float(os.getpid())
        """,
    )
    exit_file = tmp_path / "exit_file"
    with RewardRunner([function(path, arguments={"exit_file": str(exit_file)})]) as rewards:
        [first] = rewards.collect([group("later")])
        assert first.scores[0].value is not None
        exit_file.touch()
        assert gone(int(first.scores[0].value))
        [second] = rewards.collect([group("now")])
        assert second.scores[0].failure is None


def test_verl_style_results(tmp_path):
    path = write_function(
        tmp_path,
        """
        import sys
        import numpy as np
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
            return {
                "int": 2, "bool": True, "numpy": np.float32(0.5), "array": np.array(0.25), "numpy bool": np.bool_(True),
                "dict": {"score": 1, "accuracy": np.float64(0.5), "format": True, "pred": "4", "bad": float("nan")},
                "malformed": {"score": -1, "malformed": True},
                "given": {"score": extra_info["index"], "source": data_source, "truth": ground_truth, **kwargs},
                "torch": "torch" in sys.modules,
            }[solution_str]
        """,
    )
    texts = ("int", "bool", "numpy", "array", "numpy bool", "dict", "malformed", "given", "torch")
    row = group(*texts, truth=["4"], data_source="gsm8k", extra_info={"index": 7})
    [scored] = collect(function(path, arguments={"strict": 3}), row)
    assert values(scored) == [2.0, 1.0, 0.5, 0.25, 1.0, 1.0, -1.0, 7.0, 0.0]
    by_text = dict(zip(texts, scored.by_reward["function"], strict=True))
    assert by_text["dict"].parts == {"accuracy": 0.5, "format": 1.0}
    assert by_text["dict"].trace == {"pred": "4", "bad": "nan"}
    assert by_text["dict"].view == "dict"
    assert [text for text, score in by_text.items() if score.malformed] == ["malformed"]
    assert by_text["given"].parts == {"strict": 3.0}
    assert by_text["given"].trace == {"source": "gsm8k", "truth": "['4']"}


def test_an_async_function_may_import_a_neighbouring_module(tmp_path):
    (tmp_path / "neighbour.py").write_text("REWARD = 0.75")
    path = write_function(
        tmp_path,
        """
        import asyncio
        from neighbour import REWARD
        async def compute_score(solution_str):
            await asyncio.sleep(0)
            return REWARD
        """,
    )
    [scored] = collect(function(path), group("a", "b"))
    assert values(scored) == [0.75, 0.75]


def test_a_row_that_cannot_be_pickled_fails_alone(misbehaving):
    scored = collect(function(misbehaving), group("4", truth=threading.Lock(), id="odd"), group("4"))
    assert [score.failure.cause for score in scored[0].scores if score.failure] == ["exception"]
    assert values(scored[1]) == [1.0]


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        ("import no_such_module\n", {}, r"reward.py cannot be imported: ModuleNotFoundError: .*no_such_module.*at reward.py:1"),
        ("def compute_score(:\n", {}, r"cannot be imported: SyntaxError: .*at reward.py:1"),
        ("import os; os._exit(4)\n", {}, r"cannot be imported: exit code 4"),
        ("def compute_scores(solution_str): ...\n", {}, r"no function compute_score .*Did you mean compute_scores\?"),
        ("def points(solution_str): ...\n", {}, r"\(it has: points\)\. The setting `function: points` names another\."),
        ("compute_score = 3\n", {}, r"no function compute_score \(it has: none\)"),
        ("def compute_score(solution_str, ground): ...\n", {}, r"missing a required argument: 'ground'"),
        ("def compute_score(ground_truth): ...\n", {}, r"does not take solution_str"),
        ("def compute_score(solution_str): ...\n", {"arguments": {"strict": 1}}, r"unexpected keyword argument 'strict'"),
    ],
)
def test_an_unusable_function_is_reported_before_anything_starts(tmp_path, body, settings, message):
    path = write_function(tmp_path, body)
    with pytest.raises(RecipeError, match=message), RewardRunner([function(path, **settings)]):
        pass


def test_a_missing_file_is_reported_with_the_closest_match(misbehaving):
    with pytest.raises(RecipeError, match=r"reward 'mine': .*hostil\.py does not exist. Did you mean .*hostile\.py\?"):
        RewardRunner([function(misbehaving.with_name("hostil.py"), name="mine")]).__enter__()


def test_no_worker_survives_a_killed_parent(tmp_path):
    """kill -9 of a program (without a main guard) whose function forks, then hangs in C code that holds the GIL."""
    path = write_function(
        tmp_path,
        """
        import os, re, time
        def compute_score(solution_str, folder):
            if (child := os.fork()) == 0:
                time.sleep(1000)
            with open(f"{folder}/{solution_str}.aside", "w") as file:
                file.write(f"{os.getpid()} {child}")
            os.rename(f"{folder}/{solution_str}.aside", f"{folder}/{solution_str}.pids")
            re.match(r"(a+)+$", "a" * 60 + "b")
        """,
    )
    program = tmp_path / "program.py"
    settings = {"limits": {"timeout_s": 1000.0}, "workers": 2, "arguments": {"folder": str(tmp_path)}}
    program.write_text(
        dedent(f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from support.rewards import RewardRunner, function, group
        with RewardRunner([function({str(path)!r}, **{settings})]) as rewards:
            rewards.collect([group("a", "b")])
        """)
    )
    parent = subprocess.Popen([sys.executable, str(program)])
    try:
        deadline = time.monotonic() + 200
        while len(found := list(tmp_path.glob("*.pids"))) < 2 and time.monotonic() < deadline and parent.poll() is None:
            time.sleep(0.02)
        pids = [int(pid) for file in found for pid in file.read_text().split()]
        assert len(pids) == 4
        descendants = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
        assert set(pids) <= descendants
    finally:
        parent.kill()
        parent.wait()
    assert gone(*descendants)


def test_workers_are_gone_when_the_runner_exits_mid_call(misbehaving):
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def groups():
        yield group("c_code")
        raise RuntimeError("sampling broke")

    with RewardRunner([function(misbehaving, limits=FunctionLimits(timeout_s=1000.0), workers=2)]) as rewards:
        workers = {child.pid for child in psutil.Process().children(recursive=True)} - before
        assert len(workers) >= 2
        with pytest.raises(RuntimeError, match="sampling broke"):
            rewards.collect(groups())
    assert gone(*workers)


# Combined scores -----------------------------------------------------------------------------------------------------


class Fixed(Rule):
    """The number in the response."""

    kind: str = "fixed"

    def value(self, prompt: Prompt, sample: Sample) -> float:
        return float(sample.text)


def combine_one(rewards: list[Fixed], scores: list[Score]) -> Score:
    """One sample's combined score."""
    [score] = combine(rewards, group("0"), [[score] for score in scores], {})
    return score


def test_the_sum_is_weighted_and_parts_are_prefixed_with_their_reward():
    rewards = [Fixed(name="a"), Fixed(name="b", weight=0.5), Fixed(name="seen", weight=0.0)]
    score = combine_one(rewards, [Score(1.0, {"x": 3.0}), Score(-4.0), Score(9.0)])
    assert score.value == 1.0 * 1 + 0.5 * -4
    assert score.parts == {"a": 1.0, "a/x": 3.0, "b": -4.0, "seen": 9.0}
    assert (score.malformed, score.failure) == (False, None)


@pytest.mark.parametrize(("setting", "value"), [(None, 0.25), (-1.0, -1.0)])
def test_a_malformed_response_gets_the_configured_value(setting, value):
    score = combine_one([Fixed(malformed=setting), Fixed(name="other")], [Score(0.25, malformed=True), Score(2.0)])
    assert score.value == value + 2.0
    assert score.malformed
    assert score.parts == {"fixed": value, "other": 2.0}


def test_a_failure_drops_the_sample_or_counts_as_on_failure_or_is_ignored_at_weight_zero():
    dropped = combine_one([Fixed(name="a"), Fixed(name="b")], [Score(1.0), BROKEN])
    assert (dropped.value, dropped.parts) == (None, {"a": 1.0})
    assert dropped.failure == Failure("timeout", "b: after 60 s")
    stated = combine_one([Fixed(name="a"), Fixed(name="b", on_failure=-0.5, weight=2.0)], [Score(1.0), BROKEN])
    assert (stated.value, stated.failure, stated.parts) == (0.0, None, {"a": 1.0, "b": -0.5})
    measured = combine_one([Fixed(name="a"), Fixed(name="b", weight=0.0)], [Score(1.0), BROKEN])
    assert (measured.value, measured.failure, measured.parts) == (1.0, None, {"a": 1.0})


def test_metrics_count_dropped_samples_and_average_the_rest():
    class Odd(Fixed):
        def value(self, prompt: Prompt, sample: Sample) -> float | Score:
            return BROKEN if sample.text == "5" else Score(float(sample.text), malformed=sample.text == "0")

    with RewardRunner([Odd(name="odd", max_failure_rate=1.0), Fixed(name="seen", weight=0.0)]) as rewards:
        scored = rewards.collect([group("1", "0", "5", "3"), group("2", "2", "5", "5"), group("2", "5", "5", "5")])
    assert [values(one) for one in scored] == [[1, 0, None, 3], [2, 2, None, None], [2, None, None, None]]
    got = metrics(scored)
    assert got["reward"] == (1 + 0 + 3 + 2 + 2 + 2) / 6
    assert math.isclose(got["reward_std"] ** 2, (1 + 0 + 9 + 4 + 4 + 4) / 6 - (10 / 6) ** 2)
    assert (got["reward_min"], got["reward_max"]) == (0.0, 3.0)
    assert got["parts/odd"] == 10 / 6
    assert got["parts/seen"] == (10 + 6 * 5) / 12
    assert got["malformed"] == 1 / 12
    assert got["dropped"] == got["failures/timeout"] == got["failures/odd/timeout"] == 6
    assert got["groups_without_signal"] == 2 / 3
    # odd: {1, 0, 3} and {2, 2}; the third group has one value only. seen: the fives too, so that all groups differ.
    assert math.isclose(got["group_std/odd"], ((10 / 3 - (4 / 3) ** 2) ** 0.5 + 0) / 2)
    assert got["signal/odd"] == 1 / 2
    assert got["signal/seen"] == 1.0
    assert "reward" not in metrics([ScoredGroup(group("5"), (BROKEN,), {"odd": (BROKEN,)})])


def test_single_samples_have_no_group_statistics():
    scored = [ScoredGroup(group(text), (Score(1.0, {"a": 1.0}),), {"a": (Score(1.0),)}) for text in "ab"]
    assert metrics(scored).keys().isdisjoint({"groups_without_signal", "signal/a", "group_std/a"})
    assert metrics([*scored, ScoredGroup(group("a", "b"), (Score(1.0), Score(0.0)), {})])["groups_without_signal"] == 0.0


def test_metrics_by_data_source():
    def of(source: str, *scores: Score) -> ScoredGroup:
        return ScoredGroup(group(*"ab"[: len(scores)], data_source=source), scores, {})

    scored = [of("openai/gsm8k", Score(1.0, {"exact": 1.0}), BROKEN), of("sums", Score(0.0, {"style": 0.5})), of("", Score(9.0))]
    scored += [of("openai/gsm8k", Score(0.5, {"exact": 0.0})), of("dead", BROKEN)]
    assert metrics_by_source(scored) == {
        "openai/gsm8k/reward": 0.75,
        "openai/gsm8k/parts/exact": 0.5,
        "sums/reward": 0.0,
        "sums/parts/style": 0.5,
    }
    assert list(rewards_by_source(scored).items()) == [("openai/gsm8k", 0.75), ("sums", 0.0)]  # the most frequent one first
    rare = [of(f"row {i}", Score(1.0)) for i in range(100)]
    assert "sums/reward" in metrics_by_source([*rare, *scored, *scored])
    assert len(metrics_by_source(rare)) == 50


def test_metrics_of_k_by_hand():
    rewards = [{"kind": "exact"}, {"kind": "length", "at_most": 1, "unit": "characters", "weight": 2.0}]

    def recipe(**validation: object) -> RLRecipe:
        settings = {"n": 4, "temperature": 1.0, "metrics": ["pass@2", "majority@4", "best_of@4"], **validation}
        base = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "run": {"dir": "r"}, "rewards": rewards}
        return RLRecipe.model_validate(base | {"validation": settings})

    with RewardRunner(recipe().rewards) as runner:
        sums = [group("4", "44", "44", "5", id="a", data_source="sums"), group("44", "44", "44", "4", id="b", data_source="even")]
        scored = runner.collect([*sums, group("4", "4", "4", "4", id="c")], training=False)
    # By the right answer: of each prompt 1, 1 and 4 are right; the combined reward prefers those of one character.
    got = metrics_of_k(scored, recipe(gold="exact"))
    assert got["pass@2"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert got["majority@4"] == pytest.approx((0 + 0 + 1) / 3)
    assert got["best_of@4"] == 1.0
    assert (got["sums/pass@2"], got["even/majority@4"]) == (0.5, 0.0)
    assert set(got) == {f"{source}{name}" for source in ("", "sums/", "even/") for name in recipe().validation.metrics}
    # By all rewards combined, a wrong answer of one character is worth 2.
    assert metrics_of_k(scored, recipe(threshold=2.0))["pass@2"] == pytest.approx((1 - 1 / 6 + 0.5 + 1) / 3)
    assert metrics_of_k(scored, recipe(metrics=[])) == {}
    lost = [ScoredGroup(one.group, tuple(BROKEN for _ in one.scores), one.by_reward) for one in scored]
    assert metrics_of_k(lost, recipe(metrics=["pass@1"])) == {}


# The runner ----------------------------------------------------------------------------------------------------------


class Awaiting(Reward):
    """Calls a test's `handler` on the runner's loop."""

    kind: str = "awaiting"
    handler: object

    def build(self):
        return LiveAwaiting(self)


class LiveAwaiting(LiveReward[Awaiting]):
    async def score(self, groups):
        return await self.settings.handler(*groups)


def ones(of: Group) -> list[list[Score]]:
    return [[Score(1.0) for _ in of.samples]]


def test_scoring_overlaps_with_sampling():
    scored = threading.Event()

    async def handler(of: Group):
        scored.set()
        return ones(of)

    def groups():
        yield group("a", id="first")
        assert scored.wait(200), "the first group was not scored while the second was being sampled"
        yield group("b", id="second")

    with RewardRunner([Awaiting(handler=handler)]) as rewards:
        assert [one.group.prompt.id for one in rewards.collect(groups())] == ["first", "second"]


def test_groups_are_returned_in_submission_order():
    second_done = asyncio.Event()

    async def handler(of: Group):
        if of.prompt.id == "first":
            await asyncio.wait_for(second_done.wait(), 20)
        else:
            second_done.set()
        return ones(of)

    scored = collect(Awaiting(handler=handler), group("a", id="first"), group("b", id="second"))
    assert [one.group.prompt.id for one in scored] == ["first", "second"]
    assert [values(one) for one in scored] == [[1.0], [1.0]]


def test_rewards_score_concurrently():
    started = {"a": asyncio.Event(), "b": asyncio.Event()}

    def wait_for(me: str, other: str):
        async def handler(of: Group):
            started[me].set()
            await asyncio.wait_for(started[other].wait(), 20)
            return ones(of)

        return handler

    with RewardRunner([Awaiting(name=me, handler=wait_for(me, other)) for me, other in ("ab", "ba")]) as rewards:
        [scored] = rewards.collect([group("x")])
    assert values(scored) == [2.0]


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (ZeroDivisionError("oops"), "exception"),
        ([], "exception"),
        ([[Score(1.0)]], "exception"),
        (None, "exception"),
        ([[1.0, 2.0]], "bad_result"),
        ([[Score(None), Score(math.nan)]], "not_a_number"),
    ],
)
def test_a_bug_in_a_reward_fails_only_that_group(result, cause):
    async def handler(of: Group):
        if of.prompt.id == "good":
            return ones(of)
        if isinstance(result, Exception):
            raise result
        return result

    bad, good = collect(Awaiting(handler=handler, max_failure_rate=1.0), group("a", "b", id="bad"), group("c", id="good"))
    assert [score.failure.cause for score in bad.scores if score.failure] == [cause, cause]
    assert values(good) == [1.0]


def test_a_rule_that_raises_fails_only_that_sample():
    [scored] = collect(Fixed(max_failure_rate=0.5), group("1.5", "one", "nan", "2"))
    assert values(scored) == [1.5, None, None, 2.0]
    assert [score.failure.cause for score in scored.scores if score.failure] == ["exception", "not_a_number"]
    assert "ValueError: could not convert string to float: 'one', at test_runner.py" in scored.scores[1].failure.message


def test_too_many_failures_stop_the_run_with_the_cause(misbehaving):
    reward = function(misbehaving, name="mine", max_failure_rate=0.25)
    message = (
        r"reward 'mine' failed on at least 3 of 8 samples "
        r"\(2 exception: ValueError: no digits, at hostile.py:8, 1 not_a_number: .*nan\); "
        r"max_failure_rate is 0.25\. .*run the same command to resume"
    )
    with RewardRunner([reward]) as rewards:
        assert len(rewards.collect([group("raise", "4", "4", "nan", "4", "4", "4", "4")])) == 1  # 2 of 8 are allowed
        with pytest.raises(TrainingStopped, match=message):
            rewards.collect([group("raise", "4", "raise", "nan"), group("4", "4", "4", "4")])


def test_too_many_failures_stop_without_waiting_for_other_groups():
    async def handler(of: Group):
        if of.prompt.id == "hangs":
            await asyncio.Event().wait()
        return [[BROKEN for _ in of.samples]]

    with pytest.raises(TrainingStopped, match="failed on at least 1 of 2 samples"):
        collect(Awaiting(handler=handler), group("a", id="hangs"), group("b"))


@pytest.mark.parametrize(("cause", "error"), [("server_died", ServerGone), ("died", TrainingStopped)])
@pytest.mark.parametrize("settings", [{"on_failure": "stop"}, {"max_failure_rate": 0.1}])
def test_a_server_that_is_gone_differs_from_a_reward_that_has_to_be_fixed(cause, error, settings):
    """All processes of a run may be restarted because of it."""

    async def handler(of: Group):
        return [[Score(None, failure=Failure(cause, "the server for judge died again after a restart")) for _ in of.samples]]

    with pytest.raises(TrainingStopped, match="died again after a restart") as raised:
        collect(Awaiting(handler=handler, **settings), group("a"))
    assert type(raised.value) is error


def test_on_failure_stop_ends_sampling_at_the_first_failure():
    failed, closed = threading.Event(), []

    async def handler(of: Group):
        asyncio.get_running_loop().call_soon(failed.set)
        return [[BROKEN for _ in of.samples]]

    def groups():
        try:
            for _ in range(1000):
                yield group("a")
                assert failed.wait(200)
                time.sleep(0.2)
        finally:
            closed.append(True)

    message = r"failed on at least (\d+) of \d+ samples \(\1 timeout: after 60 s\); on_failure is stop"
    with RewardRunner([Awaiting(handler=handler, on_failure="stop")]) as rewards, pytest.raises(TrainingStopped, match=message):
        rewards.collect(groups())
    assert closed


def test_a_sampling_error_propagates_and_the_runner_stays_usable():
    started, cancelled = threading.Event(), threading.Event()

    async def handler(of: Group):
        if of.prompt.id == "waits":
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return ones(of)

    def groups():
        yield group("a", id="waits")
        assert started.wait(200)
        raise KeyError("sampling broke")

    with RewardRunner([Awaiting(handler=handler)]) as rewards:
        with pytest.raises(KeyError, match="sampling broke"):
            rewards.collect(groups())
        assert cancelled.wait(200)
        assert values(rewards.collect([group("b")])[0]) == [1.0]


def test_what_a_report_raises_cancels_the_calls_in_flight():
    """That is how a run stops while a judge is being waited for."""
    cancelled, reports = threading.Event(), []

    async def handler(of: Group):
        if of.prompt.id == "waits":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return ones(of)

    def report(sampled: int, scored: int):
        reports.append((sampled, scored))
        if reports[-1] == (2, 1) and len(reports) > 4:
            raise StopRequested

    with RewardRunner([Awaiting(handler=handler)]) as rewards:
        with pytest.raises(StopRequested):
            rewards.collect([group("a"), group("b", id="waits")], report=report)
        assert cancelled.wait(200)
        reports.clear()
        rewards.collect([group("a"), group("b")], report=report)
    assert reports[0][0] == 1
    assert reports[-1] == (2, 2)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="Ctrl-C goes to the main thread")
def test_ctrl_c_does_not_wait_for_a_reward():
    async def handler(of: Group):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        collect(Awaiting(handler=handler), group("a"))


# Recipes -------------------------------------------------------------------------------------------------------------


def recipe(*rewards) -> RLRecipe:
    tree = {"model": {"path": "m"}, "data": {"train": "d"}, "run": {"dir": "r"}, "rewards": list(rewards)}
    return RLRecipe.model_validate(tree)


def test_a_recipe_parses_rewards_by_kind_and_round_trips():
    read = recipe(
        {"kind": "exact", "ignore_case": True}, {"kind": "function", "path": "f.py", "arguments": {"a": 1}, "on_failure": 0.5}
    )
    exact, custom = read.rewards
    assert isinstance(exact, Exact)
    assert isinstance(custom, Function)
    assert (exact.ignore_case, custom.limits.timeout_s, custom.on_failure, custom.label) == (True, 10.0, 0.5, "function")
    assert RLRecipe.model_validate(read.model_dump(exclude_unset=True)) == read


@pytest.mark.parametrize(
    ("entry", "location", "message"),
    [
        ({"kind": "exactt"}, ("rewards", 0), "unknown kind"),
        ({"weight": 1.0}, ("rewards", 0), "no kind"),
        ({"kind": "exact", "ignorecase": True}, ("rewards", 0, "ignorecase"), "not permitted"),
        ({"kind": "function"}, ("rewards", 0, "path"), "required"),
        ({"kind": "function", "path": "f.py", "limits": {"timeout_s": 0}}, ("rewards", 0, "limits", "timeout_s"), "greater than 0"),
        ({"kind": "function", "path": "f.py", "workers": True}, ("rewards", 0, "workers"), "should not be true"),
    ],
)
def test_an_invalid_reward_is_reported_with_its_location(entry, location, message):
    with pytest.raises(ValidationError) as caught:
        recipe(entry)
    error = caught.value.errors()[0]
    assert error["loc"] == location
    assert message in error["msg"]
    if "unknown" in message:
        assert {"'exact'", "'function'"} <= set(error["ctx"]["expected_tags"].split(", "))  # suggestions come from these


def test_rewards_do_not_import_torch():
    package = REPOSITORY / "plaudit"
    files = sorted(
        file.relative_to(package.parent) for file in (package / "rewards").rglob("*.py") if file.stem not in ("__init__", "worker")
    )
    modules = ", ".join(".".join(file.with_suffix("").parts) for file in files)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0


# Settings and live rewards -------------------------------------------------------------------------------------------


def test_settings_stay_plain_data_while_rewards_are_open(tmp_path):
    """Equal before and after, picklable, and usable by two runners at once."""
    path = write_function(tmp_path, "def compute_score(solution_str): return 1")
    entries = [{"kind": "exact"}, {"kind": "math", "workers": 1}, {"kind": "function", "path": str(path), "workers": 1}]
    settings, same = (ScoreRecipe.model_validate({"rewards": entries}).rewards for _ in range(2))
    with RewardRunner(settings) as one, RewardRunner(settings) as other:
        for runner in (one, other):
            assert values(runner.collect([group("4", truth="4")])[0]) == [3.0]
        assert settings == same
        assert pickle.loads(pickle.dumps(settings)) == same


@pytest.mark.parametrize("kind", plugins.kinds("rewards"))
def test_settings_of_every_kind_hold_no_live_objects(kind):
    private = plugins.kind("rewards", kind).__private_attributes__
    assert set(private) <= {"_matched_above"}, "that one is a tuple of fields and patterns"
