"""fp32 sums of the gradients of half-precision weights, over the micro-batches of an update.

A product whose weights have such a sum adds to it directly, in one product of its own, instead of rounding every micro-batch's
gradient for someone else to add. Weights of one product (queries, keys and values) have one sum, end to end. Any other gradient is
added when autograd has computed it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

ATTRIBUTE = "gradient_sums"
"""Of a parameter: the `GradientSums` that has its sum; the last one, if it has been trained before."""


class GradientSums:
    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._of_products: dict[tuple[str, ...], Tensor] = {}
        self.by_name: dict[str, Tensor] = {}
        for parameter in parameters.values():
            setattr(parameter, ATTRIBUTE, self)
            # The hook must not refer to the optimiser: that would be a reference cycle.
            parameter.register_post_accumulate_grad_hook(self._move_gradient)

    def clear(self) -> None:
        """Free their memory: sums exist during an update only."""
        self._of_products.clear()
        self.by_name.clear()

    def of_product(self, weights: Sequence[Tensor]) -> "ProductSum":
        return ProductSum(self, tuple(self._names[id(weight)] for weight in weights), tuple(len(weight) for weight in weights))

    def get(self, product: "ProductSum", like: Tensor) -> Tensor | None:
        if product.names not in self._of_products:
            if any(name in self.by_name for name in product.names):
                return None
            whole = torch.zeros(sum(product.rows), *like.shape[1:], dtype=torch.float32, device=like.device)
            self._of_products[product.names] = whole
            self.by_name.update(zip(product.names, whole.split(product.rows), strict=True))
        return self._of_products[product.names]

    def _move_gradient(self, parameter: Tensor) -> None:
        """As soon as it is computed."""
        # None: its product has added it, and returned none. Or a later trainer has its sum.
        if parameter.grad is None or getattr(parameter, ATTRIBUTE) is not self:
            return
        name = self._names[id(parameter)]
        if name in self.by_name:
            self.by_name[name] += parameter.grad
        else:
            self.by_name[name] = parameter.grad.float()
        parameter.grad = None


class ProductSum(NamedTuple):
    """The sum of the weights of one product."""

    sums: GradientSums
    names: tuple[str, ...]
    rows: tuple[int, ...]

    def get(self, like: Tensor) -> Tensor | None:
        """Zeros at first, on the device of `like`, one of the weights. None if any of them has got gradients in another way."""
        return self.sums.get(self, like)


def sum_of_product(weights: Sequence[Tensor]) -> ProductSum | None:
    """None if autograd is to return the gradients of these weights, as usual."""
    sums = [getattr(weight, ATTRIBUTE, None) for weight in weights]
    return sums[0].of_product(weights) if sums[0] is not None and all(one is sums[0] for one in sums) else None


def add_product(sum_VD: Tensor, grad_NV: Tensor, input_ND: Tensor) -> None:
    """sum += gradᵀ input. On a GPU in the precision of the sum; a CPU rounds a half-precision product first."""
    if grad_NV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_NV.T, input_ND)
    elif grad_NV.is_cuda:
        torch.addmm(sum_VD, grad_NV.T, input_ND, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += grad_NV.T @ input_ND
