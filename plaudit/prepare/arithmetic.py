"""Additions and subtractions in verl's RL schema: a task that a small chat model can partly do.

Each prompt shows two solved equations, because a small model follows examples far better than instructions: SmolLM2-135M-Instruct,
instructed to answer with the number only and sampled at temperature 1, writes sentences and gets 17 % of single-digit sums right;
with the examples, 76 %. On the default mix, where most numbers have two digits, it gets 15 %.

Questions come in kinds: an operator, and the number of digits of each operand (1 to `digits`). Kinds are drawn in turn until
exhausted, so that the few easy questions are not lost among the many hard ones. No question repeats, across train and val.
"""

import operator
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from plaudit.errors import PlauditError
from plaudit.files import atomic_folder
from plaudit.types import Message

Question = tuple[int, str, int]
OPERATORS = {"+": operator.add, "-": operator.sub}
SYSTEM = "Complete the equation."
EXAMPLES: tuple[Question, ...] = ((40, "+", 7), (38, "-", 6))
TEXT, NUMBER = pa.string(), pa.int64()
SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": pa.list_(pa.struct({"role": TEXT, "content": TEXT})),
        "ability": TEXT,
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": pa.struct(
            {"split": TEXT, "index": NUMBER, "question": TEXT, "operator": TEXT, "left": NUMBER, "right": NUMBER}
        ),
    }
)


def make_arithmetic(
    out: str | Path, *, train: int = 2000, val: int = 200, digits: int = 2, operators: str = "+-", seed: int = 0
) -> None:
    """Write train.parquet and val.parquet into a new folder; the same arguments give the same bytes."""
    questions = draw_questions(train + val, digits, operators, random.Random(seed))
    try:
        with atomic_folder(Path(out).resolve()) as folder:
            _write(folder, "val", questions[:val])
            _write(folder, "train", questions[val:])
    except OSError as error:
        raise PlauditError(f"{out} cannot be written: {error}") from None


# Questions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Questions with a given operator and number of digits per operand. Differences are never negative."""

    operator: str
    left: int
    right: int

    def size(self) -> int:
        """Number of questions, excluding the examples that every prompt shows."""
        left, right = (len(_numbers(digits)) for digits in (self.left, self.right))
        ordered = self.operator == "-" and self.left == self.right
        return (left * (left + 1) // 2 if ordered else left * right) - sum(map(self.matches, EXAMPLES))

    def matches(self, question: Question) -> bool:
        a, sign, b = question
        return (sign, len(str(a)), len(str(b))) == (self.operator, self.left, self.right)

    def draw(self, rng: random.Random) -> Question:
        a, b = rng.choice(_numbers(self.left)), rng.choice(_numbers(self.right))
        return (max(a, b), "-", min(a, b)) if self.operator == "-" else (a, self.operator, b)


def draw_questions(count: int, digits: int, operators: str, rng: random.Random) -> list[Question]:
    """`count` distinct questions, shuffled."""
    if not operators or len(set(operators)) < len(operators) or not set(operators) <= set(OPERATORS):
        raise PlauditError(f"--operators: {operators!r} should be one or more of {' '.join(OPERATORS)}, each once: +, - or +-")
    sizes = range(1, digits + 1)
    kinds = [Kind(sign, a, b) for sign in operators for a in sizes for b in sizes if sign != "-" or a >= b]
    left = {kind: kind.size() for kind in kinds}
    if count > sum(left.values()):
        raise PlauditError(
            f"--train and --val add up to {count:,} questions, but there are only {sum(left.values()):,} with {operators} "
            f"and at most {digits} digits per number; lower them, or raise --digits"
        )
    seen: set[Question] = set(EXAMPLES)
    questions: list[Question] = []
    while len(questions) < count:
        for kind in [kind for kind in left if left[kind]][: count - len(questions)]:
            while (question := kind.draw(rng)) in seen:
                pass
            seen.add(question)
            questions.append(question)
            left[kind] -= 1
    rng.shuffle(questions)
    return questions


def _numbers(digits: int) -> range:
    return range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


# Rows ----------------------------------------------------------------------------------------------------------------


def messages(question: Question) -> list[Message]:
    """The prompt: system message, solved examples, question."""
    turns: list[Message] = [{"role": "system", "content": SYSTEM}]
    for example in EXAMPLES:
        turns.append({"role": "user", "content": f"{_text(example)} ="})
        turns.append({"role": "assistant", "content": f"{_text(example)} = {_value(example)}"})
    return [*turns, {"role": "user", "content": f"{_text(question)} ="}]


def _text(question: Question) -> str:
    a, sign, b = question
    return f"{a} {sign} {b}"


def _value(question: Question) -> int:
    a, sign, b = question
    return OPERATORS[sign](a, b)


def _row(question: Question, index: int, split: str) -> dict[str, Any]:
    a, sign, b = question
    return {
        "data_source": "arithmetic",
        "prompt": messages(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(_value(question))},
        "extra_info": {"split": split, "index": index, "question": _text(question), "operator": sign, "left": a, "right": b},
    }


def _write(folder: Path, split: Literal["train", "val"], questions: list[Question]) -> None:
    rows = [_row(question, index, split) for index, question in enumerate(questions)]
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"{split}.parquet")
