"""Losses on pairs: of log-ratios (DPO, IPO, hinge) and of scores (Bradley–Terry). Each gives a loss per pair.

h = log π(y | x) − log π_ref(y | x)          of the chosen answer and of the rejected one: sums over their tokens
m = β (h_chosen − h_rejected)                the difference of their implicit rewards
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid_loss(margins_P: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """−(1 − ε) log σ(m) − ε log σ(−m)      (Rafailov et al. 2023; ε > 0: cDPO, Mitchell 2023)"""
    return -(1 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(-margins_P)


def hinge_loss(margins_P: Tensor) -> Tensor:
    """max(0, 1 − m)      (SLiC-HF, Zhao et al. 2023)"""
    return (1 - margins_P).clamp(min=0)


def ipo_loss(chosen_ratios_P: Tensor, rejected_ratios_P: Tensor, *, beta: float) -> Tensor:
    """(h̄_chosen − h̄_rejected − 1 / (2β))²      with h̄ = h / number of tokens (Azar et al. 2023)

    The paper writes sums; its authors' code uses means, as all implementations do, or long answers would dominate.
    """
    return (chosen_ratios_P - rejected_ratios_P - 1 / (2 * beta)) ** 2


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor, *, centring_coefficient: float = 0.0) -> Tensor:
    """−log σ(r_chosen − r_rejected − margin) + c (r_chosen + r_rejected)²

    Pairs do not determine the zero point; the second term keeps it between the two (Eisenstein et al. 2023).
    """
    loss_P = -logsigmoid(chosen_P - rejected_P - margins_P)
    return loss_P + centring_coefficient * (chosen_P + rejected_P) ** 2 if centring_coefficient else loss_P


def share_preferred(margins_P: Tensor) -> Tensor:
    """Per pair: 1 if the chosen answer scores higher, 0 if lower, ½ for a tie."""
    return (margins_P > 0).double() + 0.5 * (margins_P == 0).double()


def calibration_error(margins_P: Tensor, *, bins: int = 10) -> Tensor:
    """Σ_b n_b / N · | accuracy_b − confidence_b |

    A model that scores two answers m apart predicts the better one with confidence σ(|m|). Pairs are binned by confidence, in bins
    of equal width between ½ and 1; in each, accuracy should equal the mean confidence (Guo et al. 2017).
    """
    confidence_P = margins_P.double().abs().sigmoid()
    right_P = share_preferred(margins_P)
    bin_P = ((confidence_P - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    apart = torch.zeros(bins, dtype=torch.float64, device=margins_P.device)
    for b in range(bins):
        apart[b] = (right_P - confidence_P)[bin_P == b].sum().abs()
    return apart.sum() / len(margins_P)
