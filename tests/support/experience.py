"""Samples to update a policy or a critic on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from plaudit.data.templates import load_model_template
from plaudit.models.critic import SharedCritic, load_critic
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.recipe import ModelSettings
from plaudit.rl.experience import PackedSequences, Update
from plaudit.types import Batch, Experience
from plaudit.world import World

CPU = torch.device("cpu")


def handmade_samples() -> list[Experience]:
    rng = np.random.RandomState(0)
    result = []
    for prompt, response in ((2, 1), (3, 7), (4, 3), (5, 12), (6, 4)):
        logprobs = rng.normal(-5.8, 0.8, response)
        result.append(
            Experience(
                tokens=rng.randint(3, 300, prompt + response).astype(np.int32),
                loss_mask=np.arange(prompt + response) >= prompt,
                reward=0.0,
                advantages=rng.normal(0, 1, response),
                sampler_logprobs=logprobs,
                old_logprobs=logprobs + rng.normal(0, 0.3, response),
                ref_logprobs=rng.normal(-5.8, 0.5, response),
            )
        )
    return result


EVERYTHING = {
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.2,
    "positive_sft_coefficient": 0.5,
    "importance": {"level": "sequence", "mode": "mask", "low": 0.1, "high": 2.0},
}


def critic_of(path: Path, **settings):
    model = ModelSettings(path=str(path), dtype="float32", **settings)
    return load_critic(model, load_model_template(ModelSettings(path=str(path))), CPU)


def shared_of(path: Path, **settings) -> tuple[TrainableModel, SharedCritic]:
    """A policy, and a critic that shares its layers and has a nonzero head."""
    model = ModelSettings(path=str(path), **{"dtype": "float32"} | settings)
    policy = load_policy(model, load_model_template(model), CPU)
    critic = SharedCritic(policy, model.path)
    torch.nn.init.normal_(critic.model.weight, generator=torch.Generator().manual_seed(1))
    return policy, critic


def experience(rng: np.random.RandomState, prompt: int, response: int, **fields) -> Experience:
    return Experience(
        tokens=rng.randint(3, 300, prompt + response).astype(np.int32),
        loss_mask=np.arange(prompt + response) >= prompt,
        **{"reward": 0.0, "advantages": np.zeros(response), "sampler_logprobs": np.zeros(response), **fields},
    )


def update_of(samples: list[Experience], weight: float = 1 / 27) -> Update:
    """An update in which every token has this weight."""
    return Update(samples, [weight] * len(samples))


def batches_of(update: Update, budget: int = 10_000) -> Sequence[Batch]:
    """Its micro-batches, of at most `budget` tokens."""
    return update.micro_batches(PackedSequences(update.samples, budget, World.alone(), share=True))


def valued_samples() -> list[Experience]:
    rng = np.random.RandomState(0)
    return [
        replace(
            experience(rng, prompt, response, values=rng.normal(0, 0.3, response), returns=rng.normal(0, 1, response)),
            advantages=rng.normal(0, 1, response),
            sampler_logprobs=rng.normal(-5, 0.1, response),
        )
        for prompt, response in ((2, 1), (3, 7), (4, 3), (5, 12), (6, 4))
    ]
