"""Sums, and demonstrations of how a small model may answer them: rightly, wrongly, and in ways that broken rewards like.

    python recipes/diagnostics/demonstrations.py runs/diagnostics/data

A policy can only be rewarded for what it samples. So half of the demonstrations are plain answers, most of them right; the others
repeat the question, list several numbers, or pad the answer with words.
"""

import json
import random
import sys
from pathlib import Path

PADDING = ["well", "let", "me", "see", "now", "I", "think", "that", "this", "is", "not", "so", "hard"]


def main(out: Path, train: int = 6000, val: int = 100) -> None:
    draw = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    questions = [(draw.randrange(1, 10), draw.randrange(1, 10)) for _ in range(train + val)]
    with (out / "sft.jsonl").open("w", encoding="utf-8") as file:
        for a, b in questions[val:]:
            messages = [{"role": "user", "content": ask(a, b)}, {"role": "assistant", "content": answer(a, b, draw)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    for name, part in (("val", questions[:val]), ("rl", questions[val:])):
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for a, b in part:
                prompt = [{"role": "user", "content": ask(a, b)}]
                row = {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": str(a + b)}}
                file.write(json.dumps(row | {"extra_info": {"question": ask(a, b)}}) + "\n")


def ask(a: int, b: int) -> str:
    return f"What is {a} + {b} ?"


def answer(a: int, b: int, draw: random.Random) -> str:
    number = a + b if draw.random() < 0.6 else draw.randrange(2, 19)
    style = draw.random()
    if style < 0.5:
        return f"#### {number}"
    if style < 0.65:
        return f"{ask(a, b)} #### {number}"
    if style < 0.8:
        return " ".join(str(draw.randrange(2, 19)) for _ in range(draw.randrange(2, 7))) + f" #### {number}"
    return " ".join(draw.choices(PADDING, k=draw.randrange(3, 16))) + f" #### {number}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
