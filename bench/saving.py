"""What a checkpoint costs training: seconds per save on the training thread, written in the background or not.

    python bench/saving.py                       # a model of 100M parameters, fp32, on a CPU; about three minutes on two cores
    python bench/saving.py --processes 2         # AdamW's state divided between two processes

SFT with a save after every second step, on random weights. Each run ends with the same weights, which is checked.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HIDDEN, LAYERS = 768, 16
STEPS, SAVE_EVERY = 12, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rows-per-step", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), arguments)


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    parameters = make_inputs(folder)
    print(f"{parameters:,} parameters, {STEPS} steps, a save after every {SAVE_EVERY}; {arguments.processes} process(es)")
    print("| run.save_in_background | s per save, training thread | of it waiting | s per step without a save | s in all |")
    print("| --- | --- | --- | --- | --- |")
    weights = []
    for background in ("false", "true"):
        run = folder / background
        settings = [f"run.dir={run}", f"run.save_in_background={background}", f"run.device={arguments.device}"]
        settings += [f"cluster.gpus={arguments.processes}", f"train.rows_per_step={arguments.rows_per_step}"]
        subprocess.run(
            [sys.executable, "-m", "plaudit", "sft", "-q", folder / "r.yaml", *settings], check=True, stdout=subprocess.DEVNULL
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        print(f"| {background} | {describe(rows)} |", flush=True)
        weights.append((run / "model/model.safetensors").read_bytes())
    assert weights[0] == weights[1], "saving in the background has changed the result"


def make_inputs(folder: Path) -> int:
    """A model, its rows and a recipe; returns the number of parameters."""
    from plaudit.models.memory import count_parameters
    from plaudit.prepare.tiny_model import make_tiny_model

    rows = folder / "rows.jsonl"
    questions = [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.") for a in range(30) for b in range(30)]
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in questions
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_tiny_model([rows], folder / "model", kind="llama", hidden_size=HIDDEN, layers=LAYERS, vocabulary=512)
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(rows), "max_tokens": 256},
        "train": {"rows_per_step": 8},
        "run": {"dir": "set above", "epochs": 100, "max_steps": STEPS, "save_every": SAVE_EVERY, "keep_last": 1},
    }
    (folder / "r.yaml").write_text(json.dumps(recipe))
    return count_parameters(str(folder / "model"))


def describe(rows: list[dict[str, float]]) -> str:
    """From the lines of steps; the first save, which takes its memory, is left out, and so is the first step."""
    saves = [row for row in rows[1:] if "time/save_s" in row][1:]
    steps = [row for row in rows[1:] if "time/save_s" not in row]
    save, wait = (statistics.median(row[name] for row in saves) for name in ("time/save_s", "time/save_wait_s"))
    step = statistics.median(row["time/step_s"] for row in steps)
    return f"{save:.2f} | {wait:.2f} | {step:.2f} | {sum(row['time/step_s'] for row in rows):.1f}"


if __name__ == "__main__":
    main()
