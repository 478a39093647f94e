"""Checks of a model folder before any weights are read: format, config, completeness, tokenizer."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from plaudit.data.templates import load_tokenizer
from plaudit.errors import RecipeError
from plaudit.hub import model_folder
from plaudit.lora_folder import WEIGHTS, LoraFolder, read_lora_folder
from plaudit.model_files import list_names, require_config, require_sizes_of_weights, require_weights
from plaudit.redaction import redact

# Share of tokens that may differ between the policy's tokenizer and that of a model that reads the policy's tokens: reserved slots
# that were given names. With more, it is another tokenizer.
RENAMED_SHARE = 0.01


def read_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a folder, or of a model on the hub. For a LoRA adapter, that of the model merged with it."""
    lora = read_lora_folder(path)
    if lora is not None:
        return _merged_config(lora, read_config(lora.base, trust_remote_code=trust_remote_code))
    folder = model_folder(path, weights=False)
    if folder.is_file():
        raise RecipeError(f"{path} is a file; a model is a folder with config.json, model.safetensors and a tokenizer")
    if not (folder / "config.json").exists():
        raise RecipeError(_without_config(folder))
    if Path(path).is_dir():  # weights on the hub are downloaded when they are loaded
        require_weights(folder)
    return _parse_config(folder, trust_remote_code=trust_remote_code)


def _parse_config(folder: Path, *, trust_remote_code: bool, **changes: Any) -> PretrainedConfig:
    require_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **changes)
    except Exception as error:  # whatever transformers makes of odd values
        raise RecipeError(f"{folder}/config.json cannot be read: {_reason(error)}") from None


def config_to_load(folder: Path, *, trust_remote_code: bool, **changes: Any) -> PretrainedConfig:
    """The config of a model whose weights are loaded next: they are all there, as safetensors, and large enough for it."""
    require_weights(folder)
    config = _parse_config(folder, trust_remote_code=trust_remote_code, **changes)
    require_sizes_of_weights(folder, config)
    return config


def _reason(error: Exception) -> str:
    return redact(" ".join(str(error).split()))[:300] or type(error).__name__


def _merged_config(lora: LoraFolder, config: PretrainedConfig) -> PretrainedConfig:
    if lora.scores:
        classifier: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        config.architectures, config.num_labels = [classifier.__name__], count_labels(lora)
    return config


def count_labels(lora: LoraFolder) -> int:
    """Outputs of the score head that an adapter was saved with."""
    file = lora.folder / WEIGHTS
    try:
        with safe_open(file, "pt") as tensors:
            heads = [tensors.get_slice(name).get_shape() for name in tensors.keys() if name.endswith(".score.weight")]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from None
    if len(heads) != 1:
        raise RecipeError(f"{file}: has no head `score`, so this adapter of a sequence classifier is not a reward model's")
    return heads[0][0]


def architecture(config: PretrainedConfig) -> str:
    """LlamaForCausalLM, …; empty if the config has none."""
    return next(iter(config.architectures or ()), "")


def context_tokens(config: PretrainedConfig) -> int | None:
    """The model's maximum sequence length."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def require_same_tokens(path: str, tokenizer: PreTrainedTokenizerBase, role: str, *, trust_remote_code: bool = False) -> list[str]:
    """Raise unless the model at `path` (a `role`: critic, …) has the policy's token ids, which it reads. Returns the few tokens
    that have another name there."""
    config = read_config(path, trust_remote_code=trust_remote_code)
    require_matching_tokenizer(path, config, tokenizer)
    try:
        own: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
    except RecipeError:
        return []  # no tokenizer of its own: it uses the policy's
    theirs, known = tokenizer.get_vocab(), {number: token for token, number in own.get_vocab().items()}
    renamed = sorted(token for token, number in theirs.items() if known.get(number, token) != token)
    if len(renamed) > RENAMED_SHARE * len(theirs):
        raise RecipeError(
            f"{path}: its tokenizer differs from the policy's ({len(renamed):,} of {len(theirs):,} tokens have other ids), "
            f"and a {role} reads the policy's tokens; choose a {role} of the policy's family"
        )
    return renamed


def require_matching_tokenizer(path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise RecipeError(
            f"{path}: the tokenizer has {len(tokenizer):,} tokens, the model only {vocabulary:,}; choose a matching model.tokenizer"
        )


def _without_config(folder: Path) -> str:
    inside = [child for child in sorted(folder.iterdir()) if (child / "config.json").exists()]
    hint = f" Did you mean {inside[0]}?" if inside else ""
    return f"{folder}: no config.json (found: {list_names(folder)}), so it is no model in Hugging Face format.{hint}"
