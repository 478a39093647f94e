"""`plaudit prepare rubric-rl`: graded answers → rows that train a rubric reward model."""

from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_prompts
from plaudit.errors import DataError
from plaudit.prepare.maths import make_math_rl
from plaudit.prepare.rubric import GradedColumns, make_rubric_rl
from plaudit.rewards.rules.grade import Grade
from plaudit.types import Prompt
from support.judges import backend_of, collect, make
from support.paths import REPOSITORY
from support.rewards import group
from support.rows import write_jsonl

TEMPLATE = REPOSITORY / "recipes/rubric/judge.jinja"
ROW = {"question": "2 + 3?", "criteria": "Ten points for 5.", "answer": "It is 5.", "score": 0.7}


def graded(folder: Path, *changes: dict) -> Path:
    return write_jsonl(folder / "graded.jsonl", [ROW | change for change in changes or ({},)])


def rl(file: Path, out: Path, columns: GradedColumns = GradedColumns(), **settings) -> list[Prompt]:  # noqa: B008
    make_rubric_rl([file], out, template=TEMPLATE, columns=columns, **settings)
    return list(read_prompts(Source(out)))


def test_prompts_are_those_of_the_judge_that_the_model_will_be(tmp_path):
    """Verbatim, for a policy with rows of `math-rl` that have the same criteria."""
    [row] = rl(graded(tmp_path), tmp_path / "rrm.parquet")
    file = write_jsonl(tmp_path / "policy.jsonl", [{"question": "2 + 3?", "answer": "5", "criteria": "Ten points for 5."}])
    make_math_rl([file], tmp_path / "policy.parquet", instruction_in="system")
    [policy] = read_prompts(Source(tmp_path / "policy.parquet"))
    reward = make("judge", "Total Score: 7/10", parser="total_score", template=str(TEMPLATE))
    collect(reward, replace(group("It is 5."), prompt=policy))
    [(question, _)] = backend_of(reward).calls
    assert row.messages == [{"role": "user", "content": question}]


def test_the_truth_is_a_share_of_the_best_grade(tmp_path):
    file = graded(tmp_path, {"score": 7}, {"score": 2.5}, {"score": 10})
    prompts = rl(file, tmp_path / "rrm.jsonl", highest=10)
    assert [prompt.ground_truth for prompt in prompts] == ["0.7", "0.25", "1"]
    assert {prompt.data_source for prompt in prompts} == {"grade"}
    assert Grade(kind="grade").value(prompts[0], group("… Total Score: 7/10").samples[0]).value == pytest.approx(1.0)


def test_criteria_may_be_a_list_and_columns_have_any_name(tmp_path):
    row = {"q": "2 + 3?", "rubric": ["Five.", "Reasons."], "a": 5, "grade": 1}
    columns = GradedColumns("q", "a", "rubric", "grade")
    [prompt] = rl(write_jsonl(tmp_path / "g.jsonl", [row]), tmp_path / "rrm.parquet", columns)
    assert "Scoring Criteria:\n- Five.\n- Reasons.\n" in prompt.messages[0]["content"]
    assert "Student's Answer:\n5\n" in prompt.messages[0]["content"]
    assert {name: prompt.extra_info[name] for name in ("question", "criteria", "answer")} == {
        "question": "2 + 3?", "criteria": "- Five.\n- Reasons.", "answer": "5",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": 1.5}, "row 2: column 'score': 1.5 should be a number from 0 to 1"),
        ({"score": "good"}, "row 2: column 'score': 'good' should be a number from 0 to 1"),
        ({"score": None}, "row 2: column 'score': None should be a number from 0 to 1"),
        ({"score": True}, "row 2: column 'score': True should be a number from 0 to 1"),
        ({"criteria": None}, "row 2: column 'criteria' is empty; an answer is graded by its criteria"),
        ({"criteria": " "}, "row 2: column 'criteria' is empty; an answer is graded by its criteria"),
        ({"criteria": []}, "row 2: column 'criteria' is empty; an answer is graded by its criteria"),
        ({"criteria": [""]}, "row 2: column 'criteria' is empty; an answer is graded by its criteria"),
        ({"criteria": ["Five.", "\ud800"]}, "row 2: column 'criteria' is text with unpaired surrogates; an answer is graded"),
        ({"answer": ""}, "row 2: column 'answer' should be text"),
        ({"question": 3}, "row 2: column 'question' should be text, not int"),
    ],
)
def test_bad_rows_are_named_or_left_out(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        rl(graded(tmp_path, {}, change), tmp_path / "rrm.parquet")
    assert len(rl(graded(tmp_path, {}, change), tmp_path / "rrm.parquet", skip_bad=True, report=lambda _: None)) == 1


def test_a_missing_column_is_reported(tmp_path):
    with pytest.raises(DataError, match="column 'rubric' is missing"):
        rl(graded(tmp_path), tmp_path / "rrm.parquet", GradedColumns(rubric="rubric"))
