"""Rewards of a step → the advantage of every token, by the recipe's estimator (objectives/registry.py).

A sample's reward counts at its last token, a KL penalty (if it is in the reward) at every token. Some estimators compare a sample
with its group, others whiten over the step, so all groups of a step come together. Dropped samples are not among them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plaudit.objectives.advantages import StepRewards
from plaudit.objectives.aggregate import spread
from plaudit.objectives.registry import ESTIMATORS
from plaudit.recipe import AlgorithmSettings


class Advantages(NamedTuple):
    """An array for each sample of a step, with an entry per token."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None = None
    """What a critic is trained on."""


def token_rewards(rewards: Sequence[float], lengths: Sequence[int], costs: Sequence[np.ndarray] | None = None) -> list[Tensor]:
    """The rewards of each sample's tokens, in float64: its reward at the last one, less the `costs` of its tokens."""
    rows = [np.where(np.arange(n) == n - 1, reward, 0.0) for reward, n in zip(rewards, lengths, strict=True)]
    if costs is not None:
        rows = [row - cost for row, cost in zip(rows, costs, strict=True)]
    return list(map(torch.from_numpy, rows))


def estimate_advantages(step: StepRewards, algorithm: AlgorithmSettings) -> Advantages:
    """Advantages of all tokens of a step, by `algorithm.kind`."""
    estimator = ESTIMATORS[algorithm.kind]
    function, settings = estimator.load(), {name: getattr(algorithm, name) for name in estimator.settings}
    lengths_S = step.lengths_S
    returns_N = None
    match estimator.scope:
        case "group":
            groups = zip(step.totals_S.split(step.sizes_P.tolist()), lengths_S.split(step.sizes_P.tolist()), strict=True)
            advantages_S = [
                function(rewards_G, **settings, **({"lengths_G": lengths_G} if "lengths" in estimator.needs else {}))
                for rewards_G, lengths_G in groups
            ]
            advantages_N = spread(torch.cat(advantages_S), lengths_S)
        case "step":
            advantages_N = spread(function(step, **settings), lengths_S)
        case "token":
            advantages_N = function(step, **settings)
            if "critic" in estimator.needs:
                advantages_N, returns_N = advantages_N
    return Advantages(_per_sample(advantages_N, lengths_S), None if returns_N is None else _per_sample(returns_N, lengths_S))


def _per_sample(values_N: Tensor, lengths_S: Tensor) -> list[np.ndarray]:
    return [values.numpy() for values in values_N.split(lengths_S.tolist())]
