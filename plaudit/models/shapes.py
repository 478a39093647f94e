"""The shapes of Qwen2.5, from 0.5B to 72B: models for plans and benchmarks that need no weights."""

from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    tied: bool
    """Whether the embeddings are the output head."""


QWEN = {
    "0.5B": Shape(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151936, True),
    "3B": Shape(2048, 36, 16, 2, 11008, 151936, True),
    "7B": Shape(3584, 28, 28, 4, 18944, 152064, False),
    "14B": Shape(5120, 48, 40, 8, 13824, 152064, False),
    "32B": Shape(5120, 64, 40, 8, 27648, 152064, False),
    "72B": Shape(8192, 80, 64, 8, 29568, 152064, False),
}


def write_shape(name: str, folder: Path) -> Path:
    """A model folder for memory plans: the config of one of `QWEN`, and a weights file without any."""
    shape = QWEN[name]
    config = AutoConfig.for_model(
        "qwen2", vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.mlp,
        max_position_embeddings=32768, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    config.save_pretrained(folder / name)
    (folder / name / "model.safetensors").touch()
    return folder / name
