"""Groups of scored candidate translations → rows that train a pointwise generative reward model: SFT, then RL.

Each candidate is a separate row. Its prompt is what `kind: judge` would send, from the same template, so that the trained model
later sees what it was trained on; its answer ends in the form that the training rule and the judge's parser expect:

    rule              answer                             truth     judge's parser
    pointwise_score   analysis, 7                        7         last_number_line
    grade             analysis, Total Score: 7/10        0.7       total_score

The analysis is the candidate's line in the group's analysis (`Translation A: …`), without its letter; for a single candidate, all
of it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plaudit.errors import DataError
from plaudit.prepare.scored_groups import (
    HIGHEST,
    LOWEST,
    SFT_SCHEMA,
    TEXT,
    USUAL,
    Candidates,
    Columns,
    RowSummary,
    read_groups,
    render_question,
    rl_row,
    rl_schema,
    split_analysis,
    write_rows,
)
from plaudit.recipe.reward_models import RewardModel
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.templates import BUILT_IN, JudgeTemplate
from plaudit.types import Message

Rule = Literal["pointwise_score", "grade"]
DATA_SOURCES: dict[Rule, str] = {"pointwise_score": "mt_score", "grade": "grade"}
RL_SCHEMA = rl_schema({"src_text": TEXT, "src_lang": TEXT, "trg_lang": TEXT, "candidate": TEXT})


def make_pointwise_sft(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, seed: int = 0,
) -> RowSummary:  # fmt: skip
    """Write conversations: a question about a candidate, answered with its analysis and score."""
    question, summary, rows = _Question(template, rule), RowSummary("candidates"), []
    for group in read_groups(files, columns, fewest=1, analysed=True):
        analyses = _analyses(group, columns.analysis, question.judge)
        for i in _short_enough(group, max_characters, summary):
            answer = f"{analyses[i]}\n\n{_ending(group.scores[i], rule)}"
            rows.append({"messages": [*question(group, i), {"role": "assistant", "content": answer}]})
    random.Random(seed).shuffle(rows)
    return write_rows(out, rows, SFT_SCHEMA, summary)


def make_pointwise_rl(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, data_source: str | None = None,
) -> RowSummary:  # fmt: skip
    """Write prompts with the ground truth for the rule."""
    question, summary, rows = _Question(template, rule), RowSummary("candidates"), []
    for group in read_groups(files, replace(columns, analysis=None), fewest=1, analysed=False):
        source, target = group.languages
        for i in _short_enough(group, max_characters, summary):
            extra_info = {"src_text": group.text, "src_lang": source, "trg_lang": target, "candidate": group.candidates[i]}
            truth = str(group.scores[i]) if rule == "pointwise_score" else f"{group.scores[i] / HIGHEST:g}"
            rows.append(rl_row(data_source or DATA_SOURCES[rule], question(group, i), "scoring", truth, extra_info))
    return write_rows(out, rows, RL_SCHEMA, summary)


def _short_enough(group: Candidates, max_characters: int | None, summary: RowSummary) -> list[int]:
    """Indices of candidates within the limit; each is shown alone."""
    summary.groups += 1
    lengths = [len(group.text) + len(candidate) for candidate in group.candidates]
    kept = [i for i, length in enumerate(lengths) if max_characters is None or length <= max_characters]
    summary.too_long += len(lengths) - len(kept)
    return kept


def _analyses(group: Candidates, column: str | None, judge: Judge) -> list[str]:
    analyses = [text.strip() for _, text in split_analysis(group, column, "one row per candidate")]
    read = judge.reader()
    for letter, analysis in zip(LETTERS, analyses, strict=False):
        if not analysis:
            raise DataError(f"{group.where}: column {column!r} has no analysis of candidate {letter}; an answer begins with it")
        if read(analysis) is not None:
            raise DataError(f"{group.where}: column {column!r}: the analysis of candidate {letter} already ends with a score")
    return analyses


def _ending(score: int, rule: Rule) -> str:
    return str(score) if rule == "pointwise_score" else f"Total Score: {score}/{HIGHEST}"


class _Question:
    """Renders the question about a candidate: `judge`'s prompt."""

    def __init__(self, template: Path | None, rule: Rule):
        model = RewardModel(path="the one that is trained")  # required by the settings; never called
        path = None if template is None else str(template)
        if rule == "pointwise_score":
            self.judge = Judge(kind="judge", model=model, parser="last_number_line", template=path, lowest=LOWEST, highest=HIGHEST)
        else:
            self.judge = Judge(kind="judge", model=model, parser="total_score", template=path)
        self.template = JudgeTemplate(template or BUILT_IN / f"{self.judge.default_template}.jinja", Judge.variables, "prepare")

    def __call__(self, group: Candidates, i: int) -> list[Message]:
        return render_question(self.template, group, self.judge.template_variables(group.candidates[i]))
