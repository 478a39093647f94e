"""A base model → a "zero" model: the same weights with a chat template that asks for a form in plain text.

    thinking        <think> thoughts </think> <response> reply </response>
    not thinking    <response> reply </response>

A base model continues text, so the template describes a conversation of that form and ends with the assistant's name. A system
message is a paragraph between the description and the turns; a message of a tool or developer is an error. The folder
also gets an end token that ends a turn, `stop.txt` (a response ends at `</response>`, which no base model follows by an end token)
and `longcot_config.json` (the reply is what rewards see; thoughts begin with `<think>`).
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.data.templates import ChatTemplate, load_tokenizer
from plaudit.errors import PlauditError, RecipeError
from plaudit.files import atomic_folder
from plaudit.hub import model_folder
from plaudit.json_files import UnreadableJson, read_object
from plaudit.lora_folder import is_lora_folder
from plaudit.model_files import INDEX, require_weights
from plaudit.response_files import CLOSE_RESPONSE, OPEN, OPEN_RESPONSE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn in the chat models of these families. Their base models have them too, unused."""
LONGCOT = {"longcot": True, "longcot_delimiter": OPEN_RESPONSE, "end_delimiter": None}
"""`<response>` implies `</response>`."""
THINKING = (
    "Below is a conversation between a user and an assistant. What the user says is inside <query> tags. The assistant first works "
    "out its reply inside <think> tags, at whatever length it needs; nobody else reads this. Then it writes the reply, clear, "
    "complete and helpful, inside <response> tags. A turn of the assistant looks like this: <think> its thoughts </think> "
    "<response> its reply </response>"
)
NOT_THINKING = (
    "Below is a conversation between a user and an assistant. What the user says is inside <query> tags. The assistant writes its "
    "reply, clear, complete and helpful, inside <response> tags. A turn of the assistant looks like this: <response> its reply "
    "</response>"
)
TEMPLATE = """{{{{- bos_token or "" -}}}}
{{{{- "{description}\\n\\n" -}}}}
{{%- for message in messages -%}}
{{%- if message.role == "user" -%}}
{{{{- "User: <query>" + (message.content | trim) + "</query>\\n" -}}}}
{{%- elif message.role == "assistant" -%}}
{{{{- "Assistant: " + (message.content | trim) + eos_token + "\\n" -}}}}
{{%- elif message.role == "system" -%}}
{{{{- (message.content | trim) + "\\n\\n" -}}}}
{{%- else -%}}
{{{{- raise_exception("a zero model's template has system, user and assistant messages, none with the role " ~ message.role) -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- "Assistant:" -}}}}
{{%- endif -%}}
"""
COPIED = ("*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Besides weights and config."""


def make_zero_model(
    base: str, out: Path, *, thinking: bool = True, eos: str | None = None, tokenizer: str | None = None
) -> dict[str, Any]:
    """Write the model's folder. Returns its end token and the length of its description in tokens."""
    if is_lora_folder(base):
        raise PlauditError(f"{base} is a LoRA adapter. Merge it first: plaudit merge {base} --out FOLDER")
    source = model_folder(base)
    weights = require_weights(source)
    config = _read(source / "config.json")
    encoder = load_tokenizer(tokenizer or base)
    encoder.eos_token = _choose_eos(encoder, eos, tokenizer or base)
    encoder.chat_template = TEMPLATE.format(description=THINKING if thinking else NOT_THINKING)
    _require_rows(config, encoder, tokenizer or base)
    generation = _read(source / "generation_config.json") if (source / "generation_config.json").exists() else {}
    try:
        with atomic_folder(out) as folder:
            extra = [file for pattern in COPIED for file in source.glob(pattern)]
            for file in [*weights, *extra, *(source / name for name in [INDEX] if (source / name).exists())]:
                shutil.copyfile(file, folder / file.name)
            _write(folder / "config.json", config | {"eos_token_id": encoder.eos_token_id})
            ends = _as_list(generation.get("eos_token_id", config.get("eos_token_id")))
            ends = list(dict.fromkeys([encoder.eos_token_id, *ends]))  # a base model still ends a text where it did before
            _write(folder / "generation_config.json", generation | {"eos_token_id": ends})
            encoder.save_pretrained(folder)
            (folder / "stop.txt").write_text(f"{CLOSE_RESPONSE}\n", encoding="utf-8")
            _write(folder / "longcot_config.json", LONGCOT | {"start_think_marker": OPEN if thinking else None})
            template = ChatTemplate(load_tokenizer(str(folder)), encoder.chat_template)
            prompt = template.prompt_tokens([{"role": "user", "content": "?"}])
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return {"eos": encoder.eos_token, "prompt_tokens": len(prompt)}


def _choose_eos(tokenizer: "PreTrainedTokenizerBase", eos: str | None, name: str) -> str:
    """The token that ends a turn: the one given, or the tokenizer's own one for this purpose, or its end of text."""
    vocabulary = tokenizer.get_vocab()
    if eos is not None:
        if eos not in vocabulary:
            known = ", ".join(token for token in (*END_OF_TURN, tokenizer.eos_token) if token in vocabulary)
            raise RecipeError(f"--eos: {name} has no token {eos}{f' (it has {known})' if known else ''}")
        return eos
    found = next((token for token in END_OF_TURN if token in vocabulary), tokenizer.eos_token)
    if not found:
        raise RecipeError(f"{name}: its tokenizer has no end token; name one of its tokens with --eos")
    return str(found)


def _require_rows(config: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    size = config.get("vocab_size")
    if isinstance(size, int) and len(tokenizer) > size:
        raise RecipeError(f"--tokenizer: {name} has {len(tokenizer):,} tokens, the model only {size:,}; choose a matching one")


def _as_list(ids: Any) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except UnreadableJson as error:
        raise RecipeError(f"{file} cannot be read: {error}") from None


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
