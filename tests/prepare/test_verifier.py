"""`plaudit prepare verifier-sft`: labelled answers → conversations that train a verifier."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_prompts
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, RecipeError
from plaudit.prepare.maths import make_math_rl
from plaudit.prepare.verifier import LabelledColumns, make_verifier_sft
from support.judges import backend_of, collect, make
from support.rewards import group
from support.rows import write_jsonl

ROW = {"question": "2 + 3?", "answer": "5", "response": "five", "label": True}


def labelled(folder: Path, *changes: dict) -> Path:
    return write_jsonl(folder / "labelled.jsonl", [ROW | change for change in changes or ({},)])


def sft(file: Path, out: Path, **settings) -> list[tuple[str, str]]:
    """Prompts and verdicts."""
    make_verifier_sft([file], out, **{"report": lambda _: None, **settings})
    conversations = [row["messages"] for row in read_rows(out)]
    assert {tuple(turn["role"] for turn in turns) for turns in conversations} == {("user", "assistant")}
    return [(turns[0]["content"], turns[1]["content"]) for turns in conversations]


def test_prompts_are_those_of_the_verifier_that_the_model_will_be(tmp_path):
    """Verbatim, for a policy with rows of `math-rl`, in a cascade that shows its final answer only."""
    response = "Two and three\nmake a sum.\nThe answer is \\boxed{\\text{five}}."
    [(prompt, verdict)] = sft(labelled(tmp_path, {"response": response}), tmp_path / "sft.parquet", extract="answer")
    make_math_rl([write_jsonl(tmp_path / "policy.jsonl", [{"question": "2 + 3?", "answer": "5"}])], tmp_path / "policy.parquet")
    [policy] = read_prompts(Source(tmp_path / "policy.parquet"))
    reward = make("judge", "True", parser="true_false", view={"extract": "answer"})
    collect(reward, replace(group(response), prompt=policy))
    [(question, _)] = backend_of(reward).calls
    assert (prompt, verdict) == (question, "True")


def test_labels_may_be_booleans_numbers_and_text(tmp_path):
    labels = [True, 1, 1.0, "true", " True ", "1", False, 0, 0.0, "false", "FALSE", "0"]
    made = sft(labelled(tmp_path, *({"response": f"n{i}", "label": label} for i, label in enumerate(labels))), tmp_path / "s.jsonl")
    verdicts = {prompt.partition("# Final answer\n")[2].partition("\n")[0]: verdict for prompt, verdict in made}
    assert verdicts == {f"n{i}": "True" if i < 6 else "False" for i in range(12)}


def test_columns_have_any_name(tmp_path):
    row = {"problem": "2 + 3?", "reference": 5, "answer": "five", "is_correct": False}
    columns = LabelledColumns(answer="answer", label="is_correct")
    [(prompt, verdict)] = sft(write_jsonl(tmp_path / "l.jsonl", [row]), tmp_path / "s.parquet", columns=columns)
    assert "# Question\n2 + 3?\n\n# Reference answer\n5\n\n# Final answer\nfive\n" in prompt
    assert verdict == "False"


def test_balance_draws_from_the_larger_class(tmp_path):
    file = labelled(tmp_path, *({"response": f"n{i}", "label": i < 30} for i in range(40)))
    summary = make_verifier_sft([file], tmp_path / "s.parquet", balance=True)
    assert str(summary) == "20 rows of 20 answers, 10 of them right; 20 right answers were left out by --balance"
    first = sft(file, tmp_path / "a.parquet", balance=True, seed=1)
    assert Counter(verdict for _, verdict in first) == {"True": 10, "False": 10}
    assert first == sft(file, tmp_path / "b.parquet", balance=True, seed=1)
    assert sorted(first) != sorted(sft(file, tmp_path / "c.parquet", balance=True, seed=2)), "others are drawn"
    assert len({prompt for prompt, _ in first}) == 20


def test_all_rows_are_shuffled(tmp_path):
    file = labelled(tmp_path, *({"response": f"n{i}", "label": i < 30} for i in range(40)))
    made = sft(file, tmp_path / "s.parquet")
    assert len({prompt for prompt, _ in made}) == 40
    assert 0 < [verdict for _, verdict in made][:20].count("False") < 10


def test_responses_without_a_final_answer_are_left_out(tmp_path):
    file = labelled(tmp_path, {"response": "So \\boxed{5}."}, {"response": "Let us think.", "label": False})
    summary = make_verifier_sft([file], tmp_path / "s.parquet", extract="answer", report=lambda _: None)
    assert str(summary) == "1 rows of 1 answers, 1 of them right; 1 had nothing that --extract answer finds"


def test_one_kind_of_answers_is_reported(tmp_path):
    lines: list[str] = []
    sft(labelled(tmp_path), tmp_path / "s.parquet", report=lines.append)
    assert lines == [f"{tmp_path / 'labelled.jsonl'}: no answer is wrong: a verifier is trained on both kinds"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "maybe"}, "row 2: column 'label': 'maybe' should be true or false"),
        ({"label": None}, "row 2: column 'label': None should be true or false"),
        ({"label": 0.5}, "row 2: column 'label': 0.5 should be true or false"),
        (
            {"answer": ""},
            "row 2: column 'answer' should be text, not an empty str",
        ),
        ({"response": None}, "row 2: column 'response' should be text"),
        ({"question": 3}, "row 2: column 'question' should be text, not int"),
    ],
)
def test_bad_rows_are_named_or_left_out(tmp_path, change, message):
    file = labelled(tmp_path, {}, change)
    with pytest.raises(DataError, match=message):
        sft(file, tmp_path / "s.parquet")
    assert not (tmp_path / "s.parquet").exists()
    assert len(sft(file, tmp_path / "s.parquet", skip_bad=True)) == 1


def test_a_missing_column_is_reported(tmp_path):
    with pytest.raises(DataError, match=r"column 'right' is missing \(found: .*\). --label-column names another one"):
        sft(labelled(tmp_path), tmp_path / "s.parquet", columns=LabelledColumns(label="right"))
    file = write_jsonl(tmp_path / "l.jsonl", [{"question": "2 + 3?", "ground_truth": "5", "answer": "5", "label": 1}])
    with pytest.raises(
        DataError, match=r"no column `response`, `completion` or `output` .*; name the right one with --answer-column"
    ):
        sft(file, tmp_path / "s.parquet")


def test_templates_of_ones_own(tmp_path):
    """Joined from columns or rendered row by row, the prompts are the same."""
    for name, source in {
        "plain": "{{ ground_truth }} or {{ response }}?",
        "filter": "{{ ground_truth | trim }} or {{ response }}?",
    }.items():
        (tmp_path / f"{name}.jinja").write_text(source)
        [(prompt, _)] = sft(labelled(tmp_path), tmp_path / f"{name}.parquet", template=tmp_path / f"{name}.jinja")
        assert prompt == "5 or five?"
    (tmp_path / "wrong.jinja").write_text("{{ reference }}")
    with pytest.raises(RecipeError, match="uses reference, which this kind does not provide"):
        sft(labelled(tmp_path), tmp_path / "wrong.parquet", template=tmp_path / "wrong.jinja")


def test_real_questions(tmp_path, real_data):
    """A reference is a right answer to its own question, and mostly a wrong one to the next."""
    rows = [row for row in read_rows(real_data / "bigmath_tinyv.parquet")[:400] if row["reward_model"]["ground_truth"].strip()]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    answers = [
        {"question": row["extra_info"]["question"], "ground_truth": truth, "response": answer, "label": answer == truth}
        for row, truth, other in zip(rows, truths, [truths[-1], *truths[:-1]], strict=True)
        for answer in dict.fromkeys((truth, other))
    ]
    made = sft(write_jsonl(tmp_path / "l.jsonl", answers), tmp_path / "s.parquet", balance=True)
    counts = Counter(verdict for _, verdict in made)
    assert counts["True"] == counts["False"] > 300
    assert all(question["extra_info"]["question"] in "".join(prompt for prompt, _ in made) for question in rows[:3])
