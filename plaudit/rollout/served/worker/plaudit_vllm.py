"""Inside a vLLM server: takes the policy's weights from plaudit, and answers no request for other weights than it has.

`--worker-extension-cls plaudit_vllm.PolicyWeights` adds methods to vLLM's worker, which plaudit calls through `/collective_rpc`.
`--middleware plaudit_vllm.VersionGate` stands before vLLM's own routes: a server that was just started, or is being given weights,
has no version, and refuses to sample until plaudit has set the version of what it has loaded.

Loaded in the server's environment, in which plaudit is not: only the standard library, torch and vLLM are imported.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from plaudit_gate import KeyGate, Receive, Scope, Send, answer
from plaudit_weight_stream import receive, sums_by_layer

VERSION_HEADER = b"x-plaudit-version"
SAMPLING = ("/v1/completions",)


class PolicyWeights:
    """Further methods of vLLM's worker."""

    model_runner: Any
    device: torch.device
    reload_weights: Callable[..., Any]

    def plaudit_load(self, address: str, token: str) -> dict[str, Any]:
        """Load the weights that plaudit sends from this address."""
        received = {"tensors": 0, "bytes": 0}

        def count() -> Any:
            for name, tensor in receive(address, token, self.device):
                received["tensors"] += 1
                received["bytes"] += tensor.nbytes
                yield name, tensor

        return received | {"missing": self._plaudit_reload(count())}

    def plaudit_load_files(self, folder: str) -> dict[str, Any]:
        """Load the weights in the safetensors files of a folder."""
        from safetensors import safe_open

        received = {"tensors": 0, "bytes": 0}

        def read() -> Any:
            for file in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
                with safe_open(os.path.join(folder, file), "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (no mapping)
                        tensor = opened.get_tensor(name)
                        received["tensors"] += 1
                        received["bytes"] += tensor.nbytes
                        yield name, tensor.to(self.device)

        return received | {"missing": self._plaudit_reload(read())}

    def plaudit_sums(self) -> dict[str, list[float]]:
        """What `sums_by_layer` says of the weights that this worker samples with."""
        return sums_by_layer(self.model_runner.get_model().named_parameters())

    def plaudit_memory(self) -> dict[str, int]:
        """Bytes that this process holds: on the GPU, and in RAM."""
        import resource

        on_device = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return {"device": on_device, "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def _plaudit_reload(self, weights: Any) -> list[str]:
        """The names of parameters that got no new weights. (vLLM knows, and only logs them.)"""
        model = self.model_runner.get_model()  # without what wraps it for CUDA graphs
        load, loaded = model.load_weights, set()

        def load_and_remember(weights: Any) -> Any:
            names = load(weights)
            loaded.update(names or ())
            return names

        model.load_weights = load_and_remember
        try:
            self.reload_weights(weights_iterator=weights)
        finally:
            del model.load_weights  # the class's method is visible again
        return sorted({name for name, _ in model.named_parameters()} - loaded)


class VersionGate(KeyGate):
    """ASGI middleware: plaudit's key on every route but `/health`, and the right version on those that sample."""

    def __init__(self, app: Any):
        super().__init__(app)
        self._version: str | None = None

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if scope["path"] == "/plaudit/version":
            if scope["method"] == "POST":
                self._version = headers[VERSION_HEADER].decode() or None
            await answer(send, 200, {"version": self._version})
        elif scope["path"] in SAMPLING and headers.get(VERSION_HEADER, b"").decode() != self._version:
            asked = headers.get(VERSION_HEADER, b"none").decode()
            await answer(send, 409, {"error": f"asked for version {asked} of the weights, and has {self._version or 'none yet'}"})
        else:
            await self.app(scope, receive, send)
