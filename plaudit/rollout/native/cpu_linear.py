"""Linear layers with prepacked weights, on a CPU: few rows are multiplied with them in less time than with weights as they are.

With instructions for bf16, oneDNN packs them: `F.linear` does so in every call, which for a few rows costs as much as the product
itself. Its results are the same to the bit. Elsewhere `cpu_kernels.c` packs them, for several rows: one or two take less time with
weights as they are. Its sums have another order then, so a sample's last bits depend on how many others ran in the same call.

A packed copy lives for one call of the engine, since the trainer changes the weights in between; within a call they must not
change. Making it costs what it saves in eight decode steps (oneDNN's) or eighteen (ours). It is made after eight: most calls that
take eight take dozens more.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from plaudit.rollout.native.cpu_ops import MANY_ROWS, computes_products, pack, pack_head
from plaudit.rollout.native.drafts import STEP_ROWS

PREPACK_AFTER_STEPS = 8
FEWEST_ROWS = STEP_ROWS + 1
"""Of a step that counts, if we pack the weights: more than drafts can fill, or drafts would decide when they are packed."""
ROWS = 16  # oneDNN's layout is tuned for this many; others work too

Product = Callable[[Tensor], Tensor]


def prepacking_helps(rows: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step of this many rows takes less time with packed weights."""
    if device.type != "cpu":
        return False
    return FEWEST_ROWS <= rows <= MANY_ROWS if computes_products(dtype) else dtype == torch.bfloat16 and _prepacking_works()


@cache
def _prepacking_works() -> bool:
    """Tried once: which processors can do it (x86 with AVX-512, not ARM) is up to oneDNN and this build of torch."""
    weight = torch.eye(ROWS, dtype=torch.bfloat16)
    try:
        return torch.equal(_packed_by_onednn(weight, None)(weight), weight)
    except (RuntimeError, AttributeError):  # an AttributeError if torch was built without oneDNN
        return False


def prepack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    if computes_products(weight_OI.dtype):
        return pack(weight_OI.detach(), bias_O)
    return _packed_by_onednn(weight_OI, bias_O)


def prepack_head(weight_VD: Tensor) -> Product:
    """Its results are logits in fp32, from our kernel not rounded."""
    if computes_products(weight_VD.dtype):
        return pack_head(weight_VD.detach())
    product = _packed_by_onednn(weight_VD, None)
    return lambda hidden_BD: product(hidden_BD).float()


def _packed_by_onednn(weight_OI: Tensor, bias_O: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), ROWS)

    def product(x_TI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")

    return product
