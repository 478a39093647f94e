"""Half-precision linear layers with prepacked weights, on a CPU with instructions for bf16 (others: `cpu_ops.product`).

`F.linear` reorders the weights in every call, which for a few rows costs as much as the product itself. The result is the same to
the bit. A prepacked copy lives for one call of the engine, since the trainer changes the weights in between. Making it costs what
it saves in about eight decode steps, so it is made after eight.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from plaudit.rollout.native.cpu_ops import computes_products

PREPACK_AFTER_STEPS = 8
ROWS = 16  # the layout is tuned for this many; others work too


def prepacking_helps(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16 and not computes_products(dtype) and _prepacking_works()


@cache
def _prepacking_works() -> bool:
    """Tried once: which processors can do it (x86 with AVX-512, not ARM) is up to oneDNN and this build of torch."""
    weight = torch.eye(ROWS, dtype=torch.bfloat16)
    try:
        return torch.equal(prepack_linear(weight, None)(weight), weight)
    except (RuntimeError, AttributeError):  # an AttributeError if torch was built without oneDNN
        return False


def prepack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return product
