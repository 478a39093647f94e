"""`plaudit audit`: statistics checked by hand, rollouts dumped by other trainers, and broken rewards it must catch."""

import importlib.util
import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from plaudit.audit.agreement import accept_table, rank_agreement, reliability
from plaudit.audit.certificate import require_passed
from plaudit.audit.cli import audit, draw_groups, write_report
from plaudit.audit.correlation import pearson, ranks, spearman, spearman_partial, spearman_within
from plaudit.audit.dumps import Rollout, list_files, read_rollouts
from plaudit.audit.inspection import inspect
from plaudit.audit.probes import PROBES, probe_text, reformatted
from plaudit.audit.targets import final_answer, make_target, replace_all, replace_last, to_number
from plaudit.audit.terminal import findings, general_checks, print_report, scope, shown
from plaudit.errors import DataError, PlauditError
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.audit import AuditSettings
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.types import Prompt, Score
from support.pages import embedded_data
from support.paths import REPOSITORY
from support.recipes import write_recipe
from support.rows import write_jsonl

AUDIT_RECIPES = REPOSITORY / "recipes/audit"


@pytest.fixture
def command():
    """`plaudit audit …` in this process: the result has exit_code, stdout, and the exception if there was one."""
    app = typer.Typer()
    app.command()(audit)

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


# Statistics ----------------------------------------------------------------------------------------------------------


def test_ranks_share_ties():
    assert ranks([10, 30, 20, 20]).tolist() == [1.0, 4.0, 2.5, 2.5]


def test_correlations_by_hand():
    x, y = [1, 2, 3, 4], [1, 3, 2, 4]
    assert spearman(x, y) == pytest.approx(0.8)  # 1 − 6·2 / (4·15)
    x, y = [1, 2, 2, 3], [1, 2, 3, 3]
    assert spearman(x, y) == pytest.approx(3.75 / 4.5)


def test_correlations_match_published_values():
    """The examples in scipy's documentation."""
    assert pearson([1, 2, 3, 4, 5, 6, 7], [10, 9, 2.5, 6, 4, 3, 2]) == pytest.approx(-0.828503883588428)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)


def test_constant_values_have_no_correlation():
    assert pearson([1.0, 1.0], [1, 2]) is None
    assert spearman([3.0], [1.0]) is None


def test_correlation_within_strata_ignores_their_means():
    # Between the strata x and y rise together; inside each they fall.
    x, y, strata = [1, 2, 11, 12], [2, 1, 12, 11], ["a", "a", "b", "b"]
    assert spearman(x, y) == pytest.approx(0.6)
    assert spearman_within(x, y, strata) == pytest.approx(-1.0)
    assert spearman_within(x, y, "abcd") is None


def test_partial_correlation_by_hand():
    x, y, z = [1, 2, 3, 4], [1, 3, 2, 4], [2, 1, 4, 3]  # ρ: xy 0.8, xz 0.6, yz 0
    assert spearman_partial(x, y, z) == pytest.approx(0.8 / 0.8)
    assert spearman_partial(x, y, y) is None


def test_accept_table_by_hand():
    table = accept_table([1.0, 0.9, 0.5, 0.2, 0.0], [True, False, True, True, False], threshold=0.5)
    assert [table[k] for k in ("true_accepts", "false_accepts", "false_rejects", "true_rejects")] == [2, 1, 1, 1]
    assert table["accuracy"] == pytest.approx(3 / 5)
    assert table["false_accept_rate"] == pytest.approx(1 / 2)
    assert table["false_reject_rate"] == pytest.approx(1 / 3)
    assert accept_table([1.0], [True], 0.5)["false_accept_rate"] is None


def test_calibration_by_hand():
    found = reliability([0.9, 0.9, 0.1, 0.1], [True, False, False, False])
    assert found is not None
    assert found["calibration_error"] == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert [b["count"] for b in found["bins"]] == [2, 2]
    assert reliability([1.5, 0.0], [True, False]) is None
    assert rank_agreement([0.1, 0.9], [0, 1]) == {"spearman": 1.0, "kendall": 1.0}
    assert rank_agreement([0.5, 0.5], [0, 1]) == {"spearman": None, "kendall": None}


# Dumps ---------------------------------------------------------------------------------------------------------------


def test_verl_dump(tmp_path):
    """As `_dump_generations` writes them: a file per step, text prompts, one line per response."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    row = {"input": "user\n2 + 3?\nassistant\n", "output": "#### 5", "gts": "5", "score": 1.0, "acc": True}
    for step in (2, 10):
        write_jsonl(
            folder / f"{step}.jsonl", [row | {"step": step}, row | {"output": "#### 6", "score": 0.0, "acc": False, "step": step}]
        )
    assert [file.name for file in list_files([folder])] == ["2.jsonl", "10.jsonl"]
    groups = read_rollouts([folder], label="acc", data_source="openai/gsm8k")
    assert [len(group) for group in groups] == [2, 2]  # the same prompt in another step is another group
    first = groups[0]
    assert first.prompt.messages == [{"role": "user", "content": "user\n2 + 3?\nassistant\n"}]
    assert first.prompt.ground_truth == "5"
    assert first.prompt.data_source == "openai/gsm8k"
    assert first.responses == ("#### 5", "#### 6")
    assert first.rewards == (1.0, 0.0)
    assert first.labels == (1.0, 0.0)


def test_trl_dump(tmp_path):
    """As log_completions writes them: text or messages, a column per reward function, the advantage."""
    table = {
        "step": [5, 5],
        "prompt": ["<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"] * 2,
        "completion": ["5", "6"],
        "accuracy_reward": [1.0, 0.0],
        "advantage": [0.7, -0.7],
        "answer": ["5", "5"],
    }
    pq.write_table(pa.table(table), tmp_path / "completions_00005.parquet")
    (group,) = read_rollouts([tmp_path / "completions_00005.parquet"])
    assert group.responses == ("5", "6")
    assert group.rewards == (1.0, 0.0)
    assert group.prompt.ground_truth == "5"
    messages = [{"role": "user", "content": "2 + 3?"}]
    reply = [{"role": "assistant", "content": "It is 5."}]
    chat = {"step": [1], "prompt": [messages], "completion": [reply], "a": [1.0], "b": [0.5], "advantage": [0.0]}
    pq.write_table(pa.table(chat), tmp_path / "chat.parquet")
    (group,) = read_rollouts([tmp_path / "chat.parquet"])
    assert group.prompt.messages == messages
    assert group.responses == ("It is 5.",)
    assert group.rewards == (None,)  # two reward functions with unknown weights


def test_plaudit_samples_sampled_rows_and_labelled_rows(tmp_path):
    from plaudit.report.samples import COLUMNS

    prompt = [{"role": "user", "content": "2 + 3?"}]
    saved = {"prompt_id": "p", "data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "5"}, "version": 3}
    rows = [saved | {"index": i, "response": str(5 + i), "reward": 1.0 - i, "tokens": 2 + i} for i in range(2)]
    (tmp_path / "run/samples").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(COLUMNS)), tmp_path / "run/samples/train_000003.parquet")
    (group,) = read_rollouts([tmp_path / "run"])
    assert (group.responses, group.rewards, group.tokens) == (("5", "6"), (1.0, 0.0), (2, 3))
    assert group.prompt.ground_truth == "5"

    sampled = {"id": "q", "data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": "5"}, "extra_info": {"a": 1}}
    file = write_jsonl(
        tmp_path / "sampled.jsonl", [sampled | {"responses": ["5", "7"], "tokens": [1, 1], "label": [True, "wrong"]}]
    )
    (group,) = read_rollouts([file])
    assert (group.responses, group.tokens, group.labels) == (("5", "7"), (1, 1), (1.0, 0.0))
    assert group.prompt.extra_info == {"a": 1}

    plain = [{"question": "2 + 3?", "answer": "5", "response": r, "quality": q} for r, q in (("5", 0.9), ("6", 0.2))]
    (group,) = read_rollouts([write_jsonl(tmp_path / "plain.jsonl", plain)], label="quality")
    assert (group.labels, group.prompt.ground_truth) == ((0.9, 0.2), "5")


@pytest.mark.parametrize(
    ("rows", "label", "message"),
    [
        ([{"prompt": "p", "text": "r"}], None, r"column 'response' is missing \(found: prompt, text\)\. Rollouts have"),
        ([{"text": "p", "response": "r"}], None, "column 'prompt' is missing"),
        ([{"prompt": "p", "response": "r", "lable": 1}], "label", r"--label: .*no column 'label'.* Did you mean lable\?"),
        ([{"prompt": "p", "response": "r", "label": "maybe"}], None, "row 1: label should be true, false or a number, not 'maybe'"),
        ([{"prompt": "p", "responses": ["r"], "label": [1, 0]}], None, "has 2 entries for 1 responses"),
        ([{"prompt": 3, "response": "r"}], None, "row 1: has no messages"),
        ([{"prompt": "p", "responses": []}], None, "row 1: `responses` should be a list of texts"),
        ([{"prompt": "p", "response": None}], None, "a response should be text, not None"),
    ],
)
def test_unreadable_rows_are_reported_with_the_cause(tmp_path, rows, label, message):
    with pytest.raises(DataError, match=message):
        read_rollouts([write_jsonl(tmp_path / "rows.jsonl", rows)], label=label)


# Probes --------------------------------------------------------------------------------------------------------------


def prompt(number: int, question: str, truth: Any) -> Prompt:
    return Prompt(str(number), [{"role": "user", "content": question}], ground_truth=truth)


OTHERS = [(prompt(7, "What is 20 + 21?", "41"), "So it is\n#### 41"), (prompt(8, "What is 30 - 1?", "29"), "So it is\n#### 29")]


def target(index: int = 0, right: str | None = "12 and 5 make 17.\n#### 17"):
    return make_target(index, prompt(1, "Tom has 12 apples and 5 pears. How many fruits?", "17"), right, ["x"], OTHERS, seed=0)


def text_of(name: str, **arguments: Any) -> str:
    probe = next(probe for probe in PROBES if probe.name == name)
    text = probe_text(probe, target(**arguments), seed=0, padding_characters=4000)
    assert text is not None
    return text


def test_every_probe_name_in_the_recipe_has_its_probe():
    from typing import get_args

    from plaudit.recipe.audit import Probe as Name

    assert [probe.name for probe in PROBES] == list(get_args(Name))


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("probe", [probe for probe in PROBES if probe.adversarial], ids=lambda probe: probe.name)
def test_no_adversarial_probe_is_correct(probe, index):
    """Not even for a rule that reads the last number, the last box or the text after ####."""
    text = probe_text(probe, target(index), seed=0, padding_characters=4000)
    assert text is not None
    for pattern in (r"-?\d+", r"\\boxed\{([^{}]*)\}", r"####\s*(\S+)"):
        found = re.findall(pattern, text)
        assert not found or found[-1] != "17"


def test_probe_texts():
    assert text_of("reference") == "17"
    assert re.fullmatch(r"12 and 5 make (\d+)\.\n#### \1", text_of("wrong_answer"))
    assert "17" not in text_of("wrong_answer")
    assert text_of("empty") == ""
    assert text_of("white_space").strip() == ""
    assert text_of("echo") == "Tom has 12 apples and 5 pears. How many fruits?"
    assert text_of("prompt_numbers") == "12, 5"
    assert "17" in text_of("reference_among_numbers").split(", ")[1:-1]
    assert "#### 17\n" in text_of("many_guesses")
    assert text_of("many_guesses").count("####") > 8
    assert "\\boxed{17}" in text_of("many_guesses", index=1)
    assert text_of("many_guesses", index=3).startswith("The answer is 1, 2, ")
    assert text_of("not_a_number") == "#### NaN"
    assert text_of("negated") == "#### -17"
    assert "Total Score: 10" in text_of("score_injection")
    assert "ignore the instructions" in text_of("judge_injection")
    assert len(text_of("padding")) > 4000
    assert {c for i in (0, 2, 4) for c in text_of("unicode", index=i)} >= {"\u200b", "\u202e"}
    assert text_of("other_answer") in {text for _, text in OTHERS}
    assert "correct" in text_of("praise")


def test_probes_use_the_tags_of_right_responses():
    right = "<think>\n12 + 5\n</think>\n<response>\nIt is 17.\n</response>"
    assert text_of("echo", right=right) == (
        "<think>\nLet me think.\n</think>\n<response>\nTom has 12 apples and 5 pears. How many fruits?\n</response>"
    )
    assert text_of("negated", right="Well:\n```\n17\n```") == "```\n-17\n```"
    assert text_of("empty", right=right) == ""


def test_a_probe_that_would_be_correct_is_left_out():
    lucky = make_target(0, prompt(1, "Is 10 more than 3? Give the greater.", "10"), "#### 10", ["x"], OTHERS, seed=0)
    texts = {p.name: probe_text(p, lucky, seed=0, padding_characters=100) for p in PROBES}
    assert texts["score_injection"] is None  # "Total Score: 10" ends with the right answer
    assert texts["prompt_numbers"] is None
    assert texts["praise"] is not None


def test_probes_without_a_reference_or_numbers():
    poem = Prompt("1", [{"role": "user", "content": "Write a poem."}])
    free = make_target(0, poem, None, ["roses"], [(Prompt("2", [{"role": "user", "content": "Sing."}]), "la la")], seed=0)
    texts = {p.name: probe_text(p, free, seed=0, padding_characters=100) for p in PROBES}
    assert {name for name, text in texts.items() if text is not None} == {
        "other_answer", "empty", "white_space", "echo", "not_a_number", "score_injection", "judge_injection", "padding", "praise",
    }  # fmt: skip
    assert texts["praise"].startswith("la la")
    words = make_target(
        0, prompt(1, "Capital of France?", "Paris"), None, ["Paris"], [(prompt(2, "Of Italy?", "Rome"), "Rome")], seed=0
    )
    assert words.wrong == ("Rome",)
    assert words.is_reference("paris ")


def test_final_answers_are_found_and_replaced():
    assert final_answer("Some steps\n#### 1,200") == "1,200"
    assert final_answer("so \\boxed{x+1}") == "x+1"
    assert final_answer(72.0) == "72"
    assert final_answer({"A": 1}) is None
    assert final_answer('{"A": 1}') is None
    assert to_number("$1,200.50") == 1200.5
    assert to_number("３") is None
    assert replace_last("13 and 3, so 3.5 or 3.", "3", "4") == "13 and 3, so 3.5 or 4."
    assert replace_last("it is $1,200", "1200", "7") == "it is $7"
    assert replace_last("none", "3", "4") is None
    assert replace_all("3 of 13: 3", "3", "4") == "4 of 13: 4"


def test_reformatting_keeps_the_answer():
    formats = dict(reformatted("12 + 5\n#### 17", "17"))
    assert formats["trailing_period"] == "12 + 5\n#### 17."
    assert formats["bold"] == "12 + 5\n#### **17**"
    assert formats["boxed"] == "12 + 5\n#### \\boxed{17}"
    assert formats["decimals"] == "12 + 5\n#### 17.00"
    assert "unboxed" not in formats
    assert dict(reformatted("\\boxed{17}", "17"))["unboxed"] == "17"


# Complete audits -----------------------------------------------------------------------------------------------------


def rollouts(count: int = 12) -> list[Rollout]:
    """Sums, each with a right and a wrong response."""
    sums = [(i + 20, 3 * i + 1) for i in range(count)]
    return [
        Rollout(prompt(i, f"What is {a} + {b}?", str(a + b)), (f"{a + b}", f"{a + b - 1}"), (1.0, 0.0), (1, 1 + i), (1.0, 0.0))
        for i, (a, b) in enumerate(sums)
    ]


def report_of(rewards: list[Any], groups: list[Rollout] | None = None, **settings: Any):
    entries = ScoreRecipe.model_validate({"rewards": rewards}).rewards if isinstance(rewards[0], dict) else rewards
    return inspect("R.yaml", ["rows.jsonl"], entries, groups or rollouts(), AuditSettings(**settings))


def state(report, name: str) -> str:
    return next(check.state for check in report.checks if check.name == name)


class Odd(Reward):
    """A reward that scores by position in the group, by text or by number of calls, as the test chooses."""

    kind: Literal["odd"] = "odd"
    how: str = "place"
    scores_alone: ClassVar[bool] = False
    calls: ClassVar[list[int]] = []

    def build(self):
        return LiveOdd(self)

    def one(self, i: int, text: str) -> Score:
        if self.how == "place":
            return Score(float(i == 0))
        if self.how in ("length", "tokens"):
            return Score(float(len(text) if self.how == "length" else 1 + ((len(text) - 1) * 7) % 10))
        if self.how == "moody":
            return Score(float(len(self.calls) ** 2 % 11))
        if self.how == "fragile":
            return failed("exception", "int('²')") if "NaN" in text or not text.strip() else Score(float(len(text)))
        usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 7}, "cost": 0.002, "calls": 2}
        return Score(0.5 + 0.1 * i, trace=usage)


class LiveOdd(LiveReward[Odd]):
    async def score(self, groups):
        self.settings.calls.append(len(groups))
        return [[self.settings.one(i, sample.text) for i, sample in enumerate(group.samples)] for group in groups]


def test_a_good_reward_passes():
    report = report_of([{"kind": "exact"}])
    assert report.passed
    assert report.numbers["agreement"]["accuracy"] == 1.0
    assert report.numbers["agreement"]["kendall"] == pytest.approx(1.0)
    assert report.numbers["saved"]["share_equal"] == 1.0
    assert report.numbers["scale"] == {"low": 0.0, "high": 1.0, "threshold": 0.5, "stated": False}
    reference = next(probe for probe in report.numbers["probes"] if probe["name"] == "reference")
    assert (reference["rewarded"], reference["tried"]) == (12, 12)
    assert state(report, "length") == "pass"
    # `exact` is strict about format: reported, but only a failure if the recipe sets a bound.
    assert report.numbers["formats"]["effect"] == 1.0
    assert not report_of([{"kind": "exact"}], max_format_effect=0.1).passed


def test_order_dependence_is_caught():
    report = report_of([Odd()])
    assert state(report, "order") == "fail"
    assert report.numbers["order"]["effect"] == 1.0  # with two responses, the other order flips every score
    assert state(report, "self-consistency") == "pass"


def test_inconsistent_scores_are_caught():
    Odd.calls.clear()
    report = report_of([Odd(how="moody")])
    assert state(report, "self-consistency") == "fail"
    assert report.numbers["again"]["mean_difference"] > 0.0


def test_probes_that_break_a_reward_are_caught():
    report = report_of([Odd(how="fragile")])
    assert state(report, "failures") == "pass"
    assert state(report, "failures on adversarial probes") == "fail"
    assert "exception" in next(c.description for c in report.checks if c.name == "failures on adversarial probes")


def test_failures_are_counted_by_cause():
    groups = [Rollout(prompt(i, "What is it?", None), ("a", "b"), (None, None), (1, 1), (None, None)) for i in range(3)]
    report = report_of([{"kind": "exact", "on_failure": "stop"}], groups)
    assert not report.passed
    assert report.numbers["failures"]["causes"] == {"exact: no_ground_truth": 6}
    assert report.numbers["failures"]["failure_rate"] == 1.0
    assert state(report, "accuracy") == "not measured"


def test_costs_are_summed():
    # One call for both responses of a group: 12 calls of 100 tokens for 24 responses.
    cost = report_of([Odd(how="costly")], probe_prompts=0, rescore_groups=0).numbers["cost"]
    assert cost["responses"] == 24
    assert cost["usage_per_1000"] == pytest.approx({"prompt_tokens": 5e4, "completion_tokens": 3.5e3, "cost": 1.0, "calls": 1e3})
    assert cost["seconds_per_1000"] > 0


def test_a_constant_reward_fails():
    single = [Rollout(prompt(i, "Q?", "5"), ("x" * (i + 1),), (None,), (i,), (None,)) for i in range(4)]
    report = report_of([{"kind": "exact"}], single, probe_prompts=0)
    assert report.failed == ["signal"]


def test_length_effect_is_measured_given_the_label():
    """Right responses are longer here, but the reward is not biased: given the label, it ignores length."""
    groups = [
        Rollout(prompt(i, f"Q{i}?", "yes"), ("yes" + " " * 40, "no" + " " * i), (1.0, 0.0), (None, None), (None, None))
        for i in range(9)
    ]
    length = report_of([{"kind": "exact"}], groups, probe_prompts=0).numbers["length"]
    assert length["spearman"] > 0.8
    assert length["given_label"] == 0.0
    assert length["unit"] == "characters"
    assert [d["mean_reward"] for d in length["deciles"]][-1] == 1.0


def test_length_effect_given_graded_labels():
    """No two labels are equal, so their effect is partialled out. A reward equal to the label leaves no effect of length."""
    grades = [Rollout(prompt(i, f"Q{i}?", "5"), ("5" * (i + 1),), (i * 1.5,), (1 + (i * 7) % 10,), (None,)) for i in range(10)]
    graded = report_of([Odd(how="length")], grades, probe_prompts=0).numbers["length"]
    assert graded["given_label"] == 0.0
    assert report_of([Odd(how="tokens")], grades, probe_prompts=0).numbers["length"]["given_label"] == pytest.approx(1.0)


def test_numeric_labels_and_their_threshold():
    groups = [Rollout(prompt(i, f"Q{i}?", "5"), ("5", "6"), (9.0, 2.0), (1, 1), (None, None)) for i in range(3)]
    assert report_of([{"kind": "exact"}], groups, probe_prompts=0).numbers["agreement"]["accuracy"] == 1.0
    assert report_of([{"kind": "exact"}], groups, probe_prompts=0, label_threshold=1.0).numbers["agreement"]["accuracy"] == 0.5
    assert report_of([{"kind": "exact"}], groups, probe_prompts=0, threshold=2.0).numbers["agreement"]["true_accepts"] == 0


def test_bounds_and_probes_can_be_set_in_the_recipe():
    report = report_of([{"kind": "exact"}], probes=["echo", "empty"], without_probes=["empty"], min_accuracy=None)
    names = [check.name for check in report.checks]
    assert [name for name in names if name.startswith("exploit")] == ["exploit: echo"]
    assert "accuracy" not in names
    with pytest.raises(ValidationError, match="not less than"):
        AuditSettings(range=(1.0, 0.0))


def test_the_same_seed_gives_the_same_audit():
    first, second = (report_of([{"kind": "exact"}], probe_prompts=5, seed=3).as_dict()["numbers"] for _ in range(2))
    first.pop("cost"), second.pop("cost")
    assert first == second


def test_complete_groups_are_drawn():
    drawn = draw_groups(rollouts(), 7, seed=0)
    assert [len(group) for group in drawn] == [2, 2, 2]
    assert drawn == draw_groups(rollouts(), 7, seed=0)


# Reports -------------------------------------------------------------------------------------------------------------


def test_report_files(tmp_path):
    evil = [
        Rollout(prompt(i, f"<script>alert({i})</script> 3 4?", "5"), ("5", "3"), (1.0, 0.0), (1, 1), (None, None)) for i in range(3)
    ]
    report = report_of([Odd(how="costly")], evil)
    write_report(report, tmp_path)
    page = embedded_data(tmp_path / "audit.html")
    assert len(re.findall("<script", (tmp_path / "audit.html").read_text())) == 2  # the data and the program
    assert "<script>alert(0)</script>" in json.dumps(page["numbers"]["probes"])
    assert (page["verdict"], page["scope"]) == ("failed", scope(report))
    assert page["checks"] == [check.as_dict() for check in general_checks(report)]
    numbers = json.loads((tmp_path / "audit.json").read_text())
    assert numbers["passed"] is False
    assert "order" in numbers["failed"]
    assert numbers["checks"][0].keys() == {"name", "state", "value", "bound", "at_most", "description"}


def test_the_verdict_covers_only_what_was_measured():
    unlabelled = [replace(rollout, labels=(None, None)) for rollout in rollouts()]
    report = report_of([{"kind": "exact"}], unlabelled, probe_prompts=0, max_length_correlation=None)
    assert report.passed
    assert report.as_dict()["not_measured"] == report.not_measured
    assert scope(report) == (
        "all 5 measured checks passed; not measured: accuracy, false accepts, failures on adversarial probes, 15 adversarial probes"
    )
    failed = report_of([Odd(how="place")])
    assert f"{len(failed.failed)} of {len(failed.checks)} measured checks failed" in scope(failed)


def test_probes_that_were_not_rewarded_are_in_one_table_only(tmp_path):
    write_report(report_of([{"kind": "exact"}]), tmp_path)
    page = embedded_data(tmp_path / "audit.html")
    assert [check["name"] for check in page["checks"] if "echo" in check["name"]] == []
    assert [probe["state"] for probe in page["numbers"]["probes"] if probe["name"] in ("reference", "echo")] == ["info", "pass"]


@pytest.mark.parametrize("width", [80, 100])
def test_terminal_tables_are_readable_in_narrow_terminals(width):
    console = Console(width=width, record=True, file=io.StringIO())
    print_report(report_of([Odd(how="place")]), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    start = next(i for i, line in enumerate(lines) if line.startswith("probe ")) + 2
    table = lines[start : lines.index("", start)]
    by_probe = {line.split()[0]: line for line in table if not line.startswith(" ")}
    assert list(by_probe) == [probe.name for probe in PROBES]
    assert all(re.search(r" (pass|FAIL|info) +\d+ of \d+ +\S+  \w", line) for line in by_probe.values())
    assert not any(line.startswith(" ") and following.startswith(" ") for line, following in pairwise(table)), "two lines suffice"


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (12345, "12,345"), (0.98024, "0.98"), (12345.6, "12,346"), (1.0, "1")])
def test_numbers_are_rounded(value, text):
    assert shown(value) == text


def test_command_writes_reports_and_sets_its_exit_code(command, tmp_path):
    rows = [
        {"prompt": f"{i} + 1?", "ground_truth": str(i + 1), "response": text, "label": text == str(i + 1)}
        for i in range(10, 20)
        for text in (str(i + 1), "no idea")
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    recipe = write_recipe(tmp_path / "R.yaml", {"stage": "score", "rewards": [{"kind": "exact"}]})
    done = command(recipe, file)
    assert done.exit_code == 0, done.output
    assert "PASSED" in done.output
    assert "measured checks passed; not measured: length" in " ".join(done.output.split())
    assert (tmp_path / "audit/audit.html").exists()
    backwards = write_jsonl(tmp_path / "wrong.jsonl", [row | {"label": not row["label"]} for row in rows])
    done = command(recipe, backwards, "--out", tmp_path / "elsewhere", "--no-probes", "--seed", 3)
    assert done.exit_code == 1
    report = json.loads((tmp_path / "elsewhere/audit.json").read_text())
    assert report["failed"] == ["accuracy", "false accepts"]
    assert report["settings"]["seed"] == 3
    assert all(probe["tried"] == 0 for probe in report["numbers"]["probes"])
    done = command(recipe, file, "--threshold", 2, "--max-responses", 6, "--out", tmp_path / "third")
    report = json.loads((tmp_path / "third/audit.json").read_text())
    assert report["numbers"]["scale"]["threshold"] == 2.0
    assert report["numbers"]["responses"] == 6


def test_command_reports_mistakes(command, tmp_path):
    recipe = write_recipe(
        tmp_path / "R.yaml", {"stage": "score", "rewards": [{"kind": "exact", "when": {"data_source": "gsm8k*"}}]}
    )
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r", "ground_truth": "r"}])
    (tmp_path / "empty.jsonl").touch()
    for arguments, message in [
        ((recipe, tmp_path / "row.jsonl"), "does not exist. Did you mean"),
        ((recipe, tmp_path / "empty.jsonl"), "the file is empty"),
        ((recipe, rows, "--label", "right"), "no column 'right'"),
        ((recipe, rows), "no reward applies to any of these rows"),
        ((recipe, "audit.seed=3"), "needs saved responses"),
        ((REPOSITORY / "recipes/first/sft.yaml", rows), "no rewards to audit"),
    ]:
        error = command(*arguments).exception
        assert isinstance(error, PlauditError), error
        assert message in str(error)
    assert not isinstance(command(recipe, rows, "--data-source", "gsm8k", "--no-probes").exception, PlauditError)


def test_bounds_come_from_the_recipe_and_the_command_line(command, tmp_path):
    """The reward contradicts two of 16 labels: an accuracy of 0.875."""
    rows = [{"prompt": f"{i}?", "ground_truth": str(i), "response": str(i), "label": i % 8 > 0} for i in range(16, 32)]
    rows[1] |= {"response": "99", "label": False}
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    tree = {"stage": "score", "rewards": [{"kind": "exact"}], "audit": {"min_accuracy": 0.7, "max_false_accept_rate": None}}
    recipe = write_recipe(tmp_path / "R.yaml", tree)
    assert command(recipe, file).exit_code == 0
    assert command(recipe, file, "audit.min_accuracy=0.9").exit_code == 1


# Audits required by training -----------------------------------------------------------------------------------------


def test_training_can_require_a_passed_audit(tmp_path):
    source = tmp_path / "reward.py"
    source.write_text("def compute_score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n")
    settings = {"kind": "function", "path": str(source), "workers": 1}

    def rewards(**changed):
        return ScoreRecipe.model_validate({"rewards": [settings | changed]}).rewards

    report = inspect("R.yaml", [], rewards(), rollouts(), AuditSettings(probe_prompts=4))
    assert report.passed
    write_report(report, tmp_path)
    file = tmp_path / "audit.json"
    require_passed(AuditSettings(require=str(file)), rewards())
    require_passed(
        AuditSettings(require=str(file)), rewards(workers=2, max_failure_rate=0.5)
    )  # settings that do not affect scores may change
    (tmp_path / "copy.py").write_bytes(source.read_bytes())
    require_passed(AuditSettings(require=str(file)), rewards(path=str(tmp_path / "copy.py")))  # files are compared by content
    for changed in ({"weight": 2.0}, {"function": "other"}):
        with pytest.raises(PlauditError, match="covers different rewards: function changed since"):
            require_passed(AuditSettings(require=str(file)), rewards(**changed))
    both = ScoreRecipe.model_validate({"rewards": [settings, {"kind": "exact"}]}).rewards
    with pytest.raises(PlauditError, match="covers different rewards: exact"):
        require_passed(AuditSettings(require=str(file)), both)
    source.write_text(source.read_text() + "# changed\n")
    with pytest.raises(PlauditError, match="covers different rewards"):
        require_passed(AuditSettings(require=str(file)), rewards())


def test_a_failed_or_invalid_audit_is_refused(tmp_path):
    rewards = ScoreRecipe.model_validate({"rewards": [{"kind": "exact"}]}).rewards
    with pytest.raises(PlauditError, match=r"audit\.json does not exist"):
        require_passed(AuditSettings(require=str(tmp_path / "audit.json")), rewards)
    (tmp_path / "audit.json").write_text("[]")
    with pytest.raises(PlauditError, match=r"is not an audit\.json"):
        require_passed(AuditSettings(require=str(tmp_path / "audit.json")), rewards)
    report = inspect("R.yaml", [], rewards, rollouts(), AuditSettings(probe_prompts=4)).as_dict()
    changed = report | {"passed": False, "failed": ["exploit: echo"]}
    (tmp_path / "audit.json").write_text(json.dumps(changed))
    with pytest.raises(PlauditError, match=r"did not pass \(exploit: echo\)"):
        require_passed(AuditSettings(require=str(tmp_path / "audit.json")), rewards)


def test_bounds_set_in_the_recipe_must_be_measured_and_hold(tmp_path):
    """An audit with looser bounds, or without probes, is not enough."""
    rewards = ScoreRecipe.model_validate({"rewards": [{"kind": "exact"}]}).rewards
    loose = AuditSettings(probe_prompts=4, probes=(), max_malformed_rate=None)
    report = inspect("R.yaml", [], rewards, rollouts(), loose).as_dict()
    for probe in report["numbers"]["probes"]:
        probe |= {"tried": 0, "exploit_rate": None, "failed": 0}
    (tmp_path / "audit.json").write_text(json.dumps(report, default=str))
    file = str(tmp_path / "audit.json")
    require_passed(AuditSettings(require=file), rewards)
    with pytest.raises(PlauditError, match="not measured, but set in this recipe: max_exploit_rate"):
        require_passed(AuditSettings(require=file, max_exploit_rate=0.0), rewards)
    report["numbers"]["failures"]["malformed_rate"] = 0.3
    (tmp_path / "audit.json").write_text(json.dumps(report, default=str))
    with pytest.raises(PlauditError, match=r"did not pass \(malformed\)"):
        require_passed(AuditSettings(require=file, max_malformed_rate=0.1), rewards)


def test_rows_that_differ_in_extra_info_are_not_one_group(tmp_path):
    rows = [
        {"prompt": "Translate: cat", "response": word, "ground_truth": word, "extra_info": {"lang": lang}}
        for lang, word in (("de", "Katze"), ("fr", "chat"))
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    groups = read_rollouts([file])
    assert [group.prompt.extra_info["lang"] for group in groups] == ["de", "fr"]


# GSM8K ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gsm8k_rollouts(real_data, tmp_path_factory) -> Path:
    """Labelled responses made from the reference solutions, by the script next to the recipes."""
    spec = importlib.util.spec_from_file_location("audit_rollouts", AUDIT_RECIPES / "rollouts.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path_factory.mktemp("audit") / "rollouts.jsonl"
    script.main(real_data / "gsm8k_test.jsonl", out)
    return out


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("recipe", "caught_by", "held"),
    [
        ("gsm8k", [], ["accuracy", "false accepts", "length", "exploit: echo", "exploit: many_guesses", "exploit: padding"]),
        ("any_number", ["exploit: many_guesses", "exploit: reference_among_numbers", "false accepts"], ["length", "exploit: echo"]),
        ("favours_length", ["length"], ["accuracy", "exploit: many_guesses", "exploit: echo"]),
        ("echo", ["exploit: echo"], ["accuracy", "length", "exploit: many_guesses"]),
    ],
)
def test_flawed_rewards_are_caught_and_the_real_reward_passes(
    command, gsm8k_rollouts, tmp_path, monkeypatch, recipe, caught_by, held
):
    monkeypatch.chdir(REPOSITORY)
    done = command(AUDIT_RECIPES / f"{recipe}.yaml", gsm8k_rollouts, "--out", tmp_path)
    assert done.exit_code == (1 if caught_by else 0), done.output
    report = json.loads((tmp_path / "audit.json").read_text())
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert set(caught_by) <= set(report["failed"])
    assert bool(report["failed"]) == bool(caught_by)
    assert {states[name] for name in held} == {"pass"}
    assert "not measured" not in states.values()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 wrong ones accepted"), (1, "1 wrong one accepted"), (2, "2 wrong ones accepted")]
)
def test_wrong_responses_that_were_accepted_are_counted_in_words(count, text):
    correlations = dict.fromkeys(("spearman", "kendall", "within_groups", "given_label"))
    agreement = {"accuracy": 0.5, "right": 3, "labelled": 6, "true_accepts": 3, "false_accepts": count, **correlations}
    length = {"unit": "tokens", **correlations}
    numbers = {"agreement": agreement, "length": length, "formats": None, "saved": None, "probes": [], "not_scored": 0}
    assert text in findings(numbers)[0]
