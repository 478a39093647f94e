"""Evaluations of rewards on small data: rows in, figures out."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.data.conversations import Source
from plaudit.evaluation.results import Evaluation
from plaudit.evaluation.rewards import RewardsJob, evaluate_rewards
from plaudit.evaluation.scored import EvaluatedReward
from plaudit.recipe import ScoreRecipe
from plaudit.statistics.figures import Resampling
from support.rows import write_jsonl

LONGER = {"kind": "length", "unit": "characters", "at_least": 1000, "slack": 1000}
"""Scores k characters k / 1000, up to 1000."""
SHORTER = {**LONGER, "scale": -1.0}


def of_length(*lengths: int) -> list[str]:
    """Texts that LONGER scores in proportion to these."""
    return ["x" * length for length in lengths]


def evaluated(name: str, *rewards: dict[str, Any]) -> EvaluatedReward:
    return EvaluatedReward(name, Path(f"{name}.yaml"), ScoreRecipe.model_validate({"rewards": rewards}).rewards)


def evaluate_files(
    files: Sequence[Path], out: Path, rewards: Mapping[str, dict[str, Any]] | None = None, resamples: int = 100, seed: int = 0
) -> Evaluation:
    """By one reward each; LONGER unless given."""
    named = [evaluated(name, reward) for name, reward in (rewards or {"longer": LONGER}).items()]
    return evaluate_rewards(RewardsJob(named, [Source(file) for file in files], out, Resampling(seed, resamples)))


def evaluate_rows(folder: Path, rows: list[dict], rewards: Mapping[str, dict[str, Any]] | None = None, **options) -> Evaluation:
    return evaluate_files([write_jsonl(folder / "items.jsonl", rows)], folder / "out", rewards, **options)


def values(evaluation: Evaluation, part: str, name: str | None = None) -> dict[str, float]:
    """All figures of a part, without their intervals."""
    own = evaluation.figures[name or next(iter(evaluation.figures))]
    return {figure: estimate.value for figure, estimate in own[part].items()}


def pairs(*lengths: tuple[int, int], **columns: Any) -> list[dict]:
    """A row for each (length of chosen, length of rejected)."""
    return [
        {"prompt": f"question {i}", "chosen": chosen, "rejected": rejected, **columns}
        for i, (chosen, rejected) in enumerate(of_length(*pair) for pair in lengths)
    ]


# Judges that compare, behind a server --------------------------------------------------------------------------------


def judge_at(url: str, kind: str = "pairwise_judge", **settings: Any) -> dict[str, Any]:
    points = {"highest": 20} if kind == "group_judge" else {}
    return {"kind": kind, "model": {"placement": "server", "url": url}, "limits": {"backoff_s": 0.01}, **points, **settings}


def shown_in(prompt: str) -> list[str]:
    """The responses in a judge's prompt, in the order in which it shows them."""
    if "# Answer A\n" in prompt:
        return [re.search(rf"^# Answer {letter}\n(.*?)\n\n# ", prompt, re.M | re.S)[1] for letter in "AB"]  # pyright: ignore
    candidates = prompt.partition("# Candidates\n")[2].partition("\n\n# What to write")[0]
    return re.split(r"\n*^\[[A-Z]\]\n", candidates, flags=re.M)[1:]


def task_in(prompt: str) -> str:
    return prompt.partition("# Task\n")[2].partition("\n")[0]


def answers(points: Callable[[str, list[str]], Sequence[float]]) -> Callable[[str], str]:
    """What a judge writes that gives these points to the responses it is shown: task, responses → points from 0 to 20."""

    def answer(prompt: str) -> str:
        shown = shown_in(prompt)
        given = points(task_in(prompt), shown)
        if "# Answer A\n" in prompt:
            return "tie" if given[0] == given[1] else "AB"[given[1] > given[0]]
        order = sorted(range(len(shown)), key=lambda i: -given[i])
        letters = ["ABCDEFGH"[i] for i in order]
        signs = [" = " if given[a] == given[b] else " > " for a, b in itertools.pairwise(order)]
        ranking = "".join(f"{letter}{sign}" for letter, sign in zip(letters, [*signs, ""], strict=True))
        scores = ", ".join(f"{letter}: {given[i]:g}" for letter, i in zip(letters, order, strict=True))
        return f"Ranking:\n{ranking}\nScores:\n{scores}"

    return answer
