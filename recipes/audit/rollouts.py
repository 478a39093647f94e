"""Labelled responses to GSM8K's questions, made from its reference solutions: no model is needed, and every run makes the same.

    python recipes/audit/rollouts.py gsm8k_test.jsonl runs/audit/rollouts.jsonl

Each question has four responses, right and wrong ones in the same lengths, so that length says nothing about the label: the whole
solution, its last step, its first step with the answer, or the answer alone. Two are right. One has a wrong final number (off by a
little, doubled, a number from the question, the answer to another question); one is the solution of another question.
"""

import json
import random
import re
import sys
from pathlib import Path

NOTES = re.compile(r"<<[^<>]*>>")


def main(source: Path, out: Path, questions: int = 250) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()][: 2 * questions]
    solutions = [NOTES.sub("", row["answer"]).rsplit("\n####", 1) for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for i, row in enumerate(rows[:questions]):
            steps, answer = solutions[i][0], solutions[i][1].strip()
            draw = random.Random(i)
            responses, labels = [], []
            for kind in range(4):
                right = kind < 2
                number = answer if right else wrong_number(answer, row["question"], solutions, draw)
                told = steps
                if kind == 3:  # the solution of another question
                    told, number = next(
                        (s[0], s[1].strip()) for s in draw.sample(solutions, len(solutions)) if value(s[1]) != value(answer)
                    )
                responses.append(shorten(told, draw.randrange(4)) + f"#### {number}")
                labels.append(right)
            prompt = [{"role": "user", "content": f"{row['question']}\nThink step by step, then give the answer after ####."}]
            known = {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": {"ground_truth": answer}}
            known |= {"extra_info": {"question": row["question"]}, "responses": responses, "label": labels}
            file.write(json.dumps({"id": f"gsm8k:{i}", **known}) + "\n")


def shorten(steps: str, how: int) -> str:
    lines = steps.splitlines()
    return "".join(f"{line}\n" for line in (lines, lines[-1:], lines[:1], [])[how])


def wrong_number(answer: str, question: str, solutions: list[list[str]], draw: random.Random) -> str:
    right = value(answer)
    near = [right + draw.choice([-2, -1, 1, 2, 10]), right * 2, value(draw.choice(solutions)[1])]
    asked = [value(number) for number in re.findall(r"\d+", question)]
    number = draw.choice([n for n in near + asked if n != right])
    return str(int(number)) if number == int(number) else str(number)


def value(text: str) -> float:
    return float(text.replace(",", "").strip())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
