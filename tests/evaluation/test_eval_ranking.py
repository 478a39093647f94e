"""`plaudit eval ranking`: figures by hand, judges and rules on the same groups, unreadable answers, failures, resuming."""

import json
from typing import Any

import pytest

from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_group
from plaudit.data.rows import read_rows
from plaudit.errors import DataError
from plaudit.evaluation.groups import GroupColumns, read_groups
from plaudit.prepare.translation import make_translation_rl
from support.evaluation import LONGER, judge_at, of_length
from support.fault_server import FaultServer
from support.models import make_classifier
from support.recipes import write_recipe
from support.rows import write_jsonl
from support.scored_groups import GROUP
from support.servers import load_stand_in_judge, stand_in_judge

LIMITS = {"backoff_s": 0.01, "retries": 0, "unreadable_retries": 0}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("plaudit.evaluation.pictures.draw_ranking", lambda *_: None)


def groups(*given: tuple[list[int], list[float]], **columns: Any) -> list[dict]:
    """A row for each (lengths of the candidates, scores)."""
    return [
        {"prompt": f"question {i}", "responses": of_length(*lengths), "scores": scores, **columns}
        for i, (lengths, scores) in enumerate(given)
    ]


@pytest.fixture
def rank(plaudit, tmp_path):
    """Runs the command on these rows; returns its exit code, eval.json and all that it printed."""

    def run(rows: list[dict], rewards: dict[str, dict[str, Any]], *options: Any) -> tuple[int, dict, str]:
        file = write_jsonl(tmp_path / "groups.jsonl", rows)
        recipes = [write_recipe(tmp_path / f"{name}.yaml", {"rewards": [reward]}) for name, reward in rewards.items()]
        out = tmp_path / "out"
        code, stdout, stderr = plaudit(
            "eval", "ranking", file, "--rewards", *recipes, "--out", out, "--resamples", 100, *options
        )  # fmt: skip
        found = json.loads((out / "eval.json").read_text()) if (out / "eval.json").exists() else {}
        return code, found, " ".join((stdout + stderr).split())

    return run


def values(found: dict, name: str, part: str = "all") -> dict[str, float]:
    return {figure: estimate["value"] for figure, estimate in found["figures"][name][part].items()}


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_by_hand(rank):
    """Three groups: all pairs right; one of three right, with a tie on either side; a tie that is none."""
    rows = groups(([3, 2, 1], [3, 2, 1]), ([1, 2, 2], [1, 1, 2]), ([5, 5], [0, 1]))
    code, found, shown = rank(rows, {"longer": LONGER})
    assert code == 0
    expected = {"accuracy": (1 + 1 / 3 + 0) / 3, "acc_eq": 4 / 9, "tau_b": (1 + 1 / 2) / 2, "ties": (0 + 1 / 3 + 1) / 3}
    assert values(found, "longer") == pytest.approx(expected)
    assert found["figures"]["longer"]["all"]["tau_b"]["n"] == 2  # of the third group it is not defined
    assert "pairwise accuracy 44.4" in shown
    assert "Kendall's τ_b 0.75" in shown
    assert (found["inputs"]["groups"], found["inputs"]["candidates"]) == (3, 8)


def test_acc_eq_reports_the_epsilon_that_maximises_it(rank):
    rows = groups(([10, 11], [1, 1]), ([10, 20], [1, 2]))
    _, found, shown = rank(rows, {"longer": LONGER})
    assert values(found, "longer")["accuracy"] == 0.5
    assert values(found, "longer")["acc_eq"] == 1.0
    assert found["details"]["longer"]["epsilon"]["all"] == pytest.approx(0.001)
    assert "with ε 0.001" in shown
    # Held at this value in resamples, so that both groups are right in all of them.
    assert found["figures"]["longer"]["all"]["acc_eq"] == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 2}


def test_differences_are_on_the_groups_that_both_have(rank):
    """`exact` fails on the second group, which has no ground truth."""
    rows = groups(([1, 2], [1, 2]), ([1, 2], [2, 1]), ([1, 2], [1, 2]), ground_truth="xx")
    del rows[1]["ground_truth"]
    code, found, shown = rank(rows, {"longer": LONGER, "exact": {"kind": "exact"}})
    assert code == 1
    assert values(found, "longer")["accuracy"] == pytest.approx(2 / 3)
    assert values(found, "exact")["accuracy"] == 1.0
    assert found["differences"]["longer - exact"]["all"]["accuracy"] == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 2}
    assert found["details"]["exact"] | {"failed": 1, "items": 3, "unreadable": 0} == found["details"]["exact"]
    assert "1 of exact" in shown
    assert rank(rows, {"longer": LONGER, "exact": {"kind": "exact"}}, "--allow-failures")[0] == 0


def test_parts_by_language_pair_and_data_source(rank):
    rows = [
        GROUP | {"mt_texts": of_length(1, 2), "scores": [1, 2], "data_source": "news"},
        GROUP | {"mt_texts": of_length(1, 2), "scores": [2, 1], "data_source": "talks"},
        GROUP | {"mt_texts": of_length(1, 2), "scores": [1, 2], "data_source": "talks", "trg_lang": "fr"},
    ]
    _, found, shown = rank(rows, {"longer": LONGER})
    own = {part: estimates["accuracy"]["value"] for part, estimates in found["figures"]["longer"].items()}
    assert own == {
        "all": pytest.approx(2 / 3),
        "language pair/en-de": 0.5,
        "language pair/en-fr": 1.0,
        "data source/news": 1.0,
        "data source/talks": 0.5,
    }
    assert "Pairwise accuracy by language pair" in shown


def test_systems(rank):
    """On 12 segments the first system is better: one reward is as sure of it as the reference, one is of the opposite."""
    rows = groups(*[([2 + i, 1], [9, 3]) for i in range(12)], systems=["good", "bad"])
    rewards = {"longer": LONGER, "shorter": {**LONGER, "scale": -1.0}}
    _, found, shown = rank(rows, rewards)
    assert values(found, "longer")["soft_pairwise_accuracy"] == pytest.approx(1.0, abs=0.01)
    assert values(found, "shorter")["soft_pairwise_accuracy"] == pytest.approx(0.0, abs=0.01)
    difference = found["differences"]["longer - shorter"]["all"]["soft_pairwise_accuracy"]
    assert difference["value"] == pytest.approx(1.0, abs=0.02)
    assert difference["n"] == 12
    assert "intervals by 200 resamples" in shown


def test_labels_and_columns_by_option(rank):
    rows = [{"question": "?", "drafts": of_length(3, 1), "good": [True, False], "responses": ["not", "these", "ones"]}]
    code, found, _ = rank(rows, {"longer": LONGER}, "--candidates", "drafts", "--scores", "good")
    assert (code, values(found, "longer")["accuracy"]) == (0, 1.0)


def test_real_translations(plaudit, real_data, tmp_path):
    """Of the 114 groups, the accuracy of the length is that of a few lines of Python."""
    file = real_data / "mt_ranking_ende_test.parquet"
    recipe = write_recipe(tmp_path / "longer.yaml", {"rewards": [LONGER]})
    code, *_ = plaudit("eval", "ranking", file, "--rewards", recipe, "--out", tmp_path / "out", "--resamples", 100)
    found = json.loads((tmp_path / "out/eval.json").read_text())
    shares = []
    for row in read_rows(file):
        lengths, scores = [min(len(text), 1000) for text in row["mt_texts"]], row["scores"]
        pairs = [(i, j) for i in range(len(scores)) for j in range(i)]
        same = [(lengths[i] > lengths[j]) - (lengths[i] < lengths[j]) == (scores[i] > scores[j]) - (scores[i] < scores[j])
                for i, j in pairs]  # fmt: skip
        shares.append(sum(same) / len(pairs))
    assert code == 0
    assert found["figures"]["longer"]["all"]["accuracy"]["value"] == pytest.approx(sum(shares) / len(shares))
    assert found["figures"]["longer"]["all"]["accuracy"]["n"] == 114


# What rewards see ----------------------------------------------------------------------------------------------------


def test_rewards_see_a_translation_as_in_training(tmp_path):
    """The fields of a row that trains a translation policy, and nothing that tells which candidate is good."""
    row = GROUP | {"trg_text": "Guten Morgen!", "systems": ["a", "b", "c", "d"], "id": "seg 7", "domain": "talks"}
    row["extra_info"] = {"scores": row["scores"], "analysis": "the first one is best"}
    file = write_jsonl(tmp_path / "groups.jsonl", [row])
    [group] = read_groups([Source(file)], GroupColumns())
    prompt = parse_group(group.row, group.id, group.where).prompt
    make_translation_rl([file], tmp_path / "rl.parquet")
    [trained] = read_rows(tmp_path / "rl.parquet")
    assert prompt.messages == [{"role": "user", "content": trained["extra_info"]["question"]}]
    assert prompt.extra_info == trained["extra_info"] | {
        "domain": "talks",
        "ground_truth": "Guten Morgen!",
    }
    assert prompt.ground_truth == "Guten Morgen!"
    assert (group.languages, group.systems, group.id) == ("en-de", ("a", "b", "c", "d"), "groups:seg 7")


# Judges --------------------------------------------------------------------------------------------------------------

TRANSLATIONS = [
    GROUP
    | {
        "src_text": text,
        "trg_text": "Guten Morgen",
        "mt_texts": ["Guten Morgen", f"Guten Morgen{', das ist ein sehr schöner Morgen' * 2}", "Gute Nacht"],
        "scores": scores,
    }
    for text, scores in (("Good morning", [10, 6, 1]), ("A good morning", [1, 6, 10]))
]
"""The stand-in judge gives their candidates 9, 7 and 2 points: in the order of the reference, and in the opposite one."""


def test_judges_and_a_rule_on_the_same_groups(rank):
    with stand_in_judge() as url:
        rewards = {kind: judge_at(url, kind, limits=LIMITS) for kind in ("group_judge", "pairwise_judge", "judge")}
        code, found, shown = rank(TRANSLATIONS, rewards | {"longer": LONGER})
    assert code == 0
    for kind in ("group_judge", "pairwise_judge", "judge"):
        assert (values(found, kind)["accuracy"], values(found, kind)["tau_b"]) == (0.5, 0.0), kind
    assert values(found, "longer")["accuracy"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    calls = {kind: own["usage"]["stand-in"]["calls"] for kind, own in found["details"].items() if own["usage"]}
    assert calls == {"group_judge": 2, "pairwise_judge": 2 * 3 * 2, "judge": 2 * 3}
    assert "group_judge: stand-in: 2 calls" in shown


@pytest.mark.slow
def test_a_bradley_terry_model_on_the_same_groups(rank, tiny_model, tmp_path):
    """Its pairs are right where its own scores are in the order of the reference; once retrained, it is another model."""
    folder = make_classifier(tiny_model, tmp_path / "classifier")
    model = {"kind": "scalar_model", "model": {"path": str(folder)}}
    code, found, _ = rank(TRANSLATIONS, {"bt": model, "longer": LONGER})
    scored = [json.loads(line)["reward"] for line in (tmp_path / "out/scores/bt.jsonl").read_text().splitlines()]
    shares = []
    for rewards, row in zip(scored, TRANSLATIONS, strict=True):
        pairs = [(rewards[i] > rewards[j]) == (row["scores"][i] > row["scores"][j]) for i in range(3) for j in range(i)]
        shares.append(sum(pairs) / 3)
    assert code == 0
    assert len({reward for rewards in scored for reward in rewards}) == 6
    assert values(found, "bt")["accuracy"] == pytest.approx(sum(shares) / 2)
    assert "longer" in found["figures"]
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    code, after, shown = rank(TRANSLATIONS, {"bt": model, "longer": LONGER})
    assert (code, after) == (2, found)
    assert f"files.{folder}" in shown


def test_runs_have_other_seeds_and_are_averaged(rank):
    """Right in the first run, reversed in the second; the rule runs once."""
    answer_to = load_stand_in_judge().answer_to

    with FaultServer() as server:

        def reply(prompt: str) -> str:
            return answer_to(
                prompt if len(server.requests) == 1 else prompt.replace("# Reference\nGuten Morgen", "# Reference\nNacht")
            )

        server.reply = reply
        judge = judge_at(server.url, "group_judge", limits=LIMITS, sampling={"temperature": 0.4, "top_p": 0.7, "seed": 5})
        code, found, shown = rank(TRANSLATIONS[:1], {"judge": judge, "longer": LONGER}, "--runs", 2)
        bodies = [request.body for request in server.requests]
    assert code == 0
    assert [(body["temperature"], body["top_p"]) for body in bodies] == [(0.4, 0.7)] * 2
    assert bodies[0]["seed"] != bodies[1]["seed"]
    assert values(found, "judge")["accuracy"] == 0.5  # 1 and, with 2, 2 and 9 points, 0
    assert (found["details"]["judge"]["runs"], found["details"]["longer"]["runs"]) == (2, 1)
    assert "Scored once, because nothing is sampled at a temperature above 0: longer." in shown


@pytest.mark.parametrize("kind", ["group_judge", "judge"])
def test_an_unreadable_answer_counts_0_and_is_a_result(rank, kind):
    """Of two groups one has an answer that cannot be parsed. Nothing is left to score, so the server may be gone."""
    answer_to = load_stand_in_judge().answer_to
    with FaultServer() as server:
        server.reply = lambda prompt: (
            "Well." if "A good morning" in prompt and "Gute Nacht" in prompt else answer_to(prompt)
        )  # fmt: skip
        judge = judge_at(server.url, kind, limits=LIMITS)
        code, found, shown = rank(TRANSLATIONS, {"judge": judge})
        server.die()
        again, found_again, _ = rank(TRANSLATIONS, {"judge": judge})
    assert (code, again) == (0, 0)
    assert (found_again["figures"], found_again["details"]["judge"]["usage"]) == (
        found["figures"],
        found["details"]["judge"]["usage"],
    )
    assert found["details"]["judge"]["usage"]["judge"]["calls"] == (2 if kind == "group_judge" else 6)
    assert (values(found, "judge")["accuracy"], values(found, "judge")["tau_b"]) == (0.5, 1.0)
    assert found["figures"]["judge"]["all"]["accuracy"]["n"] == 2
    assert found["details"]["judge"]["unreadable"] == 1
    assert found["details"]["judge"]["failed"] == 0
    assert "unreadable answers, which count 0 1" in shown


def test_a_dead_server_is_reported_and_the_rest_scored_later(rank):
    """Dies after the first group; then only the second one is judged."""
    answer_to = load_stand_in_judge().answer_to
    with FaultServer() as server:
        server.reply, server.dies_after = answer_to, 1
        judge = judge_at(server.url, "group_judge", limits=LIMITS | {"max_concurrent_groups": 1})
        code, found, shown = rank(TRANSLATIONS, {"judge": judge})
        assert code == 1
        assert values(found, "judge")["accuracy"] == 1.0
        assert found["figures"]["judge"]["all"]["accuracy"]["n"] == 1
        assert (found["details"]["judge"]["failed"], found["details"]["judge"]["unreadable"]) == (1, 0)
        assert "groups without a value 1" in shown
        assert "Run the same command to score them again" in shown
        code, _, shown = rank(TRANSLATIONS, {"judge": judge})  # still dead
        assert code == 2
        assert f"{server.url}/v1/models: nothing listens there" in shown
        server.dies_after = None
        server.live()
        server.requests.clear()
        code, found, _ = rank(TRANSLATIONS, {"judge": judge})
        assert (code, len(server.requests)) == (0, 1)
        assert found["details"]["judge"]["usage"]["judge"]["calls"] == 3  # of both commands: one was lost
    assert "A good morning" in server.contents()[0]
    assert values(found, "judge")["accuracy"] == 0.5


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1, "two"]}, "groups.jsonl: row 2: `scores` should be finite numbers, and one is 'two'"),
        ({"scores": [1, None]}, "row 2: `scores` should be finite numbers, and one is None"),
        ({"scores": [1, float("nan")]}, "row 2: `scores` should be finite numbers, and one is nan"),
        ({"scores": 3}, "row 2: `scores` should be a list with an entry per candidate, not 3"),
        ({"scores": [1, 2, 3]}, "row 2: `scores` has 3 entries for 2 candidates"),
        ({"responses": ["x"], "scores": [1]}, "row 2: `responses` has 1 candidate; ranking takes two"),
        ({"responses": ["x", 5]}, "row 2: a response should be text, not 5"),
        ({"systems": ["a"]}, "row 2: `systems` has 1 entries for 2 candidates"),
        ({"systems": ["a", "a"]}, "row 2: `systems` names a system twice: a, a"),
    ],
)
def test_a_bad_row_is_reported_in_one_line(rank, change, message):
    rows = groups(([1, 2], [1, 2]), ([1, 2], [1, 2]), systems=["a", "b"])
    rows[1] |= change
    code, found, shown = rank(rows, {"longer": LONGER})
    assert (code, found) == (2, {})
    assert message in shown


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "?", "responses": ["a", "b"]}, {}, "--scores: .*: has none of `scores`, `labels` or `label` .found: prompt, "),
        ({"prompt": "?", "scores": [1, 2]}, {}, "--candidates: .*: has none of `mt_texts`, `responses` or `completions`"),
        ({"responses": ["a", "b"], "scores": [1, 2]}, {}, "column 'prompt' is missing"),
        (GROUP, {"scores": "score"}, "--scores: .*: has no column 'score' .*Did you mean scores"),
        (GROUP, {"systems": "system"}, "--systems: .*: has no column 'system'"),
        (GROUP | {"src_lang": "xx"}, {}, "row 1: .*src_lang.*xx"),
        (GROUP | {"src_text": 5}, {}, "row 1: column 'src_text' should be text"),
    ],
)
def test_missing_columns_are_named(tmp_path, row, options, message):
    file = write_jsonl(tmp_path / "groups.jsonl", [row])
    with pytest.raises(DataError, match=message):
        read_groups([Source(file)], GroupColumns(**options))


def test_a_file_that_is_given_twice(tmp_path):
    file = write_jsonl(tmp_path / "groups.jsonl", [GROUP])
    with pytest.raises(DataError, match="is given twice"):
        read_groups([Source(file), Source(file)], GroupColumns())
