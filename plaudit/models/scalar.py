"""A scalar (Bradley–Terry) reward model: one score per conversation.

    r = w · h_last + b        h_last: hidden state of the conversation's last token, rendered with the model's own template

Two forms are supported: a sequence classifier with one label, whose head is `score`; or a causal model with a file
`value_head.safetensors` next to it (LLaMA-Factory's form). Differs from transformers: sequences are packed, so there is no padding
and no search for the last real token, and the head computes in fp32.

A model may be divided into blocks of layers for several processes (`layer_blocks.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from plaudit.data.pack import pack, split_by_tokens
from plaudit.data.templates import load_tokenizer, template_text
from plaudit.data.transcript import Transcript
from plaudit.errors import RecipeError
from plaudit.hub import model_folder
from plaudit.models.attention import packed_states
from plaudit.models.folder import architecture, read_config
from plaudit.models.layer_blocks import LayerBlock, ReceivedStates, class_of_block, divide_model
from plaudit.models.residual import keep_residual_fp32
from plaudit.models.trainable import LOAD_LOCK, load_pretrained, resolve_dtype
from plaudit.models.verify import verify_packed_states
from plaudit.recipe.reward_models import RewardModel
from plaudit.threads import fit_threads
from plaudit.types import Batch, Example

VALUE_HEAD = "value_head.safetensors"
# Per forward pass: enough to keep the device busy; activations without gradients are small (7B in bf16: about 0.1 MB a token).
TOKENS_PER_PASS = {"cpu": 4096, "cuda": 32768}
# Fewer on a GPU: blocks compute at the same time only if what is scored takes several passes.
TOKENS_PER_PASS_OF_BLOCKS = {"cpu": 4096, "cuda": 8192}
Form = Literal["classifier", "value_head"]


class ScalarModel(nn.Module):
    def __init__(self, decoder: PreTrainedModel, head: nn.Linear | None):
        """`head`: None in a block of layers that is not the last."""
        super().__init__()
        self.decoder, self.head = decoder, head
        self.states: Callable[[Batch], Tensor] | None = None
        """A faster way to compute hidden states than the decoder's modules, if there is one."""

    def forward(self, batch: Batch) -> Tensor:
        """A score for each sequence of a packed batch, in fp32."""
        return self._scores(batch, self._hidden(batch))

    @torch.no_grad()
    def run_block(self, batch: Batch, received_TD: Tensor | None) -> Tensor:
        """A block's hidden states from those of the block before; of the last block, a score for each sequence."""
        embeddings: Any = self.decoder.get_input_embeddings()
        assert isinstance(embeddings, ReceivedStates) == (received_TD is not None), "only the first block begins with tokens"
        with nullcontext() if received_TD is None else embeddings.holding(received_TD):
            hidden_TD = self._hidden(batch)
        return hidden_TD if self.head is None else self._scores(batch, hidden_TD)

    def _hidden(self, batch: Batch) -> Tensor:
        return (self.states or self._states)(batch)

    def _scores(self, batch: Batch, hidden_TD: Tensor) -> Tensor:
        assert self.head is not None, "only the last block has a head"
        last_SD = hidden_TD[batch.starts_S1[1:].long() - 1]
        return self.head(last_SD.float())[:, 0]

    def _states(self, batch: Batch) -> Tensor:
        return packed_states(self.decoder, batch)

    def score(self, sequences: Sequence[Sequence[int]], *, tokens_per_pass: int | None = None) -> np.ndarray:
        """A score for each sequence of tokens, in fp32."""
        values = np.empty(len(sequences), dtype=np.float32)
        for indices, some in self.score_in_passes(sequences, tokens_per_pass=tokens_per_pass):
            values[indices] = some
        return values

    @torch.no_grad()
    def score_in_passes(
        self, sequences: Sequence[Sequence[int]], *, tokens_per_pass: int | None = None
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the indices scored by each pass, and their scores."""
        self.eval()
        device = self.decoder.device
        for indices, batch in batches_of(sequences, device, tokens_per_pass or TOKENS_PER_PASS.get(device.type, 4096)):
            yield indices, self(batch).cpu().numpy()


def batches_of(sequences: Sequence[Sequence[int]], device: torch.device, tokens_per_pass: int) -> Iterator[tuple[list[int], Batch]]:
    """The packed batch of each pass, with the indices of its sequences. A sequence longer than the budget gets its own pass."""
    for indices in split_by_tokens([len(sequence) for sequence in sequences], tokens_per_pass):
        yield indices, pack([_example(sequences[i]) for i in indices], device)


def _example(sequence: Sequence[int]) -> Example:
    return Example(np.asarray(sequence, dtype=np.int32), np.zeros(len(sequence), dtype=bool))


# Loading -------------------------------------------------------------------------------------------------------------


def load_scalar(settings: RewardModel, device: torch.device, block: LayerBlock | None = None) -> ScalarModel:
    """The recipe's reward model, ready to score. `block`: only these layers of it, and no other weights."""
    path, trusted = _path(settings), settings.trust_remote_code
    config = read_config(path, trust_remote_code=trusted)
    form = scalar_form(settings, config)
    kind = _auto(form) if block is None else class_of_block(type(_without_weights(settings, config)), block)
    model: Any = load_pretrained(
        kind, path, resolve_dtype(settings.dtype, device), trust_remote_code=trusted, partial=block is not None
    )
    decoder, head = model.get_decoder(), None
    if block is None or block.is_last:
        head = _read_head(model, path, form, config.get_text_config().hidden_size)
    fit_threads(config, device)
    scalar = ScalarModel(decoder, head).to(device).eval().requires_grad_(False)
    if isinstance(decoder.get_input_embeddings(), ReceivedStates):
        decoder.get_input_embeddings().dtype = decoder.dtype
    keep_residual_fp32(decoder)
    verify_packed_states(decoder)
    return scalar


def _auto(form: Form) -> Any:
    return AutoModelForSequenceClassification if form == "classifier" else AutoModelForCausalLM


def _read_head(model: Any, path: str, form: Form, hidden: int) -> nn.Linear:
    value_head = None if form == "classifier" else read_value_head(path, hidden)
    weight, bias = value_head or _score_head(model, path)
    head = nn.Linear(hidden, 1, dtype=torch.float32)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.zero_() if bias is None else head.bias.copy_(bias)
    return head


def scalar_blocks(settings: RewardModel) -> list[LayerBlock]:
    """The blocks of a model that the ranks of the recipe divide among themselves, in their order. Reads its config only."""
    assert isinstance(settings.rank, tuple)
    config = read_config(_path(settings), trust_remote_code=settings.trust_remote_code)
    key = _path(settings), config.to_json_string(), len(settings.rank)
    if key not in _BLOCKS:
        _BLOCKS[key] = divide_model(_without_weights(settings, config), len(settings.rank))
    return _BLOCKS[key]


_BLOCKS: dict[tuple[str, str, int], list[LayerBlock]] = {}
"""A plan of a run's memory needs them a hundred times."""


def _without_weights(settings: RewardModel, config: PretrainedConfig) -> PreTrainedModel:
    with LOAD_LOCK, torch.device("meta"):
        model = _auto(scalar_form(settings, config)).from_config(config, trust_remote_code=settings.trust_remote_code)
    model.name_or_path = _path(settings)
    return model


def scalar_form(settings: RewardModel, config: PretrainedConfig) -> Form:
    """How the folder stores its head; a RecipeError if there is no supported one."""
    path, kind = _path(settings), architecture(config)
    if kind.endswith("ForSequenceClassification"):
        if config.num_labels != 1:
            raise RecipeError(
                f"{path}: {kind} has {config.num_labels} labels, and a reward model has one (num_labels in config.json): "
                "this model classifies texts"
            )
        return "classifier"
    if value_head_file(path) is not None:
        return "value_head"
    pickled = Path(path, "value_head.bin")
    if pickled.exists():
        raise RecipeError(f"{pickled} is pickled, which plaudit does not load; save it as {VALUE_HEAD}")
    raise RecipeError(
        f"{path}: {kind or 'a model of unknown architecture'} has no score: it is not a ...ForSequenceClassification, and the "
        f"folder has no {VALUE_HEAD}. If it writes its verdicts as text, use a judge (kind: judge, group_judge, ...)."
    )


def _path(settings: RewardModel) -> str:
    assert settings.path is not None, "only a served model may have none"
    return settings.path


def value_head_file(path: str) -> Path | None:
    file = model_folder(path, weights=False) / VALUE_HEAD
    return file if file.exists() else None


def _score_head(model: Any, path: str) -> tuple[Tensor, Tensor | None]:
    head = getattr(model, "score", None)
    if type(head) is not nn.Linear or head.out_features != 1:
        raise RecipeError(f"{path}: {type(model).__name__} has no linear head `score` with one output, so plaudit cannot use it")
    return head.weight.detach(), None if head.bias is None else head.bias.detach()


def read_value_head(path: str, hidden: int) -> tuple[Tensor, Tensor | None] | None:
    """`v_head.summary.weight` [1, hidden] and `.bias` [1], or the same without either prefix; None if the file is missing."""
    file = value_head_file(path)
    if file is None:
        return None
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from None
    bare = {name.removeprefix("v_head.").removeprefix("summary."): tensor for name, tensor in tensors.items()}
    weight, bias = bare.get("weight"), bare.get("bias")
    fits = weight is not None and weight.shape == (1, hidden) and (bias is None or bias.shape == (1,))
    if not fits or set(bare) - {"weight", "bias"}:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())) or "nothing"
        raise RecipeError(f"{file}: v_head.summary.weight [1, {hidden}] and v_head.summary.bias [1] are wanted; found: {found}")
    return weight, bias  # pyright: ignore[reportReturnType]


def transcript_of(settings: RewardModel) -> Transcript:
    """The tokenizer and template of a recipe's reward model."""
    tokenizer = load_tokenizer(settings.tokenizer or _path(settings), trust_remote_code=settings.trust_remote_code)
    return Transcript(tokenizer, template_text(tokenizer, settings.chat_template))
