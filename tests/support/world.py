"""Updates made by one process or by several; `main` is the program of each of them."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from plaudit.data.pack import micro_batches, pair_micro_batches
from plaudit.models.critic import target_values
from plaudit.models.logprobs import target_logprobs
from plaudit.models.memory import Sharding
from plaudit.models.sharded import shard_model
from plaudit.models.trainable import TrainableModel
from plaudit.objectives.supervised import nll
from plaudit.preference.losses import dpo_loss, reward_model_loss
from plaudit.recipe import AlgorithmSettings, CriticSettings, OptimSettings
from plaudit.recipe.preference import RewardModelLossSettings
from plaudit.rl.experience import make_update
from plaudit.rl.losses import policy_loss, shared_loss, value_loss
from plaudit.train.optimiser import Optimiser
from plaudit.train.trainer import Trainable, Trainer
from plaudit.types import Batch
from plaudit.world import World
from support.examples import make_examples
from support.experience import EVERYTHING, batches_of, critic_of, handmade_samples, shared_of, update_of, valued_samples
from support.preferences import LOSSES, load_model, make_pairs

UPDATES = 2


Case = Callable[[Path, Path], tuple[Trainable | tuple[Trainable, Trainable], Callable, Sequence[Batch]]]
"""From a model's folder and a file of pairs: a model, or two of which the second gets its gradients with the first's; the loss of
an update; and its micro-batches."""


def sft_case(folder: Path, _: Path, **model):
    policy, examples = load_model(folder, scalar=False, **model), make_examples()
    targets = sum(example.num_targets for example in examples)
    return policy, lambda batch: (nll(target_logprobs(policy.model, batch).logprobs_N, targets), {}), micro_batches(examples, 60)


def rl_case(folder: Path, _: Path, loss: str, aggregation: str, budget: int = 20):
    policy, algorithm = load_model(folder, scalar=False), AlgorithmSettings(loss=loss, aggregation=aggregation, **EVERYTHING)
    update = make_update(handmade_samples(), algorithm, horizon=12)
    return policy, policy_loss(policy.model, update.num_tokens, algorithm, 0.9), batches_of(update, budget)


def preference_case(folder: Path, file: Path, name: str):
    scalar = isinstance(LOSSES[name], RewardModelLossSettings)
    policy, pairs = load_model(folder, scalar=scalar), make_pairs(folder, file, scalar=scalar)
    make = reward_model_loss if scalar else dpo_loss
    return policy, make(policy.model, pairs, LOSSES[name]), pair_micro_batches(pairs, 150)  # pyright: ignore


def critic_case(folder: Path, _: Path):
    critic, update = critic_of(folder), update_of(valued_samples())
    return critic, value_loss(partial(target_values, critic.model), update.num_tokens, clip=0.2), batches_of(update, 20)


def shared_critic_case(folder: Path, _: Path):
    (policy, head), algorithm = shared_of(folder), AlgorithmSettings(kind="ppo")
    update = make_update(valued_samples(), algorithm, horizon=12)
    loss = shared_loss(policy.model, head, update.num_tokens, algorithm, CriticSettings(shared=True), 0.9)
    return (policy, head), loss, batches_of(update, 20)


CASES: dict[str, Case] = {
    "sft": sft_case,
    "sft with dropout": partial(sft_case, lora={"rank": 4, "dropout": 0.5}),
    "value": critic_case,
    "value, shared": shared_critic_case,
    **{f"{loss}, {mode}": partial(rl_case, loss=loss, aggregation=mode)
       for loss in ("clipped", "gspo", "cispo", "policy_gradient") for mode in ("token-mean", "seq-mean-token-mean")},
    "clipped, one micro-batch": partial(rl_case, loss="clipped", aggregation="token-mean", budget=10_000),
    **{name: partial(preference_case, name=name) for name in LOSSES},
}  # fmt: skip


SHARDED_CASES = [
    "sft", "sft with dropout", "value", "value, shared", "clipped, token-mean", "clipped, one micro-batch", "sigmoid",
    "reward model",
]  # fmt: skip
FULLY_SHARDED_CASES = ["sft with dropout", "value, shared", "clipped, one micro-batch", "sigmoid"]
"""More models: tests/models/test_sharded.py."""


def outcome(case: Case, folder: Path, pairs: Path, world: World, sharding: Sharding = "none") -> dict:
    """The metrics of the updates, the gradients of the first (as Adam's first moment), and the weights after the last."""
    models, loss, batches = case(folder, pairs)
    models = models if isinstance(models, tuple) else (models,)
    if sharding == "full":
        assert isinstance(models[0], TrainableModel)
        shard_model(models[0].model, world)
    trainers = [
        Trainer(model, OptimSettings(lr=1e-3), seed=3, max_skipped_steps=0, world=world, sharding=sharding) for model in models
    ]
    metrics, first = [], {}
    for _ in range(UPDATES):
        for i, trainer in enumerate(trainers):
            results = trainer.update(() if i else batches, loss, 1e-3)
            metrics.append({name: value for name, value in results.items() if not name.startswith("time/")})
        first = first or {
            f"{i} {name}": tensor.clone()
            for i, trainer in enumerate(trainers)
            for name, tensor in trainer.optimiser.state().items()
            if name.startswith("exp_avg/")
        }
    weights = {f"{i} {name}": _whole(parameter) for i, model in enumerate(models) for name, parameter in model.trainable()}
    return {"metrics": metrics, "first": first, "weights": weights, "micro_batches": len(batches)}


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def uneven_gradients(world: World, *, sharded: bool) -> dict:
    """An optimiser's state and weights after a step in which one weight had a gradient in the first process only, one in the last
    only, and one in none."""
    weights = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("first", "last", "none")}
    optimiser = Optimiser(weights.items(), OptimSettings(weight_decay=0.5, max_grad_norm=None), world, sharded=sharded)
    for name, rank in (("first", 0), ("last", world.size - 1)):
        if world.rank == rank:
            (weights[name] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    optimiser.gradients.finish()
    norm = optimiser.clip().item()
    optimiser.step(0.1)
    return {"weights": {name: weight.detach() for name, weight in weights.items()}, "state": optimiser.state(), "norm": norm}


def main() -> None:
    """Saves each case's outcome with each sharding."""
    folder, pairs, scratch, rank, size = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:6])
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'rendezvous'}", rank=rank, world_size=size)
    world = World.joined()
    cases: dict[Sharding, Iterable[str]] = {"none": CASES, "optimiser": SHARDED_CASES, "full": FULLY_SHARDED_CASES}
    outcomes = {
        sharding: {name: outcome(CASES[name], folder, pairs, world, sharding) for name in names}
        for sharding, names in cases.items()
    }
    for sharding in ("none", "optimiser"):
        outcomes[sharding]["uneven gradients"] = uneven_gradients(world, sharded=sharding == "optimiser")
    torch.save(outcomes, scratch / f"{rank}.pt")
    dist.destroy_process_group()
