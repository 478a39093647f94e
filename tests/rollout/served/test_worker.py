"""What plaudit adds to vLLM's worker: new weights, also for layers that vLLM has wrapped for LoRA."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from plaudit.rollout.served.vllm import WORKER_FOLDER
from plaudit.servers.server_command import INSIDE


class BaseLayerWithLoRA(nn.Module):
    """As vLLM's of that name."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.adapted = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Any) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def worker(monkeypatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(WORKER_FOLDER), str(INSIDE), *sys.path])
    from plaudit_vllm import PolicyWeights  # pyright: ignore[reportMissingImports]

    class Worker(PolicyWeights):
        def __init__(self):
            self.model, self.model_runner = Model(), self

        def get_model(self) -> Model:
            return self.model

        def reload_weights(self, weights_iterator: Any) -> None:
            self.model.load_weights(weights_iterator)

    return Worker()


@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_reach_the_layers_and_those_without_are_named(worker, wrapped):
    model = worker.model
    if wrapped:
        model.adapted = BaseLayerWithLoRA(model.adapted)
    modules = dict(model.named_modules())
    assert worker._plaudit_reload(iter([("adapted.weight", torch.full((2, 2), 7.0))])) == ["plain.weight"]
    layer: Any = model.adapted.base_layer if wrapped else model.adapted
    assert torch.equal(layer.weight, torch.full((2, 2), 7.0))
    assert dict(model.named_modules()) == modules, "the layers are wrapped again"
    assert worker._plaudit_reload((f"{name}.weight", torch.zeros(2, 2)) for name in ("plain", "adapted")) == []
    assert set(worker.plaudit_sums()) == {"plain.weight", "adapted.weight"}


def test_wrapped_layers_are_wrapped_again_after_an_error(worker):
    worker.model.adapted = BaseLayerWithLoRA(worker.model.adapted)
    with pytest.raises(KeyError):
        worker._plaudit_reload(iter([("no such layer", torch.zeros(1))]))
    assert isinstance(worker.model.adapted, BaseLayerWithLoRA)
    assert "load_weights" not in vars(worker.model)
