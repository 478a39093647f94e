"""Sorting letters: a task with right and wrong answers that a model of a hundred thousand weights learns in a minute.

The demonstrations are careless: some have two letters of the answer swapped. A model fine-tuned on them learns to sort, and to be
careless. Prompts for RL and validation come with the right answer, which only the reward sees.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError
from plaudit.files import write_atomic


def make_sorting(
    out: Path, *, demonstrations: int, prompts: int, val: int, letters: tuple[int, int], careless: float, seed: int
) -> None:
    """Write sft.jsonl (conversations), rl.jsonl and val.jsonl (prompts with ground truth); no question repeats."""
    fewest, most = letters
    if fewest > most:
        raise PlauditError(f"--letters: {fewest} {most} should be the fewest and the most, in that order")
    count, room = demonstrations + prompts + val, sum(26**n for n in range(fewest, most + 1))
    if count > room // 2:
        raise PlauditError(f"--letters: there are only {room:,} questions of {fewest} to {most} letters; {count:,} are too many")
    rng = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < count:
        questions[" ".join(rng.choices(string.ascii_lowercase, k=rng.randint(fewest, most)))] = None
    drawn = iter(questions)
    sft = [_conversation(next(drawn), rng.random() < careless, rng) for _ in range(demonstrations)]
    splits = {"sft": sft, "rl": [_prompt(next(drawn)) for _ in range(prompts)], "val": [_prompt(next(drawn)) for _ in range(val)]}
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        write_atomic(out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _conversation(question: str, swapped: bool, rng: random.Random) -> dict[str, Any]:
    answer = _sorted(question)
    if swapped:
        i, j = rng.sample(range(len(answer)), 2)
        answer[i], answer[j] = answer[j], answer[i]
    return {"messages": [_user(question), {"role": "assistant", "content": " ".join(answer)}]}


def _prompt(question: str) -> dict[str, Any]:
    truth = " ".join(_sorted(question))
    return {"prompt": [_user(question)], "data_source": "sorting", "reward_model": {"ground_truth": truth}, "extra_info": {}}


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"Sort: {question}"}


def _sorted(question: str) -> list[str]:
    return sorted(question.split())
