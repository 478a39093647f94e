"""SFT, a reward model, GRPO against it, DPO on what GRPO sampled: each stage reads what the last one saved, and each is killed.

The commands are those of docs/preferences.md. One chain goes through; in the other one every stage is killed with -9 behind its
first checkpoints, in a step whose metrics are not written yet, and started again with the same command: both end with the same
bits.
"""

import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from plaudit.prepare.pairs import make_pairs
from plaudit.prepare.tiny_model import make_tiny_model
from support.paths import REPOSITORY
from support.processes import Command, signalled
from support.recipes import train_dpo, train_reward_model, train_rl, train_sft

TRAIN = {"sft": train_sft, "reward-model": train_reward_model, "rl": train_rl, "dpo": train_dpo}
KILLED_BEHIND = {"sft": 45, "reward-model": 14, "rl": 6, "dpo": 5}
"""The step after which a stage is killed; none of them saves then."""


def commands() -> list[list[str]]:
    """The page's, as a shell would have them."""
    page = (REPOSITORY / "docs/preferences.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```\n([^`]*recipes/chain/sft\.yaml[^`]*)```", page)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def run_of(recipe: str) -> Path:
    return Path("runs/chain") / Path(recipe).stem


def metrics_of(run: Path) -> list[dict]:
    """Whole lines alone: it may be written just now."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def exact_metrics(run: Path) -> list[dict]:
    """Without the machine's, and without what models were really asked: a step done again finds scores that were kept."""
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "judge/"))} for row in metrics_of(run)]


def killed_and_started_again(verb: str, recipe: str, folder: Path) -> None:
    run, moment = folder / run_of(recipe), KILLED_BEHIND[verb]
    signalled(signal.SIGKILL, f"before line {moment + 1}", verb, recipe, cwd=folder)
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert 0 < saved < metrics_of(run)[-1]["step"] == moment, "steps behind the last checkpoint are lost, and done again"
    assert not (run / "model").exists()
    again = Command(verb, recipe, cwd=folder)
    assert again.wait() == 0, again.output
    assert f"resuming from runs/chain/{run.name}/checkpoints/step_{saved:06d}" in " ".join(again.output.split()), again.output


def assert_same(ours: Path, whole: Path) -> None:
    """Weights, the trainer's state, metrics and samples, to the bit."""
    last = sorted((whole / "checkpoints").glob("step_*"))[-1].name
    files = ["model/model.safetensors", f"checkpoints/{last}/trainer/00000.safetensors", f"checkpoints/{last}/state.json"]
    files += [str(path.relative_to(whole)) for path in whole.glob("samples/*")]
    for file in files:
        assert (ours / file).read_bytes() == (whole / file).read_bytes(), file
    assert {path.name for path in ours.glob("samples/*")} == {path.name for path in whole.glob("samples/*")}
    assert exact_metrics(ours) == exact_metrics(whole)


@pytest.mark.slow
def test_every_stage_killed_and_the_chain_ends_the_same(tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    stages = []
    for verb, *arguments in commands():
        monkeypatch.chdir(whole)
        match verb, arguments:
            case "prepare", ["tiny-model", rows, "--out", model]:
                make_tiny_model([rows], model)
                shutil.copytree(model, killed / model)
            case "prepare", ["pairs", samples, "--out", pairs]:
                for folder in (whole, killed):
                    make_pairs(sorted(folder.glob(samples)), folder / pairs)
                assert (killed / pairs / "train.jsonl").read_bytes() == (whole / pairs / "train.jsonl").read_bytes()
            case _, [recipe]:
                stages.append(verb)
                TRAIN[verb](Path(recipe))
                killed_and_started_again(verb, recipe, killed)
                assert_same(killed / run_of(recipe), whole / run_of(recipe))
            case _:
                pytest.fail(f"the page has a command that is not known here: {verb} {arguments}")
    assert stages == ["sft", "reward-model", "rl", "dpo"]

    judged, rewarded, preferred = (metrics_of(whole / run_of(name)) for name in ("reward_model", "grpo", "dpo"))
    assert judged[-1]["val/accuracy"] == 1.0
    rewards = [row["reward"] for row in rewarded if "reward" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1.0
    # On prompts that it was not trained on.
    assert preferred[-1]["val/loss"] < preferred[0]["val/loss"] - 0.02
    assert preferred[-1]["val/accuracy"] > 0.5
