"""Scoring existing responses: the Python API and `plaudit score`."""

import asyncio
import json
import threading
import time

import pytest

from plaudit.audit.dumps import read_dump
from plaudit.data.rollouts import parse_group
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, RecipeError, RunError, TrainingStopped
from plaudit.resumable import open_resumable
from plaudit.rewards.reward import LiveReward
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import Scorer
from plaudit.types import Failure
from support.fault_server import FaultServer
from support.judges import backend_of, make
from support.rewards import group, write_function

ROWS = [
    {"prompt": "2 + 2 =", "response": "4", "ground_truth": "4"},
    {"prompt": [{"role": "user", "content": "1 + 1 ="}], "responses": ["3", "2"], "reward_model": {"ground_truth": "2"}},
]


def test_rows_with_one_response_and_with_several():
    with Scorer([{"kind": "exact"}]) as scorer:
        assert scorer.score(ROWS) == [
            {"reward": 1.0, "parts": {"exact": 1.0}, "malformed": False, "failure": None, "view": "4"},
            {
                "reward": [0.0, 1.0],
                "parts": [{"exact": 0.0}, {"exact": 1.0}],
                "malformed": [False, False],
                "failure": [None, None],
                "view": ["3", "2"],
            },
        ]


def test_rewards_find_further_columns_in_extra_info(tmp_path):
    file = tmp_path / "animal.py"
    file.write_text("def compute_score(solution_str, extra_info): return {'score': extra_info['animal'] in solution_str}")
    row = {"prompt": "Which?", "animal": "hen", "reward": 7.0, "responses": ["a hen", "a cow"], "label": [True, False]}
    with Scorer([{"kind": "function", "path": str(file)}]) as scorer:
        assert scorer.score([row])[0]["reward"] == [1.0, 0.0]
    group = parse_group(row, "1", "row 1")
    assert dict(group.prompt.extra_info) == {"animal": "hen", "label": [True, False]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [dumped] = read_dump(read_rows(tmp_path / "rows.jsonl"))
    assert dict(dumped["extra_info"]) == {"animal": "hen"}


def test_views_are_by_name_with_several_rewards():
    rewards = [
        {"kind": "exact", "view": {"extract": "line"}},
        {"kind": "exact", "name": "full", "weight": 0.0},
        {"kind": "exact", "name": "elsewhere", "when": {"data_source": "x"}},
    ]
    with Scorer(rewards) as scorer:
        [scored] = scorer.score([{"prompt": "p", "response": "so\n4", "ground_truth": "4"}])
    assert scored["view"] == {"exact": "4", "full": "so\n4"}
    assert scored["parts"] == {"exact": 1.0, "full": 0.0}


def test_failure_names_the_reward_and_the_cause():
    with Scorer([{"kind": "exact"}]) as scorer:
        [scored] = scorer.score([{"prompt": "p", "response": "4"}])
    assert scored["reward"] is None
    assert scored["failure"]["reward"] == "exact"
    assert scored["failure"]["cause"] == "no_ground_truth"


@pytest.mark.parametrize("normalise", ["group", "running"])
def test_values_are_not_normalised(normalise):
    """A right answer alone in its group would be 0."""
    with Scorer([{"kind": "exact", "normalise": normalise}]) as scorer:
        assert [row["reward"] for row in scorer.score(ROWS)] == [1.0, [0.0, 1.0]]


def test_close_removes_saved_functions_and_the_scorer_can_restart(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scorer = Scorer([lambda solution_str: len(solution_str)])
    for _ in range(2):
        assert [row["reward"] for row in scorer.score(ROWS[:1])] == [1.0]
        assert list(tmp_path.rglob("reward_*.py"))
        scorer.close()
        assert list(tmp_path.iterdir()) == []


def test_scorer_restarts_after_close_and_may_be_closed_twice():
    scorer = Scorer([{"kind": "exact"}])
    assert scorer.score([]) == []
    assert scorer.score(ROWS[:1])[0]["reward"] == 1.0
    scorer.close()
    scorer.close()
    assert scorer.score(ROWS[:1])[0]["reward"] == 1.0  # started again
    scorer.close()


def test_responses_may_be_messages_and_token_counts_come_from_the_row():
    rewards = [{"kind": "exact"}, {"kind": "overlong", "max_tokens": 10, "buffer_tokens": 10, "penalty": 1.0}]
    row = {"prompt": "p", "response": [{"role": "assistant", "content": "4"}], "ground_truth": "4", "tokens": 5}
    with Scorer(rewards) as scorer:
        known, unknown = scorer.score([row, {**row, "tokens": None}])
    assert known["parts"] == {"exact": 1.0, "overlong": -0.5}
    assert (unknown["reward"], unknown["failure"]["cause"]) == (None, "no_tokens")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, r"has no response \(found: prompt\)"),
        ({"prompt": "p", "response": "a", "responses": ["a"]}, "both `response` and `responses`"),
        ({"prompt": "p", "responses": []}, "should be a list of texts"),
        ({"prompt": "p", "responses": "a"}, "should be a list of texts"),
        ({"prompt": "p", "response": 4}, "row 1: a response should be text, not 4"),
        ({"prompt": "p", "response": "a", "extra_info": 3}, "extra_info should be an object"),
    ],
)
def test_invalid_rows_are_rejected(row, message):
    with Scorer([{"kind": "exact"}]) as scorer, pytest.raises(DataError, match=message):
        scorer.score([row])


@pytest.mark.parametrize("rewards", [[], [{"kind": "exat"}], [{"kind": "exact", "wieght": 1}], [{"kind": "exact", "weight": 0}]])
def test_invalid_rewards_are_rejected(rewards):
    with pytest.raises(RecipeError):
        Scorer(rewards)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    return tmp_path


def score(plaudit, folder, *more):
    return plaudit("score", folder / "r.yaml", folder / "rows.jsonl", "--out", folder / "out.jsonl", *more)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_score_writes_each_row_with_its_reward(plaudit, files):
    code, out, _ = score(plaudit, files)
    assert code == 0
    assert "2 rows, 3 responses; mean reward 0.6667" in out
    first, second = lines(files)
    assert first["id"] == "rows.jsonl:1"
    assert {name: first[name] for name in ROWS[0]} == ROWS[0]
    assert (first["reward"], second["reward"]) == (1.0, [0.0, 1.0])
    before = (files / "out.jsonl").read_bytes()
    code, out, _ = score(plaudit, files)
    assert (code, (files / "out.jsonl").read_bytes()) == (0, before)


def test_score_writes_sums_without_binary_noise(plaudit, files):
    """0.1 + 0.2 and 0.1 · 3 are 0.30000000000000004 in binary: so they stay for a trainer, and not in a file that people read."""
    rewards = [{"kind": "exact", "weight": 0.1}, {"kind": "exact", "name": "again", "weight": 0.2}]
    rewards.append({"kind": "exact", "name": "scaled", "scale": 0.1 * 3, "weight": 0.0})
    (files / "r.yaml").write_text(json.dumps({"rewards": rewards}))
    assert score(plaudit, files)[0] == 0
    one, several = lines(files)
    assert (one["reward"], one["parts"]["scaled"], several["reward"]) == (0.3, 0.3, [0.0, 0.3])
    with Scorer(rewards) as scorer:
        assert scorer.score(ROWS[:1])[0]["reward"] == 0.1 + 0.2


def test_an_error_before_the_first_row_leaves_no_output(plaudit, files):
    (files / "rows.jsonl").write_text('{"prompt": "?", "answer": "4"}\n')
    code, _, err = score(plaudit, files)
    assert code == 2
    assert "rows.jsonl: row 1: has no response (found: prompt, answer)." in err
    assert not list(files.glob("out.jsonl"))
    assert not list(files.glob("out.jsonl.inputs*"))


def test_score_resumes_after_a_truncated_line(plaudit, files):
    score(plaudit, files)
    complete = (files / "out.jsonl").read_bytes()
    (files / "out.jsonl").write_bytes(complete[: len(complete) - 30])
    assert score(plaudit, files)[0] == 0
    assert (files / "out.jsonl").read_bytes() == complete


def test_output_scored_with_other_settings_is_not_resumed(plaudit, files):
    score(plaudit, files)
    code, _, err = score(plaudit, files, "rewards.0.ignore_case=true")
    assert code == 2
    assert "was made with other settings; choose another file, or use the same ones" in err
    (files / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    assert score(plaudit, files)[0] == 2


def test_failures_are_reported_and_other_rows_kept(plaudit, files):
    (files / "rows.jsonl").write_text(json.dumps({"prompt": "p", "response": "a"}) + "\n" + json.dumps(ROWS[0]))
    code, out, err = score(plaudit, files)
    assert code == 1
    assert "1 without a value (1 no_ground_truth: exact: row " in out
    assert "1 of 2 rows have no value. Run the same command to score them again, or pass --allow-failures" in " ".join(err.split())
    assert [line["reward"] for line in lines(files)] == [None, 1.0]
    before = (files / "out.jsonl").read_bytes()
    assert score(plaudit, files, "--allow-failures")[0] == 0
    assert (files / "out.jsonl").read_bytes() == before


def test_dead_reward_stops_scoring_which_resumes_once_it_is_fixed(plaudit, files):
    path = write_function(
        files, "def compute_score(solution_str):\n    return float(solution_str) if int(solution_str) < 256 else 1 / 0"
    )
    rows = [{"prompt": "p", "response": str(i)} for i in range(600)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "r.yaml").write_text(f"rewards: [{{kind: function, path: {path}, limits: {{max_concurrent_groups: 4}}}}]")
    code, _, err = score(plaudit, files)
    assert code == 2
    assert "calls in a row had failed, the last with exception: ZeroDivisionError" in err
    # Rows that were not scored have no line, and those that failed are scored again.
    assert all(line["reward"] == number for number, line in enumerate(lines(files)) if line["failure"] is None)
    assert not any("not called" in line["failure"]["message"] for line in lines(files) if line["failure"] is not None)
    path.write_text("def compute_score(solution_str): return float(solution_str)")
    code, _, err = score(plaudit, files, "rewards.0.limits.group_retries=1")
    assert code == 0
    assert f"{path} changed since the first rows" in " ".join(err.split())
    assert "those that have a value keep it" in " ".join(err.split())
    assert [line["reward"] for line in lines(files)] == list(range(600))
    _, _, err = score(plaudit, files, "rewards.0.limits.group_retries=1")
    assert f"{path} changed since the first rows" in " ".join(err.split()), "the file still holds scores of two versions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rows.jsonl", ""), "is empty"),
        (("rows.jsonl", '{"prompt": "p"}'), "A row to score has `prompt` and `response`"),
        (("r.yaml", "rewards: [{kind: exat}]"), "Did you mean exact?"),
        (
            ("r.yaml", "rewards: [{kind: cascade, judge: {kind: exact, weigth: 2}, mode: only}]"),
            "rewards.0.judge.weigth is not a setting",
        ),
        (("r.yaml", "stage: sft\nmodel: {path: x}\ndata: {train: x.jsonl}\nrun: {dir: d}"), "has no rewards"),
    ],
)
def test_bad_input_is_reported(plaudit, files, change, message):
    name, content = change
    (files / name).write_text(content)
    code, _, err = score(plaudit, files)
    assert code == 2
    assert message in err


def test_numpy_columns_and_wrong_arguments():
    import numpy as np

    row = {"prompt": np.array([{"role": "user", "content": "p"}], dtype=object), "responses": np.array(["4", "5"], dtype=object)}
    row |= {"ground_truth": "4", "tokens": np.array([1, 2])}
    with Scorer([{"kind": "exact"}]) as scorer:
        assert scorer.score([row])[0]["reward"] == [1.0, 0.0]
        with pytest.raises(DataError, match="`tokens` should be the number of tokens of each response"):
            scorer.score([{**row, "tokens": [3]}])
        with pytest.raises(DataError, match="put it into a list"):
            scorer.score(row)  # pyright: ignore
    with pytest.raises(RecipeError, match="rewards should be a list"):
        Scorer(7)  # pyright: ignore


def test_a_single_reward_needs_no_list():
    row = {"prompt": "p", "response": "4", "ground_truth": "4"}
    for reward in ({"kind": "exact"}, lambda solution_str: 2.0):
        with Scorer(reward) as one, Scorer([reward]) as several:
            assert one.score([row])[0]["reward"] == several.score([row])[0]["reward"] > 0


def test_damaged_output_metadata_is_reported(plaudit, files):
    score(plaudit, files)
    (files / "out.jsonl.inputs.json").write_text("{")
    code, _, err = score(plaudit, files)
    assert (code, "is damaged" in err) == (2, True)


def test_reordered_rewards_do_not_resume(plaudit, files):
    (files / "r.yaml").write_text("rewards: [{kind: exact}, {kind: contains, combine: multiply}]")
    assert score(plaudit, files)[0] == 0
    (files / "r.yaml").write_text("rewards: [{kind: contains, combine: multiply}, {kind: exact}]")
    assert score(plaudit, files)[0] == 2


def test_dead_judge_inside_a_cascade_stops_scoring_too(plaudit, files):
    path = write_function(files, "def compute_score(solution_str): raise ConnectionError('no server')")
    rows = [{"prompt": "p", "response": str(i), "ground_truth": "x"} for i in range(300)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = f"{{kind: function, path: {path}, limits: {{max_concurrent_groups: 4}}}}"
    (files / "r.yaml").write_text(f"rewards: [{{kind: cascade, rule: {{kind: exact}}, judge: {judge}}}]")
    code, _, err = score(plaudit, files)
    assert code == 2
    assert "ConnectionError: no server" in err
    assert not [line for line in (lines(files) if (files / "out.jsonl").exists() else []) if line["reward"] is not None]


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge_server():
    with FaultServer() as server:
        yield server


def judged(folder, server, *responses, **limits) -> None:
    """Rows for a judge whose answer ends with the response."""
    rows = [{"prompt": "p", "responses" if isinstance(response, list) else "response": response} for response in responses]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompt.jinja").write_text("{{ response }}")
    limits = {"retries": 0, "unreadable_retries": 0, "give_up_after": None, **limits}
    model = {"placement": "server", "url": server.url}
    template = str(folder / "prompt.jinja")
    reward = {"kind": "judge", "parser": "regex", "pattern": r"(\d+)$", "template": template, "model": model, "limits": limits}
    (folder / "r.yaml").write_text(json.dumps({"rewards": [reward]}))


@pytest.mark.parametrize("status", ["401", "403"])
def test_rejected_key_stops_at_once_and_the_right_one_scores_all_rows(plaudit, files, judge_server, status):
    judged(files, judge_server, *(f"so\n{i}" for i in range(40)), retries=4, unreadable_retries=2, max_concurrent_groups=1)
    judge_server.fault_for_all = status
    code, _, err = score(plaudit, files)
    assert (code, (files / "out.jsonl").exists()) == (2, False)
    assert f"reward 'judge': {judge_server.url}/v1/chat/completions: HTTP {status}" in err
    assert "Then run the same command to resume." in err
    assert len(err.strip().splitlines()) == 1
    assert len(judge_server.requests) < 10  # one, and those already on their way
    judge_server.fault_for_all = None
    assert score(plaudit, files)[0] == 0
    assert [line["reward"] for line in lines(files)] == list(range(40))


def test_failed_rows_are_scored_again_in_place(plaudit, files, judge_server):
    judged(files, judge_server, "1", "500:1 is\n2", ["3", "500:2 is\n4"], "5")
    code, out, err = score(plaudit, files)
    assert (code, [line["reward"] for line in lines(files)]) == (1, [1.0, None, [3.0, None], 5.0])
    assert "2 without a value (2 http: judge: " in out
    code, out, err = score(plaudit, files)
    assert (code, [line["reward"] for line in lines(files)]) == (1, [1.0, 2.0, [3.0, None], 5.0])
    assert "has 4 of 4 rows; scoring 2 of them again, on which a reward failed" in " ".join(err.split())
    assert "4 rows, 5 responses; mean reward 2.75" in out  # of the file, not only of what was scored now
    code, out, _ = score(plaudit, files)
    assert (code, [line["reward"] for line in lines(files)]) == (0, [1.0, 2.0, [3.0, 4.0], 5.0])
    assert judge_server.contents().count("3") == 1  # cached until every row has a value
    assert not list(files.glob("*.sqlite*"))
    assert score(plaudit, files)[0] == 0
    assert len(judge_server.requests) == 5 + 2 + 1


def test_interrupted_output_with_failures_is_completed(plaudit, files, judge_server):
    judged(files, judge_server, "500:1 is\n1", "2", "3")
    score(plaudit, files, "--max-rows", "2")
    assert [line["reward"] for line in lines(files)] == [None, 2.0]
    assert score(plaudit, files)[0] == 0
    assert [line["reward"] for line in lines(files)] == [1.0, 2.0, 3.0]


def test_rows_are_replaced_atomically_under_the_lock(tmp_path):
    out = tmp_path / "out.jsonl"
    with open_resumable(out, {}, "score") as file:
        file.write({"id": "a", "x": 1})
        file.write({"id": "b", "text": "\ud800 \u2028"})
        file.replace({0: {"id": "a", "x": 2}})
        file.write({"id": "c"})
        with pytest.raises(RunError, match="another process is writing"), open_resumable(out, {}, "score"):
            pass
        with pytest.raises(TypeError):
            file.replace({0: {"id": "a", (1, 2): "not JSON"}})  # pyright: ignore
    assert not list(tmp_path.glob(".*"))
    with open_resumable(out, {}, "score") as file:
        assert file.done == ["a", "b", "c"]
        assert [row.get("x") for row in file.rows()] == [2, None, None]


@pytest.mark.parametrize("settings", [{}, {"on_failure": 0.0}, {"limits": {"unreadable_retries": 5, "group_retries": 3}}])
def test_rejected_key_is_not_retried_and_stops_every_collect_but_no_service(settings):
    judge = make("judge", lambda _: Failure("unauthorised", "HTTP 401."), **settings)
    with RewardRunner([judge], tolerant=True) as runner:
        scored = runner.run(runner.score(group("a"))).result()
        assert scored.by_reward["judge"][0].failure == Failure("unauthorised", "HTTP 401.")
        assert len(backend_of(judge).calls) == 1
        with pytest.raises(TrainingStopped, match=r"reward 'judge': HTTP 401\. Then run the same command to resume"):
            runner.collect([group("b")])


def test_rejected_key_does_not_wait_for_other_rewards_and_leaves_sampling():
    """Whatever the group's other rewards still wait for, and before the next group is sampled."""
    cancelled = threading.Event()

    class Slow(LiveReward):
        async def score(self, groups):
            try:
                await asyncio.Event().wait()
                return []
            finally:
                cancelled.set()

    judge = make("judge", lambda _: Failure("unauthorised", "HTTP 401."))
    slow = Slow(judge.settings.model_copy(update={"name": "slow"}))
    with RewardRunner([slow, judge]) as runner:

        def groups():
            yield group("a")
            while True:  # the second one would take forever
                time.sleep(0.001)
                runner.check()

        with pytest.raises(TrainingStopped, match=r"reward 'judge': HTTP 401"):
            runner.collect(groups())
        assert cancelled.wait(60)
        with pytest.raises(TrainingStopped, match=r"reward 'judge': HTTP 401"):
            runner.collect([group("a")])


# Details and means ---------------------------------------------------------------------------------------------------


def test_details_keep_judge_prompts_and_answers(plaudit, files, judge_server):
    judged(files, judge_server, "so\n7", ["1", "2"])
    assert score(plaudit, files, "--details")[0] == 0
    first, second = lines(files)
    judge = first["by_reward"]["judge"]
    assert (judge["value"], judge["view"], judge["failure"]) == (7.0, "so\n7", None)
    assert judge["trace"] == {"prompt": "so\n7", "answer": "answer to so\n7", "tries": 1}
    assert [one["judge"]["trace"]["answer"] for one in second["by_reward"]] == ["answer to 1", "answer to 2"]
    assert score(plaudit, files)[0] == 2, "the rows it has are with details"


def test_means_of_components_are_printed_by_data_source(plaudit, files):
    rows = [{**row, "data_source": source} for row, source in zip([*ROWS, ROWS[0]], ["sums", "sums", ""], strict=True)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "r.yaml").write_text("rewards: [{kind: exact}, {kind: length, unit: characters, at_most: 9, weight: 0.5}]")
    _, out, _ = score(plaudit, files, "--data-source", "rest")
    table = [line.split() for line in out.splitlines()]
    assert ["data_source", "responses", "reward", "exact", "length", "length/length"] in table
    assert ["rest", "1", "1.5", "1", "1", "1"] in table
    assert ["sums", "3", "1.167", "0.6667", "1", "1"] in table
    assert ["all", "4", "1.25", "0.75", "1", "1"] in table
    assert lines(files)[2]["data_source"] == "rest"


def test_wrong_option_shows_the_usage(plaudit, files):
    code, _, err = plaudit("score", files / "rows.jsonl", "--rewards", files / "r.yaml", "--out", files / "out.jsonl")
    assert (code, "has no option --rewards. Usage: plaudit score R.yaml ROLLOUTS" in err) == (2, True)
