"""`plaudit prepare translation-sft` and `translation-rl`: rows that train a translation policy."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.languages import LANGUAGES
from plaudit.prepare.options import OutFile, RowOrderSeed, SkipBadRows, find_template, report
from plaudit.prepare.row_files import require_row_file

Texts = Annotated[
    list[Path],
    typer.Argument(help="Files of texts: src_text, src_lang, trg_lang (codes or names), trg_text.", show_default=False),
]
PolicyTemplate = Annotated[
    Path | None,
    typer.Option(
        "--template",
        callback=find_template,
        help="The prompt, a Jinja2 file; extra_info has all columns of a row, src_language and trg_language. Default: the built-in "
        "one, which asks for an analysis, and the translation in a code block.",
    ),
]


def prepare_translation_sft(
    texts: Texts,
    out: OutFile,
    response_column: Annotated[str, typer.Option(help="Column with the responses to train on.")] = "response",
    any_response: Annotated[
        bool, typer.Option("--any-response", help="Keep responses that do not end with a single code block.")
    ] = False,
    template: PolicyTemplate = None,
    skip_bad_rows: SkipBadRows = False,
    seed: RowOrderSeed = 0,
) -> None:
    """Texts with responses → conversations that teach a policy to translate into a code block, after an analysis."""
    require_row_file(out)

    from plaudit.prepare.translation import make_translation_sft

    summary = make_translation_sft(
        texts, out, response_column=response_column, any_response=any_response, template=template, skip_bad=skip_bad_rows,
        seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def prepare_translation_rl(
    texts: Texts,
    out: OutFile,
    cross_lingual: Annotated[
        bool, typer.Option("--cross-lingual", help="Each row once more, with another target language: twice as many rows.")
    ] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A language to draw from for --cross-lingual; repeat it. Default: en de fr nl it es pt ko ru zh."),
    ] = None,
    test_set: Annotated[
        bool, typer.Option("--test-set", help="Keep the order of the rows; trg_text is their ground truth.")
    ] = False,
    data_source: Annotated[str, typer.Option(help="data_source of the rows, for `when` and for metrics.")] = "translation",
    template: PolicyTemplate = None,
    skip_bad_rows: SkipBadRows = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the languages drawn and the row order.")] = 0,
) -> None:
    """Texts → prompts for RL of a translation policy with a judge."""
    require_row_file(out)
    unknown = next((code for code in target or () if code not in LANGUAGES), None)
    if unknown is not None:
        raise typer.BadParameter(f"{unknown!r} is no known language code ({' '.join(LANGUAGES)}).", param_hint="--target")
    if target is not None and len(set(target)) < 3:
        raise typer.BadParameter("name at least three: one is the row's source, one its target.", param_hint="--target")
    if test_set and cross_lingual:
        raise typer.BadParameter(
            "a text in another target language has no reference.", param_hint="--test-set with --cross-lingual"
        )

    from plaudit.prepare.translation import TARGETS, make_translation_rl

    summary = make_translation_rl(
        texts, out, cross_lingual=cross_lingual, targets=target or TARGETS, test_set=test_set, data_source=data_source,
        template=template, skip_bad=skip_bad_rows, seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


TRANSLATION_VERBS = {"translation-sft": prepare_translation_sft, "translation-rl": prepare_translation_rl}
