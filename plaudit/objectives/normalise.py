"""The normalisation that GRPO's advantages and normalised rewards share. Torch-free, so that rewards can import it.

    z = (x − mean) / (std + eps)          std has divisor n − 1

Fewer than two values carry no signal, and equal values must give exactly 0; both are the caller's to ensure. So are mean and std,
because the arithmetic differs: GRPO works on tensors, rewards on Python floats with `statistics`' exact sums. The two agree up to
rounding, and computing both in one arithmetic would change one of them in the last bits.
"""

from typing import Any

EPS = 1e-6


def standardise(x: Any, mean: Any, std: Any, eps: float = EPS) -> Any:
    """x: a number, an array or a tensor; mean and std of the values it belongs to."""
    return (x - mean) / (std + eps)
