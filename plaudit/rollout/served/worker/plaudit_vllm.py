"""Inside a vLLM server: takes the policy's weights from plaudit, and answers no request for other weights than it has.

`--worker-extension-cls plaudit_vllm.PolicyWeights` adds methods to vLLM's worker, which plaudit calls through `/collective_rpc`.
`--middleware plaudit_vllm.VersionGate` stands before vLLM's own routes: a server that was just started, or is being given weights,
has no version, and refuses to sample until plaudit has set the version of what it has loaded. Of several processes that share the
server, one is let through to load a version.

Loaded in the server's environment, in which plaudit is not: only the standard library, torch and vLLM are imported.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from plaudit_gate import KeyGate, Receive, Scope, Send, answer
from plaudit_weight_stream import receive, sums_by_layer

VERSION_HEADER = b"x-plaudit-version"
STATE = ("version", "base", "adapter")
"""What the server has: the version of its weights; with LoRA, whose base model they are for, and the newest adapter's name. Set by
a header each, `x-plaudit-…`; an empty one is none."""
CLAIMANT, CLAIM_S = b"x-plaudit-claimant", b"x-plaudit-claim-s"
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

    def plaudit_take_adapter(self, address: str, token: str, config: str, where: str) -> str:
        """The folder in which the adapter that plaudit sends was written: below `where`, or in a temporary folder of this machine.
        The one before is removed."""
        from safetensors.torch import save_file

        if previous := getattr(self, "_plaudit_adapter", None):
            shutil.rmtree(previous, ignore_errors=True)
        self._plaudit_adapter = folder = tempfile.mkdtemp(prefix="plaudit-adapter-", dir=where or None)
        tensors = {name: tensor.contiguous() for name, tensor in receive(address, token, torch.device("cpu"))}
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
        with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
            file.write(config)
        return folder

    def plaudit_sums(self) -> dict[str, list[float]]:
        """What `sums_by_layer` says of the weights that this worker samples with."""
        weights = self.model_runner.get_model().named_parameters()
        return sums_by_layer((_without_lora(name), tensor) for name, tensor in weights)

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
            with _without_lora_layers(model):
                self.reload_weights(weights_iterator=weights)
                return sorted({name for name, _ in model.named_parameters()} - loaded)
        finally:
            del model.load_weights  # the class's method is visible again


@contextmanager
def _without_lora_layers(model: torch.nn.Module) -> Iterator[None]:
    """With `--enable-lora`, vLLM wraps layers to add the adapters' results. Not every version can load weights into those, so that
    they stand aside for a moment."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if any(kind.__name__ == "BaseLayerWithLoRA" for kind in type(child).__mro__)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _without_lora(name: str) -> str:
    """The name of a weight in a model whose layers vLLM has not wrapped to add LoRA's."""
    return name.replace(".base_layer.", ".")


class VersionGate(KeyGate):
    """ASGI middleware: plaudit's key on every route but `/health`, and the right version on those that sample."""

    def __init__(self, app: Any):
        super().__init__(app)
        self._state: dict[str, str | None] = dict.fromkeys(STATE)
        self._claimed: bytes | None = None
        self._claim_ends = 0.0

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        version = headers.get(VERSION_HEADER, b"").decode()
        if scope["path"] == "/plaudit/state":
            if version and headers.get(CLAIMANT) != self._claimed:
                await answer(
                    send, 409, {"error": f"version {version} was loaded, but another process has claimed the server since"}
                )
                return
            if scope["method"] == "POST":
                self._set({name: headers[key].decode() for name in STATE if (key := f"x-plaudit-{name}".encode()) in headers})
            await answer(send, 200, self._state)
        elif scope["path"] == "/plaudit/claim":
            claim = self._claim(version, headers[CLAIMANT], float(headers[CLAIM_S]))
            await answer(send, 200, {"claim": claim, **self._state})
        elif scope["path"] in SAMPLING and version != self._state["version"]:
            has = self._state["version"] or "none yet"
            await answer(send, 409, {"error": f"version {version or 'none'} of the weights was requested; it has {has}"})
        else:
            await self.app(scope, receive, send)

    def _set(self, given: dict[str, str]) -> None:
        self._state |= {name: value or None for name, value in given.items()}
        if self._state["version"] is not None:
            self._claimed = None

    def _claim(self, version: str, claimant: bytes, seconds: float) -> str:
        """`yours`: to load this version. `has`: it is loaded. `wait`: another process is loading weights; one that is gone is
        waited for no longer than it said."""
        if self._state["version"] == version:
            return "has"
        if self._claimed not in (None, claimant) and time.monotonic() < self._claim_ends:
            return "wait"
        self._claimed, self._claim_ends = claimant, time.monotonic() + seconds
        self._state["version"] = None
        return "yours"
