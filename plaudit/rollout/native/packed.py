"""Half-precision products on a CPU, with weights laid out once as its matrix kernels want them.

`F.linear` lays them out again in every call, which at a few rows costs as much as the product itself. The result is the same to
the bit. The copy lives for one call of the engine, since the trainer changes the weights in between; making it takes what it saves
in some eight decode steps, so it is made when eight are done.
"""

from collections.abc import Callable

import torch
from torch import Tensor

PAYS_AFTER_STEPS = 8
ROWS = 16  # that the layout is made for; others work too


def packing_pays(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()


def packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")

    return product
