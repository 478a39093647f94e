"""Tiny models, and changes to them."""

import json
import shutil
from pathlib import Path

KINDS = ("llama", "qwen2", "qwen3", "mistral")


def with_other_tokens(model: Path, folder: Path) -> Path:
    """The same model with another tokenizer: the same tokens with permuted ids."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


BOS_TEMPLATE = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_classifier(source: Path, folder: Path, labels: int = 1, **changes) -> Path:
    """A sequence classifier with the causal model's config, except for `changes`, and its tokenizer, and weights that make scores
    depend on the input."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(source, num_labels=labels, **changes)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def make_grader(source: Path, folder: Path, seed: int) -> Path:
    """A judge that answers with a single digit, which depends on the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from support.engine_contract import sharpen

    model, tokenizer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    sharpen(model)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    end = model.generation_config.eos_token_id = tokenizer.eos_token_id
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    torch.manual_seed(seed)
    head.zero_()
    head[digits] = 3.0 * torch.randn(10, head.shape[1])
    head[:, 0] = 0.0
    head[end, 0] = 5.0  # the first dimension is large after a digit, and only there, so that the answer ends
    embeddings[:, 0] = 0.0
    embeddings[digits, 0] = 200.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
