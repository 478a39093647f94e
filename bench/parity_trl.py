"""plaudit's SFT computes what TRL's SFTTrainer computes: same tiny model, same rows in each step, equal losses.

    make .venv-trl/installed        # or: a venv with bench/requirements-trl.txt
    python bench/parity_trl.py      # one to three minutes on two CPU cores

For each architecture, `plaudit sft` trains a tiny fp32 model on multi-turn conversations with weight decay, clipping at
some steps, a cosine schedule and several epochs; the last step is a short one. TRL, in its own environment, gets the
same token ids and mask of learnt tokens (plaudit's; which tokens are learnt is not what is compared here), row by row
in plaudit's order. What differs on purpose: plaudit packs a step's rows into micro-batches by tokens, TRL pads them in
pairs, so both must divide by the tokens of the whole step.

Twice for each: with TRL exactly as it comes (no warm-up), and with warm-up, for which TRL is given plaudit's formula,
as its own starts at a rate of 0. Loss, AdamW, clipping and the choice of what decays are TRL's own in both.

Compared at each step: loss (absolute), gradient norm and learning rate (relative); a difference over the tolerance, and
the exit code is 1. The largest difference of the trained weights is shown.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import yaml
from safetensors.torch import load_file

from plaudit.data.conversations import Source
from plaudit.data.examples import load_examples
from plaudit.data.order import RowOrder
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.prepare.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parent.parent
KINDS = ("llama", "qwen2")
NUM_ROWS, ROWS_PER_STEP, ROWS_OF_LAST_STEP = 50, 8, 5
TRL_ROWS_PER_MICRO_BATCH = 2
TOKENS_PER_MICRO_BATCH = 150
OPTIM = {
    "lr": 3e-3,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.5,
    "max_grad_norm": 2.0,
    "schedule": "cosine",
    "min_lr_ratio": 0.1,
}


def conversations() -> list[dict]:
    """One to three turns, short and long answers, with and without a system prompt."""
    rows = []
    for i in range(NUM_ROWS):
        messages = [{"role": "system", "content": "Answer with a number."}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            a, b = (i + turn) % 7, (3 * i + turn) % 10
            answer = f"{a} + {b} makes {a + b}, so the answer is {a + b}." if (i + turn) % 2 else str(a + b)
            messages += [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    return rows


def run_quietly(command: list[str | Path]) -> None:
    """Its output is shown only if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # threads only slow tiny models down
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")


def run_plaudit(recipe: dict, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step of `plaudit sft`."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    run_quietly([sys.executable, "-m", "plaudit", "sft", file])
    return [json.loads(line) for line in (Path(recipe["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()]


def rows_in_order(recipe: dict) -> list[dict]:
    """Every row of every step as plaudit tokenises it, in the order it trains on them."""
    template = load_template(load_tokenizer(recipe["model"]["path"]), None)
    source = Source(Path(recipe["data"]["train"]))
    examples = load_examples([source], template, max_tokens=4096, too_long="error").examples
    order = RowOrder(len(examples), per_step=ROWS_PER_STEP, epochs=recipe["run"]["epochs"], seed=recipe["seed"])
    stream = [examples[row] for step in range(order.num_steps) for row in order.rows(step)]
    return [{"input_ids": e.tokens.tolist(), "assistant_masks": e.loss_mask.astype(int).tolist()} for e in stream]


def run_trl(python: str, recipe: dict, folder: Path) -> dict:
    """What TRL logs at each step, and the versions it ran with."""
    job = {
        "model": recipe["model"]["path"],
        "rows": rows_in_order(recipe),
        "rows_per_step": ROWS_PER_STEP,
        "rows_per_micro_batch": TRL_ROWS_PER_MICRO_BATCH,
        "optim": recipe["optim"],
        "trained_model": str(folder / "trl_model"),
    }
    job_file, log_file = folder / "job.json", folder / "log.json"
    job_file.write_text(json.dumps(job))
    run_quietly([python, Path(__file__).with_name("trl_sft.py"), job_file, log_file])
    return json.loads(log_file.read_text())


def compare(kind: str, warmup: int, num_steps: int, tolerance: float, trl_python: str, folder: Path) -> bool:
    """Train with both, print the table; says whether they agree."""
    rows_file = folder / "rows.jsonl"
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    make_tiny_model([rows_file], folder / "model", kind=kind, hidden_size=64, vocabulary=320)
    total_rows = (num_steps - 1) * ROWS_PER_STEP + ROWS_OF_LAST_STEP
    recipe = {
        "stage": "sft",
        "seed": 7,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(rows_file)},
        "train": {"rows_per_step": ROWS_PER_STEP, "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH},
        "optim": {**OPTIM, "warmup_steps": warmup},
        "run": {"dir": str(folder / "run"), "epochs": total_rows / NUM_ROWS, "device": "cpu"},
    }
    ours = run_plaudit(recipe, folder)
    log = run_trl(trl_python, recipe, folder)
    theirs = log["steps"]
    assert len(ours) == len(theirs) == num_steps, f"{len(ours)} steps of plaudit, {len(theirs)} of TRL, not {num_steps}"

    differences = [
        {
            "loss": abs(our["loss"] - their["loss"]),
            "grad_norm": abs(our["grad_norm"] / their["grad_norm"] - 1),
            "lr": abs(our["lr"] / their["learning_rate"] - 1),
        }
        for our, their in zip(ours, theirs, strict=True)
    ]

    print(f"\n{kind}, " + (f"{warmup} steps of warm-up by plaudit's formula" if warmup else "TRL as it comes"))
    print(f"  plaudit   {listed({name: version(name) for name in ('transformers', 'torch')})}")
    print(f"  TRL       {listed(log['versions'])}, rows_per_micro_batch {TRL_ROWS_PER_MICRO_BATCH}")
    for section in ("train", "optim", "run"):
        print(f"  {section:9} {listed({name: value for name, value in recipe[section].items() if name != 'dir'})}")
    print("step  plaudit loss      TRL loss  difference  grad norm  difference         lr  difference")
    for our, their, difference in zip(ours, theirs, differences, strict=True):
        print(
            f"{our['step']:4}  {our['loss']:12.7f}  {their['loss']:12.7f}  {difference['loss']:10.1e}"
            f"  {our['grad_norm']:9.5f}  {difference['grad_norm']:10.1e}  {our['lr']:9.7f}  {difference['lr']:10.1e}"
        )
    largest = {name: max(difference[name] for difference in differences) for name in differences[0]}
    clipped = sum(our["grad_norm"] > OPTIM["max_grad_norm"] for our in ours)
    print(f"largest differences: {listed({k: f'{v:.1e}' for k, v in largest.items()})}, ", end="")
    print(f"weights {weight_difference(folder):.1e}; clipped in {clipped} of {num_steps} steps", flush=True)
    return all(value <= tolerance for difference in differences for value in difference.values())  # NaN is not


def weight_difference(folder: Path) -> float:
    """The largest one between the two trained models."""
    ours, theirs = (load_file(folder / model / "model.safetensors") for model in ("run/model", "trl_model"))
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def listed(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=REPOSITORY / ".venv-trl/bin/python", help="Python of TRL's environment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--warmup", type=int, nargs="+", default=(0, 3), help="steps of warm-up, a table for each")
    args = parser.parse_args()
    if not Path(args.trl_python).exists():
        sys.exit(f"{args.trl_python} does not exist: make .venv-trl/installed")
    agree = []
    for kind in args.kind:
        for warmup in args.warmup:
            with tempfile.TemporaryDirectory() as folder:
                agree.append(compare(kind, warmup, args.steps, args.tolerance, str(args.trl_python), Path(folder)))
    print(f"\n{'equal' if all(agree) else 'NOT EQUAL'} within {args.tolerance:g}")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
