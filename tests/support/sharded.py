"""Models of several kinds trained with a sharded optimiser and with sharded weights; `main` is the program of each process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plaudit.data.pack import micro_batches
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.classifier import load_classifier, sequence_scores
from plaudit.models.logprobs import target_logprobs
from plaudit.models.memory import Sharding
from plaudit.models.merged import drop_merged
from plaudit.models.sharded import shard_model
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.objectives.supervised import nll
from plaudit.recipe import LoraSettings, ModelSettings, OptimSettings
from plaudit.rollout.engine import Weights
from plaudit.train.trainer import Trainer
from plaudit.types import Batch
from plaudit.world import World
from support.examples import make_examples

UPDATES = 3
MERGED, ADAPTER = LoraSettings(rank=4, alpha=8.0), LoraSettings(rank=4, alpha=8.0, merge_on_save=False)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen2", {"dtype": "float32"}),
    "untied, checkpointed": ("llama", {"dtype": "float32", "gradient_checkpointing": True}),
    "bf16, tied": ("qwen3", {"dtype": "bfloat16"}),
    "lora, checkpointed": ("llama", {"dtype": "float32", "lora": MERGED, "gradient_checkpointing": 1}),
    "lora on bf16": ("qwen2", {"dtype": "bfloat16", "lora": ADAPTER}),
    "reward model, bf16": ("llama", {"dtype": "bfloat16"}),
    "reward model, lora": ("qwen2", {"dtype": "float32", "lora": ADAPTER}),
}


class Case:
    """A model with its trainer."""

    def __init__(self, name: str, folders: Path, world: World, sharding: Sharding = "none"):
        kind, settings = MODELS[name]
        self.scores = name.startswith("reward model")
        load: Callable[..., TrainableModel] = load_classifier if self.scores else load_policy
        template = load_template(load_tokenizer(str(folders / kind)), None)
        self.model = load(ModelSettings(path=str(folders / kind), **settings), template, world.device)
        if sharding == "full":
            shard_model(self.model.model, world)
        elif name == "lora on bf16":
            drop_merged(self.model.model)  # as in sharded models: merged weights are rounded
        self.trainer = Trainer(
            self.model, OptimSettings(lr=1e-3, weight_decay=0.1), seed=3, max_skipped_steps=0, world=world, sharding=sharding
        )

    def update(self) -> dict[str, float]:
        """Of more micro-batches in one process than in another."""
        examples = make_examples()
        targets = sum(example.num_targets for example in examples)

        def loss(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if self.scores:
                return (sequence_scores(self.model.model, batch) - 1).square().sum() / len(examples), {}
            return nll(target_logprobs(self.model.model, batch).logprobs_N, targets), {}

        batches = micro_batches(examples, 60)
        assert len(batches) == 3
        metrics = self.trainer.update(batches, loss, 1e-3)
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def outcome(name: str, folders: Path, scratch: Path, world: World) -> dict[str, Any]:
    results: dict[str, Any] = {}
    states = {}
    for sharding in ("optimiser", "full"):
        folder = scratch / name / sharding
        folder.mkdir(parents=True, exist_ok=True)
        case = Case(name, folders, world, sharding)
        case.model.save(folder / "untrained" if world.leads else None)
        results[sharding] = [case.update() for _ in range(UPDATES)]
        snapshot = case.trainer.snapshot(copy=True)
        results[f"{sharding}, sent"] = {weight: tensor.clone() for weight, tensor in Weights(case.model.model)}
        results[f"{sharding}, continued"] = case.update()
        snapshot.write(folder)
        states[sharding] = snapshot.state
    world.wait("the files")
    swapped: dict[Sharding, Sharding] = {"full": "optimiser", "optimiser": "full"}
    for saved, loading in swapped.items():
        case = Case(name, folders, world, loading)
        case.trainer.load_state(scratch / name / saved, states[saved])
        results[f"{loading} from {saved}"] = case.update()
    return results | {"state": states["full"]}


def main() -> None:
    """Saves what it found of each model named by an argument."""
    (rank, size), (folders, scratch) = map(int, sys.argv[1:3]), map(Path, sys.argv[3:5])
    dist.init_process_group("gloo", init_method=f"file://{scratch / 'rendezvous'}", rank=rank, world_size=size)
    world = World.joined()
    torch.save({name: outcome(name, folders, scratch, world) for name in sys.argv[5:]}, scratch / f"{rank}.pt")
    dist.destroy_process_group()
