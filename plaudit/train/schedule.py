"""Learning rate by step: warm-up, then a schedule, as a fraction of the peak.

    warm-up    (k + 1) / w                                   for step k < w; then, with t = (k − w) / (N − w) in [0, 1):
    constant   1
    linear     m + (1 − m) · (1 − t)
    cosine     m + (1 − m) · (1 + cos πt) / 2
    wsd        m + (1 − m) · min(1, (N − k) / d)             with d = min(decay_ratio · N, N − w), at least 1

N steps in total, w warm-up steps, m = min_lr_ratio. wsd stays at the peak until the last d steps, which never start before the end
of the warm-up. Steps count from 0, but the warm-up starts at 1 / w, so the first step already changes the weights.
"""

import math
from decimal import Decimal

from plaudit.recipe import OptimSettings


def warmup_steps(optim: OptimSettings, total_steps: int) -> int:
    if optim.warmup_ratio is not None:
        return _share_of(total_steps, optim.warmup_ratio)
    return optim.warmup_steps or 0


def _share_of(total_steps: int, ratio: float) -> int:
    # Decimal: 0.07 of 100 steps is 7, but 7.000000000000001 in floats, which would round up to 8.
    return math.ceil(total_steps * Decimal(str(ratio)))


def lr_at(step: int, total_steps: int, optim: OptimSettings) -> float:
    """The learning rate of a step, counted from 0."""
    warmup, low = warmup_steps(optim, total_steps), optim.min_lr_ratio
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    t = (step - warmup) / max(1, total_steps - warmup)
    match optim.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = low + (1 - low) * (1 - t)
        case "cosine":
            share = low + (1 - low) * (1 + math.cos(math.pi * t)) / 2
        case "wsd":
            decay = max(1, min(_share_of(total_steps, optim.decay_ratio), total_steps - warmup))
            left = min(1.0, (total_steps - step) / decay)
            share = low + (1 - low) * left
    return optim.lr * share
