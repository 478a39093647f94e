"""A model folder that anybody may have made: which files its weights are, and whether its config can be true.

Checked before anything of it is loaded, and without torch. Weights are safetensors in the folder itself, whatever an index says:
anything else could be pickled, which runs code, or somebody else's file. Links are followed, as the hub's cache needs them.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.errors import RecipeError
from plaudit.json_files import UnreadableJson, read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its format says."""
LARGEST: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"), 2**31 - 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 100_000),
    "num_labels": 1_000_000,
}
"""Whole numbers in a config.json that are at least 1. transformers makes a list entry for each layer and label as it reads them."""


# Weights -------------------------------------------------------------------------------------------------------------


def require_weights(folder: Path) -> list[Path]:
    """The safetensors files of a folder's weights. A RecipeError unless all of them are there, in the folder itself."""
    needed = [WEIGHTS]
    if (folder / INDEX).exists() and not (folder / WEIGHTS).is_file():  # transformers' order
        needed = _named_in_index(folder / INDEX)
    missing = [name for name in needed if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in needed]
    if any(folder.glob("*.bin")) and needed == [WEIGHTS]:
        raise RecipeError(f"{folder}: its weights are pickled (.bin), which plaudit does not load; save them as safetensors")
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    raise RecipeError(f"{folder}: incomplete weights: {', '.join(missing[:3])}{more} missing (found: {list_names(folder)})")


def _named_in_index(index: Path) -> list[str]:
    try:
        weight_map = read_object(index).get("weight_map")
    except UnreadableJson as error:
        raise RecipeError(f"{index} cannot be read: {error}") from None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise RecipeError(f"{index}: weight_map should have the file of each tensor")
    names = sorted(set(weight_map.values()))
    for name in names:
        if name != Path(name).name or "\\" in name or "\0" in name or name.startswith("."):
            raise RecipeError(f"{index}: names {name!r:.200}, which is not a file of this folder; plaudit reads no others")
        if not name.endswith(".safetensors"):
            raise RecipeError(
                f"{index}: names {name!r:.200}, and plaudit loads safetensors only, never pickled weights; save the model again"
            )
    return names


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """From the header of a safetensors file, which is its length and then JSON."""
    try:
        with file.open("rb") as opened:
            [length] = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        shapes = {name: list(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
        if not all(type(size) is int and size >= 0 for shape in shapes.values() for size in shape):
            raise ValueError("a shape should be whole numbers")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise RecipeError(f"{file}: its weights cannot be read: {error}") from None
    return shapes


def list_names(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir())
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "") if names else "nothing"


# Config --------------------------------------------------------------------------------------------------------------


def require_config(folder: Path) -> dict[str, Any]:
    """The content of a config.json, checked as far as every architecture shares it: numbers that transformers would otherwise
    build a model from, however large, or fail on somewhere."""
    file = folder / "config.json"
    try:
        config = read_object(file)
    except UnreadableJson as error:
        raise RecipeError(f"{file} cannot be read: {error}") from None
    nested = [value for value in config.values() if isinstance(value, dict)]
    for section in (config, *nested):
        for name, largest in LARGEST.items():
            value = section.get(name)
            # A list has a number for each layer, in some architectures.
            if isinstance(value, str | float | bool) or (type(value) is int and not 1 <= value <= largest):
                raise RecipeError(f"{file}: {name} should be a whole number from 1 to {largest:,}, not {value!r:.80}")
        _require_dividing_heads(file, section)
        for name, value in section.items():
            if name.endswith(("_eps", "dropout")) and not isinstance(value, bool) and not _is_share(value):
                raise RecipeError(f"{file}: {name} should be a number from 0 to 1, not {value!r:.80}")
    kinds = config.get("architectures")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise RecipeError(f"{file}: architectures should be a list of names, not {kinds!r:.80}")
    if config.get("transformers_weights") not in (None, WEIGHTS, INDEX):
        raise RecipeError(f"{file}: transformers_weights names another file than {WEIGHTS}; delete that setting")
    if (folder / "adapter_config.json").exists():
        raise RecipeError(
            f"{folder}: has both config.json and adapter_config.json. Delete the first to use it as a LoRA adapter, or the second "
            "to use it as a complete model."
        )
    return config


def _is_share(value: Any) -> bool:
    """What is no number at all is left to transformers."""
    return not isinstance(value, str) and (not isinstance(value, int | float) or 0 <= value < 1)


def _require_dividing_heads(file: Path, section: Mapping[str, Any]) -> None:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    hidden, heads, kv_heads, head_dim = (value if type(value := section.get(name)) is int else None for name in names)
    if heads and kv_heads and heads % kv_heads:
        raise RecipeError(f"{file}: num_attention_heads, {heads}, is not a multiple of num_key_value_heads, {kv_heads}")
    if hidden and heads and head_dim is None and hidden % heads:
        raise RecipeError(f"{file}: hidden_size, {hidden}, is not a multiple of num_attention_heads, {heads}")


def require_sizes_of_weights(folder: Path, config: Any) -> None:
    """A RecipeError if the weights are far too small for their config: transformers would create what is missing, of any size.
    (A small difference is reported by name once they are loaded.) `config`: as transformers read it."""
    shapes = [shape for file in require_weights(folder) for shape in tensor_shapes(file).values()]
    most, text = max(16 * sum(map(math.prod, shapes)), 1 << 28), config.get_text_config()
    names = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "head_dim")
    layers, hidden, *others = (value if type(value := getattr(text, name, None)) is int else 1 for name in names)
    if layers > len(shapes):
        raise RecipeError(f"{folder}/config.json: num_hidden_layers is {layers:,}, but there are only {len(shapes):,} tensors")
    for name, size in zip(names[2:], others, strict=True):
        if size * hidden > most:
            raise RecipeError(f"{folder}/config.json: hidden_size {hidden:,} and {name} {size:,} are too large for its weights")
