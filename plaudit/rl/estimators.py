"""A step's rewards → the advantage of every token, as the recipe's `algorithm.kind` has it.

A sample's reward is paid at its last token, and KL (if it is in the reward) at every token. Some kinds compare a sample with its
group alone, some whiten over the whole step, so all groups of a step come together. Dropped samples are not among them.
With a critic (ppo), a token is compared with what the critic expected, which learns what it should have expected: the returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from plaudit.objectives.advantages import gae, grpo, returns_to_go, rloo, whiten
from plaudit.objectives.aggregate import spread
from plaudit.recipe import AlgorithmSettings
from plaudit.rl.kl_penalty import KLPenalty
from plaudit.types import Experience


def with_advantages(
    groups: Sequence[Sequence[Experience]],
    algorithm: AlgorithmSettings,
    *,
    baselines: Sequence[float | None] = (),
    penalty: KLPenalty | None = None,
) -> tuple[list[list[Experience]], dict[str, float]]:
    """The same groups with their advantages, and metrics. `baselines`: ReMax's, one per group, None where it was dropped."""
    flat = [experience for group in groups for experience in group]
    charged, metrics = penalty.charge(flat) if penalty is not None else (None, {})
    if not flat:
        return [list(group) for group in groups], metrics
    rewards = [np.where(np.arange(e.num_targets) == e.num_targets - 1, e.reward, 0.0) for e in flat]
    if charged is not None:
        rewards = [reward - cost for reward, cost in zip(rewards, charged, strict=True)]
    paid = list(map(torch.from_numpy, rewards))
    if algorithm.kind == "ppo":
        values = [torch.from_numpy(e.values.astype(np.float64)) for e in flat if e.values is not None]
        advantages, returns = critic_advantages(paid, values, algorithm)
        flat = [replace(e, returns=R.numpy()) for e, R in zip(flat, returns, strict=True)]
    else:
        advantages = token_advantages(paid, [len(group) for group in groups], algorithm, baselines)
    filled = iter([replace(e, advantages=A.numpy()) for e, A in zip(flat, advantages, strict=True)])
    return [[next(filled) for _ in group] for group in groups], metrics


def critic_advantages(
    rewards: Sequence[Tensor], values: Sequence[Tensor], algorithm: AlgorithmSettings
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Whitened advantages and returns of each sample, given the rewards and the critic's values of its tokens."""
    assert len(values) == len(rewards), "a value for every token"
    lengths_S = torch.tensor([len(reward) for reward in rewards])
    rewards_ST, values_ST = (torch.nn.utils.rnn.pad_sequence(list(some), batch_first=True) for some in (rewards, values))
    mask_ST = torch.arange(rewards_ST.shape[1]) < lengths_S[:, None]
    A_ST, returns_ST = gae(rewards_ST, values_ST, mask_ST, gamma=algorithm.discount, lam=algorithm.gae_lambda)
    A_N = whiten(A_ST[mask_ST], torch.ones(int(lengths_S.sum()), dtype=torch.bool))
    return A_N.split(lengths_S.tolist()), returns_ST[mask_ST].split(lengths_S.tolist())


def token_advantages(
    rewards: Sequence[Tensor], sizes: Sequence[int], algorithm: AlgorithmSettings, baselines: Sequence[float | None] = ()
) -> tuple[Tensor, ...]:
    """Of each sample, given the rewards of its tokens, without a critic. The samples of a group stand together; `sizes` says how
    many each of the P prompts has."""
    assert algorithm.kind != "ppo"
    lengths_S = torch.tensor([len(reward) for reward in rewards])
    total_S = torch.stack([reward.sum() for reward in rewards])
    sizes_P = torch.tensor(sizes)
    # A sample alone in its group is compared with nothing: A = 0, and it stays out of what is whitened.
    compared_S = spread(sizes_P, sizes_P) > 1

    def by_group(advantages: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.cat([advantages(r, torch.ones_like(r, dtype=torch.bool)) for r in total_S.split(list(sizes))])

    def still_to_come() -> Tensor:
        rewards_ST = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)
        mask_ST = torch.arange(rewards_ST.shape[1]) < lengths_S[:, None]
        return returns_to_go(rewards_ST, mask_ST, gamma=algorithm.discount)[mask_ST]

    centred = partial(grpo, divide_by_std=False)
    match algorithm.kind:
        case "grpo":
            A_N = spread(by_group(partial(grpo, divide_by_std=algorithm.divide_by_std)), lengths_S)
        case "rloo":
            A_N = spread(by_group(rloo), lengths_S)
        case "gdpo":  # each reward was normalised by its group before they were added up
            A_N = spread(whiten(by_group(centred), compared_S), lengths_S)
        case "reinforce++":
            returns_N = still_to_come()
            A_N = whiten(returns_N, torch.ones_like(returns_N, dtype=torch.bool))
        case "reinforce++-baseline":
            A_N = whiten(spread(by_group(centred), lengths_S), spread(compared_S, lengths_S))
        case "remax":
            assert len(baselines) == len(sizes), "one greedy sample per prompt"
            greedy_P = torch.tensor([b or 0.0 for b in baselines], dtype=torch.float64)
            known_P = torch.tensor([b is not None for b in baselines])
            greedy_N, known_N = (spread(spread(x, sizes_P), lengths_S) for x in (greedy_P, known_P))
            # Without its baseline a group carries no signal.
            A_N = torch.where(known_N, still_to_come() - greedy_N, 0.0)
        case _:
            assert_never(algorithm.kind)
    return A_N.split(lengths_S.tolist())
