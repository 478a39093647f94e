"""Two processes that train together (gloo) make the update that one makes: for every loss, and with dropout.

`main` is the program of the two processes.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Command
from test_algorithms import EVERYTHING, samples_by_hand
from test_critic import critic_of, shared_of
from test_critic import samples_by_hand as valued_samples
from test_packing_gradients import make_examples
from test_preferences import LOSSES, loaded, make_pairs

from plaudit.data.pack import micro_batches, pair_micro_batches
from plaudit.models.critic import target_values
from plaudit.models.logprobs import target_logprobs
from plaudit.objectives.supervised import nll
from plaudit.preference.losses import dpo_loss, reward_model_loss
from plaudit.recipe import Algorithm, Critic, Optim
from plaudit.recipe.preference import RewardModelLoss
from plaudit.rl.experience import weighted
from plaudit.rl.policy_loss import policy_loss
from plaudit.rl.value_loss import shared_loss, value_loss
from plaudit.train.optimiser import Optimiser
from plaudit.train.trainer import Trained, Trainer
from plaudit.types import Batch
from plaudit.world import World

UPDATES = 2
Case = Callable[[Path, Path], tuple[Trained | tuple[Trained, Trained], Callable, Sequence[Batch]]]
"""A model, or two of which the second's gradients come with the first's; the loss of an update, and its micro-batches: of a model's
folder and a file of pairs."""


def supervised(folder: Path, _: Path, **model):
    policy, examples = loaded(folder, scalar=False, **model), make_examples()
    targets = sum(example.num_targets for example in examples)
    return policy, lambda batch: (nll(target_logprobs(policy.model, batch).logprobs_N, targets), {}), micro_batches(examples, 60)


def reinforced(folder: Path, _: Path, loss: str, aggregation: str, budget: int = 20):
    policy, algorithm = loaded(folder, scalar=False), Algorithm(loss=loss, aggregation=aggregation, **EVERYTHING)
    samples = weighted(samples_by_hand(), algorithm, horizon=12)
    return policy, policy_loss(policy.model, samples, algorithm, 0.9), micro_batches(samples, budget)


def preferred(folder: Path, file: Path, name: str):
    scalar = isinstance(LOSSES[name], RewardModelLoss)
    policy, pairs = loaded(folder, scalar=scalar), make_pairs(folder, file, scalar=scalar)
    make = reward_model_loss if scalar else dpo_loss
    return policy, make(policy.model, pairs, LOSSES[name]), pair_micro_batches(pairs, 150)  # pyright: ignore


def valued(folder: Path, _: Path):
    critic, samples = critic_of(folder), valued_samples()
    return critic, value_loss(partial(target_values, critic.model), samples, clip=0.2), micro_batches(samples, 20)


def valued_by_the_policy(folder: Path, _: Path):
    (policy, head), algorithm = shared_of(folder), Algorithm(kind="ppo")
    samples = weighted(valued_samples(), algorithm, horizon=12)
    return (policy, head), shared_loss(policy.model, head, samples, algorithm, Critic(shared=True), 0.9), micro_batches(samples, 20)


CASES: dict[str, Case] = {
    "sft": supervised,
    "sft with dropout": partial(supervised, lora={"rank": 4, "dropout": 0.5}),
    "value": valued,
    "value, shared": valued_by_the_policy,
    **{f"{loss}, {mode}": partial(reinforced, loss=loss, aggregation=mode)
       for loss in ("clipped", "gspo", "cispo", "policy_gradient") for mode in ("token-mean", "seq-mean-token-mean")},
    "clipped, one micro-batch": partial(reinforced, loss="clipped", aggregation="token-mean", budget=10_000),
    **{name: partial(preferred, name=name) for name in LOSSES},
}  # fmt: skip


def outcome(case: Case, folder: Path, pairs: Path, world: World) -> dict:
    """What updates return, what the first one's gradients were (Adam's first moment), and the weights after the last."""
    models, loss, batches = case(folder, pairs)
    models = models if isinstance(models, tuple) else (models,)
    trainers = [Trainer(model, Optim(lr=1e-3), seed=3, max_skipped_steps=0, world=world) for model in models]
    told, first = [], {}
    for _ in range(UPDATES):
        for i, trainer in enumerate(trainers):
            results = trainer.update(() if i else batches, loss, 1e-3)
            told.append({name: value for name, value in results.items() if not name.startswith("time/")})
        first = first or {
            f"{i} {name}": tensor.clone()
            for i, trainer in enumerate(trainers)
            for name, tensor in trainer.optimiser.state().items()
            if name.startswith("exp_avg/")
        }
    weights = {f"{i} {name}": parameter.detach() for i, model in enumerate(models) for name, parameter in model.trainable()}
    return {"told": told, "first": first, "weights": weights, "micro_batches": len(batches)}


@pytest.fixture(scope="module")
def of_two(tiny_models, pairs_file, tmp_path_factory) -> list[dict[str, dict]]:
    """Every case in two processes: what came out of each."""
    scratch = tmp_path_factory.mktemp("ranks")
    given, script = (tiny_models["qwen2"], pairs_file, scratch), "import test_ranks; test_ranks.main()"
    for process in [Command(*given, rank, script=script) for rank in (0, 1)]:
        assert process.wait() == 0, process.output
    return [torch.load(scratch / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_update_of_one(tiny_models, pairs_file, of_two, name):
    alone = outcome(CASES[name], tiny_models["qwen2"], pairs_file, World.alone())
    one, other = (result[name] for result in of_two)
    assert one["told"] == other["told"]
    for parameter, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][parameter]), parameter
    assert alone["micro_batches"] == 1 if "one micro-batch" in name else alone["micro_batches"] > 2
    updates = list(zip(one["told"], alone["told"], strict=True))
    for ours, expected in updates[: len(updates) // UPDATES]:
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for ours, expected in updates[len(updates) // UPDATES :]:
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4)  # Adam has divided by gradients that are next to nothing
    assert alone["first"].keys() == one["first"].keys()
    whole = torch.cat([moment.flatten() for moment in alone["first"].values()]).norm()
    assert whole > 0
    for parameter, moment in alone["first"].items():
        assert (one["first"][parameter] - moment).norm() <= 2e-6 * max(moment.norm(), 1e-3 * whole), parameter


def test_a_weight_without_a_gradient_anywhere_is_left_alone(monkeypatch):
    """And one that has its gradient elsewhere is not."""
    here, there, nowhere = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimiser = Optimiser({"here": here, "there": there, "nowhere": nowhere}.items(), Optim())
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


def main() -> None:
    folder, pairs, scratch, rank = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'meeting'}", rank=rank, world_size=2)
    torch.save({name: outcome(case, folder, pairs, World.joined()) for name, case in CASES.items()}, scratch / f"{rank}.pt")
    dist.destroy_process_group()
