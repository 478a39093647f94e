"""Check that a refactoring changes no number: train small recipes in two checkouts and compare them bit for bit.

    git worktree add ../before COMMIT
    python bench/same_bits.py ../before

Both checkouts get the same data and models. Compared for equality: every line of metrics.jsonl (except `time/`), every sampled
token and score, and every weight of the trained model and the critic. The cases are the demo's RL recipe, PPO with a separate and
with a shared critic, ReMax, dynamic sampling, KL in the reward, several updates per step with LoRA, DPO and a reward model.

Recipes use this checkout's setting names. RENAMED lists settings with a different name in the other one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open

HERE = Path(__file__).resolve().parent.parent

RENAMED: dict[str, str] = {}
"""This checkout's name of a setting → the other one's."""

REWARD = """
def compute_score(solution_str, ground_truth):
    written = sum(c.isascii() and c.isalnum() for c in solution_str)
    return {"score": written / max(1, len(solution_str)) + (ground_truth in solution_str), "written": written}
"""

FUNCTION = {"kind": "function", "path": "reward.py", "workers": 1, "limits": {"timeout_s": 120}}
RL: dict[str, Any] = {
    "model": {"path": "base"},
    "data": {"train": "data/rl.jsonl", "val": "data/val.jsonl", "max_prompt_tokens": 64},
    "rollout": {"n": 4, "max_new_tokens": 12},
    "validation": {"max_prompts": 16},
    "rewards": [FUNCTION, {"kind": "length", "weight": 0.1, "unit": "characters", "at_most": 8, "slack": 8}],
    "train": {"prompts_per_step": 8, "tokens_per_micro_batch": 512},
    "optim": {"lr": 1e-3, "warmup_steps": 1},
    "run": {"max_steps": 3, "validate_every": 2, "device": "cpu"},
}
PAIRS: dict[str, Any] = {
    "model": {"path": "base"},
    "data": {"train": "pairs.jsonl", "val": "pairs.jsonl", "max_tokens": 128},
    "train": {"pairs_per_step": 8, "tokens_per_micro_batch": 256},
    "optim": {"lr": 1e-3},
    "run": {"epochs": 4, "max_steps": 4, "validate_every": 2, "device": "cpu"},
}


def merged(tree: dict[str, Any], **sections: Any) -> dict[str, Any]:
    merged = dict(tree)
    for name, section in sections.items():
        merged[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return merged


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("rl", {}),  # recipes/demo/rl.yaml itself, a few steps of it
    "grpo, several updates, LoRA": (
        "rl",
        merged(
            RL, model={"lora": {"rank": 4}}, algorithm={"kl_coefficient": 0.01, "entropy_coefficient": 0.01},
            train={"prompts_per_update": 4, "epochs_per_step": 2},
        ),
    ),
    "ppo": (
        "rl",
        merged(RL, algorithm={"kind": "ppo", "gae_lambda": 0.95}, critic={"pretrain_steps": 1}, train={"prompts_per_update": 4}),
    ),
    "ppo, shared critic": ("rl", merged(RL, algorithm={"kind": "ppo"}, critic={"shared": True}, train={"prompts_per_update": 4})),
    "remax": ("rl", merged(RL, algorithm={"kind": "remax"})),
    "reinforce++": ("rl", merged(RL, algorithm={"kind": "reinforce++", "discount": 0.99}, train={"prompts_per_update": 4})),
    "gspo": ("rl", merged(RL, algorithm={"loss": "gspo", "old_logprobs": "sampler"}, train={"prompts_per_update": 4})),
    "dynamic sampling": (
        "rl", merged(RL, rewards=[{"kind": "contains", "text": "a"}], algorithm={"dynamic_sampling": {"max_rounds": 3}})
    ),
    "kl in the reward": (
        "rl", merged(RL, algorithm={"kind": "rloo", "kl_reward": {"coefficient": 0.05, "target": 0.1, "horizon": 100}})
    ),
    "dpo": ("dpo", merged(PAIRS, loss={"nll_coefficient": 0.1})),
    "reward model": ("reward-model", merged(PAIRS, loss={"centring_coefficient": 0.01})),
}  # fmt: skip


def plaudit(checkout: Path, scratch: Path, *arguments: str) -> None:
    """The checkout's own command, in the scratch folder."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "plaudit", *arguments], cwd=scratch, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{checkout}: plaudit {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def prepare(checkout: Path, scratch: Path) -> None:
    """Data and models for all cases, made once by one of the checkouts."""
    plaudit(checkout, scratch, "prepare", "sorting", "--out", "data")
    plaudit(
        checkout, scratch, "prepare", "tiny-model", "data/sft.jsonl", "--out", "base", "--hidden-size", "64", "--vocabulary", "300"
    )
    (scratch / "reward.py").write_text(REWARD)
    prompts = [json.loads(line) for line in (scratch / "data/rl.jsonl").read_text().splitlines()[:40]]
    pairs = [
        {"prompt": row["prompt"], "chosen": truth, "rejected": truth[::-1] + "x"}
        for row in prompts
        for truth in [str(row["reward_model"]["ground_truth"])]
    ]
    (scratch / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def renamed(tree: dict[str, Any]) -> dict[str, Any]:
    """The recipe in the other checkout's names: `section.name`, at any depth that RENAMED spells out, in every entry of a list."""
    tree = json.loads(json.dumps(tree))
    for new, old in RENAMED.items():
        section, _, inside = new.partition(".")
        entries = tree.get(section)
        for entry in entries if isinstance(entries, list) else [tree]:
            if entry is tree:
                rename(entry, new, old)
            else:
                rename(entry, inside, old.partition(".")[2])
    return tree


def rename(tree: dict[str, Any], new: str, old: str) -> None:
    *sections, name = new.split(".")
    holder = tree
    for section in sections:
        holder = holder.get(section) or {}
    if name not in holder:
        return
    value = holder.pop(name)
    *sections, name = old.split(".")
    target = tree
    for section in sections:
        target = target.setdefault(section, {})
    target[name] = value


def train(checkout: Path, scratch: Path, case: str, run: Path) -> None:
    verb, tree = CASES[case]
    if case == "demo":
        settings = [
            "data.train=data/rl.jsonl",
            "data.val=data/val.jsonl",
            "model.path=base",
            "run.max_steps=4",
            "run.validate_every=2",
        ]
        plaudit(checkout, scratch, verb, str(checkout / "recipes/demo/rl.yaml"), *settings, f"run.dir={run}")
        return
    recipe = scratch / f"{run.name}.yaml"
    recipe.write_text(json.dumps(tree if checkout == HERE else renamed(tree)))
    plaudit(checkout, scratch, verb, str(recipe), f"run.dir={run}")


def result(run: Path) -> dict[str, Any]:
    """Everything in a run folder that must be equal, by name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        f"metrics, step {row['step']}": {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    }
    for file in sorted((run / "samples").glob("*.parquet")):
        found[f"samples/{file.name}"] = pq.read_table(file).to_pylist()
    for folder in ("model", "critic"):
        for file in sorted((run / folder).glob("*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    found[f"{folder}: {name}"] = tensors.get_tensor(name).tobytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--scratch", type=Path, help="folder for the runs; existing runs are not repeated")
    options = parser.parse_args()
    before = options.before.resolve()
    commit = subprocess.run(
        ["git", "-C", str(before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="same_bits_"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    if not (scratch / "pairs.jsonl").exists():
        prepare(before, scratch)
    print(f"compared with {commit}, runs in {scratch}")
    different = 0
    for case in options.cases:
        name = "".join(c if c.isalnum() else "_" for c in case)
        runs = scratch / f"before_{name}", scratch / f"after_{name}"
        shutil.rmtree(runs[1], ignore_errors=True)  # this checkout may have changed
        for checkout, run in zip((before, HERE), runs, strict=True):
            if not (run / "model").exists():
                train(checkout, scratch, case, run)
        theirs, ours = map(result, runs)
        differ = [what for what in {**theirs, **ours} if theirs.get(what) != ours.get(what)]
        different += bool(differ)
        steps = sum(what.startswith("metrics") for what in ours)
        tensors = sum(": " in what for what in ours)
        verdict = f"DIFFERENT in {len(differ)}: {', '.join(differ[:4])}" if differ else "same bits"
        print(f"{case:30} {steps} lines of metrics, {tensors} tensors: {verdict}", flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
