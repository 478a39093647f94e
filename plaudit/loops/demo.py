"""`plaudit demo`: the full pipeline in miniature, with ordinary commands and recipes.

Rows of letters to sort → a tokenizer and a small Llama with random weights → SFT on careless demonstrations → GRPO against a rule
that rewards only right answers. Every step can be run by hand (docs/demo.md shows how).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from plaudit.cluster.ranks import ranks_from_environment
from plaudit.errors import RecipeError
from plaudit.inputs import load_checked
from plaudit.loops import rl
from plaudit.loops.train import train
from plaudit.output_folder import DEMO_FILES, require_empty
from plaudit.prepare.sorting import make_sorting
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.report.demo import draw_demo
from plaudit.report.progress import print_line

SFT, RL = Path("recipes/demo/sft.yaml"), Path("recipes/demo/rl.yaml")


def run_demo(out: Path, seed: int, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Run the steps that have not been done yet; print validation rewards and the path of the figure. `overrides`: of settings that
    both stages have, such as cluster.gpus=2."""
    if (ranks := ranks_from_environment()) is not None and ranks.size > 1:
        raise RecipeError(f"the demo starts its processes itself: run `plaudit demo cluster.gpus=N` without {ranks.launcher}")
    require_empty(out, DEMO_FILES)
    data, base = out / "data", out / "base"
    if not (data / "val.jsonl").exists():
        make_sorting(data, demonstrations=2000, prompts=4000, val=200, letters=(3, 6), careless=0.5, seed=seed)
    if not (base / "config.json").exists():
        size = make_tiny_model([data / "sft.jsonl"], base, hidden_size=96, layers=2, vocabulary=300, seed=seed)
        print_line(f"{base}: a Llama with {size:,} random weights and its own tokenizer")

    prompts = [f"seed={seed}", f"data.train={data / 'rl.jsonl'}", f"data.val={data / 'val.jsonl'}", f"run.dir={out / 'rl'}"]
    before = rl.evaluate(*load_checked(RL, [*prompts, f"model.path={base}", *overrides], "rl"))["val/reward"]
    demonstrations = [f"seed={seed}", f"model.path={base}", f"data.train={data / 'sft.jsonl'}", f"run.dir={out / 'sft'}"]
    print_line("\nSFT: a cold start on careless demonstrations", "bold")
    cold_start = train(*load_checked(SFT, [*demonstrations, *overrides], "sft"))
    print_line("\nRL: GRPO with a reward for right answers", "bold")
    train(*load_checked(RL, [*prompts, f"model.path={cold_start}", *overrides], "rl"))

    curve = _metrics(out / "rl")
    validated = [row for row in curve if "val/reward" in row]
    rewards = {"base": before, "after SFT": validated[0]["val/reward"], "after RL": validated[-1]["val/reward"]}
    picture = out / "demo.png"
    draw_demo(_metrics(out / "sft"), curve, rewards, picture)
    table = Table("", "validation reward", title=f"sorting letters, seed {seed}", title_justify="left")
    for name, reward in rewards.items():
        table.add_row(name, f"{reward:.3f}")
    Console().print(table)
    print(f"picture: {picture}\nsamples: {out / 'rl/samples'}\nmodel:   {out / 'rl/model'}")
    return rewards


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
