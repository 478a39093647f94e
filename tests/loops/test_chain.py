"""SFT, a reward model, GRPO against it, DPO on GRPO's samples: each stage starts from the last one's output, and each is killed.

The commands are those of docs/preferences.md. One chain runs uninterrupted. In the other, every stage is killed with SIGKILL after
its first checkpoints, before a step's metrics are written, and restarted with the same command. Both end with the same bits.
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
KILLED_AFTER = {"sft": 45, "reward-model": 14, "rl": 6, "dpo": 5}
"""The step after which each stage is killed; none of them is a checkpoint."""


def commands() -> list[list[str]]:
    """The page's commands, split as a shell would."""
    page = (REPOSITORY / "docs/preferences.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```sh\n([^`]*recipes/chain/sft\.yaml[^`]*)```", page)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def run_folder(recipe: str) -> Path:
    return Path("runs/chain") / Path(recipe).stem


def metrics_of(run: Path) -> list[dict]:
    """Complete lines only: the run may still be writing the file."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def exact_metrics(run: Path) -> list[dict]:
    """Without timings and without counts of judge calls: a repeated step finds its scores in the cache, and a text that comes again
    before its score is known is scored twice."""
    varies = ("time/", "judge/", "val/judge/")
    return [{name: value for name, value in row.items() if not name.startswith(varies)} for row in metrics_of(run)]


def kill_and_restart(verb: str, recipe: str, folder: Path) -> None:
    run, moment = folder / run_folder(recipe), KILLED_AFTER[verb]
    signalled(signal.SIGKILL, f"before line {moment + 1}", verb, recipe, cwd=folder)
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert 0 < saved < metrics_of(run)[-1]["step"] == moment, "steps after the last checkpoint are lost and repeated"
    assert not (run / "model").exists()
    again = Command(verb, recipe, cwd=folder)
    assert again.wait() == 0, again.output
    assert f"resuming from runs/chain/{run.name}/checkpoints/step_{saved:06d}" in " ".join(again.output.split()), again.output


def assert_same(ours: Path, uninterrupted: Path) -> None:
    """Weights, the trainer's state, metrics and samples, to the bit."""
    last = sorted((uninterrupted / "checkpoints").glob("step_*"))[-1].name
    files = ["model/model.safetensors", f"checkpoints/{last}/trainer/00000.safetensors", f"checkpoints/{last}/state.json"]
    files += [str(path.relative_to(uninterrupted)) for path in uninterrupted.glob("samples/*")]
    for file in files:
        assert (ours / file).read_bytes() == (uninterrupted / file).read_bytes(), file
    assert {path.name for path in ours.glob("samples/*")} == {path.name for path in uninterrupted.glob("samples/*")}
    assert exact_metrics(ours) == exact_metrics(uninterrupted)


@pytest.mark.slow
def test_a_chain_with_every_stage_killed_ends_the_same(tmp_path, monkeypatch):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    for folder in (uninterrupted, killed):
        folder.mkdir()
        (folder / "recipes").symlink_to(REPOSITORY / "recipes")
    stages = []
    for verb, *arguments in commands():
        monkeypatch.chdir(uninterrupted)
        match verb, arguments:
            case "prepare", ["tiny-model", rows, "--out", model]:
                make_tiny_model([rows], model)
                shutil.copytree(model, killed / model)
            case "prepare", ["pairs", samples, "--out", pairs]:
                for folder in (uninterrupted, killed):
                    make_pairs(sorted(folder.glob(samples)), folder / pairs)
                assert (killed / pairs / "train.jsonl").read_bytes() == (uninterrupted / pairs / "train.jsonl").read_bytes()
            case _, [recipe]:
                stages.append(verb)
                TRAIN[verb](Path(recipe))
                kill_and_restart(verb, recipe, killed)
                assert_same(killed / run_folder(recipe), uninterrupted / run_folder(recipe))
            case _:
                pytest.fail(f"docs/preferences.md has a command that this test does not know: {verb} {arguments}")
    assert stages == ["sft", "reward-model", "rl", "dpo"]

    reward_model, grpo, dpo = (metrics_of(uninterrupted / run_folder(name)) for name in ("reward_model", "grpo", "dpo"))
    assert reward_model[-1]["val/accuracy"] == 1.0
    rewards = [row["reward"] for row in grpo if "reward" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1.0
    # On held-out prompts.
    assert dpo[-1]["val/loss"] < dpo[0]["val/loss"] - 0.02
    assert dpo[-1]["val/accuracy"] > 0.5
