"""Estimates of the memory that training and its reward models take, without loading anything.

    weights       P · b                                   b = 2 bytes in bf16, 4 in fp32
                  with model.lora.base_bits               1.0625 or 0.5625 for those of linear layers, and b for the largest of them
    training      P' · (4 gradient + 8 moments, + 4 master in bf16),   P' trainable parameters
                  with optim.placement: offload           gradients and the chunks in flight; moments and masters are on the host
    activations   T · L · b · (12 h + 2 k + 3 f)          T tokens of a micro-batch, L layers, sizes h hidden, k keys, f MLP
                  in bf16                                 T · L · 16 h bytes more: norms keep their inputs and results in fp32
                  with LoRA in bf16                       T · L · 4 i bytes instead, i inputs of a layer's adapters: they compute
                                                          in fp32; with dropout, each keeps 5 i more
                  with fused layers, or with Liger        T · L · b · (7 h + 2 q + 2 k + 3 f), q queries; with head norms q + 2 k
                                                          more
                  with n layers checkpointed              T · 4 n · h + max(L − n, 1) layers' share, the residual stream being fp32
    shared keys   U · b · (4 k + 2 q)                     U keys of sequences that share prompts: copies for one layer at a time,
                                                          and their gradients, which flash attention has for every query head
                  outside that kernel                     (U − T) · L · 2 k · b: layers keep them
    logits        the chunk that models/logprobs.py computes at a time, twice in fp32 (in bf16: with its gradient and the last
                  one's; in fp32 on a GPU, three times), and the head's gradient
                  Of a layer's copies and a chunk of logits, the larger counts: one is freed before the other is there.
                  The gradients of an update that is one micro-batch appear as its activations go: the larger of the two counts.
    sampling      12 S · V + T · b · (6 h + 2 k + 3 f)    S sequences at a time, V words, T tokens of a pass over prompts;
                                                          with LoRA in bf16, T · 12 f more; on a CPU P · b for packed weights;
                                                          with base_bits, b for each dequantised weight
    cache         S · T · L · 2 k · b                     keys and values of S sequences of T tokens; if short, sequences wait
    critic        as the policy, without logits; its updates alternate with the policy's, so only the larger working set counts
    N processes   each has the above, and divides with the others, by `cluster.sharding`:
      optimiser   state P' · 12 / N; gradients 4 P', and 4 P' / N at the end, when activations are gone; gathered weights
                  pass through two buckets (train/gradients.py)
      full        weights P · 4 / N (their own masters; LoRA: P · b / N), state P' · 8 / N, gradients 4 P' / N; while a pass runs,
                  two layers and the root (embeddings, head) whole, b bytes each, and a layer's gradient, (b + 4) bytes each;
                  at the end the root's gradient, likewise; an engine's own copy of the weights, P · b
    reward model  P · b; a scalar one, while scoring      T · b · (6 h + 2 k + 3 f), T tokens of a pass; a generative one: a cache
                  divided among processes                 P of the largest block of layers

A step samples, then scores with the offloaded models one at a time, then trains. Each phase has its own sum. The factors are fitted
to peaks (bench/memory_plan.py, bench/gpu_sft.py): 7 to Qwen2.5's shapes of 0.5B and 1.5B on a GPU, the terms for LoRA to 0.5B and
7B there, 12 and 16 to SmolLM2-135M's shape on CPUs. The share of head norms (Qwen3) is derived, not measured.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from plaudit.lora_folder import with_weights
from plaudit.model_files import require_weights, tensor_shapes
from plaudit.models.folder import read_config
from plaudit.models.logprobs import CHUNK_LOGITS
from plaudit.models.parameter_counts import count_for_training
from plaudit.models.quantised import BYTES_PER_WEIGHT, Bits
from plaudit.models.scalar import TOKENS_PER_PASS, TOKENS_PER_PASS_OF_BLOCKS, scalar_blocks
from plaudit.models.trainable import resolve_dtype
from plaudit.recipe import ModelSettings
from plaudit.recipe.reward_models import RewardModel

Phase = Literal["sampling", "scoring", "training"]
PHASES: tuple[Phase, ...] = ("sampling", "scoring", "training")
Sharding = Literal["none", "optimiser", "full"]
"""What processes that train together divide among themselves."""

CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT = 2**25, 3
"""Chunks of offloaded optimiser state on the device at a time (train/offload.py): 128 MiB of each kind keep the bus busy."""
BUCKET_ELEMENTS, BUCKETS_IN_FLIGHT = 2**25, 2
"""Gradients per collective (train/gradients.py): enough to use the bandwidth, few enough to overlap with the backward pass."""
RUNTIME = {"cpu": 0.9e9, "cuda": 0.6e9}
"""What Python, torch and the other libraries take besides models; on a GPU, what CUDA takes."""
COPIES_SHARE = 0.25
"""Of what weights and optimiser leave of a device's memory, what copies of weights, dequantised or packed, may take while the
engine samples: its cache takes most of the rest, on a CPU up to half."""
SAFE_SHARE = 0.9
"""Share of a device's memory up to which an estimate is trusted to fit."""


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int
    trainable: int
    layers: int
    weights: float
    gathered: float
    """What passes hold of sharded weights and their gradients, whole, for a while; 0 unless weights are sharded."""
    gradients: float
    """Sums over micro-batches."""
    exchange: float
    """Gradients and weights while they are exchanged between processes, when activations are gone."""
    state: float
    """Moments and master weights."""
    streamed: float
    """Offloaded optimiser state that is on the device during a step; 0 without offload."""
    activations: float
    logits: float
    """Or the copied keys of a layer, if they take more: neither is there when the other is."""
    one_micro_batch: bool
    """Whether no update has more than one."""
    merged: float = 0.0
    """Of the weights, merged copies of those that LoRA adapts (models/merged.py); 0 if peft computes it. With `base_bits`, of one
    matrix at a time."""
    saved: float = 0.0
    """The complete model, on disk."""
    base_bits: Bits | None = None
    packed: float = 0.0
    """What the engine's packed weights take on a CPU: the output head, and linear layers that it has fused."""
    dequantised: float = 0.0
    """What linear layers with a quantised base take once they are dequantised, as the engine keeps them if there is room."""

    @property
    def resident_state(self) -> float:
        """Optimiser state that is always on the device."""
        return 0.0 if self.streamed else self.state

    @property
    def passes(self) -> float:
        """Memory of forward and backward passes: activations, logits, gradients."""
        kept = self.activations + self.logits
        backward = max(self.gradients, kept) if self.one_micro_batch else self.gradients + kept
        return max(backward, self.exchange) + self.gathered

    @property
    def work(self) -> float:
        """Memory taken for an update and freed after it."""
        return self.passes + self.streamed

    @property
    def total(self) -> float:
        return self.weights + self.resident_state + self.work

    def __str__(self) -> str:
        bits = self.base_bits
        sizes = {f"weights with a base in {bits} bits" if bits else "weights": self.weights - self.merged}
        sizes |= {"a merged matrix" if bits else "merged weights": self.merged} if self.merged else {}
        sizes |= {"optimiser": self.resident_state + self.streamed, "passes": self.passes}
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items())
        return f"about {gigabytes(self.total)} ({parts}) for {self.parameters:,} parameters, {self.trainable:,} of them trained"


def plan_memory(
    recipe: ModelSettings,
    device: torch.device,
    *,
    micro_batch: int,
    one_micro_batch: bool = False,
    keys: int = 0,
    keep_logits: bool = False,
    scalar: bool = False,
    offload: bool = False,
    processes: int = 1,
    sharding: Sharding = "none",
) -> MemoryPlan:
    """Of one of `processes`. `micro_batch`: tokens of the largest; `keys`: of its sequences, if they share prompts. `scalar`: with
    a score head instead of an output head. `offload`: with the optimiser's state on the host."""
    config = read_config(recipe.path, trust_remote_code=recipe.trust_remote_code)
    counts = count_for_training(config, recipe, scalar=scalar)
    trained = counts.trainable
    half = resolve_dtype(recipe.dtype, device) == torch.bfloat16
    size = 2 if half else 4
    fused = half and device.type == "cuda" and counts.can_be_fused and not recipe.liger
    can_merge = counts.merged > 0 and (fused or device.type == "cpu")
    merged = can_merge and recipe.lora is not None and not recipe.lora.dropout and sharding != "full"
    bits = recipe.lora.base_bits if recipe.lora is not None and counts.linears else None
    on_kernels = recipe.liger or (fused and (merged or not recipe.lora))
    has_masters = half and not recipe.lora and sharding != "full"
    state = trained * (12 if has_masters else 8) / (1 if sharding == "none" else processes)
    gradients, exchange, gathered = 4.0 * trained, 4.0 * trained, 0.0
    merged_copies = (counts.merged if bits is None else counts.largest_product) * size if merged or bits else 0
    saved = counts.parameters * size + (trained * 4 if recipe.lora else 0)
    weights = saved + merged_copies - (counts.linears * (size - BYTES_PER_WEIGHT[bits]) if bits else 0)
    if sharding == "optimiser":
        in_flight = min(BUCKETS_IN_FLIGHT * max(BUCKET_ELEMENTS, counts.largest), trained)
        gathering = in_flight * (4 if recipe.lora else size) * (1 + 1 / processes)
        exchange = gradients / processes + max(gradients, gathering)
    elif sharding == "full":
        weights = (counts.parameters * (size if recipe.lora else 4) + (trained * 4 if recipe.lora else 0)) / processes
        gradients /= processes
        root, of_gradient = counts.parameters - counts.in_layers, size + 4  # and what is summed, in fp32
        gathered = size * (2 * counts.layer + root) + of_gradient * counts.trained_of_layer
        exchange = gradients + (0 if recipe.lora else of_gradient * root)
    shape = _shape(config)
    in_kernel = half and device.type == "cuda"  # attention, which then keeps no copied keys
    kept_copies = 0 if in_kernel else max(keys - micro_batch, 0) * 2 * shape.kv * size
    copies = keys * size * (4 * shape.kv + (2 * shape.query if shape.query > shape.kv else 0)) if in_kernel else 0
    times = 3 if device.type == "cuda" and not half else 2
    chunk = 0 if scalar else times * 4 * CHUNK_LOGITS.get(device.type, 0)
    kept_logits = 4 * config.vocab_size * micro_batch if keep_logits and not scalar else 0
    head_gradient = 0 if scalar or recipe.lora else 4 * config.vocab_size * shape.hidden
    per_token = _bytes_kept(recipe, shape, size, counts.adapted_inputs, on_kernels=on_kernels, merged=merged or bits is not None)
    return MemoryPlan(
        parameters=counts.parameters,
        trainable=trained,
        layers=shape.layers,
        weights=weights,
        gathered=gathered,
        gradients=gradients,
        exchange=exchange,
        state=state,
        streamed=_streamed(trained / (1 if sharding == "none" else processes), state) if offload and device.type != "cpu" else 0,
        activations=_activations(recipe, shape, micro_batch, micro_batch * per_token + kept_copies),
        logits=max(chunk + kept_logits, copies) + head_gradient,
        one_micro_batch=one_micro_batch,
        merged=merged_copies,
        saved=saved,
        base_bits=bits,
        packed=size * (config.vocab_size * shape.hidden + (0 if bits or (recipe.lora and not merged) else counts.linears)),
        dequantised=size * counts.linears if bits else 0.0,
    )


def _streamed(trainable: float, state: float) -> float:
    """Whole chunks of every kind of optimiser state."""
    part = min(CHUNK_ELEMENTS, trainable)
    return min(CHUNKS_IN_FLIGHT, math.ceil(trainable / max(part, 1))) * part * state / max(trainable, 1)


def _bytes_kept(recipe: ModelSettings, shape: "_Shape", size: int, adapted_inputs: int, *, on_kernels: bool, merged: bool) -> float:
    """Bytes per token that a layer keeps for its backward pass."""
    inputs = adapted_inputs / shape.layers
    dropped = 5 * inputs if recipe.lora and recipe.lora.dropout else 0  # fp32 values and a mask
    if on_kernels:
        norms_of_heads = shape.query + 2 * shape.kv if shape.has_head_norms else 0
        return size * (7 * shape.hidden + 2 * shape.query + 2 * shape.kv + 3 * shape.mlp + norms_of_heads) + dropped
    # Frozen layers keep no inputs; in bf16 each of peft's adapters keeps its own, which it has converted to fp32.
    in_fp32 = 0 if size == 4 else 4 * inputs if recipe.lora and not merged else 16 * shape.hidden
    return size * (12 * shape.hidden + 2 * shape.kv + 3 * shape.mlp) + in_fp32 + dropped


def _activations(recipe: ModelSettings, shape: "_Shape", tokens: int, of_layer: float) -> float:
    """`of_layer`: bytes that a layer keeps."""
    wanted = recipe.gradient_checkpointing
    checkpointed = 0 if wanted is False or wanted == "auto" else shape.layers if wanted is True else min(wanted, shape.layers)
    # One recomputed layer is live at a time, after the layers that are not checkpointed have freed their activations.
    return tokens * checkpointed * 4 * shape.hidden + max(shape.layers - checkpointed, 1) * of_layer


def total_memory(device: torch.device) -> int:
    """Total memory available to the process, in use or not: the container's limit if it is below the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" means none
            limits.append(int(Path(file).read_text()))
    return min(limits)


class _Shape(NamedTuple):
    layers: int
    hidden: int
    query: int
    kv: int
    mlp: int
    has_head_norms: bool


def _shape(config: PretrainedConfig) -> _Shape:
    text = config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or hidden // heads
    mlp = getattr(text, "intermediate_size", None) or 4 * hidden
    return _Shape(text.num_hidden_layers, hidden, heads * size, kv_heads * size, mlp, text.model_type == "qwen3")


def widest_activation(config: PretrainedConfig) -> int:
    """Elements per token of the largest tensor in a layer: all queries, keys and values, or gate and up of the MLP."""
    shape = _shape(config)
    return max(shape.query + 2 * shape.kv, 2 * shape.mlp)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


# All of a step -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Memory that one component takes on a device, and in which phases."""

    name: str
    phases: tuple[Phase, ...]
    fixed: float
    elastic: float = 0.0
    """Used if available: a cache, which works with less."""
    in_turn: bool = False
    """Only one of these needs is on the device at a time."""
    part: Literal["weights", "optimiser", "passes", "sampling", "other"] = "other"
    """Weights of policy, critic and reference; their optimisers' state; a policy's passes; the engine."""


@dataclass(frozen=True)
class Budget:
    """Everything that a device has to hold."""

    needs: tuple[Need, ...]
    available: float

    def at(self, phase: Phase, *, fixed_only: bool = False) -> float:
        """The sum in a phase, counting only the largest of the needs that take turns."""
        sizes = [(need.fixed + (0.0 if fixed_only else need.elastic), need) for need in self.needs if phase in need.phases]
        together = sum(size for size, need in sizes if not need.in_turn)
        return together + max((size for size, need in sizes if need.in_turn), default=0.0)

    @property
    def peak(self) -> Phase:
        return max(PHASES, key=self.at)

    @property
    def verdict(self) -> Literal["fits", "tight", "too much"]:
        if max(self.at(phase, fixed_only=True) for phase in PHASES) > self.available:
            return "too much"
        return "tight" if self.at(self.peak) > SAFE_SHARE * self.available else "fits"


@dataclass(frozen=True)
class RewardModelMemory:
    parameters: int
    weights: float
    working: float
    """Working memory while it scores."""
    elastic: bool
    """Whether that working memory is a cache, which works with less."""


def plan_reward_model(
    settings: RewardModel, device: torch.device, *, scalar: bool, sequences: int, tokens: int
) -> RewardModelMemory:
    """`sequences`, `tokens`: concurrent sequences of a generative model, and the length of each. Of a model that several processes
    divide among themselves: what the process with the largest block takes."""
    assert settings.path is not None
    config = read_config(settings.path, trust_remote_code=settings.trust_remote_code)
    size = resolve_dtype(settings.dtype, device).itemsize
    parameters = count_parameters(settings.path, trust_remote_code=settings.trust_remote_code)
    shape = _shape(config)
    tokens_of_pass = TOKENS_PER_PASS
    if isinstance(settings.rank, tuple):
        parameters, tokens_of_pass = max(block.parameters for block in scalar_blocks(settings)), TOKENS_PER_PASS_OF_BLOCKS
    a_pass = tokens_of_pass[device.type] * size * _working(shape)
    working = a_pass if scalar else plan_cache(config, size, sequences=sequences, tokens=tokens)
    return RewardModelMemory(parameters, parameters * size, working, elastic=not scalar)


def plan_sampling(config: PretrainedConfig, size: int, *, sequences: int, prefill_tokens: int, adapters: bool) -> float:
    """Working memory of the engine: logits, scores and noise in fp32, and a pass over the prompts, which `adapters` that are not
    merged compute in fp32."""
    shape = _shape(config)
    a_pass = prefill_tokens * (size * _working(shape) + (12 * shape.mlp if adapters and size == 2 else 0))
    return 3 * 4 * sequences * config.get_text_config().vocab_size + a_pass


def _working(shape: _Shape) -> int:
    """Elements per token that are live in a pass without gradients."""
    return 6 * shape.hidden + 2 * shape.kv + 3 * shape.mlp


def plan_cache(config: PretrainedConfig, size: int, *, sequences: int, tokens: int) -> float:
    """Size of a key-value cache with elements of `size` bytes."""
    shape = _shape(config)
    return sequences * tokens * shape.layers * 2 * shape.kv * size


def count_parameters(path: str, *, trust_remote_code: bool = False) -> int:
    """From the headers of its safetensors files; for a model that is not a local folder, from its config. An adapter is merged into
    its base, so it adds none."""
    path = with_weights(path)
    folder = Path(path)
    if folder.is_dir():
        return sum(math.prod(shape) for file in require_weights(folder) for shape in tensor_shapes(file).values())
    config = read_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in model.parameters())
