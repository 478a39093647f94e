"""Weights divided among processes: the same updates, the same files, checkpoints that fit any division."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plaudit.world import World
from support.processes import Command
from support.sharded import MODELS, Case


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def runs(request, tiny_models, tmp_path_factory) -> tuple[list[dict], Path]:
    """What each process found, and the files that they wrote."""
    scratch = tmp_path_factory.mktemp("ranks")
    given, script = (tiny_models["llama"].parent, scratch), "from support.sharded import main; main()"
    for process in [Command(*given, rank, request.param, script=script) for rank in range(request.param)]:
        assert process.wait() == 0, process.output
    return [torch.load(scratch / f"{rank}.pt") for rank in range(request.param)], scratch


def close(name: str):
    """bf16 gradients differ by their rounding where sums are made in another order."""
    return {"rel": 2e-3, "abs": 1e-4} if "bf16" in name else {"rel": 1e-5, "abs": 1e-6}


@pytest.mark.parametrize("name", MODELS)
def test_updates_are_those_of_whole_weights(runs, name):
    for result in (process[name] for process in runs[0]):
        assert result["full"][0] == pytest.approx(result["optimiser"][0], rel=1e-5)
        for ours, expected in zip(result["full"], result["optimiser"], strict=True):
            assert ours == pytest.approx(expected, **close(name))
        for weight, tensor in result["optimiser, sent"].items():
            sent = result["full, sent"][weight]
            assert sent.dtype == tensor.dtype
            tolerance = 1e-2 if "bf16" in name else 1e-5
            assert (sent.float() - tensor.float()).norm() <= tolerance * tensor.float().norm() + 1e-6, weight
        assert result["full, sent"].keys() == result["optimiser, sent"].keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_fits_every_division(runs, tiny_models, name):
    processes, scratch = runs
    for result in (process[name] for process in processes):
        assert result["optimiser from full"] == pytest.approx(result["full, continued"], **close(name))
        assert result["full from optimiser"] == pytest.approx(result["optimiser, continued"], **close(name))
    alone = Case(name, tiny_models["llama"].parent, World.alone())
    alone.trainer.load_state(scratch / name / "full", processes[0][name]["state"])
    assert alone.update() == pytest.approx(processes[0][name]["full, continued"], **close(name))


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_are_the_same_files(runs, name):
    folders = [runs[1] / name / sharding / "untrained" for sharding in ("full", "optimiser")]
    ours, expected = ({file.name: file for file in folder.iterdir()} for folder in folders)
    assert ours.keys() == expected.keys()
    for file in expected:
        if not file.endswith(".safetensors"):
            assert ours[file].read_bytes() == expected[file].read_bytes(), file
            continue
        saved, whole = load_file(ours[file]), load_file(expected[file])
        assert saved.keys() == whole.keys()
        for weight, tensor in whole.items():
            assert saved[weight].dtype == tensor.dtype
            assert torch.equal(saved[weight], tensor), weight
    trained = [runs[1] / name / sharding / "model" for sharding in ("full", "optimiser")]
    assert len({tuple(sorted(file.name for file in folder.iterdir())) for folder in trained}) == 1
    if "reward model" not in name and "lora" not in name:
        assert json.loads((trained[0] / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")
