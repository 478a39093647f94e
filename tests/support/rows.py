"""Rows of data sets."""

import json
from pathlib import Path


def arithmetic_rows(count: int = 60) -> list[dict]:
    """Single- and multi-turn conversations of different lengths, with and without a system prompt."""
    rows = []
    for i in range(count):
        a, b = i % 7, (i * 3) % 10
        messages = [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a + b}" if i % 2 else f"{a} + {b} makes {a + b}, so the answer is {a + b}."},
        ]
        if i % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Answer with a number."})
        if i % 5 == 0:
            messages += [{"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": f"{2 * (a + b)}"}]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pair_rows(count: int = 40) -> list[dict]:
    """Sums with a plain answer that is preferred to a guess; some after an earlier turn, some with a system prompt."""
    rows = []
    for i in range(count):
        a, b = i % 7, (i * 3) % 10
        prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
        if i % 3 == 0:
            prompt.insert(0, {"role": "system", "content": "Answer with a number."})
        if i % 5 == 0:
            prompt += [{"role": "assistant", "content": f"{a + b}"}, {"role": "user", "content": "And twice that?"}]
        rejected = f"I guess {a + b}" if i % 2 else f"I guess that it may be {a + b} or more"
        rows.append({"prompt": prompt, "chosen": f"the answer is {a + b}." if i % 4 else f"{a + b}.", "rejected": rejected})
    return rows


def prompt_rows(count: int = 12) -> list[dict]:
    """Questions with one right answer, of different lengths."""
    sums = [(i % 7, (i * 3) % 10) for i in range(count)]
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?{'' if i % 3 else ' Answer with a number.'}"}],
            "data_source": "sums",
            "reward_model": {"ground_truth": str(a + b)},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(sums)
    ]
