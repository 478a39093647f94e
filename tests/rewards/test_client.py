"""Calls to rewards: limits, retries, giving up, the cache; and a long run with faults of every kind."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from plaudit.objectives.advantages import grpo
from plaudit.rewards.cache import ScoreCache, keys, own_cache, reward_digest
from plaudit.rewards.functions.function import Function, FunctionLimits
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, Score
from plaudit.world import World
from support.fault_server import FaultServer
from support.judges import make
from support.rewards import group, values, write_function


class Busy(Reward):
    """Takes a moment, counts the calls in flight, and fails as often as the response says: 'f2' fails twice."""

    kind: Literal["busy"] = "busy"
    duration_s: float = 0.01

    def build(self) -> "LiveBusy":
        return LiveBusy(self)


class LiveBusy(LiveReward[Busy]):
    def __init__(self, settings: Busy):
        super().__init__(settings)
        self.tries: Counter[str] = Counter()
        self.in_flight = self.max_in_flight = 0
        self.started: list[float] = []

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.started.append(time.monotonic())
        await asyncio.sleep(self.settings.duration_s)
        self.in_flight -= 1
        return [[self.one(sample.text) for sample in one.samples] for one in groups]

    def one(self, text: str) -> Score:
        self.tries[text] += 1
        if text.startswith("f") and self.tries[text] <= int(text[1:]):
            return failed("http", f"try {self.tries[text]}")
        return Score(1.0)


class Comparative(Busy):
    """Compares the samples of a group."""

    scores_alone = False


def score(reward: Reward | LiveReward, *groups: Group, **settings) -> list[list[float | None]]:
    with RewardRunner([reward], tolerant=True, **settings) as runner:
        return [values(one) for one in runner.collect(groups)]


def test_max_concurrent_groups_limits_calls_in_flight():
    reward = Busy(duration_s=0.1, limits={"max_concurrent_groups": 3}).build()
    score(reward, *(group("a", id=str(i)) for i in range(12)))
    assert (reward.max_in_flight, len(reward.started)) == (3, 12)


def test_groups_per_s_limits_the_call_rate():
    reward, started = Busy(duration_s=0.0, limits={"groups_per_s": 100}).build(), time.monotonic()
    score(reward, *(group("a", id=str(i)) for i in range(6)))
    assert all(call - started >= 0.01 * i - 1e-3 for i, call in enumerate(sorted(reward.started)))


def test_a_call_that_times_out_fails_with_that_cause():
    with RewardRunner([Busy(duration_s=30, limits={"group_timeout_s": 0.05})], tolerant=True) as runner:
        [scored] = runner.collect([group("a", "b")])
    assert [score.failure.cause for score in scored.scores if score.failure] == ["timeout", "timeout"]


def test_only_failed_samples_are_retried():
    reward = Busy(limits={"group_retries": 2, "group_backoff_s": 0.001}).build()
    assert score(reward, group("a", "f1", "f2", "f3")) == [[1.0, 1.0, 1.0, None]]
    assert reward.tries == {"a": 1, "f1": 2, "f2": 3, "f3": 3}


def test_groups_and_calls_back_off_separately(monkeypatch):
    """`backoff_s` is between attempts of a call, `group_backoff_s` between retries of a group."""
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with FaultServer() as server:
        model = {"placement": "server", "url": [server.url]}
        judge = make("judge", model=model, limits={
            "group_retries": 2, "group_backoff_s": 100.0, "retries": 1, "backoff_s": 7.0, "unreadable_retries": 0,
        })  # fmt: skip
        with RewardRunner([judge], tolerant=True) as runner:
            server.fault_for_all = "500"
            monkeypatch.setattr("plaudit.reward_models.connection.random.uniform", lambda low, high: high)
            monkeypatch.setattr(asyncio, "sleep", sleep)
            runner.collect([group("a")])
            monkeypatch.undo()
    assert [wait for wait in waits if wait] == [7.0, 100.0, 7.0, 200.0, 7.0]


def test_a_comparative_reward_retries_the_full_group():
    reward = Comparative(limits={"group_retries": 1, "group_backoff_s": 0.001}).build()
    assert score(reward, group("a", "f1")) == [[1.0, 1.0]]
    assert reward.tries == {"a": 2, "f1": 2}


def test_a_failing_reward_is_given_up_and_retried_after_a_pause():
    reward = Busy(duration_s=0.0, limits={"max_concurrent_groups": 1, "give_up_after": 3, "pause_s": 60})
    with RewardRunner([reward], tolerant=True) as runner:
        scored = runner.collect([group(f"f{9 + i}", id=str(i)) for i in range(8)])
        causes = [one.scores[0].failure.cause for one in scored if one.scores[0].failure]
        assert causes == ["http"] * 3 + ["given_up"] * 5
        assert "3 calls in a row had failed, the last with http: try 1" in scored[-1].scores[0].failure.message
        runner.clients[0]._given_up_until = 0.0  # a minute later
        again = runner.collect([group("a", id=str(i)) for i in range(4)])
        assert [values(one) for one in again] == [[1.0]] * 4  # one trial call found it working again


def test_rows_without_a_ground_truth_do_not_count_towards_giving_up():
    class WithoutTruth(LiveBusy):
        def one(self, text: str) -> Score:
            return failed("no_ground_truth", "none") if text == "none" else Score(1.0)

    reward = WithoutTruth(Busy(duration_s=0.0, limits={"max_concurrent_groups": 1, "give_up_after": 2}))
    assert score(reward, *(group("none", id=str(i)) for i in range(5)), group("a")) == [[None]] * 5 + [[1.0]]


def test_a_large_group_counts_once_towards_giving_up_and_the_limits():
    """Although the reward is called with one slice after another."""
    reward = Busy(limits={"max_concurrent_groups": 1, "groups_per_s": 0.001, "give_up_after": 2}).build()
    with RewardRunner([reward], tolerant=True) as runner:
        [scored] = runner.collect([group(*(f"f{9 + i}" for i in range(200)))])  # a second call would wait for 1000 s
        client = runner.clients[0]
        assert (client.given_up, client.counts["calls"]) == (None, 1)
    assert [score.failure.cause for score in scored.scores if score.failure] == ["http"] * 200
    assert (len(reward.started), reward.max_in_flight) == (4, 4)
    assert len(reward.tries) == 200


def test_a_slice_of_a_large_group_fails_alone():
    class Raises(LiveBusy):
        async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
            if any(sample.text == "bug" for one in groups for sample in one.samples):
                raise ValueError("bug")
            return await super().score(groups)

    reward = Raises(Busy(limits={"give_up_after": 1}))
    assert score(reward, group(*["a"] * 128, "bug", "a"), group("a", id="next")) == [[1.0] * 128 + [None] * 2, [1.0]]


# The cache -----------------------------------------------------------------------------------------------------------


def test_cached_scores_are_reused(tmp_path):
    first, second = Busy().build(), Busy().build()
    rows = [group("a", "f1", id="1"), group("b", id="2")]
    assert score(first, *rows, cache=tmp_path / "c.sqlite") == [[1.0, None], [1.0]]
    assert score(second, *rows, group("a", id="1", truth="another"), cache=tmp_path / "c.sqlite") == [[1.0, None], [1.0], [1.0]]
    assert second.tries == {"f1": 1, "a": 1}  # the failure, and the same response for another ground truth


def test_comparative_scores_are_cached_per_group(tmp_path):
    assert score(Comparative(), group("a", "b"), cache=tmp_path / "c.sqlite") == [[1.0, 1.0]]
    same, other = Comparative().build(), Comparative().build()
    score(same, group("a", "b"), cache=tmp_path / "c.sqlite")
    score(other, group("a", "c"), cache=tmp_path / "c.sqlite")
    assert (same.tries, other.tries) == ({}, {"a": 1, "c": 1})


def test_parts_views_and_traces_are_cached(tmp_path):
    path = write_function(
        tmp_path, "def compute_score(solution_str): return {'score': 1, 'part': 2.0, 'why': 'so', 'malformed': True}"
    )
    found = []
    for _ in range(2):
        with RewardRunner([Function(kind="function", path=str(path))], cache=tmp_path / "c.sqlite") as runner:
            [scored] = runner.collect([group("ä\ud800")])
            found.append(scored.by_reward["function"])
            counts = runner.clients[0].counts
    assert found[0] == found[1]
    assert counts["cached"] == 1


def test_the_cache_key_covers_settings_and_files_but_not_weight_or_limits(tmp_path):
    path = write_function(tmp_path, "def compute_score(solution_str): return 1")
    base = Function(kind="function", path=str(path))
    digest = reward_digest(base)
    assert (
        reward_digest(
            Function(kind="function", path=str(path), weight=2.0, name="x", limits=FunctionLimits(timeout_s=3.0), scale=0.1)
        )
        == digest
    )
    assert reward_digest(Function(kind="function", path=str(path), arguments={"a": 1})) != digest
    assert reward_digest(Function(kind="function", path=str(path), view={"extract": "line"})) != digest
    path.write_text("def compute_score(solution_str): return 2")
    assert reward_digest(base) != digest
    one = group("a", "b")
    assert (
        len({*keys(digest, one, scores_alone=True), *keys(digest, one, scores_alone=False), *keys("x", one, scores_alone=True)})
        == 6
    )


def test_rules_are_cached_only_on_request(tmp_path):
    from plaudit.rewards.rules.exact import Exact

    for setting, kept in ((None, 0), (True, 1)):
        file = tmp_path / f"{setting}.sqlite"
        score(Exact(kind="exact", cache=setting), group("4"), cache=file)
        if not kept:
            assert not file.exists()  # a new file without a score is removed
            continue
        with sqlite3.connect(file) as database:
            assert database.execute("select count(*) from scores").fetchone() == (kept,)


def test_failures_are_not_cached_and_clear_empties_the_cache(tmp_path):
    cache = ScoreCache(tmp_path / "c.sqlite")
    cache.put({"k": Score(1.0), "failed": failed("x", "y")})
    assert cache.get(["k", "failed"]) == {"k": Score(1.0)}
    cache.clear()
    assert cache.get(["k"]) == {}
    cache.close()


def test_duplicate_responses_are_scored_once(tmp_path):
    reward = Busy().build()
    assert score(reward, group("a", "b", "a"), cache=tmp_path / "c.sqlite") == [[1.0, 1.0, 1.0]]
    assert reward.tries == {"a": 1, "b": 1}


def test_duplicate_responses_of_a_large_group_are_scored_once(tmp_path):
    """A reward that draws at random must not score equal responses differently, however many there are."""
    reward = Busy().build()
    texts = [f"{i % 130}" for i in range(400)]
    assert score(reward, group(*texts), cache=tmp_path / "c.sqlite") == [[1.0] * 400]
    assert reward.tries == dict.fromkeys(texts, 1)
    again = Busy().build()
    assert score(again, group(*texts, "new"), cache=tmp_path / "c.sqlite") == [[1.0] * 401]
    assert again.tries == {"new": 1}


def test_an_unwritable_cache_only_turns_off_caching(tmp_path, capsys):
    other = sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)
    with RewardRunner([Busy()], cache=tmp_path / "c.sqlite") as runner:
        other.execute("begin exclusive")
        assert [values(one) for one in runner.collect([group("a"), group("b")])] == [[1.0], [1.0]]
        other.execute("rollback")
        once_saved = runner.saving()
        assert once_saved is not None
        once_saved()
    other.close()
    assert capsys.readouterr().err.count("scores are no longer cached") == 1


def test_no_calls_are_made_after_giving_up():
    reward = Busy(duration_s=0.0, limits={"max_concurrent_groups": 1, "groups_per_s": 50, "give_up_after": 3}).build()
    score(reward, *(group(f"f{9 + i}", id=str(i)) for i in range(40)))
    assert len(reward.started) == 3


def test_a_timeout_error_raised_by_a_reward_is_an_exception():
    class Impatient(LiveBusy):
        async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
            raise TimeoutError("the database")

    with RewardRunner([Impatient(Busy())], tolerant=True) as runner:
        [scored] = runner.collect([group("a")])
    assert scored.scores[0].failure is not None
    assert "TimeoutError: the database" in scored.scores[0].failure.message


# 2,000 samples, 30 % faults ------------------------------------------------------------------------------------------

FAULTY = """
import os, time
from pathlib import Path
def compute_score(solution_str, log):
    kind, number = solution_str.split()
    with open(log, "a") as file:
        file.write(solution_str + "\\n")
    if kind == "raises": raise ValueError("no")
    if kind == "hangs": time.sleep(1000)
    if kind == "dies": os._exit(3)
    if kind == "nan": return float("nan")
    return int(number) % 5
"""
# Blocks after the given number of calls, so that the process cannot finish before it is killed.
WAITS_AT_A_GATE = """
    while Path(log).exists() and Path(log).read_bytes().count(b"\\n") >= int(Path(log + ".gate").read_text()):
        time.sleep(0.01)"""
FAULTS = ("raises", "nan", "dies", "hangs")
SAMPLES, GROUP = 2000, 8


def responses() -> list[str]:
    """Three of every ten are faults: mostly exceptions and NaN; every 40th kills its process, two hang."""

    def kind(i: int) -> str:
        if i % 10 not in (2, 5, 8):
            return "good"
        return "hangs" if i % 1000 == 15 else "dies" if i % 40 == 25 else "nan" if i % 20 >= 10 else "raises"

    return [f"{kind(i)} {i}" for i in range(SAMPLES)]


@pytest.fixture
def faulty(tmp_path) -> Function:
    path = write_function(tmp_path, FAULTY)
    arguments = {"log": str(tmp_path / "calls.txt")}
    return Function(
        kind="function", path=str(path), arguments=arguments, limits=FunctionLimits(timeout_s=5.0), workers=4, max_failure_rate=0.5
    )


@pytest.mark.slow
def test_2000_samples_with_30_percent_faults(faulty, tmp_path):
    texts = responses()
    expected = Counter(text.split()[0] for text in texts)
    assert sum(expected[fault] for fault in FAULTS) == 0.3 * SAMPLES
    groups = [group(*texts[i : i + GROUP], id=str(i)) for i in range(0, SAMPLES, GROUP)]
    with RewardRunner([faulty]) as runner:
        scored = runner.collect(groups, expected=SAMPLES)
        counts = runner.clients[0].counts
    found = {score.view: score for one in scored for score in one.by_reward["function"]}
    assert list(found) == texts
    causes = {"raises": "exception", "nan": "not_a_number", "dies": "died", "hangs": "timeout"}
    for text, score in found.items():
        kind, number = text.split()
        if kind == "good":
            assert (score.value, score.failure) == (int(number) % 5, None)
        else:
            assert score.value is None  # never a zero
            assert score.failure is not None
            assert score.failure.cause == causes[kind]
    assert counts["scored"] + sum(counts[f"failed: {cause}"] for cause in causes.values()) == SAMPLES
    assert {kind: counts[f"failed: {cause}"] for kind, cause in causes.items()} == {kind: expected[kind] for kind in FAULTS}
    calls = Counter((tmp_path / "calls.txt").read_text().splitlines())
    assert calls == Counter(texts)  # each sample was scored exactly once

    # The first group by hand: 0…7 without the faults at 2 and 5 is 0, 1, 3, 4, 1, 2, whose mean is 11/6.
    import torch

    first = values(scored[0])
    assert first == [0.0, 1.0, None, 3.0, 4.0, None, 1.0, 2.0]
    rewards = torch.tensor([value for value in first if value is not None], dtype=torch.float64)
    advantages = grpo(rewards, divide_by_std=False)
    assert advantages.tolist() == pytest.approx([-11 / 6, -5 / 6, 7 / 6, 13 / 6, -5 / 6, 1 / 6])


@pytest.mark.slow
def test_plaudit_score_resumes_after_kill_9(faulty, tmp_path):
    """`plaudit score`, killed with -9 three times: only calls in flight are repeated."""
    texts = [text for text in responses() if not text.startswith("hangs")][:1200]
    rows = [{"prompt": "p", "responses": texts[i : i + 6]} for i in range(0, len(texts), 6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(faulty.path).write_text(FAULTY.replace("    kind, number", f"{WAITS_AT_A_GATE}\n    kind, number", 1))
    patient = faulty.model_copy(update={"limits": FunctionLimits(timeout_s=60.0)})
    (tmp_path / "r.yaml").write_text(json.dumps({"rewards": [patient.model_dump(mode="json", exclude_defaults=True)]}))
    command = [sys.executable, "-m", "plaudit", "score", str(tmp_path / "r.yaml"), str(tmp_path / "rows.jsonl")]
    command += ["--out", str(tmp_path / "out.jsonl"), "--allow-failures"]
    calls, gate = tmp_path / "calls.txt", tmp_path / "calls.txt.gate"
    for stop_after in (150, 500, 900):
        gate.write_text(str(stop_after))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not calls.exists() or calls.read_bytes().count(b"\n") < stop_after):
            time.sleep(0.01)
        assert process.poll() is None, "it finished before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    gate.write_text(str(10**9))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [response for line in lines for response in line["responses"]] == texts
    for line in lines:
        for text, reward, failure in zip(line["responses"], line["reward"], line["failure"], strict=True):
            assert (reward is not None) == text.startswith("good")
            assert (failure is None) == text.startswith("good")
    call_counts = Counter(calls.read_text().splitlines())
    # Good samples scored twice were in flight at a kill: at most one batch per worker and kill.
    repeated = [text for text, count in call_counts.items() if count > 1 and text.startswith("good")]
    assert len(repeated) <= 3 * faulty.workers * 16
    assert len(lines) == len(rows)
    assert not (tmp_path / "out.jsonl.scores.sqlite").exists()


def test_caches_of_processes_that_a_run_has_no_more_are_removed(tmp_path):
    """A run of three processes is resumed by two: rank 2's scores would be found, long out of date, when there are three again."""
    for rank, name in enumerate(("scores.sqlite", "scores_1.sqlite", "scores_2.sqlite")):
        cache = ScoreCache(tmp_path / name)
        cache.put({"key": Score(float(rank))})
        cache.close()
    (tmp_path / "scores_2.sqlite-wal").touch()
    (tmp_path / "scores_of_mine.sqlite").touch()
    files = [own_cache(tmp_path, World(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    assert [file.name for file in files] == ["scores.sqlite", "scores_1.sqlite"]
    assert {file.name for file in tmp_path.iterdir()} == {"scores.sqlite", "scores_1.sqlite", "scores_of_mine.sqlite"}
