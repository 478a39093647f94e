"""The loss of a critic's update, micro-batch by micro-batch:

    L = 1/N · Σ_t ½ · max((V_t − R_t)², (clamp(V_t, V_old,t ± clip) − R_t)²)

over the N tokens of the update, whatever the policy's aggregation is: every token has a value to be learnt.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.models.critic import target_values
from plaudit.objectives.value import clipped_value, explained_variance
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Experience


def value_loss(model: nn.Module, samples: Sequence[Experience], *, clip: float | None) -> Loss:
    """The loss of an update on these samples."""
    num_tokens = sum(sample.num_targets for sample in samples)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        assert targets.values_N is not None
        assert targets.returns_N is not None
        token = clipped_value(target_values(model, batch), targets.values_N, targets.returns_N, clip=clip)
        return token.loss_N.sum() / num_tokens, {"clip_fraction": token.clipped_N.float().sum() / num_tokens}

    return loss


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
