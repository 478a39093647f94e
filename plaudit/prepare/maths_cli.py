"""`plaudit prepare math-rl`, `verifier-sft` and `rubric-rl`: questions for RL, answers for verifiers and rubric models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.prepare.options import OutFile, SkipBadRows, find_template, report
from plaudit.prepare.row_files import require_row_file


def prepare_math_rl(
    questions: Annotated[
        list[Path], typer.Argument(help="Files of questions with answers; other columns are kept.", show_default=False)
    ],
    out: OutFile,
    question_column: Annotated[
        str | None, typer.Option(help="Default: the first of prompt, instruction, question, problem, input.")
    ] = None,
    answer_column: Annotated[
        str | None, typer.Option(help="Default: the first of ground_truth, gts, answer, solution, reference.")
    ] = None,
    answer_in: Annotated[
        Literal["all", "hashes", "boxed"],
        typer.Option(help="Where the ground truth is in the answer: all of it, after ####, or in the last \\boxed{}."),
    ] = "all",
    instruction: Annotated[str | None, typer.Option(help="How to answer; empty: nothing. Default: to put it in \\boxed{}.")] = None,
    instruction_in: Annotated[Literal["user", "system"], typer.Option(help="After the question, or in a system message.")] = "user",
    data_source: Annotated[
        str | None,
        typer.Option(
            help="data_source of the rows, which decides who scores them (`when`). Default: the column of that name, or math."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="extra_info.split of the rows.")] = "train",
    sample: Annotated[int | None, typer.Option(min=1, help="Draw this many rows, instead of all in their order.")] = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --sample.")] = 0,
) -> None:
    """Questions with answers → prompts with ground truths, for RL with rules, verifiers and rubric reward models."""
    require_row_file(out)

    from plaudit.prepare.maths import INSTRUCTION, make_math_rl

    summary = make_math_rl(
        questions, out, question_column=question_column, answer_column=answer_column, answer_in=answer_in,
        instruction=INSTRUCTION if instruction is None else instruction, instruction_in=instruction_in, data_source=data_source,
        split=split, sample=sample, skip_bad=skip_bad_rows, seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def prepare_verifier_sft(
    answers: Annotated[
        list[Path],
        typer.Argument(help="Files of labelled answers: question, reference, answer, and whether it is right.", show_default=False),
    ],
    out: OutFile,
    question_column: Annotated[
        str | None, typer.Option(help="Default: the first of prompt, instruction, question, problem, input.")
    ] = None,
    reference_column: Annotated[
        str | None, typer.Option(help="Default: the first of ground_truth, gts, answer, solution, reference.")
    ] = None,
    answer_column: Annotated[
        str | None, typer.Option(help="Column with the labelled answer. Default: the first of response, completion, output.")
    ] = None,
    label_column: Annotated[str, typer.Option(help="Column with true or false (1 or 0).")] = "label",
    extract: Annotated[
        Literal["none", "answer", "boxed", "line", "codeblock", "oneline"],
        typer.Option(help="The part of an answer that the verifier sees, as in the `view` of its reward. none: all of it."),
    ] = "none",
    balance: Annotated[bool, typer.Option("--balance", help="As many right answers as wrong ones: leave out others.")] = False,
    template: Annotated[
        Path | None,
        typer.Option(
            callback=find_template,
            help="The prompt of the `judge` that the verifier will be (question, ground_truth, response). Default: the built-in.",
        ),
    ] = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --balance and the row order.")] = 0,
) -> None:
    """Labelled answers → conversations that train a verifier to say True or False."""
    require_row_file(out)

    from plaudit.prepare.verifier import LabelledColumns, make_verifier_sft

    summary = make_verifier_sft(
        answers, out, columns=LabelledColumns(question_column, reference_column, answer_column, label_column), extract=extract,
        balance=balance, template=template, skip_bad=skip_bad_rows, seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def prepare_rubric_rl(
    answers: Annotated[
        list[Path], typer.Argument(help="Files of graded answers: question, answer, criteria, score.", show_default=False)
    ],
    out: OutFile,
    question_column: Annotated[str, typer.Option(help="Column with the question.")] = "question",
    answer_column: Annotated[str, typer.Option(help="Column with the answer that was graded.")] = "answer",
    rubric_column: Annotated[str, typer.Option(help="Column with the criteria: text, or a list.")] = "criteria",
    truth_column: Annotated[str, typer.Option(help="Column with the grade.")] = "score",
    highest: Annotated[float, typer.Option(min=1e-6, help="The best possible grade.")] = 1.0,
    template: Annotated[
        Path,
        typer.Option(
            callback=find_template, help="The prompt of the `judge` that the model will be; extra_info.criteria is the rubric."
        ),
    ] = Path("recipes/rubric/judge.jinja"),
    data_source: Annotated[str, typer.Option(help="data_source of the rows, for `when` and for metrics.")] = "grade",
    skip_bad_rows: SkipBadRows = False,
) -> None:
    """Graded answers → prompts with the grade, for RL of a rubric reward model with the `grade` rule."""
    require_row_file(out)

    from plaudit.prepare.rubric import GradedColumns, make_rubric_rl

    columns = GradedColumns(question_column, answer_column, rubric_column, truth_column)
    summary = make_rubric_rl(
        answers, out, template=template, columns=columns, highest=highest, data_source=data_source, skip_bad=skip_bad_rows,
        report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


MATHS_VERBS = {"math-rl": prepare_math_rl, "verifier-sft": prepare_verifier_sft, "rubric-rl": prepare_rubric_rl}
