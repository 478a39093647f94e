"""The loss of an RL update, micro-batch by micro-batch:

    L = Σ_t w_t · ( clipped(π, π_old, A)_t + β · kl(π, ref)_t − c · H_t )

with the weights of objectives/aggregate.py. Metrics beside it are means over the update's tokens.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from plaudit.models.logprobs import target_logprobs
from plaudit.objectives.kl import kl
from plaudit.objectives.policy import clipped
from plaudit.recipe import Algorithm
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Experience


def policy_loss(model: nn.Module, samples: Sequence[Experience], algorithm: Algorithm, temperature: float) -> Loss:
    """The loss of an update on these samples."""
    num_tokens = sum(sample.num_targets for sample in samples)
    clip_low, clip_high = algorithm.clip

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        targets = batch.targets
        assert targets is not None
        entropy = "learnt" if algorithm.entropy_coefficient else "measured"
        logprobs_N, entropy_N = target_logprobs(model, batch, temperature=temperature, entropy=entropy)
        assert entropy_N is not None
        # The only update of a step: π_old is π itself, and the ratio 1 with the gradient of log π.
        old_N = logprobs_N.detach() if targets.old_logprobs_N is None else targets.old_logprobs_N
        token = clipped(
            logprobs_N, old_N, targets.advantages_N, clip_low=clip_low, clip_high=clip_high, dual_clip=algorithm.dual_clip
        )
        loss_N = token.loss_N
        apart_N = (logprobs_N - targets.sampler_logprobs_N).detach()
        metrics_N = {
            "entropy": entropy_N,
            "clip_fraction": token.clipped_N.float(),
            "dual_clip_fraction": token.dual_clipped_N.float(),
            "policy_kl": kl(old_N, logprobs_N.detach(), "k3"),  # KL(π_old ‖ π): the tokens were drawn from π_old
            "mismatch": apart_N.abs(),
            "mismatch_kl": apart_N.expm1() - apart_N,
        }
        if targets.ref_logprobs_N is not None:
            kl_N = kl(logprobs_N, targets.ref_logprobs_N, algorithm.kl_kind)
            loss_N = loss_N + algorithm.kl_coefficient * kl_N
            metrics_N["kl"] = kl_N
        if algorithm.entropy_coefficient:
            loss_N = loss_N - algorithm.entropy_coefficient * entropy_N
        return (targets.weights_N * loss_N).sum(), {name: values.sum() / num_tokens for name, values in metrics_N.items()}

    return loss
