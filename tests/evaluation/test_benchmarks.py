"""Preference benchmarks: every format, with figures that can be checked by hand."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plaudit.data.conversations import Source
from plaudit.errors import DataError
from plaudit.evaluation.benchmarks import read_items
from support.evaluation import answers, evaluate_files, evaluate_rows, judge_at, of_length, pairs, values
from support.rows import write_jsonl
from support.servers import stand_in_judge

# A judge that gives a response its length in points, and 2 more to the one that is shown first.
LONGER_AND_FIRST = answers(lambda _, shown: [len(text) + 2 * (i == 0) for i, text in enumerate(shown)])


@pytest.fixture(scope="module")
def biased():
    """The address of a judge that favours longer responses, and those that are shown first."""
    with stand_in_judge(answer_to=LONGER_AND_FIRST) as url:
        yield url


@pytest.fixture(params=["pairwise_judge", "group_judge"])
def judge(request, biased):
    return {"judge": judge_at(biased, request.param)}


# Pairs of one's own --------------------------------------------------------------------------------------------------


def test_pairs(tmp_path):
    """Longer is right, wrong, right; and a tie."""
    found = evaluate_rows(tmp_path, pairs((5, 3), (2, 4), (9, 1), (3, 3)))
    assert values(found, "pairs") == {
        "accuracy": 2.5 / 4, "ties": 1 / 4, "prefers_longer": 1.0, "right_longer": 1.0, "right_shorter": 0.0,
    }  # fmt: skip
    assert {name: estimate.n for name, estimate in found.figures["longer"]["pairs"].items()} == {
        "accuracy": 4, "ties": 4, "prefers_longer": 3, "right_longer": 2, "right_shorter": 1,
    }  # fmt: skip


def test_pairs_judged_in_both_orders(tmp_path, judge):
    """Lengths that differ by more than the favour for the first place decide both orders; else the place decides. A difference of
    exactly 2 is a tie where the longer one is second."""
    found = values(evaluate_rows(tmp_path, pairs((9, 3), (3, 9), (4, 3), (3, 4), (6, 4)), judge), "pairs")
    assert found == pytest.approx(
        {
            "accuracy": (1 + 0 + 0.5 + 0.5 + 0.75) / 5,
            "as_given": (1 + 0 + 1 + 1 + 1) / 5,
            "swapped": (1 + 0 + 0 + 0 + 0.5) / 5,
            "ties": (0 + 0 + 0 + 0 + 0.5) / 5,
            "both_right": 1 / 5,
            "consistency": 2 / 5,
            "position_bias": 2 / 5,
            "first_position": (0.5 + 0.5 + 1 + 1 + 1) / 5,
            "prefers_longer": (1 + 1 + 0.5 + 0.5 + 0.75) / 5,
            "right_longer": (1 + 0.5 + 0.75) / 3,
            "right_shorter": (0 + 0.5) / 2,
        }
    )


def messages(*turns: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


@pytest.mark.parametrize("form", ["texts", "messages", "conversations", "prompt messages"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_forms_of_pairs(tmp_path, form, suffix):
    rows = []
    for prompt, chosen, rejected in (("one", "xxx", "x"), ("two", "xx", "xxxx"), ("three", "xxxx", "xxx")):
        match form:
            case "texts":
                row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            case "messages":
                row = {"prompt": prompt, "chosen": messages("", chosen)[1:], "rejected": messages("", rejected)[1:]}
            case "conversations":
                row = {"chosen": messages(prompt, chosen), "rejected": messages(prompt, rejected)}
            case _:
                row = {"prompt": messages(prompt), "chosen": chosen, "rejected": rejected}
        rows.append(row | {"subset": "odd" if prompt != "two" else "even"})
    file = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        write_jsonl(file, rows)
    elif suffix == "json":
        file.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    found = evaluate_files([file], tmp_path / "out")
    assert values(found, "pairs")["accuracy"] == pytest.approx(2 / 3)
    assert values(found, "pairs/odd")["accuracy"] == 1.0
    assert values(found, "pairs/even")["accuracy"] == 0.0
    assert [item.responses for item in read_items([Source(file)])] == [("xxx", "x"), ("xx", "xxxx"), ("xxxx", "xxx")]


def test_equal_responses_are_a_tie(tmp_path, judge):
    """A judge is not called for them."""
    found = values(evaluate_rows(tmp_path, pairs((3, 3), (9, 1)), judge), "pairs")
    assert (found["accuracy"], found["ties"], found["consistency"]) == (0.75, 0.5, 1.0)


# RewardBench ---------------------------------------------------------------------------------------------------------


def test_rewardbench(tmp_path):
    """Sections weight their subsets by published sizes, not by the number of rows here; math-prm counts as 984."""
    rows = [
        *pairs((5, 3), (5, 3), subset="alpacaeval-easy"),  # 1, of 100
        *pairs((3, 5), subset="mt-bench-med"),  # 0, of 40
        *pairs((5, 3), (3, 5), subset="math-prm"),  # 1/2, of 984
        *pairs((5, 3), subset="hep-go"),  # 1, of 164
    ]
    found = evaluate_rows(tmp_path, [row | {"id": i} for i, row in enumerate(rows)])
    chat, reasoning = 100 / 140, (0.5 * 984 + 164) / (984 + 164)
    assert values(found, "RewardBench/Chat")["accuracy"] == pytest.approx(chat)
    assert values(found, "RewardBench/Reasoning")["accuracy"] == pytest.approx(reasoning)
    assert values(found, "RewardBench")["accuracy"] == pytest.approx((chat + reasoning) / 2)  # of the sections that are there
    assert values(found, "RewardBench/math-prm")["accuracy"] == 0.5
    assert {part for part in found.figures["longer"] if "Safety" in part or "Hard" in part} == set()
    # All else is of a section's own items.
    assert found.figures["longer"]["RewardBench/Chat"]["accuracy"].n == 3
    assert values(found, "RewardBench/Chat")["right_longer"] == 1.0


RB2 = {"prompt": "p", "num_correct": 1, "num_rejected": 3, "total_completions": 4, "models": ["a", "b", "c", "d"]}


def best_of_four(subset: str, *lengths: int) -> dict:
    chosen, *rejected = of_length(*lengths)
    return {**RB2, "chosen": [chosen], "rejected": rejected, "subset": subset}


def test_own_pairs_with_a_subset_of_rewardbench(tmp_path):
    """A subset that RewardBench does not have is in none of its sections: its items would not count."""
    rows = [*pairs((5, 1), subset="donotanswer"), *pairs((1, 5), subset="mine")]
    found = evaluate_rows(tmp_path, rows)
    assert {part: own["accuracy"].value for part, own in found.figures["longer"].items()} == {
        "pairs": 0.5, "pairs/donotanswer": 1.0, "pairs/mine": 0.0,
    }  # fmt: skip


def test_rewardbench_2(tmp_path):
    """The right one is the only maximum, one of two, one of four, none."""
    rows = [
        best_of_four("Math", 9, 3, 2, 1),
        best_of_four("Math", 5, 5, 2, 1),
        best_of_four("Safety", 5, 5, 5, 5),
        best_of_four("Safety", 5, 6, 2, 1),
    ]
    found = evaluate_rows(tmp_path, [row | {"id": str(i)} for i, row in enumerate(rows)])
    assert values(found, "RewardBench 2/Math")["accuracy"] == (1 + 1 / 2) / 2
    assert values(found, "RewardBench 2/Safety")["accuracy"] == (1 / 4 + 0) / 2
    assert values(found, "RewardBench 2")["accuracy"] == (0.75 + 0.125) / 2


def test_rewardbench_2_compared_in_both_orders(tmp_path, biased):
    """Last in the second order, the right one loses its favour: 4 + 2 against 5, then 4 against 5 + 2."""
    rows = [best_of_four("Math", 4, 2, 1, 5), best_of_four("Math", 8, 1, 1, 1)]
    found = evaluate_rows(tmp_path, rows, {"judge": judge_at(biased, "group_judge")})
    assert values(found, "RewardBench 2")["accuracy"] == (1 / 2 + 1) / 2


def test_ties_of_rewardbench_2(tmp_path):
    """ref: 9 against 4, gap 5. tied: 8, 7, 6 against 3, gap 3, spread 2: right, and the gap exceeds the spread."""
    ties = {**RB2, "subset": "Ties"}
    rows = [
        {**ties, "id": "ref:0", "chosen": of_length(9), "rejected": of_length(4, 1)},
        {**ties, "id": "tied:0", "chosen": of_length(8, 7, 6), "rejected": of_length(3), "num_correct": 3},
    ]
    expected = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * 0.46211715726  # tanh(3 / 2 − 1)
    assert values(evaluate_rows(tmp_path, rows), "RewardBench 2")["accuracy"] == pytest.approx(expected)


# The others ----------------------------------------------------------------------------------------------------------


def test_rm_bench(tmp_path, judge):
    """chosen 5, 2, 8 against rejected 4, 2, 6 (concise, detailed, markdown):

    5 > 4  5 > 2  5 < 6        normal: 5 > 4, 2 = 2, 8 > 6: two of three, as only a higher score counts
    2 < 4  2 = 2  2 < 6        hard, above the diagonal: 5 > 2, 5 < 6, 2 < 6: one of three
    8 > 4  8 > 2  8 > 6        easy, below it: 2 < 4, 8 > 4, 8 > 2: two of three
    """
    row = {"id": 1, "prompt": "p", "chosen": of_length(5, 2, 8), "rejected": of_length(4, 2, 6), "domain": "math"}
    found = values(evaluate_rows(tmp_path, [row]), "RM-Bench")
    assert [found[name] for name in ("hard", "normal", "easy", "accuracy")] == pytest.approx([1 / 3, 2 / 3, 2 / 3, 5 / 9])
    # With 2 more for the first place: of the right ones, 5 > 4 and 8 > 6 win only there; of the wrong ones, none wins by it, but
    # 5 + 2 > 6 and 2 + 2 = 4. Two equal texts are a tie.
    (tmp_path / "judged").mkdir()
    found = values(evaluate_rows(tmp_path / "judged", [row], judge), "RM-Bench")
    expected = {"hard": (1 + 0.5 + 0) / 3, "normal": (0.5 + 0 + 0.5) / 3, "easy": (0 + 1 + 1) / 3}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


JUDGEBENCH = [("A>B", 9, 3), ("B>A", 9, 3), ("A>B", 4, 3), ("B>A", 4, 3), ("A>B", 6, 4), ("B>A", 6, 4)]


def test_judgebench(tmp_path, judge):
    """+1 or −1 in each order, right if the sum is positive: so one order and a tie are right, and one order alone is not."""
    rows = [
        {"pair_id": str(i), "question": f"q{i}", "response_A": a, "response_B": b, "label": label, "source": f"s{i // 4}"}
        for i, (label, *lengths) in enumerate(JUDGEBENCH)
        for a, b in [of_length(*lengths)]
    ]
    assert values(evaluate_rows(tmp_path, rows), "JudgeBench")["accuracy"] == 3 / 6
    (tmp_path / "judged").mkdir()
    found = evaluate_rows(tmp_path / "judged", rows, judge)
    assert values(found, "JudgeBench/s0")["accuracy"] == 1 / 4
    assert values(found, "JudgeBench/s1")["accuracy"] == 1 / 2
    assert values(found, "JudgeBench")["as_given"] == (1 + 0 + 1 + 0 + 1 + 0) / 6


def rmb_answer(length: int) -> dict:
    return {"answer": "x" * length, "llm_name": f"model{length}"}


def test_rmb(tmp_path):
    """A pair; and best-of-n, right only if the best one beats all others: not if another is as good."""
    conversation = messages("one", "two", "three")
    pair = [
        {"pair_uid": "1", "conversation_input": conversation, "chosen": rmb_answer(5), "reject": rmb_answer(3)},
        {"pair_uid": "2", "conversation_input": conversation, "chosen": rmb_answer(3), "reject": rmb_answer(3)},
    ]
    best = [
        {"bon_uid": "1", "conversation_input": conversation, "bon_best": rmb_answer(5), "loser_list": [*map(rmb_answer, (3, 4))]},
        {"bon_uid": "2", "conversation_input": conversation, "bon_best": rmb_answer(5), "loser_list": [*map(rmb_answer, (3, 5))]},
        {"bon_uid": "3", "conversation_input": conversation, "bon_best": rmb_answer(5), "loser_list": [*map(rmb_answer, (6, 1))]},
    ]
    files = [
        write_jsonl(tmp_path / "pair.jsonl", [row | {"category_path": "Helpfulness/pair"} for row in pair]),
        write_jsonl(tmp_path / "bon.jsonl", [row | {"category_path": "Helpfulness/bon"} for row in best]),
    ]
    found = evaluate_files(files, tmp_path / "out")
    assert values(found, "RMB/Helpfulness/pair")["accuracy"] == (1 + 0.5) / 2
    assert values(found, "RMB/Helpfulness/bon")["accuracy"] == pytest.approx(1 / 3)
    assert values(found, "RMB")["accuracy"] == pytest.approx(2.5 / 5)
    assert read_items([Source(files[0])])[0].row["prompt"] == conversation


def test_rmb_best_of_n_compared(tmp_path, judge):
    """First and last: 5 + 2 beats 6, and then 5 loses to 6 + 2. 8 beats all in both orders."""
    rows = [
        {"conversation_input": [{"role": "user", "content": str(best)}], "bon_best": rmb_answer(best), "category_path": "c",
         "loser_list": [rmb_answer(1), rmb_answer(6)]}
        for best in (5, 9)
    ]  # fmt: skip
    assert values(evaluate_rows(tmp_path, rows, judge), "RMB")["accuracy"] == (0.5 + 1) / 2


def test_llmbar_by_file(tmp_path, judge):
    rows = [
        {"input": f"i{i}", "output_1": a, "output_2": b, "label": label}
        for i, (label, *lengths) in enumerate([(1, 9, 3), (2, 9, 3), (2, 4, 3)])
        for a, b in [of_length(*lengths)]
    ]
    files = [write_jsonl(tmp_path / "natural.jsonl", rows[:2]), write_jsonl(tmp_path / "manual.jsonl", rows[2:])]
    found = evaluate_files(files, tmp_path / "out", judge)
    natural, manual = (values(found, f"LLMBar/{name}") for name in ("natural", "manual"))
    assert (natural["accuracy"], natural["as_given"], natural["swapped"], natural["consistency"]) == (0.5, 0.5, 0.5, 1.0)
    assert (manual["accuracy"], manual["as_given"], manual["swapped"], manual["consistency"]) == (0.5, 0.0, 1.0, 0.0)
    assert manual["position_bias"] == manual["first_position"] == 1.0


# What is refused -----------------------------------------------------------------------------------------------------


def refused(folder: Path, rows: list[dict]) -> str:
    with pytest.raises(DataError) as error:
        read_items([Source(write_jsonl(folder / "items.jsonl", rows))])
    return str(error.value)


def test_an_empty_file(tmp_path):
    assert "items.jsonl" in refused(tmp_path, [])


def test_a_file_that_is_no_benchmark(tmp_path):
    message = refused(tmp_path, [{"question": "2 + 2", "answer": "4"}])
    assert "has no pairs (found: question, answer)" in message
    assert "`chosen` and `rejected`" in message


BENCHMARKS = {
    "pairs": pairs((2, 1))[0],
    "rewardbench2": {**best_of_four("Math", 4, 3, 2, 1), "id": "1"},
    "rm_bench": {"prompt": "p", "chosen": of_length(3, 2, 1), "rejected": of_length(3, 2, 1)},
    "judgebench": {"question": "q", "response_A": "a", "response_B": "b", "label": "A>B"},
    "rmb": {"conversation_input": [{"role": "user", "content": "q"}], "chosen": rmb_answer(2), "reject": rmb_answer(1)},
    "llmbar": {"input": "i", "output_1": "a", "output_2": "b", "label": 1},
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("other", [{"prompt": "p", "response": "4"}, {"prompt": "p", "chosen": 7, "rejected": None}])
def test_a_row_of_another_form_in_the_middle(tmp_path, benchmark, other):
    message = refused(tmp_path, [BENCHMARKS[benchmark], other, BENCHMARKS[benchmark]])
    assert "items.jsonl: row 2: " in message
    assert "is missing" in message or "should be" in message or "has no messages" in message, message


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_responses_that_are_no_text(tmp_path, benchmark):
    """In the second row, whose form is that of the first."""
    good, broken = BENCHMARKS[benchmark], dict(BENCHMARKS[benchmark])
    for name in ("chosen", "response_A", "output_1"):
        if name in broken:
            broken[name] = [7] * len(broken[name]) if isinstance(broken[name], list) else 7
    message = refused(tmp_path, [good, broken])
    assert "items.jsonl: row 2: " in message
    assert "should be text, not 7" in message or "has no messages (found int)" in message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**BENCHMARKS["llmbar"], "label": 3}, "label should be 1 or 2"),
        ({**BENCHMARKS["judgebench"], "label": "A=B"}, "label should be A>B or B>A"),
        ({**BENCHMARKS["rewardbench2"], "num_correct": 2}, "num_correct is 2, and `chosen` has 1 texts"),
        ({**BENCHMARKS["rewardbench2"], "rejected": []}, "has 1 responses, 1 of them right"),
        ({**BENCHMARKS["rewardbench2"], "subset": "Ties"}, "ref:N or tied:N"),
        ({**BENCHMARKS["rm_bench"], "chosen": ["a", "b"]}, "three texts each"),
        ({**BENCHMARKS["pairs"], "chosen": ["a", "b"]}, "one is a list of texts and the other is not"),
    ],
)
def test_wrong_rows(tmp_path, row, message):
    assert message in refused(tmp_path, [row])


def test_equal_ids(tmp_path):
    """Rows of one prompt may share its id; in Ties, an id says which rows belong together; a file is not read twice."""
    rows = [row | {"id": "same"} for row in pairs((2, 1), (3, 1))]
    file = write_jsonl(tmp_path / "mine.jsonl", rows)
    assert [item.id for item in read_items([Source(file)])] == ["mine:same", "mine:same (row 2)"]
    tied = {**BENCHMARKS["rewardbench2"], "subset": "Ties", "id": "ref:1"}
    assert "has the id 'ref:1' too" in refused(tmp_path, [tied, tied])
    with pytest.raises(DataError, match="is given twice"):
        read_items([Source(file), Source(file)])
