"""Letters to sort: a task that a model of a hundred thousand weights learns in a minute, and whose answers are right or wrong.

The demonstrations are careless: in a share of them two letters of the answer are swapped. A model that is fine-tuned on them learns
to sort, and to be careless. Prompts for RL and validation come with the right answer, for the reward alone.
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
    """Write sft.jsonl (conversations), rl.jsonl and val.jsonl (prompts with the truth); no question twice."""
    fewest, most = letters
    if fewest > most:
        raise PlauditError(f"--letters: {fewest} {most} should be the fewest and the most, in that order")
    count, room = demonstrations + prompts + val, sum(26**n for n in range(fewest, most + 1))
    if count > room // 2:
        raise PlauditError(f"--letters: there are only {room:,} questions of {fewest} to {most} letters; {count:,} are too many")
    chance = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < count:
        questions[" ".join(chance.choices(string.ascii_lowercase, k=chance.randint(fewest, most)))] = None
    drawn = iter(questions)
    sft = [_conversation(next(drawn), chance.random() < careless, chance) for _ in range(demonstrations)]
    parts = {"sft": sft, "rl": [_prompt(next(drawn)) for _ in range(prompts)], "val": [_prompt(next(drawn)) for _ in range(val)]}
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        write_atomic(out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _conversation(question: str, swapped: bool, chance: random.Random) -> dict[str, Any]:
    answer = _sorted(question)
    if swapped:
        i, j = chance.sample(range(len(answer)), 2)
        answer[i], answer[j] = answer[j], answer[i]
    return {"messages": [_asked(question), {"role": "assistant", "content": " ".join(answer)}]}


def _prompt(question: str) -> dict[str, Any]:
    truth = " ".join(_sorted(question))
    return {"prompt": [_asked(question)], "data_source": "sorting", "reward_model": {"ground_truth": truth}, "extra_info": {}}


def _asked(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"Sort: {question}"}


def _sorted(question: str) -> list[str]:
    return sorted(question.split())
