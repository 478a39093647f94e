"""fp32 sums of gradients, over the micro-batches of an update.

A product whose weights have such a sum adds to it directly, in one product of its own, instead of returning (and for half-precision
weights rounding) every micro-batch's gradient for someone else to add. Weights of one product (queries, keys and values) have one
sum, end to end. Any other gradient is added when autograd has computed it. The sum of an fp32 parameter is its `grad`, where
autograd would add, too.
"""

from collections.abc import Iterable, Mapping, Sequence
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
            if parameter.dtype != torch.float32:
                # The hook must not refer to the optimiser: that would be a reference cycle.
                parameter.register_post_accumulate_grad_hook(self._move_gradient)

    def clear(self) -> None:
        """Free their memory: sums exist during an update only. (`grad` of fp32 parameters is the caller's to clear.)"""
        self._of_products.clear()
        self.by_name.clear()

    def of_product(self, weights: Sequence[Tensor]) -> "ProductSum":
        return ProductSum(self, tuple(self._names[id(weight)] for weight in weights))

    def get(self, names: tuple[str, ...], weights: Sequence[Tensor]) -> Tensor | None:
        known = self._of_products.get(names)
        if known is not None and self._is_current(known, weights[0]):
            return known
        if any(name in self.by_name or weight.grad is not None for name, weight in zip(names, weights, strict=True)):
            return None
        if any(weight.dtype == torch.float32 and not weight.requires_grad for weight in weights):
            return None  # not the parameters, whose `grad` it would be: a checkpointed layer saves detached copies of them
        rows, like = [len(weight) for weight in weights], weights[0]
        whole = torch.zeros(sum(rows), *like.shape[1:], dtype=torch.float32, device=like.device)
        self._of_products[names] = whole
        for name, weight, part in zip(names, weights, whole.split(rows), strict=True):
            if weight.dtype == torch.float32:
                weight.grad = part
            else:
                self.by_name[name] = part
        return whole

    @staticmethod
    def _is_current(whole: Tensor, first: Tensor) -> bool:
        """Unless somebody has cleared or replaced the `grad` of an fp32 parameter."""
        return first.dtype != torch.float32 or (first.grad is not None and first.grad.data_ptr() == whole.data_ptr())

    def _move_gradient(self, parameter: Tensor) -> None:
        """As soon as it is computed."""
        # None: its product has added it, and returned none. Or a later trainer has its sum.
        if parameter.grad is None or getattr(parameter, ATTRIBUTE, None) is not self:
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

    def get(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Zeros at first. None if any of the weights has got gradients in another way."""
        return self.sums.get(self.names, weights)


def forget_sums(parameters: Iterable[nn.Parameter]) -> None:
    """Those of an earlier trainer, to which products would add."""
    for parameter in parameters:
        if hasattr(parameter, ATTRIBUTE):
            delattr(parameter, ATTRIBUTE)


def sum_of_product(weights: Sequence[Tensor]) -> ProductSum | None:
    """None if autograd is to return the gradients of these weights, as usual."""
    sums = [getattr(weight, ATTRIBUTE, None) for weight in weights]
    return sums[0].of_product(weights) if sums[0] is not None and all(one is sums[0] for one in sums) else None


def add_or_return(total: ProductSum | None, parameters: Sequence[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Adds the gradients of these parameters, end to end in fp32, to their sum and returns None for each; without a sum, returns
    them. `total`: `sum_of_product` of the parameters themselves, which a checkpointed layer has only in its forward pass."""
    if total is not None and (whole := total.get(parameters)) is not None:
        whole += grad
        return [None] * len(parameters)
    parts = grad.split([len(parameter) for parameter in parameters])
    return [part.to(parameter.dtype) for part, parameter in zip(parts, parameters, strict=True)]


def add_product(sum_VD: Tensor, grad_NV: Tensor, input_ND: Tensor) -> None:
    """sum += gradᵀ input. On a GPU in the precision of the sum; a CPU rounds a half-precision product first."""
    if grad_NV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_NV.T, input_ND)
    elif grad_NV.is_cuda:
        torch.addmm(sum_VD, grad_NV.T, input_ND, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += grad_NV.T @ input_ND
