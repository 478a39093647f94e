"""What the pages of `plaudit view` get to show, from runs and dumps."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plaudit.errors import PlauditError, RunError
from plaudit.types import Failure
from plaudit.viewing.metrics_log import MetricsLog, Series, thin
from plaudit.viewing.search import Query, search
from plaudit.viewing.sources import NotThere, open_source
from plaudit.viewing.steps import split_into_pages
from plaudit.viewing.viewer import Viewer, evenly_spaced, from_coarse_to_fine, unique_names
from support.made_runs import make_run, scored_group


@pytest.fixture
def run(tmp_path) -> Path:
    first = scored_group("p1", ["2", "3", "4"], [1.0, 0.0, 0.5], trace={"prompt": "Rate it.", "answer": "7"})
    flat = scored_group("p2", ["two words", "two words"], [1.0, 1.0], prompt="Repeat: two words here", data_source="echo")
    failed = scored_group("p3", ["x", "y"], [None, 0.25])
    return make_run(tmp_path / "made", {1: [first, flat], 2: [failed, first]})


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in sorted(folder.rglob("*")) if f.is_file()}


# A step and a sample -------------------------------------------------------------------------------------------------


def test_a_step_has_its_groups_with_mean_spread_and_failures(run):
    step = Viewer([open_source(run)]).step(0, "train", 1)
    first, flat = step["groups"]
    assert (first["row"], first["rows"], first["mean"], first["signal"]) == (0, 3, 0.5, True)
    assert first["std"] == pytest.approx((0.5 / 3) ** 0.5)  # of 1, 0 and 0.5
    assert (flat["row"], flat["mean"], flat["signal"], flat["data_source"]) == (3, 1.0, False, "echo")
    failed = Viewer([open_source(run)]).step(0, "train", 2)["groups"][0]
    assert (failed["failed"], failed["mean"]) == (1, 0.25)


def test_the_same_prompt_twice_in_a_step_is_two_groups(tmp_path):
    group = scored_group("p1", ["a", "b"], [1.0, 0.0])
    viewer = Viewer([open_source(make_run(tmp_path / "made", {1: [group, group]}))])
    assert [g["row"] for g in viewer.step(0, "train", 1)["groups"]] == [0, 2]


def test_a_sample_has_all_that_was_recorded(run):
    sample = Viewer([open_source(run)]).sample(0, "train", 1, 1)
    assert sample["response"] == "3"
    assert sample["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert (sample["ground_truth"], sample["reward"], sample["tokens"], sample["mean_logprob"]) == ("2", 0.0, 1, -0.5)
    assert sample["rewards"]["tone"]["view"] == "scored: 3"
    assert sample["rewards"]["tone"]["trace"] == {"prompt": "Rate it.", "answer": "7"}
    failed = Viewer([open_source(run)]).sample(0, "train", 2, 0)
    assert failed["reward"] is None
    assert failed["failure"] == "timeout: tone: no answer after 60 s"
    with pytest.raises(NotThere, match="no sample number 99"):
        Viewer([open_source(run)]).sample(0, "train", 1, 99)


def test_a_sample_is_read_from_its_row_group_alone(run):
    source = open_source(run)
    table = source.read("train", 1)
    pq.write_table(table, source.file("train", 1), row_group_size=2)
    for row in range(table.num_rows):
        assert source.read("train", 1, rows=range(row, row + 1)).to_pylist() == table.slice(row, 1).to_pylist()
    assert source.read("train", 1, rows=range(1, 4)).to_pylist() == table.slice(1, 3).to_pylist()


def test_the_same_prompt_is_found_where_a_resumed_run_has_sampled_it_anew(run):
    viewer = Viewer([open_source(run)])
    assert {(one["step"], one["row"]) for one in viewer.same_prompt(0, "p1")["found"]} == {(1, 0), (2, 2)}
    make_run(run, {2: [scored_group("p1", ["again", "and again"], [1.0, 0.0])]})
    assert {(one["step"], one["row"]) for one in viewer.same_prompt(0, "p1")["found"]} == {(1, 0), (2, 0)}


def test_a_regular_expression_that_is_slow_on_every_response_ends(run, monkeypatch):
    monkeypatch.setattr("plaudit.viewing.search.REQUEST_TIMEOUT_S", -1.0)
    with pytest.raises(PlauditError, match="simplify it"):
        search(open_source(run), Query("[a-z]", is_regex=True))
    assert search(open_source(run), Query("two"))["hits"]


def test_the_same_prompt_is_found_in_other_steps(run):
    found = Viewer([open_source(run)]).same_prompt(0, "p1")
    assert found["found"] == [{"split": "train", "step": 1, "row": 0}, {"split": "train", "step": 2, "row": 2}]
    assert found["searched"] == found["of"] == 2


def test_a_very_large_step_has_pages_of_whole_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("plaudit.viewing.steps.MAX_SAMPLES", 4)
    groups = [scored_group(f"p{i}", list("abc"), [1.0, 0.0, float(i)], prompt=f"Prompt {i}") for i in range(3)]
    viewer = Viewer([open_source(make_run(tmp_path / "made", {1: groups}))])
    for row in (4, 0, 7, 5):
        page = viewer.step(0, "train", 1, row)
        (group,) = page["groups"]
        assert (group["row"], group["rows"], group["prompt"]) == (row - row % 3, 3, f"Prompt {row // 3}")
        assert [sample["row"] for sample in page["samples"]] == [group["row"] + i for i in range(3)]
        assert (page["groups_before"], page["of_groups"], page["of_samples"]) == (row // 3, 3, 9)
        assert page["summary"]["reward"] == pytest.approx((3 * 1.0 + 0 + 1 + 2) / 9)  # of the whole step
    assert page["pages"] == [[0, 3], [3, 6], [6, 9]]
    with pytest.raises(NotThere, match="no sample number 9"):
        viewer.step(0, "train", 1, 9)


def test_pages_divide_only_a_group_that_is_longer_than_a_page(monkeypatch):
    monkeypatch.setattr("plaudit.viewing.steps.MAX_SAMPLES", 4)
    assert split_into_pages([0, 2, 4, 5], 8) == [range(4), range(4, 8)]
    assert split_into_pages([0, 1], 11) == [range(1), range(1, 5), range(5, 9), range(9, 11)]
    assert split_into_pages([], 0) == [range(0)]


# Runs and metrics ----------------------------------------------------------------------------------------------------


def test_metrics_are_read_as_they_grow_and_anew_after_a_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward": 0.5, "time/step_s": 2.0}\n{"step": 2, "rew')
    log = MetricsLog(file)
    log.refresh()
    assert list(log.series["reward"].values) == [0.5]
    with file.open("a") as opened:
        opened.write('ard": null, "time/step_s": 3.0}\nnot json\n{"step": 3, "reward": 1.5}\n')
    log.refresh()
    assert thin(log.series["reward"]) == {"x": [1, 2, 3], "y": [0.5, None, 1.5]}
    assert list(log.seconds.values) == [2.0, 5.0, 5.0]
    assert log.damaged == [3]
    file.with_name("new").write_text('{"step": 1, "reward": 0.25}\n')
    os.replace(file.with_name("new"), file)  # as a run that resumes does
    log.refresh()
    assert thin(log.series["reward"]) == {"x": [1], "y": [0.25]}


def test_of_many_damaged_lines_the_first_are_named(run):
    with (run / "metrics.jsonl").open("a") as opened:
        opened.write("not json\n" * 1000)
    (problem,) = Viewer([open_source(run)]).runs()[0]["problems"]
    assert problem == "metrics.jsonl, lines 3, 4, 5, 6, 7 and 995 more: damaged, skipped"


def test_a_thinned_curve_keeps_its_peaks_and_its_ends():
    series = Series()
    for step in range(10_000):
        series.append(step, 100.0 if step == 4321 else -50.0 if step == 9 else step / 10_000)
    points = thin(series, 400)
    assert len(points["x"]) <= 402
    assert (points["x"][0], points["x"][-1]) == (0, 9999)
    assert max(points["y"]) == 100.0
    assert min(points["y"]) == -50.0
    assert points["x"] == sorted(points["x"])


def test_a_killed_run_counts_as_stopped_and_a_locked_one_as_training(run):
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (0, 0))
    viewer = Viewer([open_source(run)])
    assert viewer.runs()[0]["state"] == "stopped"
    import fcntl

    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert viewer.runs()[0]["state"] == "training"
    (run / "model").mkdir()
    assert viewer.runs()[0]["state"] == "finished"


def test_runs_are_named_by_as_much_of_their_path_as_tells_them_apart():
    assert unique_names([Path("/x/runs/a"), Path("/x/runs/b")]) == ["a", "b"]
    assert unique_names([Path("/x/a/rl"), Path("/x/b/rl")]) == ["a/rl", "b/rl"]
    assert unique_names([Path("/x/demo/rl")]) == ["demo/rl"]


def test_steps_chosen_for_diagnostics_stay_chosen_as_a_run_grows():
    assert evenly_spaced(range(1, 8), 200) == [1, 2, 3, 4, 5, 6, 7]
    few, more = evenly_spaced(range(1, 500), 200), evenly_spaced(range(1, 700), 200)
    assert set(few[:-1]) <= set(more)
    assert len(more) <= 201
    assert from_coarse_to_fine([1, 2, 3, 4, 5]) == [5, 1, 3, 2, 4]


def test_a_secret_in_a_recipe_is_not_shown(tmp_path):
    recipe = {"rewards.1.url": "https://user:hunter2hunter2@judge.example/v1"}
    run = make_run(tmp_path / "made", {1: [scored_group("p", ["a", "b"], [1.0, 0.0])]}, recipe=recipe)
    assert "hunter2" not in json.dumps(Viewer([open_source(run)]).runs())


# Diagnostics ---------------------------------------------------------------------------------------------------------


def test_length_correlation_is_taken_within_groups(tmp_path):
    # Longer answers are better within each group, although the prompt with longer answers has lower rewards.
    short = scored_group("p1", ["a", "b"], [0.8, 1.0], tokens=[1, 2])
    long = scored_group("p2", ["c", "d"], [0.0, 0.2], tokens=[11, 12])
    series = Viewer([open_source(make_run(tmp_path / "made", {1: [short, long]}))]).diagnostics(0)["series"]
    assert series["length correlation"]["y"] == [1.0]
    assert series["length"]["y"] == [6.5]


def test_duplicates_echoes_and_variety(tmp_path):
    echo = scored_group("p", ["one two three", "one two three", "six"], [1.0, 1.0, 0.0], prompt="Say: one two three")
    series = Viewer([open_source(make_run(tmp_path / "made", {1: [echo]}))]).diagnostics(0)["series"]
    assert series["duplicates"]["y"] == [pytest.approx(1 / 3, rel=1e-5)]
    assert series["copied from the prompt"]["y"] == [1.0]
    assert series["words of the prompt"]["y"] == [pytest.approx(3 / 5 * 2 / 3)]  # of say : one two three, in two of three responses
    assert series["distinct-2"]["y"] == [0.5]  # one two, two three, of four
    assert "length correlation" not in series  # three samples are too few


def test_judge_against_rule_where_both_spoke(tmp_path):
    parts = [{"exact": 1.0, "tone": 0.0}, {"exact": 0.0, "tone": 1.0}, {"exact": 1.0, "tone": 0.0}, {"exact": 0.0, "tone": 1.0}]
    group = scored_group("p", list("abcd"), [1.0, 0.0, 1.0, 0.0], parts=[*parts])
    series = Viewer([open_source(make_run(tmp_path / "made", {1: [group]}))]).diagnostics(0)["series"]
    assert series["agreement/tone and exact"]["y"] == [-1.0]


def test_how_much_each_component_differs_within_groups(tmp_path):
    apart = scored_group("p", ["a", "b"], [1.0, 1.0], parts=[{"exact": 0.0, "tone": 0.5}, {"exact": 1.0, "tone": 0.5}])
    equal = scored_group("q", ["a", "b"], [1.0, 1.0], parts=[{"exact": 1.0, "tone": 0.5}, {"exact": 1.0, "tone": 0.5}])
    run = make_run(tmp_path / "made", {1: [apart, equal], 2: [equal]})
    (run / "samples/train_000002.parquet").unlink()
    series = Viewer([open_source(run)]).diagnostics(0)["series"]
    assert series["signal/exact"] == {"x": [1], "y": [0.5]}
    assert series["group_std/exact"] == {"x": [1], "y": [0.25]}
    assert series["signal/tone"] == series["group_std/tone"] == {"x": [1], "y": [0.0]}
    # What the run has written itself is there for steps without samples too.
    rows = [{"step": step, "signal/exact": 0.5 / step, "groups_without_signal": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = Viewer([open_source(run)]).diagnostics(0)["series"]
    assert series["signal/exact"] == {"x": [1, 2], "y": [0.5, 0.25]}
    assert series["groups without signal"] == {"x": [1, 2], "y": [1.0, 1.0]}
    assert series["signal/tone"]["x"] == [1]


def test_failed_means_the_same_everywhere(tmp_path):
    """A reward that is only measured has failed on one of four samples: they all have a total."""
    made = scored_group("p", list("abcd"), [1.0, 0.0, 1.0, 0.0])
    of_judge = (replace(made.by_reward["tone"][0], failure=Failure("timeout", "no answer")), *made.by_reward["tone"][1:])
    viewer = Viewer([open_source(make_run(tmp_path / "made", {1: [replace(made, by_reward={"tone": of_judge})]}))])
    step = viewer.step(0, "train", 1)
    assert viewer.diagnostics(0)["series"]["failed"]["y"] == [step["summary"]["failed"]] == [0.25]
    assert step["groups"][0]["failed"] == len(search(viewer.source(0), Query(failure="any"))["hits"]) == 1


def test_groups_of_one_sample_have_no_signal_to_lack(tmp_path):
    group = scored_group("p", ["a"], [1.0])
    viewer = Viewer([open_source(make_run(tmp_path / "made", {1: [group]}))])
    assert viewer.step(0, "train", 1)["summary"]["groups without signal"] is None
    assert viewer.step(0, "train", 1)["groups"][0]["signal"] is None


# Search --------------------------------------------------------------------------------------------------------------


def test_search_finds_text_from_the_newest_step_back(run):
    hits = search(open_source(run), Query("2"))["hits"]
    assert [(hit["step"], hit["row"]) for hit in hits] == [(2, 2), (1, 0)]
    assert [hit["found"] for hit in search(open_source(run), Query("TWO W"))["hits"]] == ["two w", "two w"]
    assert [hit["found"] for hit in search(open_source(run), Query(r"^[xy]$", is_regex=True))["hits"]] == ["x", "y"]


def test_search_continues_where_it_has_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("plaudit.viewing.search.MAX_HITS", 2)
    five = [scored_group("p", ["yes", "no", "yes", "yes", "yes", "yes"], [1.0] * 6)]
    source = open_source(make_run(tmp_path / "made", {1: five, 2: five}))
    found, counts, start = [], [], {}
    while start is not None:
        answer = search(source, Query("yes", **start))
        found += [(hit["step"], hit["row"]) for hit in answer["hits"]]
        counts.append((len(answer["hits"]), answer["more"], answer["searched"], answer["left"]))
        start = answer["next"]
    rows = [0, 2, 3, 4, 5]
    assert found == [(2, row) for row in rows] + [(1, row) for row in rows]
    # Two at a time: of step 2 there are 3 and then 1 left, the fifth comes with the first of step 1, …
    assert counts == [(2, 3, 0, 1), (2, 1, 0, 1), (2, 4, 1, 0), (2, 2, 0, 0), (2, 0, 1, 0)]


def test_search_says_how_many_steps_it_could_not_read(run):
    (run / "samples/train_000002.parquet").write_bytes(b"broken")
    answer = search(open_source(run), Query("2"))
    assert ([hit["step"] for hit in answer["hits"]], answer["unreadable"]) == ([1], 1)


def test_search_filters_by_reward_failure_source_and_step(run):
    def rows(**filters) -> list[tuple[int, int]]:
        return [(hit["step"], hit["row"]) for hit in search(open_source(run), Query(**filters))["hits"]]

    assert rows(failure="timeout") == rows(failure="any") == [(2, 0)]
    assert rows(least=0.2, greatest=0.6) == [(2, 1), (2, 4), (1, 2)]
    assert rows(data_source="echo") == [(1, 3), (1, 4)]
    assert rows(step=1, least=1.0) == [(1, 0), (1, 3), (1, 4)]


def test_a_regular_expression_that_cannot_be_read_or_never_ends_is_one_line(run, tmp_path):
    with pytest.raises(PlauditError, match="cannot be read"):
        search(open_source(run), Query("(", is_regex=True))
    slow = make_run(tmp_path / "slow", {1: [scored_group("p", ["a" * 200 + "b"], [1.0], tokens=[1])]})
    with pytest.raises(PlauditError, match="simplify"):
        search(open_source(slow), Query(r"^(a|aa)+(a|aa)+$", is_regex=True))


# Dumps of others -----------------------------------------------------------------------------------------------------


def test_verl_dumps(tmp_path):
    for step in (1, 2, 10):
        rows = [{"input": "user\nWhat is 2 + 2?", "output": text, "gts": "4", "score": score, "step": step, "acc": score == 1.0}
                for text, score in (("4", 1.0), ("5", 0.0))]  # fmt: skip
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    viewer = Viewer([open_source(tmp_path)])
    assert viewer.steps(0)["train"] == [1, 2, 10]
    (group,) = viewer.step(0, "train", 10)["groups"]
    assert (group["mean"], group["rows"], group["parts"]) == (0.5, 2, {"acc": 0.5})
    assert viewer.sample(0, "train", 2, 1)["response"] == "5"
    assert viewer.metrics(0)["series"]["reward"] == {"x": [1, 2, 10], "y": [0.5, 0.5, 0.5]}
    elsewhere = viewer.same_prompt(0, viewer.sample(0, "train", 2, 1)["prompt_id"])["found"]
    assert [(one["step"], one["row"]) for one in elsewhere] == [(1, 0), (2, 0), (10, 0)]


def test_trl_dumps(tmp_path):
    for step in (5, 10):
        rows = [{"step": step, "prompt": "Hi", "completion": text, "brevity": 1.0 - i, "politeness": 0.5, "advantage": 0.7 - i}
                for i, text in enumerate(("Hello.", "Hello, hello."))]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"completions_{step:05d}.parquet")
    viewer = Viewer([open_source(tmp_path)])
    assert viewer.steps(0)["train"] == [5, 10]
    sample = viewer.sample(0, "train", 10, 0)
    assert (sample["response"], sample["advantage"]) == ("Hello.", 0.7)
    assert sample["parts"] == {"brevity": 1.0, "politeness": 0.5}
    assert viewer.metrics(0)["series"]["parts/brevity"] == {"x": [5, 10], "y": [0.5, 0.5]}  # TRL saves no total of several


def test_what_a_dump_does_not_record_is_unknown(tmp_path):
    rows = [{"input": "user\nHi", "output": text, "score": 1.0} for text in ("a", "b")]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    viewer = Viewer([open_source(tmp_path)])
    unknown = {"malformed": None, "failed": None, "truncated": None}
    step = viewer.step(0, "train", 0)
    assert {name: step["summary"][name] for name in unknown} == unknown
    assert {name: step["groups"][0][name] for name in unknown} == unknown
    assert not viewer.diagnostics(0)["series"].keys() & unknown.keys()
    for wanted in ("any", "timeout", "malformed", "truncated"):
        with pytest.raises(PlauditError, match="does not say which samples are"):
            search(viewer.source(0), Query(failure=wanted))


def test_a_total_that_trl_has_not_saved_is_unknown(tmp_path):
    rows = [{"step": 1, "prompt": "Hi", "completion": text, "brevity": 1.0, "tone": 0.5, "advantage": 0.5} for text in ("a", "b")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    step = Viewer([open_source(tmp_path)]).step(0, "train", 1)
    assert step["summary"]["reward"] is step["summary"]["groups without signal"] is step["groups"][0]["signal"] is None
    assert step["samples"][0]["advantage"] == 0.5


def test_what_plaudit_score_has_written_is_known(tmp_path):
    failure = {"cause": "timeout", "message": "no answer", "reward": "tone"}
    row = {"prompt": "Hi", "responses": ["a", "b"], "reward": [1.0, None], "malformed": [True, False], "failure": [None, failure],
           "parts": [{"tone": 0.5}, {}], "status": ["truncated", "finished"]}  # fmt: skip
    (tmp_path / "scored.jsonl").write_text(json.dumps(row) + "\n")
    viewer = Viewer([open_source(tmp_path / "scored.jsonl")])
    step = viewer.step(0, "train", 0)
    assert {name: step["summary"][name] for name in ("malformed", "failed", "truncated")} == {
        "malformed": 0.5, "failed": 0.5, "truncated": 0.5
    }  # fmt: skip
    assert viewer.sample(0, "train", 0, 1)["failure"] == "timeout: tone: no answer"
    assert viewer.sample(0, "train", 0, 0)["parts"] == {"tone": 0.5}


def test_a_dump_that_is_deleted_meanwhile(tmp_path):
    for step in (1, 2):
        (tmp_path / f"{step}.jsonl").write_text(json.dumps({"input": "user\nHi", "output": "a", "score": 1.0}) + "\n")
    viewer = Viewer([open_source(tmp_path)])
    (tmp_path / "2.jsonl").unlink()
    assert viewer.step(0, "train", 1)["groups"]
    with pytest.raises(NotThere, match=r"2\.jsonl"):
        viewer.step(0, "train", 2)
    assert viewer.diagnostics(0)["series"]["reward"]["x"] == [1]


# Bad input -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"not a run folder \(it has no run.json\)"):
        open_source(tmp_path)
    make_run(tmp_path / "rl", {})
    with pytest.raises(RunError, match=f"plaudit view {tmp_path / 'rl'}"):
        open_source(tmp_path)


def test_a_damaged_parquet_file_affects_no_other_step(run):
    file = run / "samples/train_000001.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    viewer = Viewer([open_source(run)])
    with pytest.raises(NotThere, match=r"train_000001.parquet cannot be read: .*[^.]\. Other steps are not affected\.$"):
        viewer.step(0, "train", 1)
    assert viewer.step(0, "train", 2)["groups"]
    for _ in range(2):  # once it is known, it is not forgotten
        found = viewer.diagnostics(0)
        assert found["series"]["reward"]["x"] == [2]
        assert len(found["problems"]) == 1
        assert "train_000001.parquet cannot be read" in found["problems"][0]
    assert search(open_source(run), Query("2"))["hits"]


def test_a_run_that_is_deleted_meanwhile(run):
    viewer = Viewer([open_source(run)])
    viewer.metrics(0)
    shutil.rmtree(run)
    assert viewer.runs()[0]["state"] == "gone"
    assert viewer.metrics(0)["series"] == {}
    assert viewer.diagnostics(0)["series"] == {}
    with pytest.raises(NotThere, match="no train samples of step 1"):
        viewer.step(0, "train", 1)


def test_a_link_to_a_run_is_followed_and_one_out_of_it_is_not(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    viewer = Viewer([open_source(tmp_path / "link")])
    assert viewer.step(0, "train", 1)["groups"]
    assert viewer.metrics(0)["series"]["reward"]["x"] == [1, 2]
    secret = make_run(tmp_path / "secret", {3: [scored_group("p", ["a secret", "b"], [1.0, 0.0])]})
    (run / "samples/train_000003.parquet").symlink_to(secret / "samples/train_000003.parquet")
    (run / "samples/train_000004.parquet").symlink_to("train_000001.parquet")  # stays inside
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    with pytest.raises(NotThere, match="leads out of the run's folder"):
        viewer.step(0, "train", 3)
    assert viewer.step(0, "train", 4)["groups"]
    assert search(viewer.source(0), Query("secret"))["hits"] == []
    assert "leads out" in viewer.diagnostics(0)["problems"][0]
    assert viewer.metrics(0)["series"] == {}
    assert "leads out" in viewer.runs()[0]["problems"][0]
    (run / "run.json").unlink()
    (run / "run.json").symlink_to(secret / "run.json")
    with pytest.raises(RunError, match="leads out"):
        open_source(run)


def test_nothing_is_written_to_a_run(run):
    before = files_of(run)
    viewer = Viewer([open_source(run), open_source(run)])
    viewer.runs(), viewer.metrics(0), viewer.diagnostics(1), viewer.step(0, "train", 1), viewer.same_prompt(0, "p1")
    search(viewer.source(0), Query("2"))
    assert files_of(run) == before


def test_a_file_that_cannot_be_written_is_one_line(plaudit, run, tmp_path):
    code, out, err = plaudit("view", run, "--out", tmp_path / "nowhere" / "a.html")
    assert (code, out) == (2, "")
    assert err.strip() == f"--out: there is no folder {tmp_path / 'nowhere'}; create it, or name a file in one that exists"
    code, out, err = plaudit("view", run, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert "is a folder; name a file in it" in " ".join(err.split())
