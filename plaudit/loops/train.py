"""Training, whatever the recipe's stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.errors import PlauditError
from plaudit.loops import dpo, reward_model, rl, sft
from plaudit.models.trainable import resolve_device
from plaudit.recipe import RLRecipe, ScoreRecipe
from plaudit.world import World

LOOPS = {"sft": sft, "dpo": dpo, "reward-model": reward_model, "rl": rl}


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """Train the recipe's model, or resume its run; returns the trained model's folder."""
    with _memory_advice(loaded):
        assert not isinstance(loaded.recipe, ScoreRecipe)
        world = World.alone(resolve_device(loaded.recipe.run.device))
        return LOOPS[loaded.recipe.stage].train(loaded, sources, world)


@contextmanager
def _memory_advice(loaded: LoadedRecipe) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        assert not isinstance(loaded.recipe, ScoreRecipe)
        train = loaded.recipe.train
        rollout = ", lower rollout.max_sequences (the cache while sampling)" if isinstance(loaded.recipe, RLRecipe) else ""
        raise PlauditError(
            f"out of GPU memory ({str(error).split('. ')[0]}). Lower train.tokens_per_micro_batch (now "
            f"{train.tokens_per_micro_batch:,}), set model.gradient_checkpointing=true or optim.placement=offload{rollout}, or "
            "train a LoRA with model.lora.rank=16. `plaudit doctor` estimates the memory needed; see docs/memory.md."
        ) from None
