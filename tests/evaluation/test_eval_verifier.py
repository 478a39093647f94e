"""`plaudit eval verifier`: rates by hand, a rule and a judge alone and together, failures, bad labels."""

import json
from typing import Any

import pytest

from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_group
from plaudit.evaluation.verifier import read_labelled
from support.evaluation import answers, judge_at
from support.fault_server import FaultServer
from support.paths import REPOSITORY
from support.recipes import write_recipe
from support.rows import write_jsonl
from support.servers import load_stand_in_judge, stand_in_judge

EXACT = {"kind": "exact"}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("plaudit.evaluation.pictures.draw_verifier", lambda *_: None)


def answer(response: str, label: Any, source: str = "sums", truth: str = "4") -> dict:
    return {"prompt": "2 + 2 =", "response": response, "ground_truth": truth, "label": label, "data_source": source}


ANSWERS = [
    answer("4", True),
    answer("four", True),
    answer("5", False),
    answer("4", False, "trick"),
    answer("6", False, "trick"),
    answer("4", True, "trick"),
]
"""By `exact`: of 3 right answers one is rejected, of 3 wrong ones one is accepted."""


@pytest.fixture
def verify(plaudit, tmp_path):
    """Runs the command on these rows; returns its exit code, eval.json and all that it printed."""

    def run(rows: list[dict], rewards: dict[str, dict[str, Any]], *options: Any) -> tuple[int, dict, str]:
        file = write_jsonl(tmp_path / "answers.jsonl", rows)
        recipes = [write_recipe(tmp_path / f"{name}.yaml", {"rewards": [reward]}) for name, reward in rewards.items()]
        out = tmp_path / "out"
        code, stdout, stderr = plaudit(
            "eval", "verifier", file, "--rewards", *recipes, "--out", out, "--resamples", 100, *options
        )  # fmt: skip
        found = json.loads((out / "eval.json").read_text()) if (out / "eval.json").exists() else {}
        return code, found, " ".join((stdout + stderr).split())

    return run


def values(found: dict, name: str, part: str = "all") -> dict[str, float]:
    return {figure: estimate["value"] for figure, estimate in found["figures"][name][part].items()}


def test_rates_by_hand(verify):
    code, found, shown = verify(ANSWERS, {"rule": EXACT})
    assert code == 0
    rates = {"accuracy": 4 / 6, "false_accept_rate": 1 / 3, "false_reject_rate": 1 / 3, "accepted": 3 / 6, "judged": 0.0}
    assert values(found, "rule") == pytest.approx(rates)
    counts = {figure: estimate["n"] for figure, estimate in found["figures"]["rule"]["all"].items()}
    assert counts == {"accuracy": 6, "false_accept_rate": 3, "false_reject_rate": 3, "accepted": 6, "judged": 6}
    sums = {"accuracy": 2 / 3, "false_accept_rate": 0.0, "false_reject_rate": 0.5, "accepted": 1 / 3, "judged": 0.0}
    assert values(found, "rule", "data source/sums") == pytest.approx(sums)
    trick = {"accuracy": 2 / 3, "false_accept_rate": 0.5, "false_reject_rate": 0.0, "accepted": 2 / 3, "judged": 0.0}
    assert values(found, "rule", "data source/trick") == pytest.approx(trick)
    assert found["inputs"] | {"rows": 6, "answers": 6, "right": 3, "threshold": 0.5} == found["inputs"]
    assert "accuracy 66.7" in shown


def test_an_answer_is_accepted_from_the_threshold_on(verify):
    half = EXACT | {"scale": 0.5}
    assert values(verify(ANSWERS, {"half": half})[1], "half")["accepted"] == 0.5  # 0.5 is enough
    assert values(verify(ANSWERS, {"half": half}, "--threshold", 0.51)[1], "half")["accepted"] == 0.0


@pytest.mark.parametrize("label", ["correct", None])
def test_several_answers_in_a_row_and_other_columns(verify, label):
    name = label or "labels"
    rows = [{"question": "2 + 2 =", "responses": ["4", "5", "4"], "answer": "4", name: ["true", 0, False]}]
    code, found, _ = verify(rows, {"rule": EXACT}, *(["--label", label] if label else []))
    assert (code, found["inputs"]["answers"]) == (0, 3)
    assert values(found, "rule")["accuracy"] == pytest.approx(2 / 3)


def test_answers_to_one_question_are_drawn_together(verify):
    """All are answers to the same question: there is nothing else to draw."""
    _, found, _ = verify(ANSWERS, {"rule": EXACT})
    interval = found["figures"]["rule"]["all"]["accuracy"]
    assert interval["low"] == interval["high"] == interval["value"]


@pytest.mark.parametrize("prompt", ["in messages", "missing"])
def test_rows_whose_messages_have_the_prompt_and_rows_without_one(verify, prompt):
    """Messages end with the answers, which differ. Without a prompt there is nothing that rows have in common."""

    def row(said: str) -> dict[str, Any]:
        conversation = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": said}]
        return {"messages": conversation} if prompt == "in messages" else {"response": said}

    _, found, _ = verify([row(said) | {"ground_truth": "4", "label": True} for said in ("4", "5")], {"rule": EXACT})
    interval = found["figures"]["rule"]["all"]["accuracy"]
    assert (interval["value"], interval["n"]) == (0.5, 2)
    assert (interval["low"] == interval["high"]) == (prompt == "in messages")


def test_rewards_do_not_see_the_label(tmp_path):
    info = {"label": True, "labels": [True], "topic": "sums"}
    file = write_jsonl(tmp_path / "answers.jsonl", [answer("4", True) | {"extra_info": json.dumps(info)}])
    [row] = read_labelled([Source(file)], None)
    assert parse_group(row.row, row.id, row.where).prompt.extra_info == {"topic": "sums", "ground_truth": "4"}


def test_judges_that_compare_do_not_always_see_the_right_answer_first(verify):
    """Of pairs it is the first one in the file."""
    firsts = list[str]()

    def record(_: str, shown: list[str]) -> list[float]:
        firsts.append(shown[0].split()[0])
        return [1.0, 0.0]

    rows = [{"prompt": f"question {i}", "chosen": f"right {i}", "rejected": f"wrong {i}"} for i in range(20)]
    with stand_in_judge(answer_to=answers(record)) as url:
        code, _, shown = verify(rows, {"judge": judge_at(url, "group_judge")})
    assert code == 0, shown
    assert set(firsts) == {"right", "wrong"}


# Rule and judge ------------------------------------------------------------------------------------------------------


def verifier_at(url: str) -> dict[str, Any]:
    limits = {"backoff_s": 0.01, "retries": 0, "unreadable_retries": 0}
    return judge_at(url, "judge", parser="true_false", limits=limits)


def test_rule_judge_and_both(verify):
    """The stand-in judge accepts what holds the reference."""
    rows = [
        answer("4", True),  # both accept it
        answer("It is 4", True),  # the judge alone
        answer("four", True),  # neither
        answer("14", False),  # the judge alone
        answer("5", False),  # neither
    ]
    with stand_in_judge() as url:
        judge = verifier_at(url)
        rewards = {
            "rule": EXACT,
            "judge": judge,
            "addon": {"kind": "cascade", "mode": "addon", "rule": EXACT, "judge": judge},
            "mixed": {"kind": "cascade", "mode": "mixed", "judge_weight": 0.5, "rule": EXACT, "judge": judge},
        }
        code, found, shown = verify(rows, rewards, "--threshold", 0.75)
    assert code == 0
    figures = {name: values(found, name) for name in rewards}
    assert {name: own["false_accept_rate"] for name, own in figures.items()} == {"rule": 0, "judge": 0.5, "addon": 0.5, "mixed": 0}
    rejected = {name: round(3 * own["false_reject_rate"]) for name, own in figures.items()}
    assert rejected == {"rule": 2, "judge": 1, "addon": 1, "mixed": 2}
    assert {name: own["judged"] for name, own in figures.items()} == {"rule": 0, "judge": 1, "addon": 0.8, "mixed": 1}
    calls = {name: own["usage"]["stand-in"]["calls"] for name, own in found["details"].items() if own["usage"]}
    assert calls == {"judge": 5, "addon": 4, "mixed": 5}
    assert "addon: stand-in: 4 calls" in shown
    assert found["differences"]["rule - addon"]["all"]["false_accept_rate"]["value"] == -0.5
    assert found["differences"]["judge - addon"]["all"]["judged"]["value"] == pytest.approx(0.2)


@pytest.mark.slow
def test_the_shipped_recipes(plaudit, tmp_path, monkeypatch):
    """On the answers that ship with them: addon calls the judge only where the rule rejects, and mixed by 0.5 accepts the same."""
    monkeypatch.chdir(REPOSITORY)
    names = ["rule", "judge", "addon", "mixed"]
    with stand_in_judge() as url:
        for name in names:
            recipe = (REPOSITORY / f"recipes/eval/verifier_{name}.yaml").read_text().replace("http://127.0.0.1:8000", url)
            (tmp_path / f"{name}.yaml").write_text(recipe.replace("{kind: math}", "{kind: math, workers: 1}"))
        recipes = [tmp_path / f"{name}.yaml" for name in names]
        out = tmp_path / "out"
        code, *_ = plaudit(
            "eval", "verifier", "recipes/eval/answers.jsonl", "--rewards", *recipes, "--out", out, "--resamples", 100
        )  # fmt: skip
    found = json.loads((out / "eval.json").read_text())
    figures = {name: values(found, name) for name in names}
    assert (code, found["inputs"]["answers"]) == (0, 36)
    assert figures["rule"]["false_accept_rate"] == 0.0 < figures["addon"]["false_accept_rate"]
    assert figures["addon"]["false_reject_rate"] < figures["rule"]["false_reject_rate"]
    assert figures["addon"]["judged"] == pytest.approx(1 - figures["rule"]["accepted"])
    assert figures["mixed"]["accepted"] == figures["addon"]["accepted"]


# Failures ------------------------------------------------------------------------------------------------------------


def test_failures_are_beside_the_figures_whatever_training_does_with_them(verify):
    """`on_failure` gives an answer without a reference 0.9 in training; here it has no value."""
    rows = [answer("4", True), answer("4", False) | {"ground_truth": None}]
    code, found, shown = verify(rows, {"rule": EXACT | {"on_failure": 0.9}})
    assert code == 1
    assert values(found, "rule") == {"accuracy": 1.0, "false_reject_rate": 0.0, "accepted": 1.0, "judged": 0.0}
    assert found["details"]["rule"] | {"failed": 1, "items": 2, "without a value": 1} == found["details"]["rule"]
    assert "answers without a value 1" in shown
    assert "rule: 1 responses without a value (no_ground_truth)" in shown
    assert "1 of rule" in shown


def test_unreadable_and_lost_verdicts_are_scored_again(verify):
    answer_to = load_stand_in_judge().answer_to
    with FaultServer() as server:
        server.reply = lambda prompt: "Well." if "four" in prompt else answer_to(prompt)
        code, found, shown = verify(ANSWERS, {"judge": verifier_at(server.url)})
        assert code == 1
        assert found["figures"]["judge"]["all"]["accuracy"]["n"] == 5
        assert found["details"]["judge"]["failures"] == {"unparsable": 1}
        assert "1 of judge" in shown
        server.reply = answer_to
        server.requests.clear()
        code, found, _ = verify(ANSWERS, {"judge": verifier_at(server.url)})
        assert (code, len(server.requests)) == (0, 1)
    assert found["figures"]["judge"]["all"]["accuracy"]["n"] == 6


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": None}, "answers.jsonl: row 2: has no 'label': every answer needs one, true or false"),
        ({"label": "perhaps"}, "row 2: label should be true, false or a number, not 'perhaps'"),
        ({"label": 0.7}, "row 2: label should be true or false (1 or 0), not 0.7"),
        ({"label": [True, False]}, "row 2: label: has 2 entries for 1 responses"),
        ({"response": None}, "row 2: has no response"),
    ],
)
def test_a_bad_row_is_reported_in_one_line(verify, change, message):
    code, found, shown = verify([ANSWERS[0], ANSWERS[1] | change], {"rule": EXACT})
    assert (code, found) == (2, {})
    assert message in shown


def test_a_missing_label_column_is_named(verify):
    rows = [{name: value for name, value in row.items() if name != "label"} | {"correct": 1} for row in ANSWERS]
    code, _, shown = verify(rows, {"rule": EXACT})
    assert code == 2
    assert "has no column 'label' (found: prompt, response, ground_truth, data_source, correct)" in shown
    code, _, shown = verify(rows, {"rule": EXACT}, "--label", "corect")
    assert "has no column 'corect'" in shown
    assert "Did you mean correct?" in shown
