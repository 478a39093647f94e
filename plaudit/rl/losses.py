"""The losses of an RL update, micro-batch by micro-batch. The policy's:

    L = Σ_t w_t · ( u_t · loss(π, π_old, A)_t + β · kl(π, ref)_t − c · H_t ) + b · Σ_t v_t · max(A_t, 0) · (−log π_t)

with the weights w of objectives/aggregate.py, and v like them but over tokens with A > 0 only; the importance weights u of
objectives/importance.py, or 1; and a loss of objectives/policy.py. The critic's, over the N tokens of the update, whatever the
policy's aggregation:

    L_V = 1/N · Σ_t ½ · max((V_t − R_t)², (clamp(V_t, V_old,t ± clip) − R_t)²)

A critic that shares the policy's layers is trained in the same pass:

    L + c · L_V          in the shared layers; in the value head, which has its own optimiser, L_V

Metrics are means over the update's tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.models.critic import SharedCritic
from plaudit.models.logprobs import state_logprobs, target_states
from plaudit.objectives.importance import importance_weights
from plaudit.objectives.kl import kl
from plaudit.objectives.policy import TokenLoss, positive_sft
from plaudit.objectives.registry import POLICY_LOSSES
from plaudit.objectives.value import clipped_value, explained_variance
from plaudit.recipe import AlgorithmSettings, CriticSettings, ImportanceSettings
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Experience

LossShare = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch's share of the loss and metrics, from what the model computed for it (hidden states, or values)."""


def policy_loss(model: nn.Module, num_tokens: int, algorithm: AlgorithmSettings, temperature: float) -> Loss:
    """The policy's loss for an update of `num_tokens` target tokens."""
    share = policy_share(model, num_tokens, algorithm, temperature)
    return lambda batch: share(target_states(model, batch), batch)


def policy_share(model: nn.Module, num_tokens: int, algorithm: AlgorithmSettings, temperature: float) -> LossShare:
    """The same, given a micro-batch's hidden states."""

    def share(hidden_ND: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        entropy = "with_gradient" if algorithm.entropy_coefficient else "value"
        logprobs_N, entropy_N = state_logprobs(model, hidden_ND, batch, temperature=temperature, entropy=entropy)
        assert entropy_N is not None
        # In a step's only update π_old is π itself, and the ratio is 1 with the gradient of log π.
        old_N = logprobs_N.detach() if targets.old_logprobs_N is None else targets.old_logprobs_N
        token = token_loss(logprobs_N, old_N, targets.advantages_N, batch, algorithm)
        loss_N = token.loss_N
        mismatch_N = (logprobs_N - targets.sampler_logprobs_N).detach()
        metrics_N = {
            "entropy": entropy_N,
            "clip_fraction": token.clipped_N.float(),
            "dual_clip_fraction": token.dual_clipped_N.float(),
            "ratio": token.ratio_N,
            "policy_kl": kl(old_N, logprobs_N.detach(), "k3"),  # KL(π_old ‖ π): the tokens were drawn from π_old
            "mismatch": mismatch_N.abs(),
            "mismatch_kl": mismatch_N.expm1() - mismatch_N,
        }
        if isinstance(settings := algorithm.importance, ImportanceSettings):
            importance = importance_weights(
                old_N, targets.sampler_logprobs_N, batch.target_lengths_S,
                level=settings.level, mode=settings.mode, high=settings.high, low=settings.low or 0.0,
            )  # fmt: skip
            loss_N = importance.weights_N * loss_N
            metrics_N |= {"importance": importance.weights_N, "importance_bounded": importance.bounded_N.float()}
        if targets.ref_logprobs_N is not None:
            kl_N = kl(logprobs_N, targets.ref_logprobs_N, algorithm.kl_estimator)
            metrics_N["kl"] = kl_N
            if algorithm.kl_coefficient:
                loss_N = loss_N + algorithm.kl_coefficient * kl_N
        if algorithm.entropy_coefficient:
            loss_N = loss_N - algorithm.entropy_coefficient * entropy_N
        total = (targets.weights_N * loss_N).sum()
        metrics = {name: values.sum() / num_tokens for name, values in metrics_N.items()}
        if targets.positive_weights_N is not None:
            imitation = (targets.positive_weights_N * positive_sft(logprobs_N, targets.advantages_N)).sum()
            total = total + algorithm.positive_sft_coefficient * imitation
            metrics["positive_sft_loss"] = imitation
        return total, metrics

    return share


def token_loss(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, batch: Batch, algorithm: AlgorithmSettings
) -> TokenLoss:
    """The loss of each token, by `algorithm.loss`."""
    loss = POLICY_LOSSES[algorithm.loss]
    settings = {name: getattr(algorithm, name) for name in loss.settings if name != "clip_ratio"}
    if "clip_ratio" in loss.settings:
        settings["clip_low"], settings["clip_high"] = algorithm.clip_ratio
    if "lengths" in loss.needs:
        settings["lengths_S"] = batch.target_lengths_S
    return loss.load()(policy_logprobs_N, old_logprobs_N, advantages_N, **settings)


def value_loss(values: Callable[[Batch], Tensor], num_tokens: int, *, clip: float | None) -> Loss:
    """The critic's loss for an update of `num_tokens` target tokens; `values`: its predictions for a batch."""
    share = value_share(num_tokens, clip=clip)
    return lambda batch: share(values(batch), batch)


def value_share(num_tokens: int, *, clip: float | None) -> LossShare:
    """The same, given a micro-batch's values."""

    def share(values_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        assert targets.values_N is not None
        assert targets.returns_N is not None
        token = clipped_value(values_N, targets.values_N, targets.returns_N, clip=clip)
        return token.loss_N.sum() / num_tokens, {"clip_fraction": token.clipped_N.float().sum() / num_tokens}

    return share


def shared_loss(
    model: nn.Module,
    critic: SharedCritic,
    num_tokens: int,
    algorithm: AlgorithmSettings,
    settings: CriticSettings,
    temperature: float,
) -> Loss:
    """Policy and critic in one pass through the layers they share. `loss` among the metrics is the policy's."""
    policy = policy_share(model, num_tokens, algorithm, temperature)
    value = value_share(num_tokens, clip=settings.clip_value)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        hidden_ND = target_states(model, batch)
        policy_total, metrics = policy(hidden_ND, batch)
        value_total, value_shares = value(critic.values(hidden_ND, coefficient=settings.loss_coefficient), batch)
        metrics |= {"loss": policy_total, "critic/loss": value_total}
        metrics |= {f"critic/{name}": share for name, share in value_shares.items()}
        return policy_total + value_total, metrics

    return loss


def value_metrics(samples: Sequence[Experience]) -> dict[str, float]:
    """How well the critic predicted a step's returns, before it was trained on them."""
    known = [(sample.values, sample.returns) for sample in samples if sample.values is not None and sample.returns is not None]
    if not known:
        return {}
    values_N, returns_N = (torch.from_numpy(np.concatenate(arrays).astype(np.float64)) for arrays in zip(*known, strict=True))
    return {
        "critic/value": values_N.mean().item(),
        "critic/return": returns_N.mean().item(),
        "critic/explained_variance": explained_variance(values_N, returns_N),
    }
