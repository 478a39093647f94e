"""A LoRA adapter saved by peft: a folder that names its base model instead of containing it.

Wherever a recipe or a command names a model, it may name such a folder, or an adapter on the hub: it stands for the base with the
adapter merged in. Nothing here imports torch, so that a missing base is reported before anything heavy is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plaudit.errors import RecipeError, nearest_path
from plaudit.hub import looks_local, model_folder
from plaudit.json_files import UnreadableJson, read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUANTISED = "quantised_base.json"
"""What an adapter's base was rounded to in training: {"base_bits": 4, "dtype": "bfloat16"}, as in model.lora.base_bits and
model.dtype. peft does not read it."""


class QuantisedBase(NamedTuple):
    bits: Literal[4, 8]
    """Of linear layers."""
    dtype: Literal["float32", "bfloat16"]
    """Of all weights before linear layers were quantised."""


@dataclass(frozen=True)
class LoraFolder:
    folder: Path
    base: str
    """Folder or hub name of the complete model that the adapter was trained on."""
    scores: bool
    """A reward model's adapter, with a score head; otherwise a causal model's."""
    quantised: QuantisedBase | None = None
    """What the base's weights were rounded to in training; None: they are as in the base."""

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer_config.json").is_file()

    @property
    def files(self) -> list[Path]:
        names = [CONFIG, WEIGHTS] if self.quantised is None else [CONFIG, WEIGHTS, QUANTISED]
        return [self.folder / name for name in names]


def is_lora_folder(path: str | Path) -> bool:
    """Also true of a damaged one; `read_lora_folder` says what is wrong with it."""
    folder = _folder(path)
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def _folder(path: str | Path) -> Path:
    """Where its small files are: here, or in the hub's cache. A name that the hub does not have is reported when it is loaded."""
    if Path(path).exists() or looks_local(str(path)):
        return Path(path)
    try:
        return model_folder(str(path), weights=False)
    except RecipeError:
        return Path(path)


def read_lora_folder(path: str | Path) -> LoraFolder | None:
    """The adapter at `path`; None if it is anything else. A RecipeError if plaudit cannot use it, or its base is missing."""
    if not is_lora_folder(path):
        return None
    folder = Path(path) if Path(path).exists() else model_folder(str(path))
    try:
        config = read_object(folder / CONFIG)
        base, kind = config["base_model_name_or_path"], config["peft_type"]
    except UnreadableJson as error:
        raise RecipeError(f"{folder / CONFIG} is not peft's description of an adapter: {error}") from None
    except KeyError as error:
        raise RecipeError(f"{folder / CONFIG} is not peft's description of an adapter: it has no {error}") from None
    if kind != "LORA":
        raise RecipeError(
            f"{folder}: an adapter of type {kind}, and plaudit reads LoRA only; merge it into its model with peft first"
        )
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickled, which plaudit does not load)" if (folder / "adapter_model.bin").exists() else ""
        raise RecipeError(f"{folder}: this LoRA adapter has no {WEIGHTS}{pickled}; copy all files of the folder, or save it again")
    if not isinstance(base, str) or not base:
        raise RecipeError(
            f"{folder / CONFIG}: base_model_name_or_path is empty; set it to the model that the adapter was trained on"
        )
    if config.get("megatron_config") is not None:
        raise RecipeError(f"{folder / CONFIG}: megatron_config makes peft import the module it names; plaudit does not load that")
    found = _find_base(Path(path), folder, base)
    return LoraFolder(folder, found, scores=config.get("task_type") == "SEQ_CLS", quantised=_read_quantised(folder / QUANTISED))


def _read_quantised(file: Path) -> QuantisedBase | None:
    if not file.is_file():
        return None
    try:
        content: dict[str, Any] = read_object(file)
    except UnreadableJson as error:
        raise RecipeError(f"{file} cannot be read: {error}. Copy the adapter's folder again") from None
    bits, dtype = content.get("base_bits"), content.get("dtype")
    if not isinstance(bits, int) or bits not in (4, 8):
        raise RecipeError(f"{file}: base_bits should be 4 or 8, not {json.dumps(bits)}. Copy the adapter's folder again")
    if dtype not in ("float32", "bfloat16"):
        raise RecipeError(
            f'{file}: dtype should be that of training, "float32" or "bfloat16", not {json.dumps(dtype)}. Copy the adapter\'s '
            "folder again"
        )
    return QuantisedBase(bits, dtype)  # pyright: ignore


def _find_base(name: Path, folder: Path, base: str) -> str:
    """As named, from the current folder or from the adapter's; or a name on the hub. `name`: the adapter as it was given."""
    for candidate in (Path(base), folder / base):
        if candidate.is_dir():
            if is_lora_folder(candidate):
                raise RecipeError(
                    f"{folder}: its base, {base}, is a LoRA adapter too. Merge that one first (plaudit merge {base} --out FOLDER), "
                    f"then set base_model_name_or_path in {folder / CONFIG} to FOLDER."
                )
            return str(candidate)
    may_be_on_hub = not base.startswith((".", "/", "~")) and base.count("/") <= 1 and not Path(base).parent.is_dir()
    if may_be_on_hub or (base.count("/") == 0 and not Path(base).suffix):
        return base
    file = f"{folder / CONFIG}" if name == folder else f"{CONFIG} of a copy (hf download {name} --local-dir FOLDER)"
    raise RecipeError(
        f"{name}: a LoRA adapter for {base}, which does not exist.{nearest_path(Path(base))} Put the base model there, or set "
        f"base_model_name_or_path in {file} to where it is."
    )


def with_weights(path: str) -> str:
    """The folder or hub name that has the model's config and weights: for an adapter, its base."""
    lora = read_lora_folder(path)
    return path if lora is None else lora.base


def with_tokenizer(path: str) -> str:
    """The folder or hub name that has the model's tokenizer: an adapter may be saved without one."""
    lora = read_lora_folder(path)
    return path if lora is None or lora.has_tokenizer else lora.base
