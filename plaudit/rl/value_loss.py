"""The loss of a critic's update, micro-batch by micro-batch:

    L_V = 1/N · Σ_t ½ · max((V_t − R_t)², (clamp(V_t, V_old,t ± clip) − R_t)²)

over the N tokens of the update, whatever the policy's aggregation is: every token has a value to be learnt. A critic that shares
the policy's layers has its loss beside the policy's, from one pass:

    L = L_policy + c · L_V          in the layers they share; in the value head, which has an optimiser of its own, L_V
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.models.critic import SharedCritic
from plaudit.models.logprobs import target_states
from plaudit.objectives.value import clipped_value, explained_variance
from plaudit.recipe import AlgorithmSettings, CriticSettings
from plaudit.rl.policy_loss import policy_share
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Experience


def value_loss(values: Callable[[Batch], Tensor], samples: Sequence[Experience], *, clip: float | None) -> Loss:
    """The loss of an update on these samples; `values`: what the critic says of a batch's tokens."""
    share = value_share(samples, clip=clip)
    return lambda batch: share(values(batch), batch)


def shared_loss(
    model: nn.Module,
    critic: SharedCritic,
    samples: Sequence[Experience],
    algorithm: AlgorithmSettings,
    settings: CriticSettings,
    temperature: float,
) -> Loss:
    """The loss of an update of the policy and the critic on its layers. `loss` among the metrics is the policy's."""
    of_policy = policy_share(model, samples, algorithm, temperature)
    of_values = value_share(samples, clip=settings.clip_value)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_ND = target_states(model, batch)
        policys, metrics = of_policy(hidden_ND, batch)
        critics, others = of_values(critic.values(hidden_ND, coefficient=settings.loss_coefficient), batch)
        metrics |= {"loss": policys, "critic/loss": critics} | {f"critic/{name}": value for name, value in others.items()}
        return policys + critics, metrics

    return loss


def value_share(
    samples: Sequence[Experience], *, clip: float | None
) -> Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The same, of a micro-batch whose values are there."""
    num_tokens = sum(sample.num_targets for sample in samples)

    def share(values_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        assert targets.values_N is not None
        assert targets.returns_N is not None
        token = clipped_value(values_N, targets.values_N, targets.returns_N, clip=clip)
        return token.loss_N.sum() / num_tokens, {"clip_fraction": token.clipped_N.float().sum() / num_tokens}

    return share


def value_metrics(samples: Sequence[Experience]) -> dict[str, float]:
    """How well the critic foresaw a step's returns, before it learnt from them."""
    known = [(sample.values, sample.returns) for sample in samples if sample.values is not None and sample.returns is not None]
    if not known:
        return {}
    values_N, returns_N = (torch.from_numpy(np.concatenate(arrays).astype(np.float64)) for arrays in zip(*known, strict=True))
    return {
        "critic/value": values_N.mean().item(),
        "critic/return": returns_N.mean().item(),
        "critic/explained_variance": explained_variance(values_N, returns_N),
    }
