"""Weights divided among processes: the same updates, the same files, checkpoints that fit any division."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from plaudit.models.sharded import PASS
from plaudit.world import Heartbeat, World
from support.processes import Command
from support.sharded import MODELS, Case

pytestmark = pytest.mark.slow  # (a few cases of tests/test_world.py are in the core suite)
GROUPS = {"2": 2, "3": 3}
each_model = pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in MODELS])


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """By group: what each process found, and the folder that they wrote to."""

    @cache
    def run(group: str) -> tuple[list[dict], Path]:
        size, names = GROUPS[group], tuple(MODELS)
        scratch = tmp_path_factory.mktemp("ranks")
        given, script = (tiny_models["llama"].parent, scratch, *names), "from support.sharded import main; main()"
        for process in [Command(rank, size, *given, script=script) for rank in range(size)]:
            assert process.wait() == 0, process.output
        return [torch.load(scratch / f"{rank}.pt") for rank in range(size)], scratch

    return run


def same(expected: dict[str, float]):
    """Up to the order of additions."""
    return pytest.approx(expected, rel=2e-5, abs=1e-6)


@each_model
def test_updates_are_those_of_whole_weights(runs, group, name):
    for result in (process[name] for process in runs(group)[0]):
        for ours, expected in zip(result["full"], result["optimiser"], strict=True):
            assert ours == same(expected)
        for weight, tensor in result["optimiser, sent"].items():
            sent = result["full, sent"][weight]
            assert sent.dtype == tensor.dtype
            assert (sent.float() - tensor.float()).norm() <= 1e-6 * tensor.float().norm() + 1e-6, weight
        assert result["full, sent"].keys() == result["optimiser, sent"].keys()


@each_model
def test_a_checkpoint_fits_every_division(runs, tiny_models, group, name):
    processes, scratch = runs(group)
    for result in (process[name] for process in processes):
        assert result["optimiser from full"] == same(result["full, continued"])
        assert result["full from optimiser"] == same(result["optimiser, continued"])
    alone = Case(name, tiny_models["llama"].parent, World.alone())
    alone.trainer.load_state(scratch / name / "full", processes[0][name]["state"])
    assert alone.update() == same(processes[0][name]["full, continued"])


@each_model
def test_saved_models_are_the_same_files(runs, group, name):
    scratch = runs(group)[1]
    folders = [scratch / name / sharding / "untrained" for sharding in ("full", "optimiser")]
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
    trained = [scratch / name / sharding / "model" for sharding in ("full", "optimiser")]
    assert len({tuple(sorted(file.name for file in folder.iterdir())) for folder in trained}) == 1
    if "reward model" not in name and "lora" not in name:
        assert json.loads((trained[0] / "config.json").read_text())["architectures"][0].endswith("ForCausalLM")


def test_passes_of_sharded_weights_count_as_waiting(tiny_models, tmp_path):
    """A process is in them for as long as the slowest one, and is not to blame."""
    reports: list[tuple[str, bool]] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        world = World.joined(heartbeat=Heartbeat(lambda doing, waiting: reports.append((doing, waiting))))
        case = Case("tied", tiny_models["llama"].parent, world, "full")
        world.heartbeat.beat("step 3, training")
        reports.clear()
        case.update()
    finally:
        dist.destroy_process_group()
    passes = [reports[i + 1] for i, report in enumerate(reports) if report == (PASS, True)]
    assert len(passes) >= 2, "forward and backward"
    assert set(passes) == {("step 3, training", False)}
