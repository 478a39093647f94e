"""What training a model takes in memory: an estimate, made without loading it.

    weights       P · b                                   b = 2 bytes in bf16, 4 in fp32
    training      P' · (4 gradient + 8 moments, + 4 master in bf16),   P' trainable parameters
    activations   T · L · b · (13 h + 2 k + 4 f)          T tokens of a micro-batch, L layers, sizes h hidden, k keys+values, f MLP
                  with gradient checkpointing             T · (4 L · h + b · one layer's share), the residual stream being in fp32
    logits        the chunk that models/logprobs.py holds, three times in fp32, and its head's gradient

The 13 is fitted to peaks that bench/gpu_sft.py measured: for Qwen2.5 shapes of 0.5B and 1.5B estimates are 1–5 % above them.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plaudit.errors import RecipeError
from plaudit.models.logprobs import CHUNK_LOGITS
from plaudit.models.policy import resolve_dtype
from plaudit.recipe import Lora, Model


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int
    trainable: int
    weights: float
    training: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.training + self.activations + self.logits

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gigabytes(getattr(self, name))}" for name in ("weights", "training", "activations", "logits"))
        return f"about {_gigabytes(self.total)} ({parts}) for {self.parameters:,} parameters, {self.trainable:,} of them trained"


def plan_memory(recipe: Model, device: torch.device, *, tokens_per_micro_batch: int) -> MemoryPlan:
    config = AutoConfig.from_pretrained(recipe.path, trust_remote_code=recipe.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.trust_remote_code)
    parameters = sum(p.numel() for p in model.parameters())
    trainable = _lora_parameters(model, recipe.lora) if recipe.lora else parameters
    half = resolve_dtype(recipe.dtype, device) == torch.bfloat16
    size = 2 if half else 4

    text = config.get_text_config()
    layers, hidden, mlp = text.num_hidden_layers, text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads = text.num_attention_heads
    kv = getattr(text, "num_key_value_heads", heads) * (getattr(text, "head_dim", None) or hidden // heads)
    layer = tokens_per_micro_batch * size * (13 * hidden + 2 * kv + 4 * mlp)
    whole = layers * layer
    checkpointed = layer + layers * tokens_per_micro_batch * 4 * hidden
    return MemoryPlan(
        parameters=parameters,
        trainable=trainable,
        weights=parameters * size + (trainable * 4 if recipe.lora else 0),
        training=trainable * (16 if half and not recipe.lora else 12),
        activations=checkpointed if recipe.gradient_checkpointing else whole,
        logits=3 * 4 * CHUNK_LOGITS.get(device.type, 0) + (0 if recipe.lora else 4 * config.vocab_size * hidden),
    )


def total_memory(device: torch.device) -> int:
    """All there is for us, whether in use or not: a container's limit, if that is less than the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" means none
            limits.append(int(Path(file).read_text()))
    return min(limits)


def _lora_parameters(model: torch.nn.Module, lora: Lora) -> int:
    adapted = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head") and _is_target(name, lora.targets)
    ]
    return sum(lora.rank * (m.in_features + m.out_features) for m in adapted)


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """As peft reads them: a string is a pattern for the whole name, a list holds last parts of names."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, name) is not None
        except re.error as error:
            raise RecipeError(f"model.lora.targets: {targets!r} is not a pattern: {error}") from None
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
