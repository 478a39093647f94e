"""Groups of scored candidate translations → rows that train a generative reward model of single answers: SFT, then RL.

Each candidate is a row of its own. The prompt is the one that `kind: judge` fills in for it, with the same template, so that the
trained model is asked later what it was asked here; its answer ends as the rule that trains it and the judge's parser read it:

    rule              answer                             truth     judge's parser
    pointwise_score   analysis, 7                        7         last_number_line
    grade             analysis, Total Score: 7/10        0.7       total_score

The analysis is the candidate's own line of the group's (`Translation A: …`), without its letter.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from plaudit.prepare.scored_groups import (
    HIGHEST,
    MESSAGES,
    SFT_SCHEMA,
    TEXT,
    USUAL,
    Candidates,
    Columns,
    Made,
    lines_of,
    read_groups,
    write_rows,
)
from plaudit.recipe.reward_models import RewardModel
from plaudit.rewards.judge import Judge
from plaudit.rewards.templates import OURS, JudgeTemplate
from plaudit.types import Message, Prompt

Rule = Literal["pointwise_score", "grade"]
DATA_SOURCES: dict[Rule, str] = {"pointwise_score": "mt_score", "grade": "grade"}
RL_SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": MESSAGES,
        "ability": TEXT,
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": pa.struct({"src_text": TEXT, "src_lang": TEXT, "trg_lang": TEXT, "candidate": TEXT}),
    }
)


def make_pointwise_sft(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, seed: int = 0,
) -> Made:  # fmt: skip
    """Write conversations: the question about a candidate, and the analysis and score it should be answered with."""
    ask, made, rows = _Question(template, rule), Made(), []
    for group in read_groups(files, columns, max_characters, made, analysed=True):
        said = lines_of(group, columns.analysis, "a row for each candidate asks")
        for i, (_, analysis) in enumerate(said):
            answer = f"{analysis.strip()}\n\n{_ending(group.scores[i], rule)}"
            rows.append({"messages": [*ask(group, i), {"role": "assistant", "content": answer}]})
    random.Random(seed).shuffle(rows)
    return write_rows(out, rows, SFT_SCHEMA, made)


def make_pointwise_rl(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, data_source: str | None = None,
) -> Made:  # fmt: skip
    """Write prompts with the truth, for the rule."""
    ask, made, rows = _Question(template, rule), Made(), []
    for group in read_groups(files, columns, max_characters, made, analysed=False):
        source, target = group.languages
        for i, (candidate, score) in enumerate(zip(group.candidates, group.scores, strict=True)):
            about = {"src_text": group.text, "src_lang": source, "trg_lang": target, "candidate": candidate}
            truth = str(score) if rule == "pointwise_score" else f"{score / HIGHEST:g}"
            rows.append(
                {
                    "data_source": data_source or DATA_SOURCES[rule], "prompt": ask(group, i), "ability": "scoring",
                    "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": about,
                }
            )  # fmt: skip
    return write_rows(out, rows, RL_SCHEMA, made)


def _ending(score: int, rule: Rule) -> str:
    return str(score) if rule == "pointwise_score" else f"Total Score: {score}/{HIGHEST}"


class _Question:
    """What the model is asked about a candidate: `judge`'s prompt."""

    def __init__(self, template: Path | None, rule: Rule):
        parser = "last_number_line" if rule == "pointwise_score" else "total_score"
        model = RewardModel(path="the one that is trained")  # nobody asks it here
        self.judge = Judge(kind="judge", model=model, parser=parser, template=None if template is None else str(template))
        self.template = JudgeTemplate(template or OURS / f"{self.judge.own_template}.jinja", Judge.variables, "--template")

    def __call__(self, group: Candidates, i: int) -> list[Message]:
        text = self.template.render(Prompt(group.where, group.task), self.judge.about(group.candidates[i]))
        return [{"role": "user", "content": text}]
