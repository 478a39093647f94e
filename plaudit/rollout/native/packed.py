"""Half-precision linear layers on a CPU, with weights laid out once as its matrix kernels want them.

`F.linear` lays them out again in every call, which at a few rows costs as much as the product itself. The result is the same to
the bit. The copy lives for one call of the engine, since the trainer changes the weights in between; making it takes what it saves
in some eight decode steps, so it is made when eight are done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PAYS_AFTER_STEPS = 8
ROWS = 16  # that the layout is made for; others work too


class PackedLinears:
    """A model's plain linear layers, packed. `within()` puts them in place of its own for the time of a forward pass."""

    def __init__(self, model: PreTrainedModel):
        self._forwards = {module: _packed(module) for module in model.modules() if type(module) is nn.Linear}
        head: Any = model.get_output_embeddings()
        self.logits = self._forwards[head]

    @staticmethod
    def pays(model: PreTrainedModel) -> bool:
        return model.device.type == "cpu" and model.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()

    @contextmanager
    def within(self) -> Iterator[None]:
        # In the instance's dict, past nn.Module's slower way of setting attributes.
        for module, forward in self._forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self._forwards:
                del module.__dict__["forward"]


def _packed(module: nn.Linear) -> Any:
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), ROWS)
    bias = None if module.bias is None else module.bias.detach()

    def forward(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward
