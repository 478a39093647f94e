"""`plaudit doctor` for several GPUs, wherever it runs."""

from typing import Any

import pytest

from plaudit.config import load
from plaudit.doctor.sharding import HEADER, check_gpus, processes_of
from plaudit.train.limits import longest_sequence
from plaudit.train.processes import Processes
from support.recipes import rl_recipe, sft_recipe, write_recipe


@pytest.fixture
def sft_file(tmp_path, tiny_model, rows_file):
    tree = sft_recipe(tiny_model, rows_file, tmp_path / "run", run={"device": "auto"}, model={"gradient_checkpointing": "auto"})
    return write_recipe(tmp_path / "sft.yaml", {"stage": "sft", **tree})


def tables(out: str) -> dict[str, list[str]]:
    """Cells of each sharding's line."""
    lines = [line.replace(" GB", "GB").replace(" MB", "MB").split() for line in out.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in ("none", "optimiser", "full")}


def test_several_processes_are_planned_by_sharding(plaudit, sft_file):
    code, out, _ = plaudit("doctor", sft_file, "cluster.gpus=8", "--gpu-memory", "141")
    assert code == 0, out
    text = " ".join(out.split())
    assert "cluster.sharding: auto chooses optimiser, with which each of 8 processes takes at least" in text
    assert "Memory of each of 8 processes by cluster.sharding, 141.0 GB" in text
    assert " ".join(HEADER) in text
    found = tables(out)
    assert set(found) == {"none", "optimiser", "full"}
    assert all("yes" in cells for cells in found.values())
    assert "longest sequence that fits, with a micro-batch to itself: " in text
    assert "the largest of Qwen2.5's shapes from 0.5B to 72B that fits with these settings: 32B (sharding full)" in text


def test_one_process_has_no_table(plaudit, sft_file):
    code, out, _ = plaudit("doctor", sft_file, "--gpu-memory", "141")
    assert code == 0, out
    assert "cuda in bfloat16 has 141 GB" in " ".join(out.split()), "planned for that GPU, which need not be here"
    assert not tables(out)
    assert "sharding" not in out


def test_what_does_not_fit_is_reported_with_what_would(plaudit, tmp_path, tiny_model, prompts_file, reward_file):
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, run={"device": "auto"})
    file = write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})
    code, out, _ = plaudit("doctor", file, "cluster.gpus=2", "cluster.sharding=none", "--gpu-memory", "1")
    assert code == 1
    text = " ".join(out.split())
    assert "✗ sharding cluster.sharding: none, with which each of 2 processes takes at least" in text
    assert "Set model.gradient_checkpointing=true, set optim.placement=offload, use model.lora, or use more GPUs" in text
    assert "fits with these settings: none" in text
    code, out, _ = plaudit(
        "doctor", file, "cluster.gpus=2", "cluster.sharding=none", "optim.placement=offload", "--gpu-memory", "24"
    )
    assert code == 0, out
    text = " ".join(out.split())
    assert "Memory on cuda, 24.0 GB for each of 2 processes, sharding none" in text
    assert "✓ memory cpu: at most" in text, "the host is another machine's: what it must have is reported, not compared"


def test_weights_are_not_divided_around_a_quantised_base(plaudit, tmp_path, tiny_model, prompts_file, reward_file):
    """Of a critic, say: nothing else would explain why the policy's weights are not divided."""
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, run={"device": "auto"})
    tree |= {"algorithm": {"kind": "ppo"}, "critic": {"lora": {"rank": 4, "base_bits": 4}}}
    file = write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})
    code, out, _ = plaudit("doctor", file, "cluster.gpus=2", "--gpu-memory", "1")
    assert code == 1
    assert "full, which divides all weights, cannot divide a base with critic.lora.base_bits. " in " ".join(out.split())
    assert "use more GPUs" in " ".join(out.split())
    assert set(tables(out)) == {"none", "optimiser"}
    file = write_recipe(
        tmp_path / "rl.yaml", {"stage": "rl", **tree, "model": {**tree["model"], "lora": {"rank": 4, "base_bits": 4}}}
    )
    _, out, _ = plaudit("doctor", file, "cluster.gpus=2", "--gpu-memory", "1")
    assert "use more GPUs" not in " ".join(out.split()), "only the adapters' state would be divided"


def test_processes_on_this_machine(plaudit, sft_file):
    code, out, _ = plaudit("doctor", sft_file, "cluster.gpus=2", "run.device=cpu", "cluster.sharding=full")
    assert code == 0, out
    assert "cluster.sharding: full, with which each of 2 processes takes at least" in " ".join(out.split())


@pytest.mark.parametrize(
    ("gpus_here", "settings", "line"),
    [
        (0, ["cluster.gpus=all", "--gpu-memory", "80"], "! gpus cluster.gpus is all, but this machine has no GPUs to count"),
        (8, ["cluster.gpus=1"], "! gpus 8 GPUs here, cluster.gpus is 1: set cluster.gpus=all to train on all of them"),
        (2, ["cluster.gpus=4"], "✗ gpus cluster.gpus is 4, but torch sees 2 GPUs here"),
        (0, ["cluster.gpus=all", "run.device=cpu"], None),
        (8, ["cluster.gpus=1", "--gpu-memory", "80"], None),
        (2, ["cluster.gpus=4", "--gpu-memory", "80"], None),
        (1, ["cluster.gpus=1"], None),
        (2, ["cluster.gpus=4", "cluster.nodes=2"], None),
    ],
)
def test_cluster_gpus_is_compared_with_the_gpus_here(sft_file, monkeypatch, gpus_here, settings, line):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus_here)
    overrides = [setting for setting in settings if "=" in setting]
    recipe: Any = load(sft_file, overrides).recipe
    found = [f"{mark} gpus {text}" for mark, text in check_gpus(recipe, processes_of(recipe, 80e9 if "80" in settings else None))]
    assert len(found) == (line is not None)
    assert all(each.startswith(line) for each in found)


def test_processes_of_all_machines_are_counted(sft_file):
    assert processes_of(load(sft_file, ["cluster.gpus=8", "cluster.nodes=2"]).recipe, 80e9).size == 16


def test_all_gpus_of_a_machine_without_any_are_reported(plaudit, sft_file, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, out, _ = plaudit("doctor", sft_file, "cluster.gpus=all", "--gpu-memory", "80")
    assert code == 0, out
    assert "! gpus cluster.gpus is all, but this machine has no GPUs" in " ".join(out.split())


# What fits at most ----------------------------------------------------------------------------------------------------


@pytest.fixture
def limits_of(tmp_path, tiny_model, rows_file, prompts_file, reward_file):
    def longest(stage: str, sharding: Any = "optimiser", size: int = 2, memory: float = 8e9, **sections: Any) -> int:
        if stage == "rl":
            tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, **sections)
        else:
            tree = sft_recipe(tiny_model, rows_file, tmp_path / "run", **sections)
        recipe: Any = load(write_recipe(tmp_path / "r.yaml", {"stage": stage, **tree})).recipe
        return longest_sequence(recipe, [20], Processes(size, sharding, memory=memory, kind="cuda"))

    return longest


def test_the_longest_sequence_by_hand(limits_of):
    """All that is left of the memory, divided by what a token keeps. The tiny llama: width 64, 2 layers, 32 for keys and values,
    MLP 160; not checkpointed, in bf16 with fused layers."""
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64
    parameters = 2 * layer + 2 * 320 * 64 + 64
    logits = 2 * 4 * 2**28 + 4 * 320 * 64
    left = 0.9 * 8e9 - 0.6e9 - (2 + 4 + 6) * parameters - logits
    a_token = 2 * 2 * (7 * 64 + 2 * 64 + 2 * 32 + 3 * 160)
    assert limits_of("sft") == pytest.approx(left / a_token, rel=1e-3)


def test_more_of_everything_fits_longer_sequences(limits_of):
    assert limits_of("sft", memory=1e9) == 0, "not even the weights"
    some = limits_of("sft")
    assert some > 1000
    assert limits_of("sft", memory=16e9) > some
    assert limits_of("sft", model={"gradient_checkpointing": True}) > some
    assert limits_of("sft", model={"gradient_checkpointing": "auto"}) >= limits_of("sft", model={"gradient_checkpointing": True})
    assert limits_of("sft", size=8) >= some
    assert limits_of("rl") <= some, "sampling needs a cache besides"
