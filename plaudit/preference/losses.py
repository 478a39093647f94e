"""The losses of updates on pairs, micro-batch by micro-batch: DPO's and a reward model's.

    L = (1/P) Σ_p ℓ_p                       over the P pairs of the whole update, with ℓ of objectives/preference.py
        + c · (−(1/N) Σ_t log π(token_t))   DPO with nll_coefficient: over the N tokens of the whole update's chosen answers

Metrics are means over the update's pairs. Sums over a sequence are in float64: the log-prob of an answer of thousands of tokens is
a large number, and the loss depends on a small difference of two of them.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.data.pack import Batches, pack_pairs, split_pairs
from plaudit.models.classifier import sequence_scores
from plaudit.models.logprobs import target_logprobs
from plaudit.models.sharded import is_sharded
from plaudit.objectives.preference import bradley_terry_loss, hinge_loss, ipo_loss, share_preferred, sigmoid_loss
from plaudit.recipe import DPOLossSettings, RewardModelLossSettings
from plaudit.train.trainer import Loss
from plaudit.types import Batch, Pair, PairTargets
from plaudit.world import World

Sums = tuple[Tensor, Tensor]
"""Of the chosen and of the rejected answers, a number per pair."""


def answer_logprobs(model: PreTrainedModel, batch: Batch) -> Sums:
    """log π(answer | prompt): the sum over the target tokens of each sequence."""
    logprobs_N = target_logprobs(model, batch).logprobs_N.double()
    # One sum per sequence: a scatter-add would add in any order on a GPU.
    sums = torch.stack([part.sum() for part in logprobs_N.split(_targets(batch).num_targets)])
    return sums[0::2], sums[1::2]


def answer_scores(model: PreTrainedModel, batch: Batch) -> Sums:
    scores = sequence_scores(model, batch).double()
    return scores[0::2], scores[1::2]


def _targets(batch: Batch) -> PairTargets:
    assert batch.pairs is not None
    return batch.pairs


# Training ------------------------------------------------------------------------------------------------------------


def dpo_loss(model: PreTrainedModel, pairs: Sequence[Pair], settings: DPOLossSettings) -> Loss:
    """The loss of an update on these pairs."""
    num_pairs, num_chosen = len(pairs), sum(pair.chosen.num_targets for pair in pairs)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return dpo_shares(answer_logprobs(model, batch), _targets(batch), settings, num_pairs, num_chosen)

    return loss


def dpo_shares(
    logprobs: Sums, targets: PairTargets, settings: DPOLossSettings, num_pairs: int, num_chosen: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """These pairs' share of the loss and metrics of an update of `num_pairs`, whose chosen answers have `num_chosen` tokens."""
    chosen_P, rejected_P = logprobs
    chosen_ratios_P, rejected_ratios_P = chosen_P - targets.ref_chosen_P, rejected_P - targets.ref_rejected_P
    margins_P = settings.beta * (chosen_ratios_P - rejected_ratios_P)
    match settings.kind:
        case "sigmoid":
            loss_P = sigmoid_loss(margins_P, label_smoothing=settings.label_smoothing)
        case "hinge":
            loss_P = hinge_loss(margins_P)
        case "ipo":
            lengths = torch.tensor(targets.num_targets, dtype=torch.float64, device=margins_P.device)
            loss_P = ipo_loss(chosen_ratios_P / lengths[0::2], rejected_ratios_P / lengths[1::2], beta=settings.beta)
    nll = -chosen_P.sum() / num_chosen
    total = loss_P.sum() / num_pairs
    if settings.nll_coefficient:
        total = total + settings.nll_coefficient * nll
    metrics_P = {
        "accuracy": share_preferred(margins_P),
        "margin": margins_P,
        "reward_chosen": settings.beta * chosen_ratios_P,
        "reward_rejected": settings.beta * rejected_ratios_P,
        "logprob_chosen": chosen_P,
        "logprob_rejected": rejected_P,
    }
    return total, {"nll": nll} | {name: values.sum() / num_pairs for name, values in metrics_P.items()}


def reward_model_loss(model: PreTrainedModel, pairs: Sequence[Pair], settings: RewardModelLossSettings) -> Loss:
    """The loss of an update on these pairs."""
    num_pairs = len(pairs)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return reward_model_shares(answer_scores(model, batch), _targets(batch), settings, num_pairs)

    return loss


def reward_model_shares(
    scores: Sums, targets: PairTargets, settings: RewardModelLossSettings, num_pairs: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """These pairs' share of the loss and metrics of an update of `num_pairs`."""
    chosen_P, rejected_P = scores
    loss_P = bradley_terry_loss(chosen_P, rejected_P, targets.margins_P, centring_coefficient=settings.centring_coefficient)
    metrics_P = {
        "accuracy": share_preferred(chosen_P - rejected_P),
        "margin": chosen_P - rejected_P,
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
    }
    return loss_P.sum() / num_pairs, {name: values.sum() / num_pairs for name, values in metrics_P.items()}


# Evaluation ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    sums: Callable[[PreTrainedModel, Batch], Sums],
    budget: int,
    world: World,
    progress: Batches = iter,
    *,
    share: bool = True,
) -> Sums:
    """`answer_logprobs` or `answer_scores` of all pairs, in order, on the CPU. `progress` sees every batch of this process.
    `share`: the answers of a pair share its prompt."""
    model.eval()
    chosen, rejected = (torch.empty(len(pairs), dtype=torch.float64) for _ in range(2))
    batches = split_pairs(pairs, budget, world.size, share=share)
    own: list[tuple[list[int], Tensor, Tensor]] = []
    for group in progress([batch for _, batch in world.shard(batches, equal=is_sharded(model))]):
        world.heartbeat.beat()
        batch_chosen, batch_rejected = sums(model, pack_pairs([pairs[i] for i in group], model.device, share=share))
        own.append((group, batch_chosen.cpu(), batch_rejected.cpu()))
    for group, group_chosen, group_rejected in chain.from_iterable(world.gather(own, "scores of pairs")):
        chosen[group], rejected[group] = group_chosen.double(), group_rejected.double()
    return chosen, rejected
