"""Which models can be trained on a base in 8 or 4 bits (lora.base_bits), by their config alone: without torch, before anything is
loaded or tokenised."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those whose layers plaudit computes by itself (models/residual.py): model_type of their configs."""


def find_obstacle(config: Mapping[str, Any], *, own_code: bool) -> str:
    """Why not this model; empty if it can be. `config`: its config.json. `own_code`: its class is not transformers' own."""
    activation = config.get("hidden_act") or "silu"
    if own_code:
        return "this one comes with code of its own"
    if config.get("model_type") not in FAMILIES:
        return f"this one is a {config.get('model_type')} model"
    return "" if activation == "silu" else f"this one computes {activation}"


def undivided(section: str) -> str:
    return f"cluster.sharding: full cannot divide a base with {section}.lora.base_bits: set it to optimiser"


def only_linear_layers(section: str) -> str:
    return (
        f"with {section}.lora.base_bits, only linear layers of the decoder can be adapted: set {section}.lora.targets to "
        "all-linear, or remove base_bits"
    )


def refusal(path: str, section: str, obstacle: str) -> str:
    return (
        f"{path}: {section}.lora.base_bits is for Llama, Mistral, Qwen2 and Qwen3 models, whose MLPs compute SiLU, and {obstacle}. "
        "Remove it"
    )
