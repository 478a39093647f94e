"""`plaudit merge`: a LoRA adapter and its base → a complete model, with the adapter's tokenizer and chat template."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from plaudit.data.templates import ChatTemplate, load_tokenizer
from plaudit.errors import PlauditError
from plaudit.files import atomic_folder, is_disk_error
from plaudit.lora_folder import LoraFolder
from plaudit.models.trainable import fix_generation_config, load_pretrained, stop_at_end_of_turn
from plaudit.response_files import read_response_files


def merge_adapter(
    lora: LoraFolder, out: Path, dtype: Literal["auto", "float32", "bfloat16"] = "auto", trust_remote_code: bool = False
) -> int:
    """Write the merged model to the new folder `out`; returns its number of parameters."""
    auto = AutoModelForSequenceClassification if lora.scores else AutoModelForCausalLM
    model: Any = load_pretrained(
        auto, str(lora.folder), None if dtype == "auto" else getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    tokenizer = load_tokenizer(str(lora.folder), trust_remote_code=trust_remote_code)
    if lora.scores:
        model.config.pad_token_id = tokenizer.pad_token_id  # transformers looks for the last token that is not padding
    else:
        _set_end_tokens(model, tokenizer)
    responses = {} if lora.scores else read_response_files(str(lora.folder))
    try:
        with atomic_folder(out.resolve()) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            for name, content in responses.items():
                (folder / name).write_bytes(content)
    except Exception as error:
        if not is_disk_error(error):
            raise
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return sum(p.numel() for p in model.parameters())


def _set_end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """As training does before it saves a complete model."""
    if tokenizer.chat_template:
        stop_at_end_of_turn(model, ChatTemplate(tokenizer, tokenizer.get_chat_template()))
    fix_generation_config(model)
