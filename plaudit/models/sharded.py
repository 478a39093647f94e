"""A model whose weights are divided among processes: torch's FSDP2, by decoder layer.

Each process keeps a part of every weight, in fp32 if the weight is trained, so that its part is the optimiser's master. A layer's
weights are gathered before it computes, in the dtype that the model computes in, and freed after it; its gradients are summed over
processes as soon as the backward pass has left it. What is outside of the layers (embeddings, last norm, head) is gathered for a
whole pass.

Weights are whole only inside the model's forward pass, so that is where everything that reads them runs: `in_forward_pass`. Every
process must make the same number of passes: the others wait for each of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from plaudit.models.host_memory import HostMemory
from plaudit.models.merged import drop_merged
from plaudit.models.quantised import is_quantised
from plaudit.models.weights import release_memory
from plaudit.world import World, all_gather

T = TypeVar("T")
P = ParamSpec("P")
PASS = "a pass of sharded weights"
"""What a process does that waits for the others with every layer."""


class ShardedModel(nn.Module):
    """What a sharded model's class inherits from first. Its forward pass runs any function."""

    in_pass: bool = False
    computes_in: torch.dtype
    computes_on: torch.device
    shared_by: World

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.in_pass = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.in_pass = False
        # FSDP hooks into the gradients of what is returned, and may lose those of a view.
        return tree_map_only(Tensor, lambda t: t if t._base is None else t.clone(), result)

    @property
    def dtype(self) -> torch.dtype:
        """Of saved weights too; a trained shard is in fp32."""
        return self.computes_in


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, ShardedModel)


def run_in_pass(model: nn.Module, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result. If the model is sharded, the function runs within a forward pass of it, in which weights are whole;
    its tensors can be trained on."""
    if not isinstance(model, ShardedModel) or model.in_pass:
        return function(*args, **kwargs)
    with model.shared_by.waiting(PASS):
        result = model(function, *args, **kwargs)
    if not torch.is_grad_enabled():
        assert isinstance(model, FSDPModule)
        model.reshard()  # there is no backward pass that would
    return result


def in_forward_pass(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """For a function whose first argument is a model: see `run_in_pass`."""

    @wraps(function)
    def run(model: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_in_pass(model, function, model, *args, **kwargs)

    return run


def bytes_on_device(model: nn.Module) -> int:
    """Memory of the model's weights, or of this process's part of them, on the device that computes."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]
    device = getattr(model, "computes_on", None)
    return sum(t.numel() * t.element_size() for t in tensors if device is None or t.device.type == device.type)


# Dividing ------------------------------------------------------------------------------------------------------------


def shard_model(model: PreTrainedModel, world: World, *, offload: bool = False) -> None:
    """Divide the model's weights among the world's processes, in place. `offload`: a process's part is in host memory, and only
    what is gathered on the device; for a model that is not trained."""
    assert world.is_joined
    assert not is_quantised(model), "train/auto.py has refused it"
    assert not (offload and any(p.requires_grad for p in model.parameters()))
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, world.device.type)
    policy = CPUOffloadPolicy() if offload and world.device.type == "cuda" else OffloadPolicy()
    computes_in = model.dtype
    drop_merged(model)  # it would be a whole copy of the weights in each process
    model.__class__ = _with_passes(type(model))
    model.computes_in, model.computes_on, model.shared_by = computes_in, world.device, world  # pyright: ignore (its class has changed)
    for module in (*_units(model), model):
        _shard(module, mesh, policy, is_root=module is model)
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are shares of a sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if world.through_host:
                module.set_custom_all_gather(_GatherThroughHost(world))  # pyright: ignore (its base class is private)
                module.set_custom_reduce_scatter(_SumThroughHost(world))  # pyright: ignore
    with torch.no_grad():
        # FSDP notes in the first pass what is trained, and peft's adapters would not be if they are disabled in it.
        run_in_pass(model, lambda: None)
    if world.device.type == "cuda":
        release_memory()


@cache
def _with_passes(theirs: type) -> type:
    return type(theirs.__name__, (ShardedModel, theirs), {})


def _units(model: PreTrainedModel) -> list[nn.Module]:
    """What is gathered on its own: decoder layers, and a trained head in a dtype of its own."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [
        (module, parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and id(parameter) not in inside
    ]
    if len({parameter.dtype for _, parameter in outside}) < 2:
        return layers
    return layers + list(dict.fromkeys(module for module, parameter in outside if parameter.dtype != model.dtype))


def _shard(module: nn.Module, mesh: DeviceMesh, offload: OffloadPolicy, *, is_root: bool) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad and not hasattr(p, "to_local")]
    dtypes = {p.dtype for p in parameters}
    assert len(dtypes) < 2, "parameters that are gathered together must have one dtype"
    dtype = next(iter(dtypes), torch.float32)
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for parameter in parameters:
            parameter.data = parameter.data.float()
    fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=not is_root)


class _ThroughHost:
    """FSDP's collectives for processes that share a GPU (NCCL refuses that)."""

    def __init__(self, world: World):
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _GatherThroughHost(_ThroughHost):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        self._world.gather_parts(output_tensor, input_tensor).wait()


class _SumThroughHost(_ThroughHost):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._world.sum_parts(output_tensor, input_tensor).wait()


# Whole weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def iter_whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's state dict, in order, with whole weights in the model's dtype. If the model is sharded, all processes must
    iterate over all of it; a tensor, and those of the same layer, are whole until the next layer's is taken."""
    if not isinstance(model, ShardedModel):
        yield from model.state_dict().items()
        return
    names = list(model.state_dict())
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    root, current = units.pop(""), None
    root.unshard()
    try:
        for name in names:
            unit = next((module for prefix, module in units.items() if name.startswith(f"{prefix}.")), None)
            if unit is not current:
                if current is not None:
                    current.reshard()
                current = unit
                if unit is not None:
                    unit.unshard()
            owner, _, leaf = name.rpartition(".")
            yield name, getattr(model.get_submodule(owner), leaf).detach()
    finally:
        for unit in (current, root):
            if unit is not None:
                unit.reshard()


@torch.no_grad()
def iter_some(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Some of a sharded model's weights, those that are trained in fp32, whole and in host memory; the others are not gathered."""
    for name in names:
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        own, size = parameter.to_local().detach().cpu(), dist.get_world_size()
        rows = -(-len(parameter) // size)  # as torch.chunk divides them: the last ones may have fewer, or none
        padded = torch.zeros(rows, *own.shape[1:], dtype=own.dtype)
        padded[: len(own)] = own
        whole = torch.empty(size * rows, *own.shape[1:], dtype=own.dtype)
        all_gather(whole, padded)
        yield name, whole[: len(parameter)]


def gather_on_host(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], memory: HostMemory | None, *, keep: bool
) -> dict[str, Tensor]:
    """Copies of a sharded model's whole weights in host memory (in `memory`, if there is one), tied ones still tied; `keep` says
    whether this process needs them, and all must take part."""
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    copies: dict[str, Tensor] = {}
    for name, tensor in weights:
        if not keep:
            continue
        tied = copies.get(ties.get(name, name))
        if tied is not None:
            copies[name] = tied
        elif memory is None:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
        else:
            copies[name] = memory.copy(f"model/{name}", tensor)
            memory.settle()  # before the layer is freed
    return copies
