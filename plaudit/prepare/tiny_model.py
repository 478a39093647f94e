"""A small model with random weights and its own tokenizer, made from rows, to try a recipe in seconds on any machine.

The tokenizer is a byte-level BPE trained on the rows' text (it can encode any string), with ChatML's tokens and template.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from plaudit.data.columns import CONVERSATIONS, PAIR, TARGETS, find_column, has_prompt
from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.data.pairs import read_pairs
from plaudit.files import atomic_folder
from plaudit.shipped import find_shipped
from plaudit.types import Message

Kind = Literal["llama", "qwen2", "qwen3", "mistral"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_model(
    rows: Sequence[str | Path],
    out: str | Path,
    *,
    kind: Kind = "llama",
    hidden_size: int = 128,
    layers: int = 2,
    vocabulary: int = 512,
    seed: int = 0,
) -> int:
    """Write the model folder; return its number of parameters. `rows`: of any training stage."""
    texts = _texts(rows)
    first = next(texts)  # rows that cannot be read are reported before anything heavy is imported

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = _tokenizer(chain([first], texts), vocabulary)
    tokens = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,  # grouped-query attention, as in the models it stands in for
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=kind in ("qwen2", "qwen3"),
        **tokens,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**tokens)
    with atomic_folder(Path(out)) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _texts(rows: Sequence[str | Path]) -> Iterator[str]:
    for path in rows:
        source = Source(find_shipped(Path(path)))
        for messages in _messages(source):
            yield from (message["content"] for message in messages)


def _messages(source: Source) -> Iterator[list[Message]]:
    columns = source.rows().columns
    if set(PAIR) <= set(columns):
        for _, pair in read_pairs(source):
            yield from (pair.chosen.messages, pair.rejected.messages)
    elif has_prompt(columns) and not find_column(columns, (*CONVERSATIONS, *TARGETS)):  # prompts for RL, perhaps with ground truth
        for prompt in read_prompts(source):
            truth = prompt.ground_truth
            yield [*prompt.messages, *([{"role": "assistant", "content": truth}] if isinstance(truth, str) else [])]
    else:
        yield from (conversation.messages for _, conversation in read_conversations(source))


def _tokenizer(texts: Iterator[str], vocabulary: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from plaudit.data.templates import load_template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    load_template(wrapped, "chatml")
    return wrapped
