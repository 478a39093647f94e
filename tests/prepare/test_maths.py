"""`plaudit prepare math-rl`: questions with answers → rows for RL."""

import json
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_prompts
from plaudit.data.rows import read_rows
from plaudit.errors import DataError
from plaudit.prepare.maths import INSTRUCTION, make_math_rl
from plaudit.types import Prompt
from support.rows import write_jsonl

ROWS = [{"question": "2 + 3?", "answer": 5, "criteria": "One step.", "level": 1}, {"question": "1/2?", "answer": "\\frac12"}]


def rl(file: Path, out: Path, **settings) -> list[Prompt]:
    make_math_rl([file], out, **settings)
    return list(read_prompts(Source(out)))


def rows(folder: Path, *changes: dict) -> Path:
    return write_jsonl(folder / "rows.jsonl", [*ROWS, *(ROWS[1] | change for change in changes)])


def test_a_row_has_question_instruction_truth_and_the_other_columns(tmp_path):
    first, second = rl(rows(tmp_path), tmp_path / "rl.parquet", data_source="polaris_tinyv")
    assert first.messages == [{"role": "user", "content": f"2 + 3? {INSTRUCTION}"}]
    assert (first.ground_truth, second.ground_truth, first.data_source) == ("5", "\\frac12", "polaris_tinyv")
    assert {name: first.extra_info[name] for name in ("question", "criteria", "level", "split", "index")} == {
        "question": "2 + 3?", "criteria": "One step.", "level": 1, "split": "train", "index": 0,
    }  # fmt: skip


def test_the_instruction_may_be_a_system_message_or_nothing(tmp_path):
    [prompt, _] = rl(rows(tmp_path), tmp_path / "a.jsonl", instruction="Box it.", instruction_in="system")
    assert prompt.messages == [{"role": "system", "content": "Box it."}, {"role": "user", "content": "2 + 3?"}]
    for place in ("user", "system"):
        [prompt, _] = rl(rows(tmp_path), tmp_path / f"{place}.parquet", instruction="", instruction_in=place)
        assert prompt.messages == [{"role": "user", "content": "2 + 3?"}]


def test_the_truth_may_be_a_part_of_the_answer(tmp_path):
    file = write_jsonl(tmp_path / "g.jsonl", [{"question": "q", "answer": "a #### 3\nb\n#### 1,200 "}])
    assert rl(file, tmp_path / "h.parquet", answer_in="hashes")[0].ground_truth == "1200"
    file = write_jsonl(tmp_path / "b.jsonl", [{"problem": "q", "solution": "\\boxed{1} so \\boxed{\\frac{1}{2}}."}])
    [prompt] = rl(file, tmp_path / "b.parquet", answer_in="boxed")
    assert (prompt.ground_truth, prompt.extra_info["solution"]) == ("\\frac{1}{2}", "\\boxed{1} so \\boxed{\\frac{1}{2}}.")
    with pytest.raises(DataError, match=r"g.jsonl: row 1: column 'answer' has no a \\boxed{} answer: "):
        make_math_rl([tmp_path / "g.jsonl"], tmp_path / "x.parquet", answer_in="boxed")


@pytest.mark.parametrize(
    ("written", "truth"),
    [("(1,2)", "(1,2)"), ("$1,200,000.50", "$1200000.50"), ("1,2,3", "1,2,3"), ("1,234 and 12,34", "1234 and 12,34")],
)
def test_only_thousands_separators_are_removed(tmp_path, written, truth):
    file = write_jsonl(tmp_path / "g.jsonl", [{"question": "q", "answer": f"a #### {written}"}])
    assert rl(file, tmp_path / "h.parquet", answer_in="hashes")[0].ground_truth == truth


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("as_text", [False, True])
def test_own_fields_reach_the_rewards(tmp_path, suffix, as_text):
    extra = {"level": 3, "index": 8, "question": "old"}
    row = {"question": "q", "answer": "1", "solution": "long", "split": "dev", "ability": "x"}
    row["extra_info"] = json.dumps(extra) if as_text else extra
    lines: list[str] = []
    [prompt] = rl(write_jsonl(tmp_path / "own.jsonl", [row]), tmp_path / f"rl.{suffix}", report=lines.append)
    expected = {"level": 3, "index": 8, "question": "q", "solution": "long", "split": "dev"}
    assert {name: prompt.extra_info[name] for name in expected} == expected
    [line] = lines
    assert "left out ability, extra_info.question" in line


def test_extra_info_that_is_no_object_is_named(tmp_path):
    with pytest.raises(DataError, match=r"row 3: extra_info should be an object, not str"):
        make_math_rl([rows(tmp_path, {"extra_info": "x"})], tmp_path / "rl.parquet")


def test_sources_come_from_the_option_the_column_or_are_math(tmp_path):
    assert {prompt.data_source for prompt in rl(rows(tmp_path), tmp_path / "a.parquet")} == {"math"}
    file = write_jsonl(tmp_path / "s.jsonl", [row | {"data_source": f"s{i}"} for i, row in enumerate(ROWS)])
    assert [prompt.data_source for prompt in rl(file, tmp_path / "b.parquet")] == ["s0", "s1"]
    assert {prompt.data_source for prompt in rl(file, tmp_path / "c.parquet", data_source="x")} == {"x"}


def test_a_sample_is_drawn_by_seed(tmp_path):
    file = write_jsonl(tmp_path / "m.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(100)])
    drawn = [
        [prompt.ground_truth for prompt in rl(file, tmp_path / f"{i}.parquet", sample=10, seed=seed)]
        for i, seed in enumerate((1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
    assert [prompt.ground_truth for prompt in rl(file, tmp_path / "all.parquet")] == [str(i) for i in range(100)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "row 3: column 'answer' should be text, a number or an object, not nothing"),
        ({"answer": ["5"]}, "row 3: column 'answer' should be text, a number or an object, not list"),
        ({"answer": True}, "row 3: column 'answer' should be text, a number or an object, not bool"),
        ({"question": ""}, "row 3: column 'question' should be text, not an empty str"),
        ({"level": "hard"}, "column 'level' has values of several types"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        make_math_rl([rows(tmp_path, change)], tmp_path / "rl.parquet")
    assert not (tmp_path / "rl.parquet").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [({"meta": {}}, "meta"), ({"meta": {"a": [{}]}}, "meta.a.item"), ({"extra_info": {"a": {}}}, "extra_info.a")],
)
def test_objects_without_fields_need_jsonl(tmp_path, change, name):
    file = rows(tmp_path, change)
    with pytest.raises(DataError, match=f"column '{name}' has objects without any field, which parquet cannot store"):
        make_math_rl([file], tmp_path / "rl.parquet")
    assert len(rl(file, tmp_path / "rl.jsonl")) == 3


def test_missing_columns_are_reported(tmp_path):
    file = write_jsonl(tmp_path / "o.jsonl", [{"frage": "2 + 3?", "answer": "5"}])
    with pytest.raises(
        DataError, match=r"o.jsonl: there is no column .prompt., .*found: frage, answer.; name the right one with --question-column"
    ):
        make_math_rl([file], tmp_path / "rl.parquet")
    assert rl(file, tmp_path / "rl.parquet", question_column="frage")[0].extra_info["question"] == "2 + 3?"


def test_other_tasks_than_maths_have_prompts_for_several_reward_models(tmp_path):
    """The rows of several_rms: a task, a reward model's prompt, an object as reference."""
    raw = [{"input": "Where is my order?", "grm_input": "Grade {response}.", "target": {"Solution": 3, "Knowledge": "ä"}}]
    file = write_jsonl(tmp_path / "service.jsonl", raw)
    columns = {"question_column": "input", "answer_column": "target"}
    [prompt] = rl(file, tmp_path / "rl.parquet", **columns, instruction="", data_source="service")
    assert prompt.messages == [{"role": "user", "content": "Where is my order?"}]
    assert json.loads(prompt.ground_truth) == raw[0]["target"]
    assert prompt.extra_info["grm_input"] == "Grade {response}."


def test_files_of_both_kinds_are_read_together(tmp_path):
    make_math_rl([rows(tmp_path)], tmp_path / "a.parquet", instruction="")
    table = [{"question": row["extra_info"]["question"], "answer": "5"} for row in read_rows(tmp_path / "a.parquet")]
    made = make_math_rl([write_jsonl(tmp_path / "x.jsonl", table), rows(tmp_path)], tmp_path / "both.jsonl")
    assert made.rows == 4


# Real rows -----------------------------------------------------------------------------------------------------------


def test_the_rows_of_tinyv_are_reproduced(tmp_path, real_data):
    """From their questions and answers, with their instruction: the same prompts, truths, sources and further columns."""
    theirs = list(read_rows(real_data / "bigmath_tinyv.parquet"))
    sentence = " Let's think step by step and output the final answer within \\boxed{}."
    kept = ("source", "llama8b_solve_rate", "prime_correctness", "llm_verifier_is_correct")
    raw = [
        {
            "problem": row["extra_info"]["question"].removesuffix(sentence),
            "answer": row["reward_model"]["ground_truth"],
            **{name: row[name] for name in kept},
        }
        for row in theirs
    ]
    file, out, lines = write_jsonl(tmp_path / "raw.jsonl", raw), tmp_path / "rl.parquet", list[str]()
    settings = {"instruction": sentence.strip(), "data_source": "bigmath_rl_tinyv"}
    made = make_math_rl([file], out, **settings, skip_bad=True, report=lines.append)
    assert str(made) == "4,999 rows of 4,999 questions; 1 bad rows were left out (1 without answer)"
    assert [line.partition(": row ")[2] for line in lines] == ["3348: column 'answer' should be text, not an empty str"]
    del theirs[3347]
    for ours, row in zip(read_rows(out), theirs, strict=True):
        assert ours["prompt"][0]["content"].split() == row["prompt"][0]["content"].split()
        assert (ours["data_source"], ours["ability"]) == (row["data_source"], row["ability"])
        assert ours["reward_model"]["ground_truth"] == row["reward_model"]["ground_truth"].strip()
        assert all(ours[name] == row[name] for name in kept)


def test_gsm8k_gets_numbers(tmp_path, real_data):
    made = make_math_rl([real_data / "gsm8k_train.jsonl"], tmp_path / "rl.parquet", answer_in="hashes", data_source="openai/gsm8k")
    assert made.rows == 7473
    first = json.loads((real_data / "gsm8k_train.jsonl").open().readline())
    row = read_rows(tmp_path / "rl.parquet")[0]
    assert row["extra_info"]["question"] == first["question"]
    assert row["reward_model"]["ground_truth"] == "72"
    assert all(
        float(truth["ground_truth"]) is not None for truth in read_rows(tmp_path / "rl.parquet").column("reward_model").to_pylist()
    )
