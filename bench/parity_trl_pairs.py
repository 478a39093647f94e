"""plaudit's DPO and reward models compute what TRL's trainers compute: same tiny model, same pairs in each step, equal losses.

    make .venv-trl/installed              # or: a venv with bench/requirements-trl.txt
    python bench/parity_trl_pairs.py      # about three minutes on two CPU cores

As parity_trl.py does for SFT: for each loss, plaudit trains a tiny fp32 model on pairs of single- and multi-turn conversations
with weight decay, clipping at some steps, a cosine schedule and several epochs; TRL, in its own environment, gets the same tokens,
pair by pair in plaudit's order. plaudit packs a step's pairs into micro-batches by tokens, TRL pads them two by two (or all of a
step, where its loss is a mean over a micro-batch's tokens). Reward models start from the same head.

Compared at each step: loss and margin (absolute), gradient norm and learning rate (relative); a difference over the tolerance, and
the exit code is 1. The largest difference of the trained weights is shown.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from parity_trl import OPTIM, REPOSITORY, listed, run_quietly, weight_difference

from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.pairs import load_pairs
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.classifier import load_classifier
from plaudit.models.scalar import Transcript
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import Model
from plaudit.types import Pair

NUM_PAIRS, PAIRS_PER_STEP = 50, 8
TOKENS_PER_MICRO_BATCH = 400
# A head learns these pairs in a few steps; faster than this, rounding grows tenfold in each of them.
LR = {"dpo": 1e-3, "reward-model": 2e-4}
CASES = {
    # stage, plaudit's loss, TRL's settings, TRL's pairs in a micro-batch
    "dpo": ("dpo", {"beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}, 2),
    "ipo": ("dpo", {"kind": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}, 2),
    "hinge": ("dpo", {"kind": "hinge", "beta": 0.05}, {"loss_type": ["hinge"], "beta": 0.05}, 2),
    "dpo with nll": (
        "dpo",
        {"beta": 0.3, "nll_coefficient": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
        PAIRS_PER_STEP,
    ),
    "reward model": ("reward-model", {}, {}, 2),
    "reward model with margins and centring": (
        "reward-model",
        {"centring_coefficient": 0.05},
        {"center_rewards_coefficient": 0.05},
        2,
    ),
}


def pairs() -> list[dict]:
    """One to three turns, answers of different lengths, with and without a system prompt."""
    rows = []
    for i in range(NUM_PAIRS):
        prompt = [{"role": "system", "content": "Answer with a number."}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            a, b = (i + turn) % 7, (3 * i + turn) % 10
            prompt += [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        right = prompt.pop()["content"]
        answers = f"It makes {right}, so the answer is {right}.", f"{int(right) + 1 + i % 3}"
        chosen, rejected = answers if i % 2 else (right, f"Perhaps {int(right) + 2}, or something like {int(right) + 3}.")
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "by": 0.25 * (i % 4)})
    return rows


def run_plaudit(recipe: dict, folder: Path) -> list[dict[str, float]]:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    run_quietly([sys.executable, "-m", "plaudit", recipe["stage"], file])
    return [json.loads(line) for line in (Path(recipe["run"]["dir"]) / "metrics.jsonl").read_text().splitlines()]


def pairs_in_order(recipe: dict) -> list[Pair]:
    """Every pair of every step as plaudit tokenises it, in the order it trains on them."""
    template = load_template(load_tokenizer(recipe["model"]["path"]), None)
    tokenise = Transcript(template.tokenizer, template.text).examples
    if recipe["stage"] == "dpo":
        tokenise = lambda conversations: template.examples(conversations, "all")  # noqa: E731
    source, column = Source(Path(recipe["data"]["train"])), recipe["data"].get("margin_column")
    loaded = load_pairs([source], tokenise, max_tokens=4096, too_long="error", margin_column=column).pairs
    order = RowOrder(len(loaded), per_step=PAIRS_PER_STEP, epochs=recipe["run"]["epochs"], seed=recipe["seed"])
    return [loaded[row] for step in range(order.num_steps) for row in order.rows(step)]


def as_trl(pair: Pair, recipe: dict) -> dict:
    if recipe["stage"] == "reward-model":
        row = {"chosen_ids": pair.chosen.tokens.tolist(), "rejected_ids": pair.rejected.tokens.tolist()}
        return row | ({"margin": pair.margin} if "margin_column" in recipe["data"] else {})
    # All behind the prompt is learnt there; what plaudit does not learn behind the end token changes no other log-prob.
    begin = int(pair.chosen.loss_mask.argmax())
    sides = {}
    for name, example in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        end = len(example) - int(example.loss_mask[::-1].argmax())
        assert example.loss_mask[begin:end].all()
        assert not example.loss_mask[:begin].any()
        sides[f"{name}_ids"] = example.tokens[begin:end].tolist()
    return {"prompt_ids": pair.chosen.tokens[:begin].tolist(), **sides}


def run_trl(python: str, recipe: dict, settings: dict, rows_per_micro_batch: int, folder: Path) -> dict:
    """What TRL logs at each step, and the versions it ran with."""
    job = {
        "stage": recipe["stage"],
        "model": recipe["model"]["path"],
        "rows": [as_trl(pair, recipe) for pair in pairs_in_order(recipe)],
        "rows_per_step": PAIRS_PER_STEP,
        "rows_per_micro_batch": rows_per_micro_batch,
        "optim": recipe["optim"],
        "settings": settings,
        "trained_model": str(folder / "trl_model"),
    }
    job_file, log_file = folder / "job.json", folder / "log.json"
    job_file.write_text(json.dumps(job))
    run_quietly([python, Path(__file__).with_name("trl_pairs.py"), job_file, log_file])
    return json.loads(log_file.read_text())


def compare(case: str, kind: str, num_steps: int, tolerance: float, trl_python: str, folder: Path) -> bool:
    """Train with both, print the table; says whether they agree."""
    stage, loss, settings, rows_per_micro_batch = CASES[case]
    rows_file = folder / "pairs.jsonl"
    rows_file.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    texts = [{"messages": [*row["prompt"], {"role": "assistant", "content": row["chosen"]}]} for row in pairs()]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    model = folder / "model"
    make_tiny_model([folder / "texts.jsonl"], model, kind=kind, hidden_size=64, vocabulary=320)
    if stage == "reward-model":
        template = load_template(load_tokenizer(str(model)), None)
        load_classifier(Model(path=str(model)), template, torch.device("cpu"), seed=3).save(folder / "classifier")
        model = folder / "classifier"
    recipe = {
        "stage": stage,
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(rows_file), **({"margin_column": "by"} if "margins" in case else {})},
        "loss": loss,
        "train": {"pairs_per_step": PAIRS_PER_STEP, "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH},
        "optim": {**OPTIM, "lr": LR[stage]},
        "run": {"dir": str(folder / "run"), "epochs": num_steps * PAIRS_PER_STEP / NUM_PAIRS, "device": "cpu"},
    }
    ours = run_plaudit(recipe, folder)
    log = run_trl(trl_python, recipe, settings, rows_per_micro_batch, folder)
    theirs = log["steps"]
    assert len(ours) == len(theirs) == num_steps, f"{len(ours)} steps of plaudit, {len(theirs)} of TRL, not {num_steps}"
    accuracy, margin = ("rewards/accuracies", "rewards/margins") if stage == "dpo" else ("accuracy", "margin")
    differences = [
        {
            "loss": abs(our["loss"] - their["loss"]),
            "grad_norm": abs(our["grad_norm"] / their["grad_norm"] - 1),
            "lr": abs(our["lr"] / their["learning_rate"] - 1),
            "margin": abs(our["margin"] - their[margin]),
        }
        for our, their in zip(ours, theirs, strict=True)
    ]
    print(f"\n{case}, {kind}")
    print(f"  plaudit   {listed({name: version(name) for name in ('transformers', 'torch')})}")
    print(f"  TRL       {listed(log['versions'])}, rows_per_micro_batch {rows_per_micro_batch}, {listed(settings)}")
    for section in ("loss", "train", "optim", "run"):
        print(f"  {section:9} {listed({name: value for name, value in recipe[section].items() if name != 'dir'})}")
    print("step  plaudit loss      TRL loss  difference  grad norm  difference     margin  difference  accuracy")
    for our, their, difference in zip(ours, theirs, differences, strict=True):
        print(
            f"{our['step']:4}  {our['loss']:12.7f}  {their['loss']:12.7f}  {difference['loss']:10.1e}"
            f"  {our['grad_norm']:9.5f}  {difference['grad_norm']:10.1e}  {our['margin']:9.5f}  {difference['margin']:10.1e}"
            f"  {our['accuracy']:.3f} {their[accuracy]:.3f}"
        )
    largest = {name: max(difference[name] for difference in differences) for name in differences[0]}
    clipped = sum(our["grad_norm"] > OPTIM["max_grad_norm"] for our in ours)
    print(f"largest differences: {listed({k: f'{v:.1e}' for k, v in largest.items()})}, ", end="")
    print(f"weights {weight_difference(folder):.1e}; clipped in {clipped} of {num_steps} steps", flush=True)
    return all(value <= tolerance for difference in differences for value in difference.values())  # NaN is not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=REPOSITORY / ".venv-trl/bin/python", help="Python of TRL's environment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--kind", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    args = parser.parse_args()
    if not Path(args.trl_python).exists():
        sys.exit(f"{args.trl_python} does not exist: make .venv-trl/installed")
    agree = []
    for case in args.case:
        with tempfile.TemporaryDirectory() as folder:
            agree.append(compare(case, args.kind, args.steps, args.tolerance, str(args.trl_python), Path(folder)))
    print(f"\n{'equal' if all(agree) else 'NOT EQUAL'} within {args.tolerance:g}")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
