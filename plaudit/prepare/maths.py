r"""Questions with answers → rows for RL with rules and verifiers: question, instruction, ground truth, source.

`data_source` decides which reward scores a row (`when: {data_source: "*_tinyv*"}`). The instruction, which asks for the answer in
\boxed{}, follows the question after a space (as in TinyV's rows) or is a system message (as in the rubric reward model's);
`extra_info.question` is the question without it, for judges. All other columns stay as they are: rewards find them in `extra_info`.
So do the fields of an `extra_info` column; a `split`, `index` or `solution` of the file's own replaces the one made here.

The ground truth is the answer column's text, or a part of it:

    all       12                                           the text, or a number
    hashes    … #### 1,200       → 1200                    what follows the last ####, without thousands separators (GSM8K)
    boxed     … \boxed{\frac12}. → \frac12                 what is in the last box (MATH)

Differs from TinyV's code: there `extra_info.question` includes the instruction.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from plaudit.data.columns import GROUND_TRUTHS, PROMPTS, parse_object
from plaudit.data.conversations import describe_type
from plaudit.errors import DataError
from plaudit.prepare.made_rows import BATCH_ROWS, RowSummary, messages, rl_rows, rl_schema, write_rows
from plaudit.prepare.tables import TEXT, Table, compute
from plaudit.rewards.view import last_boxed

AnswerIn = Literal["all", "hashes", "boxed"]
INSTRUCTION = r"Think it through step by step, then give the final answer in \boxed{}."
MADE_FIELDS = {"split": pa.string(), "index": pa.int64(), "question": pa.string(), "solution": pa.string()}
"""Of extra_info."""
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")


def make_math_rl(
    files: Sequence[Path], out: Path, *, question_column: str | None = None, answer_column: str | None = None,
    answer_in: AnswerIn = "all", instruction: str = INSTRUCTION, instruction_in: Literal["user", "system"] = "user",
    data_source: str | None = None, split: str = "train", sample: int | None = None, skip_bad: bool = False, seed: int = 0,
    report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write prompts with ground truths, in their order; or `sample` rows that are drawn at random."""
    table = Table(files, skip_bad=skip_bad, report=report)
    question_column = table.find(question_column, PROMPTS, "--question-column")
    answer_column = table.find(answer_column, GROUND_TRUTHS, "--answer-column")
    questions, solutions = table.text(question_column), table.value(answer_column)
    answers = _answers(table, solutions, answer_column, answer_in)
    own_sources = table.text("data_source") if data_source is None and "data_source" in table.names else None
    others = table.other_columns({*rl_schema({}).names, question_column, answer_column})
    own_extra = _extra_info(table)
    replaced = {"prompt", "ability", "reward_model"} & set(table.names) - {question_column, answer_column}
    if own_extra.pop("question", None) is not None:
        replaced.add("extra_info.question")
    if replaced:
        report(f"{table.source}: left out {', '.join(sorted(replaced))}: rows for RL get new ones")
    made_fields = {name: type for name, type in MADE_FIELDS.items() if name == "question" or name not in others}
    base = rl_schema(made_fields | {name: column.type for name, column in own_extra.items()})
    schema = pa.schema([*base, *((name, column.type) for name, column in others.items())])
    rows = np.flatnonzero(table.usable)
    if sample is not None:
        rows = np.random.default_rng(seed).permutation(rows)[:sample]
    summary = RowSummary("questions", read=len(rows), bad=table.bad)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(rows), BATCH_ROWS):
            some = pa.array(rows[start : start + BATCH_ROWS])
            question = questions.take(some)
            if instruction_in == "system" and instruction:
                prompt = messages(("system", [instruction]), ("user", [question]))
            else:
                prompt = messages(("user", [question, f" {instruction}" if instruction else ""]))
            index = pa.array(np.arange(start, start + len(some)))
            extra = {"split": pa.repeat(split, len(some)), "index": index, "question": question, "solution": solutions.take(some)}
            extra |= {name: column.take(some) for name, column in own_extra.items()}
            source = (data_source or "math") if own_sources is None else own_sources.take(some)
            made = rl_rows(base, source, prompt, "math", answers.take(some), extra)
            yield pa.Table.from_arrays([*made.columns, *(column.take(some) for column in others.values())], schema=schema)

    return write_rows(out, batches(), schema, summary)


def _extra_info(table: Table) -> dict[str, pa.Array]:
    """The fields of an `extra_info` column, of objects or of objects as JSON text."""
    if "extra_info" not in table.names:
        return {}
    [column] = table.other_columns(set(table.names) - {"extra_info"}).values()
    if not pa.types.is_struct(column.type):
        objects = [parse_object(value) for value in column.to_pylist()]
        wrong = np.array([not isinstance(one, Mapping | None) for one in objects])

        def describe(i: int) -> str:
            return f"extra_info should be an object, not {describe_type(table.row(i)['extra_info'])}"

        table.reject(wrong, "with other extra_info", describe)
        objects = [None if bad else one for one, bad in zip(objects, wrong.tolist(), strict=True)]
        try:
            column = pa.chunked_array([pa.array(objects, None if any(objects) else pa.struct({}))])
        except (pa.ArrowException, UnicodeEncodeError):
            raise DataError(f"{table.source}: a field of extra_info has values of several types: make them one type") from None
    fields = [field.name for field in column.type]
    return {name: compute.struct_field(column.combine_chunks(), name) for name in fields}


def _answers(table: Table, texts: pa.Array, column: str, answer_in: AnswerIn) -> pa.Array:
    if answer_in == "all":
        return texts
    if answer_in == "hashes":
        after = compute.struct_field(compute.extract_regex(texts, r"(?s)\A.*####(?P<answer>.*)\z"), "answer")
        trimmed, what = compute.utf8_trim_whitespace(after).to_pylist(), "#### and an answer"
        found = pa.array([text and _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text) for text in trimmed], TEXT)
    else:
        found, what = pa.array([last_boxed(text) for text in texts.to_pylist()], TEXT), r"a \boxed{} answer"
    empty = compute.equal(compute.binary_length(found), 0).fill_null(True)
    table.reject(empty, f"without {what} in {column}", lambda i: f"column {column!r} has no {what}: {texts[i].as_py()[-60:]!r}")
    return found.fill_null("")
