"""`plaudit prepare ranking-sft`, `ranking-rl`, `pointwise-sft`, `pointwise-rl`: rows that train judges, from scored groups."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.prepare.options import OutFile, RowOrderSeed, SkipBadRows, find_template, report
from plaudit.prepare.row_files import require_row_file

Groups = Annotated[
    list[Path],
    typer.Argument(
        help="Files of groups: src_text, src_lang, trg_lang, candidates, scores (0 to 10); for SFT also an analysis.",
        show_default=False,
    ),
]
CandidatesColumn = Annotated[str, typer.Option(help="Column with the candidates.")]
ScoresColumn = Annotated[str, typer.Option(help="Column with their scores.")]
AnalysisColumn = Annotated[str, typer.Option(help="Column with the analysis.")]

# Rows for a group judge ----------------------------------------------------------------------------------------------

SubgroupAugment = Annotated[int, typer.Option(min=0, help="Number of additional subgroups per group.")]
ShuffleAugment = Annotated[int, typer.Option(min=0, help="Number of additional orders of each group and subgroup.")]
MaxCharacters = Annotated[int | None, typer.Option(min=1, help="Leave out groups with a longer total text.")]
AddExample = Annotated[bool, typer.Option("--add-example", help="End the prompt with an example answer.")]
GroupTemplate = Annotated[
    Path | None,
    typer.Option(
        "--template",
        callback=find_template,
        help="A `group_judge` prompt template; extra_info has all columns of a row, src_language and trg_language. "
        "Default: the built-in one.",
    ),
]
RankingHeading = Annotated[str, typer.Option(help="The line above an answer's ranking.")]
ScoresHeading = Annotated[str, typer.Option(help="The line above an answer's scores; empty: none.")]
BlankLines = Annotated[bool, typer.Option("--blank-lines", help="Blank lines around the headings of an answer.")]


def prepare_ranking_sft(
    groups: Groups,
    out: OutFile,
    format: Annotated[
        Literal["ranking_score", "ranking", "score"], typer.Option(help="What an answer ends with.")
    ] = "ranking_score",
    subgroup_augment: SubgroupAugment = 0,
    shuffle_augment: ShuffleAugment = 0,
    max_characters: MaxCharacters = None,
    add_example: AddExample = False,
    template: GroupTemplate = None,
    ranking_heading: RankingHeading = "Ranking:",
    scores_heading: ScoresHeading = "Scores:",
    blank_lines: BlankLines = False,
    candidates_column: CandidatesColumn = "mt_texts",
    scores_column: ScoresColumn = "scores",
    analysis_column: AnalysisColumn = "analysis",
    skip_bad_rows: SkipBadRows = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the augmentation and the row order.")] = 0,
) -> None:
    """Scored candidates → conversations that teach a judge of groups (GRRM) to analyse, rank and score them."""
    require_row_file(out)
    _require_heading(ranking_heading)

    from plaudit.prepare.ranking import Headings, make_ranking_sft
    from plaudit.prepare.scored_groups import Columns

    summary = make_ranking_sft(
        groups, out, format=format, subgroup_augment=subgroup_augment, shuffle_augment=shuffle_augment,
        max_characters=max_characters, add_example=add_example, template=template,
        headings=Headings(ranking_heading, scores_heading, blank_lines),
        columns=Columns(candidates_column, scores_column, analysis_column), skip_bad=skip_bad_rows, seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def prepare_ranking_rl(
    groups: Groups,
    out: OutFile,
    format: Annotated[Literal["ranking_score", "ranking"], typer.Option(help="What an answer ends with.")] = "ranking_score",
    subgroup_augment: SubgroupAugment = 0,
    shuffle_augment: ShuffleAugment = 0,
    max_characters: MaxCharacters = None,
    add_example: AddExample = False,
    template: GroupTemplate = None,
    candidates_column: CandidatesColumn = "mt_texts",
    scores_column: ScoresColumn = "scores",
    analysis_column: AnalysisColumn = "analysis",
    data_source: Annotated[str, typer.Option(help="data_source of the rows, for `when` and for metrics.")] = "mt_ranking",
    skip_bad_rows: SkipBadRows = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the augmentation.")] = 0,
) -> None:
    """Scored candidates → prompts with ground truth, for RL with the `ranking` rule; without augmentation, a validation set."""
    require_row_file(out)

    from plaudit.prepare.ranking import make_ranking_rl
    from plaudit.prepare.scored_groups import Columns

    summary = make_ranking_rl(
        groups, out, format=format, subgroup_augment=subgroup_augment, shuffle_augment=shuffle_augment,
        max_characters=max_characters, add_example=add_example, template=template,
        columns=Columns(candidates_column, scores_column, analysis_column), data_source=data_source, skip_bad=skip_bad_rows,
        seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def _require_heading(heading: str) -> None:
    """The `ranking` rule looks for the ranking below a heading."""
    if not heading.strip():
        raise typer.BadParameter("the `ranking` rule needs a heading above the ranking.", param_hint="--ranking-heading")


# Rows for a pointwise judge ------------------------------------------------------------------------------------------

RewardRule = Annotated[Literal["pointwise_score", "grade"], typer.Option(help="The rule that rewards RL; sets how answers end.")]
MaxCharactersOfOne = Annotated[
    int | None, typer.Option("--max-characters", min=1, help="Leave out candidates that are longer, source text included.")
]
PointwiseTemplate = Annotated[
    Path | None,
    typer.Option(
        "--template",
        callback=find_template,
        help="A `judge` prompt template; extra_info has all columns of a row, src_language and trg_language. "
        "Default: the built-in one.",
    ),
]


def prepare_pointwise_sft(
    groups: Groups,
    out: OutFile,
    rule: RewardRule = "pointwise_score",
    max_characters: MaxCharactersOfOne = None,
    template: PointwiseTemplate = None,
    candidates_column: CandidatesColumn = "mt_texts",
    scores_column: ScoresColumn = "scores",
    analysis_column: AnalysisColumn = "analysis",
    skip_bad_rows: SkipBadRows = False,
    seed: RowOrderSeed = 0,
) -> None:
    """Scored candidates → conversations that train a pointwise judge to analyse and score one answer."""
    require_row_file(out)

    from plaudit.prepare.pointwise import make_pointwise_sft
    from plaudit.prepare.scored_groups import Columns

    summary = make_pointwise_sft(
        groups, out, rule=rule, max_characters=max_characters, template=template,
        columns=Columns(candidates_column, scores_column, analysis_column), skip_bad=skip_bad_rows, seed=seed, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


def prepare_pointwise_rl(
    groups: Groups,
    out: OutFile,
    rule: RewardRule = "pointwise_score",
    max_characters: MaxCharactersOfOne = None,
    template: PointwiseTemplate = None,
    candidates_column: CandidatesColumn = "mt_texts",
    scores_column: ScoresColumn = "scores",
    data_source: Annotated[
        str | None, typer.Option(help="data_source of the rows, for `when` and for metrics. Default: mt_score, or grade.")
    ] = None,
    skip_bad_rows: SkipBadRows = False,
) -> None:
    """Scored candidates → one prompt per candidate with its score, for RL with the `pointwise_score` or `grade` rule."""
    require_row_file(out)

    from plaudit.prepare.pointwise import make_pointwise_rl
    from plaudit.prepare.scored_groups import Columns

    summary = make_pointwise_rl(
        groups, out, rule=rule, max_characters=max_characters, template=template,
        columns=Columns(candidates_column, scores_column), data_source=data_source, skip_bad=skip_bad_rows, report=report,
    )  # fmt: skip
    print(f"{out}: {summary}")


JUDGE_VERBS = {
    "ranking-sft": prepare_ranking_sft,
    "ranking-rl": prepare_ranking_rl,
    "pointwise-sft": prepare_pointwise_sft,
    "pointwise-rl": prepare_pointwise_rl,
}
