"""The loss of an RL update, micro-batch by micro-batch:

    L = Σ_t w_t · ( u_t · loss(π, π_old, A)_t + β · kl(π, ref)_t − c · H_t ) + b · Σ_t v_t · max(A_t, 0) · (−log π_t)

with the weights w of objectives/aggregate.py, and v like them but over tokens with A > 0 alone; the importance weights u of
objectives/importance.py, or 1; and a loss of objectives/policy.py. Metrics beside it are means over the update's tokens.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from torch import Tensor, nn

from plaudit.models.logprobs import state_logprobs, target_states
from plaudit.objectives.importance import importance_weights
from plaudit.objectives.kl import kl
from plaudit.objectives.policy import TokenLoss, cispo, clipped, gspo, policy_gradient, positive_sft
from plaudit.recipe import AlgorithmSettings
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Experience


def policy_loss(model: nn.Module, samples: Sequence[Experience], algorithm: AlgorithmSettings, temperature: float) -> Loss:
    """The loss of an update on these samples."""
    share = policy_share(model, samples, algorithm, temperature)
    return lambda batch: share(target_states(model, batch), batch)


def policy_share(
    model: nn.Module, samples: Sequence[Experience], algorithm: AlgorithmSettings, temperature: float
) -> Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]:
    """The same, of a micro-batch whose hidden states are there."""
    num_tokens = sum(sample.num_targets for sample in samples)

    def share(hidden_ND: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        entropy = "learnt" if algorithm.entropy_coefficient else "measured"
        logprobs_N, entropy_N = state_logprobs(model, hidden_ND, batch, temperature=temperature, entropy=entropy)
        assert entropy_N is not None
        # The only update of a step: π_old is π itself, and the ratio 1 with the gradient of log π.
        old_N = logprobs_N.detach() if targets.old_logprobs_N is None else targets.old_logprobs_N
        token = token_loss(logprobs_N, old_N, targets.advantages_N, batch, algorithm)
        loss_N = token.loss_N
        apart_N = (logprobs_N - targets.sampler_logprobs_N).detach()
        metrics_N = {
            "entropy": entropy_N,
            "clip_fraction": token.clipped_N.float(),
            "dual_clip_fraction": token.dual_clipped_N.float(),
            "ratio": token.ratio_N,
            "policy_kl": kl(old_N, logprobs_N.detach(), "k3"),  # KL(π_old ‖ π): the tokens were drawn from π_old
            "mismatch": apart_N.abs(),
            "mismatch_kl": apart_N.expm1() - apart_N,
        }
        if (settings := algorithm.importance) is not None:
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
    """The recipe's policy loss of each token."""
    given = policy_logprobs_N, old_logprobs_N, advantages_N
    clip_low, clip_high = algorithm.clip_ratio
    match algorithm.loss:
        case "clipped":
            return clipped(*given, clip_low=clip_low, clip_high=clip_high, dual_clip=algorithm.dual_clip)
        case "gspo":
            return gspo(*given, batch.target_lengths_S, clip_low=clip_low, clip_high=clip_high)
        case "cispo":
            return cispo(*given, clip_low=clip_low, clip_high=clip_high)
        case "policy_gradient":
            return policy_gradient(*given)
    assert_never(algorithm.loss)
