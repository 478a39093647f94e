"""Groups of scored candidate translations → rows that train a generative reward model of single answers: SFT, then RL.

Each candidate is a row of its own. The prompt is the one that `kind: judge` fills in for it, with the same template, so that the
trained model is asked later what it was asked here; its answer ends as the rule that trains it and the judge's parser read it:

    rule              answer                             truth     judge's parser
    pointwise_score   analysis, 7                        7         last_number_line
    grade             analysis, Total Score: 7/10        0.7       total_score

The analysis is the candidate's own line of the group's (`Translation A: …`), without its letter; of a candidate that is alone, the
whole of it.
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
    Made,
    fill_in,
    lines_of,
    read_groups,
    rl_row,
    rl_schema,
    write_rows,
)
from plaudit.recipe.reward_models import RewardModel
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.templates import OURS, JudgeTemplate
from plaudit.types import Message

Rule = Literal["pointwise_score", "grade"]
DATA_SOURCES: dict[Rule, str] = {"pointwise_score": "mt_score", "grade": "grade"}
RL_SCHEMA = rl_schema({"src_text": TEXT, "src_lang": TEXT, "trg_lang": TEXT, "candidate": TEXT})


def make_pointwise_sft(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, seed: int = 0,
) -> Made:  # fmt: skip
    """Write conversations: the question about a candidate, and the analysis and score it should be answered with."""
    ask, made, rows = _Question(template, rule), Made("candidates"), []
    for group in read_groups(files, columns, fewest=1, analysed=True):
        analyses = _analyses(group, columns.analysis, ask.judge)
        for i in _short_enough(group, max_characters, made):
            answer = f"{analyses[i]}\n\n{_ending(group.scores[i], rule)}"
            rows.append({"messages": [*ask(group, i), {"role": "assistant", "content": answer}]})
    random.Random(seed).shuffle(rows)
    return write_rows(out, rows, SFT_SCHEMA, made)


def make_pointwise_rl(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, data_source: str | None = None,
) -> Made:  # fmt: skip
    """Write prompts with the truth, for the rule."""
    ask, made, rows = _Question(template, rule), Made("candidates"), []
    for group in read_groups(files, replace(columns, analysis=None), fewest=1, analysed=False):
        source, target = group.languages
        for i in _short_enough(group, max_characters, made):
            about = {"src_text": group.text, "src_lang": source, "trg_lang": target, "candidate": group.candidates[i]}
            truth = str(group.scores[i]) if rule == "pointwise_score" else f"{group.scores[i] / HIGHEST:g}"
            rows.append(rl_row(data_source or DATA_SOURCES[rule], ask(group, i), "scoring", truth, about))
    return write_rows(out, rows, RL_SCHEMA, made)


def _short_enough(group: Candidates, max_characters: int | None, made: Made) -> list[int]:
    """Which candidates: each is shown alone."""
    made.groups += 1
    lengths = [len(group.text) + len(candidate) for candidate in group.candidates]
    some = [i for i, length in enumerate(lengths) if max_characters is None or length <= max_characters]
    made.too_long += len(lengths) - len(some)
    return some


def _analyses(group: Candidates, column: str | None, judge: Judge) -> list[str]:
    analyses = [behind.strip() for _, behind in lines_of(group, column, "a row for each candidate asks")]
    read = judge.reader()
    for letter, analysis in zip(LETTERS, analyses, strict=False):
        if not analysis:
            raise DataError(f"{group.where}: column {column!r} says nothing about candidate {letter}: an answer begins with that")
        if read(analysis) is not None:
            raise DataError(f"{group.where}: column {column!r}: what it says about candidate {letter} ends with a score already")
    return analyses


def _ending(score: int, rule: Rule) -> str:
    return str(score) if rule == "pointwise_score" else f"Total Score: {score}/{HIGHEST}"


class _Question:
    """What the model is asked about a candidate: `judge`'s prompt."""

    def __init__(self, template: Path | None, rule: Rule):
        model = RewardModel(path="the one that is trained")  # nobody asks it here
        own = None if template is None else str(template)
        if rule == "pointwise_score":
            self.judge = Judge(kind="judge", model=model, parser="last_number_line", template=own, lowest=LOWEST, highest=HIGHEST)
        else:
            self.judge = Judge(kind="judge", model=model, parser="total_score", template=own)
        self.template = JudgeTemplate(template or OURS / f"{self.judge.own_template}.jinja", Judge.variables, "prepare")

    def __call__(self, group: Candidates, i: int) -> list[Message]:
        return fill_in(self.template, group, self.judge.about(group.candidates[i]))
