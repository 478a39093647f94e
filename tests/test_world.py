"""Two processes (gloo) make the same update as one, for every loss and with dropout.

Each of the two runs `support.world.main`.
"""

import pytest
import torch
import torch.distributed as dist

from plaudit.recipe import OptimSettings
from plaudit.train.optimiser import Optimiser
from plaudit.world import World
from support.processes import Command
from support.world import CASES, UPDATES, outcome


@pytest.fixture(scope="module")
def two_processes(tiny_models, pairs_file, tmp_path_factory) -> list[dict[str, dict]]:
    """Each process's results of every case."""
    scratch = tmp_path_factory.mktemp("ranks")
    given, script = (tiny_models["qwen2"], pairs_file, scratch), "from support.world import main; main()"
    for process in [Command(*given, rank, script=script) for rank in (0, 1)]:
        assert process.wait() == 0, process.output
    return [torch.load(scratch / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_same_update_as_one(tiny_models, pairs_file, two_processes, name):
    alone = outcome(CASES[name], tiny_models["qwen2"], pairs_file, World.alone())
    one, other = (result[name] for result in two_processes)
    assert one["metrics"] == other["metrics"]
    for parameter, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][parameter]), parameter
    assert alone["micro_batches"] == 1 if "one micro-batch" in name else alone["micro_batches"] > 2
    updates = list(zip(one["metrics"], alone["metrics"], strict=True))
    for ours, expected in updates[: len(updates) // UPDATES]:
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for ours, expected in updates[len(updates) // UPDATES :]:
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4)  # Adam has divided by tiny gradients
    assert alone["first"].keys() == one["first"].keys()
    total_norm = torch.cat([moment.flatten() for moment in alone["first"].values()]).norm()
    assert total_norm > 0
    for parameter, moment in alone["first"].items():
        assert (one["first"][parameter] - moment).norm() <= 2e-6 * max(moment.norm(), 1e-3 * total_norm), parameter


def test_a_weight_without_a_gradient_on_any_rank_is_left_alone(monkeypatch):
    """One with a gradient only on another rank is not."""
    here, there, nowhere = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimiser = Optimiser({"here": here, "there": there, "nowhere": nowhere}.items(), OptimSettings())
    here.grad = torch.tensor([1.0, 2.0])

    def all_reduce(tensor: torch.Tensor, op=None, group=None) -> None:
        if op == dist.ReduceOp.MAX:
            tensor.copy_(torch.maximum(tensor, torch.tensor([0, 1, 0], dtype=tensor.dtype)))
        else:
            tensor += torch.tensor([0.0, 0.0, 5.0, 6.0])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    optimiser.sum_gradients(World(0, 2, torch.device("cpu")))
    assert here.grad.tolist() == [1, 2]
    assert there.grad is not None
    assert there.grad.tolist() == [5, 6]
    assert nowhere.grad is None
