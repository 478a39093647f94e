"""`plaudit eval rewards`: what rewards see, failures, resuming, intervals, and figures that are known."""

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.errors import PlauditError
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, in_given_order, load_evaluated
from plaudit.loops.score import LocatedRow
from plaudit.recipe import ScoreRecipe
from support.evaluation import (
    LONGER,
    SHORTER,
    answers,
    evaluate_files,
    evaluate_rows,
    evaluated,
    judge_at,
    pairs,
    task_in,
    values,
)
from support.processes import Command
from support.recipes import write_recipe
from support.rows import write_jsonl
from support.servers import stand_in_judge


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("plaudit.evaluation.pictures.draw_rewards", lambda *_: None)


def evaluate(plaudit, *arguments) -> tuple[int, dict, str]:
    """The exit code of `plaudit eval rewards`, eval.json, and what it printed."""
    out = Path(arguments[arguments.index("--out") + 1])
    code, stdout, stderr = plaudit("eval", "rewards", *arguments, "--resamples", 100)
    file = out / "eval.json"
    return code, json.loads(file.read_text()) if file.exists() else {}, stdout + stderr


# LLMBar --------------------------------------------------------------------------------------------------------------

# Looks the published verdict up: which output is better, when output_1 was shown first, and when output_2 was.
GPT4 = """
import json
from pathlib import Path

VERDICTS = {}
for name, given in json.loads(Path("DATA/gpt4_verdicts.json").read_text()).items():
    for i, row in enumerate(json.loads(Path(f"DATA/{name}.json").read_text())):
        outputs = (row["output_1"], row["output_2"])
        for order, shown in (("as_given", outputs), ("swapped", outputs[::-1])):
            VERDICTS[row["input"], shown] = outputs[int(given[order][i]) - 1]

def compute_scores(prompts, responses):
    better = VERDICTS[prompts[0][-1]["content"], tuple(responses)]
    return [float(response == better) for response in responses]
"""
PUBLISHED = {
    "as_given": "accuracy_as_given",
    "swapped": "accuracy_swapped",
    "accuracy": "mean_accuracy",
    "both_right": "both_right",
    "consistency": "same_in_both_orders",
}


def published(text: str) -> Fraction:
    """ "95 / 100" or "95.5%"."""
    return Fraction(text.rstrip("%")) / 100 if "%" in text else Fraction(text.replace(" ", ""))


def test_llmbar_gives_the_published_accuracies_of_gpt_4(tmp_path, real_data, plaudit):
    data = real_data / "llmbar"
    if not data.is_dir():
        pytest.skip(f"needs LLMBar in {data}")
    verdicts = json.loads((data / "gpt4_verdicts.json").read_text())
    (tmp_path / "gpt4.py").write_text(GPT4.replace("DATA", str(data)))
    reward = {"kind": "function", "path": str(tmp_path / "gpt4.py"), "scores": "group", "workers": 1}
    recipe = write_recipe(tmp_path / "gpt4.yaml", {"rewards": [reward]})
    files = [data / f"{name}.json" for name in verdicts]
    code, found, _ = evaluate(plaudit, *files, "--rewards", recipe, "--out", tmp_path / "out")
    assert code == 0
    parts = found["figures"]["gpt4"]
    for name, judged in verdicts.items():
        for figure, own in PUBLISHED.items():
            assert parts[f"LLMBar/{name}"][figure]["value"] == pytest.approx(float(published(judged["published"][own])), abs=1e-12)
        assert parts[f"LLMBar/{name}"]["accuracy"]["n"] == len(judged["as_given"])
    assert parts["LLMBar"]["accuracy"]["n"] == sum(len(judged["as_given"]) for judged in verdicts.values())


# What rewards see ----------------------------------------------------------------------------------------------------

TELLING_ROWS = [
    {"prompt": "p", "chosen": "CHOSEN", "rejected": "REJECTED", "score_chosen": 9, "rejected_model": "m", "chosen-rating": 1,
     "margin": 2.0, "label": 0, "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "CHOSEN"}],
     "output": "CHOSEN", "lang": "de", "ground_truth": "4", "extra_info": {"winner": 0, "topic": "sums"}, "id": "pair-1"},
    {"input": "i", "output_1": "CHOSEN", "output_2": "REJECTED", "label": 1, "lang": "de"},
    {"question": "q", "response_A": "CHOSEN", "response_B": "REJECTED", "label": "A>B", "source": "s", "judges": ["A>B"],
     "response_model": "m", "pair_id": "1", "lang": "de"},
    {"conversation_input": [{"role": "user", "content": "q"}], "chosen": {"answer": "CHOSEN", "llm_name": "m"}, "lang": "de",
     "reject": {"answer": "REJECTED", "llm_name": "n"}, "category_path": "c", "pair_uid": "1"},
    {"prompt": "p", "chosen": ["CHOSEN"], "rejected": ["REJECTED"], "num_correct": 1, "num_rejected": 1, "total_completions": 2,
     "models": ["m", "n"], "subset": "Ties", "id": "ref:1", "lang": "de"},
    {"prompt": "p", "chosen": ["CHOSEN", "2", "3"], "rejected": ["REJECTED", "5", "6"], "domain": "math", "id": "1", "lang": "de"},
]  # fmt: skip
RECORD = """
import json

def compute_scores(prompts, responses, ground_truths, extra_infos, data_sources):
    seen = {"prompts": prompts, "ground_truths": ground_truths, "extra_infos": extra_infos, "data_sources": data_sources}
    with open("FILE", "a") as file:
        file.write(json.dumps(seen) + "\\n")
    return [0.0] * len(responses)
"""


def test_rewards_see_nothing_that_tells_which_response_is_right(tmp_path):
    seen = tmp_path / "seen.jsonl"
    (tmp_path / "record.py").write_text(RECORD.replace("FILE", str(seen)))
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(TELLING_ROWS)]
    reward = {"kind": "function", "path": str(tmp_path / "record.py"), "scores": "group", "workers": 1}
    evaluate_files(files, tmp_path / "out", {"record": reward})
    rows = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(rows) == 5 * 2 + 9 * 2
    extra = {tuple(sorted(info.items())) for row in rows for info in row["extra_infos"]}
    own = ("lang", "de")
    assert extra == {(("ground_truth", "4"), own, ("topic", "sums")), (own,), (own, ("pair_id", "1")), (own, ("pair_uid", "1"))}
    assert {truth for row in rows for truth in row["ground_truths"]} == {"4", None}
    assert "CHOSEN" not in seen.read_text()
    assert "REJECTED" not in seen.read_text()


# Orders --------------------------------------------------------------------------------------------------------------


def test_judges_show_the_responses_in_both_orders(tmp_path):
    """In the order of the file and swapped, once each: alone, and inside another reward. Which order comes first in a batch, and
    how training would order them, does not matter."""
    calls: list[list[str]] = []

    def record(_: str, shown: list[str]) -> list[float]:
        calls.append(shown)
        return [1.0, 0.0]

    rows = pairs(*((k + 2, 1) for k in range(9)))
    both = [order for row in rows for order in ([row["chosen"], row["rejected"]], [row["rejected"], row["chosen"]])]
    with stand_in_judge(answer_to=answers(record)) as url:
        for kind in ("pairwise_judge", "group_judge"):
            nested = {"kind": "cascade", "mode": "only", "judge": judge_at(url, kind)}
            mixed = {"kind": "cascade", "mode": "mixed", "rule": LONGER, "judge": judge_at(url, kind), "judge_weight": 0.999}
            for name, reward in {"alone": judge_at(url, kind), "nested": nested, "mixed": mixed}.items():
                calls.clear()
                folder = tmp_path / f"{kind} {name}"
                folder.mkdir()
                found = values(evaluate_rows(folder, rows, {"judge": reward}), "pairs")
                assert sorted(calls) == sorted(both), f"{kind} {name}"
                assert (found["accuracy"], found["as_given"], found["swapped"]) == (0.5, 1.0, 0.0)
                assert (found["position_bias"], found["consistency"], found["first_position"]) == (1.0, 0.0, 1.0)


def test_a_judge_that_is_a_gate_shows_both_orders_too():
    """Without a weight of its own it decides what others are worth. If it only watches, its order does not matter."""
    judge = {"kind": "pairwise_judge", "model": {"path": "m"}, "weight": 0.0}
    assert evaluated("gate", judge, LONGER | {"gate": "pairwise_judge"}).compares
    assert not evaluated("watches", judge, LONGER).compares


def test_given_order_changes_nothing_else():
    judge = {"kind": "pairwise_judge", "model": {"path": "models/judge"}, "ties": False}
    [reward] = ScoreRecipe.model_validate({"rewards": [{"kind": "cascade", "rule": LONGER, "judge": judge, "scale": 2.0}]}).rewards
    before = reward.model_dump()
    changed = in_given_order(reward).model_dump()
    assert reward.model_dump() == before
    assert changed["judge"] | {"order": "shuffled", "both_orders": True} == before["judge"]
    assert {**changed, "judge": None} == {**before, "judge": None}


# Failures and resuming -----------------------------------------------------------------------------------------------


class FlakyJudge:
    """Prefers the longer response. For some tasks it writes nothing that can be read."""

    def __init__(self, *broken: str):
        self.broken, self.calls = set(broken), list[str]()
        self._answer = answers(lambda _, shown: [float(len(text)) for text in shown])

    def __call__(self, prompt: str) -> str:
        self.calls.append(task_in(prompt))
        return "no idea" if task_in(prompt) in self.broken else self._answer(prompt)


@pytest.fixture
def flaky(tmp_path):
    """A judge that fails on one of four pairs, its recipe, and the command's arguments."""
    judge = FlakyJudge("question 2")
    file = write_jsonl(tmp_path / "mine.jsonl", pairs((5, 1), (1, 5), (6, 1), (7, 1)))
    with stand_in_judge(answer_to=judge) as url:
        recipe = write_recipe(
            tmp_path / "judge.yaml", {"rewards": [judge_at(url, limits={"unreadable_retries": 0, "max_concurrent_calls": 1})]}
        )
        yield judge, [file, "--rewards", recipe, "--out", tmp_path / "out"]


def test_failures_are_counted_beside_accuracy(flaky, plaudit):
    _, arguments = flaky
    code, found, printed = evaluate(plaudit, *arguments)
    assert code == 1
    assert "some items have no value (1 of judge); they are in no figure" in " ".join(printed.split())
    assert "--allow-failures" in printed
    accuracy = found["figures"]["judge"]["pairs"]["accuracy"]
    assert (accuracy["value"], accuracy["n"]) == (pytest.approx(2 / 3), 3)
    assert found["details"]["judge"]["failed"] == 1  # an item, shown twice
    assert found["details"]["judge"]["failures"] == {"unparsable": 4}  # two responses in two orders
    assert evaluate(plaudit, *arguments, "--allow-failures")[0] == 0


def test_run_again_it_scores_only_what_failed(flaky, plaudit):
    judge, arguments = flaky
    evaluate(plaudit, *arguments)
    assert len(judge.calls) == 8
    judge.broken.clear()
    judge.calls.clear()
    code, found, _ = evaluate(plaudit, *arguments)
    assert (code, judge.calls) == (0, ["question 2"] * 2)
    assert found["figures"]["judge"]["pairs"]["accuracy"]["value"] == 3 / 4
    judge.calls.clear()
    assert evaluate(plaudit, *arguments)[1]["figures"] == found["figures"]
    assert judge.calls == []


def test_stopped_halfway_it_resumes(flaky, plaudit, monkeypatch):
    judge, arguments = flaky
    judge.broken.clear()
    from plaudit.resumable import ResumableJsonl

    write, written = ResumableJsonl.write, []

    def stop_after_three(self, row):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(row)
        write(self, row)

    monkeypatch.setattr(ResumableJsonl, "write", stop_after_three)
    assert plaudit("eval", "rewards", *arguments)[0] == 130
    monkeypatch.setattr(ResumableJsonl, "write", write)
    before = len(judge.calls)
    code, found, _ = evaluate(plaudit, *arguments)
    assert (code, found["figures"]["judge"]["pairs"]["accuracy"]["value"]) == (0, 3 / 4)
    # Three rows were written: both orders of the first pair, and one of the second.
    again = Counter(judge.calls[before:])
    [usage] = found["details"]["judge"]["usage"].values()
    assert usage["calls"] >= 3 + again.total(), "of both commands"
    assert again <= Counter({"question 1": 1, "question 2": 2, "question 3": 2})
    assert Counter(judge.calls) >= Counter({f"question {i}": 2 for i in range(4)})


@pytest.mark.slow
def test_killed_halfway_it_resumes(tmp_path, plaudit):
    """kill -9 after two thirds of the calls."""
    judge = FlakyJudge()
    file = write_jsonl(tmp_path / "mine.jsonl", pairs(*((k % 9 + 2, 1) for k in range(600))))
    with stand_in_judge(answer_to=judge) as url:
        recipe = write_recipe(tmp_path / "judge.yaml", {"rewards": [judge_at(url, limits={"max_concurrent_calls": 8})]})
        arguments = [file, "--rewards", recipe, "--out", tmp_path / "out"]
        command = Command("eval", "rewards", *arguments)
        command.wait_for(lambda: len(judge.calls) > 800)
        assert command.kill() == -9
        before = len(judge.calls)
        code, found, _ = evaluate(plaudit, *arguments)
    assert (code, found["figures"]["judge"]["pairs"]["accuracy"]["value"]) == (0, 1.0)
    assert 800 < before < 1200
    assert 1200 <= len(judge.calls) < 1200 + before / 2  # again only rows whose scores were not yet saved


@pytest.mark.parametrize("change", ["items", "settings", "rows"])
def test_output_of_other_items_or_settings_is_not_resumed(tmp_path, plaudit, change):
    file = write_jsonl(tmp_path / "mine.jsonl", pairs((5, 1), (1, 5)))
    recipe = write_recipe(tmp_path / "longer.yaml", {"rewards": [LONGER]})
    arguments = [file, "--rewards", recipe, "--out", tmp_path / "out"]
    assert evaluate(plaudit, *arguments)[0] == 0
    if change == "items":
        write_jsonl(file, pairs((5, 1), (2, 5)))
    elif change == "rows":
        arguments += ["--max-items", 1]
    else:
        write_recipe(recipe, {"rewards": [SHORTER]})
    before = (tmp_path / "out/eval.json").read_text()
    code, _, printed = evaluate(plaudit, *arguments)
    assert code == 2
    printed = " ".join(printed.split())
    assert "was made with other settings; choose another" in printed
    assert ('items: "2 with digest' in printed) == (change != "settings")
    assert ("rewards.0.scale: 1.0 there, -1.0 now" in printed) == (change == "settings")
    assert (tmp_path / "out/eval.json").read_text() == before


def test_an_evaluation_of_other_data_is_not_overwritten(tmp_path, plaudit):
    """Not by another reward, and not by another kind of evaluation."""
    own, other = (write_jsonl(tmp_path / f"{name}.jsonl", pairs((5, 1), (1, 5))[:n]) for name, n in (("own", 2), ("other", 1)))
    longer = write_recipe(tmp_path / "longer.yaml", {"rewards": [LONGER]})
    shorter = write_recipe(tmp_path / "shorter.yaml", {"rewards": [SHORTER]})
    assert evaluate(plaudit, own, "--rewards", longer, "--out", tmp_path / "out")[0] == 0
    before = (tmp_path / "out/eval.json").read_text()
    for verb, file in (("rewards", other), ("verifier", own)):
        code, _, stderr = plaudit("eval", verb, file, "--rewards", shorter, "--out", tmp_path / "out")
        assert code == 2
        assert "has scores of other data" in stderr
    assert (tmp_path / "out/eval.json").read_text() == before
    assert evaluate(plaudit, own, "--rewards", longer, shorter, "--out", tmp_path / "out")[0] == 0


def test_scores_of_a_function_that_has_changed_are_not_kept(tmp_path, plaudit):
    """eval.json says which function it is of, and training may require it."""
    file = write_jsonl(tmp_path / "mine.jsonl", pairs((5, 1)))
    function = tmp_path / "own.py"
    function.write_text("def compute_score(solution_str): return len(solution_str)")
    recipe = write_recipe(tmp_path / "own.yaml", {"rewards": [{"kind": "function", "path": str(function)}]})
    arguments = [file, "--rewards", recipe, "--out", tmp_path / "out"]
    code, before, _ = evaluate(plaudit, *arguments)
    assert (code, before["figures"]["own"]["pairs"]["accuracy"]["value"]) == (0, 1.0)
    function.write_text("def compute_score(solution_str): return -len(solution_str)")
    code, after, printed = evaluate(plaudit, *arguments)
    assert (code, after) == (2, before)
    assert f"files.{function}" in printed


# Several rewards -----------------------------------------------------------------------------------------------------


def test_names_of_rewards(tmp_path, plaudit):
    """By file, with its folder where that is needed, or as given."""
    recipes = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        recipes.append(write_recipe(tmp_path / folder / "rm.yaml", {"rewards": [LONGER]}))
    third = write_recipe(tmp_path / "short.yaml", {"rewards": [SHORTER]})
    assert [reward.name for reward in load_evaluated([str(path) for path in (*recipes, third)])] == ["one/rm", "two/rm", "short"]
    file = write_jsonl(tmp_path / "mine.jsonl", pairs((5, 1), (1, 5), (6, 1)))
    given = ["--rewards", f"first={recipes[0]}", recipes[1], third, "--out", tmp_path / "out"]
    code, found, _ = evaluate(plaudit, file, *given)
    assert code == 0
    assert {name: parts["pairs"]["accuracy"]["value"] for name, parts in found["figures"].items()} == pytest.approx(
        {"first": 2 / 3, "rm": 2 / 3, "short": 1 / 3}
    )
    assert {name: parts["pairs"]["accuracy"]["value"] for name, parts in found["differences"].items()} == pytest.approx(
        {"first - rm": 0.0, "first - short": 1 / 3, "rm - short": 1 / 3}
    )
    code, _, printed = evaluate(plaudit, file, "--rewards", recipes[0], recipes[0], "--out", tmp_path / "twice")
    assert code == 2
    assert "two of them are called 'one/rm'; name them: --rewards first=" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a - b"], "'a - b' is also what a part of the result is called"),
        (["judge-run2", "judge"], "'judge-run2' is also what a part of the result is called"),
        (["x" * 300], "has 300 characters; choose a shorter one"),
        ([".."], "'..' is a folder; choose another name"),
    ],
)
def test_names_that_cannot_be_used(tmp_path, names, message):
    recipe = write_recipe(tmp_path / "r.yaml", {"rewards": [LONGER]})
    with pytest.raises(PlauditError, match=message):
        load_evaluated([f"{name}={recipe}" for name in names])


def test_a_difference_is_of_the_items_that_both_have_values_for(tmp_path):
    """`exact` has no value without a ground truth: of the first pair, which only the other one can score."""
    rows = [{"prompt": "a", "chosen": "44", "rejected": "5"}, {"prompt": "b", "chosen": "4", "rejected": "55", "ground_truth": "4"}]
    found = evaluate_rows(tmp_path, rows, {"exact": {"kind": "exact"}, "longer": LONGER})
    assert {name: (parts["pairs"]["accuracy"].value, parts["pairs"]["accuracy"].n) for name, parts in found.figures.items()} == {
        "exact": (1.0, 1), "longer": (0.5, 2),
    }  # fmt: skip
    difference = found.differences["exact - longer"]["pairs"]["accuracy"]
    assert (difference.value, difference.n) == (1.0, 1)


# Intervals -----------------------------------------------------------------------------------------------------------


def test_intervals_are_a_function_of_the_seed(tmp_path):
    rows = pairs(*((5, 1) if k % 3 else (1, 5) for k in range(60)))
    first, again = evaluate_rows(tmp_path, rows), evaluate_rows(tmp_path, rows)
    assert (again.figures, again.curves) == (first.figures, first.curves)
    other = evaluate_rows(tmp_path, rows, seed=1)
    accuracy, with_other = (found.figures["longer"]["pairs"]["accuracy"] for found in (first, other))
    assert accuracy.value == with_other.value == pytest.approx(2 / 3)
    assert accuracy.low < 2 / 3 < accuracy.high
    assert (accuracy.low, accuracy.high) != (with_other.low, with_other.high)


def test_a_paired_difference_has_a_narrower_interval(tmp_path):
    """Two rewards that agree on 190 of 200 pairs: which prompts are drawn matters to each, and hardly to their difference."""
    rows = pairs(*((5, 1) if k % 2 else (1, 5) for k in range(190)), *[(1, 500)] * 10)
    rewards = {"longer": LONGER, "same": {**LONGER, "bounds": [0.0, 0.0029]}}
    found = evaluate_rows(tmp_path, rows, rewards, resamples=400)
    single = found.figures["longer"]["pairs"]["accuracy"]
    difference = found.differences["longer - same"]["pairs"]["accuracy"]
    assert difference.high - difference.low < 0.5 * (single.high - single.low)


def test_pairs_of_one_prompt_are_drawn_together(tmp_path):
    """Ten pairs of each of 20 prompts, all right or all wrong: that is 20 observations, not 200."""
    lengths = [(5, 1) if k % 2 else (1, 5) for k in range(20) for _ in range(10)]
    alone = evaluate_rows(tmp_path, pairs(*lengths), resamples=400).figures["longer"]["pairs"]["accuracy"]
    rows = [row | {"prompt": f"question {i // 10}"} for i, row in enumerate(pairs(*lengths))]
    (tmp_path / "shared").mkdir()
    together = evaluate_rows(tmp_path / "shared", rows, resamples=400).figures["longer"]["pairs"]["accuracy"]
    assert together.value == alone.value == 0.5
    assert together.n == 200
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(10**0.5, rel=0.25)


# Properties ----------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def score_by_length(reward: EvaluatedReward, rows: Sequence[LocatedRow], *_: Any, **options: Any) -> RewardScores:
    """LONGER and SHORTER without the processes and files of the reward layer, which take most of the time."""
    found: list[list[float | None]] = [[reward.rewards[0].scale * len(text) for text in row["responses"]] for row, _, _ in rows]
    return RewardScores(found, failed=0, malformed=0, failures=Counter(), messages={})


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_symmetries(tmp_path_factory, lengths, seed):
    """A reward and its negative share 1; exchanging chosen and rejected mirrors the accuracy; neither the order of rows nor that of
    files matters."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [row | {"subset": "ab"[i % 2]} for i, row in enumerate(pairs(*lengths))]
    mirrored = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    half = len(rows) // 2
    files = [write_jsonl(folder / f"{name}.jsonl", part) for name, part in (("b", shuffled[half:]), ("a", shuffled[:half])) if part]
    rewards = {"longer": LONGER, "shorter": SHORTER}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plaudit.evaluation.rewards.score_rows", score_by_length)
        found = evaluate_rows(folder, rows, rewards)
        other = evaluate_files(files, folder, rewards)
        swapped = evaluate_rows(folder, mirrored)
    longer, shorter = (values(found, "pairs", name) for name in rewards)
    assert longer["accuracy"] + shorter["accuracy"] == pytest.approx(1.0)
    assert longer["ties"] == shorter["ties"]
    assert values(swapped, "pairs")["accuracy"] == pytest.approx(shorter["accuracy"])
    for name in rewards:
        assert other.figures[name].keys() == found.figures[name].keys()
        for part in found.figures[name]:
            assert values(other, part, name) == pytest.approx(values(found, part, name))
