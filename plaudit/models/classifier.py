"""A model with a score head, as plaudit trains it: a reward model or critic, as a sequence classifier with one label.

    r = w · h_last        h_last: hidden state of the conversation's last token

It is saved as transformers' ...ForSequenceClassification, which transformers, vLLM and plaudit's own `scalar_model` load. As in
models/scalar.py, sequences are packed and the head is in fp32 whatever the model's dtype.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from plaudit.data.templates import ChatTemplate
from plaudit.errors import RecipeError
from plaudit.models.attention import packed_states
from plaudit.models.checkpointing import checkpoint_layers
from plaudit.models.folder import architecture, read_config, require_matching_tokenizer
from plaudit.models.fused import merge_adapters, prepare_layers, quantise_base
from plaudit.models.lora import attach_lora
from plaudit.models.scalar import read_value_head
from plaudit.models.sharded import in_forward_pass
from plaudit.models.trainable import TrainableModel, load_pretrained, resolve_dtype
from plaudit.models.verify import verify_packed_states, verify_shared
from plaudit.recipe import ModelSettings
from plaudit.seeding import stable_seed
from plaudit.threads import fit_threads
from plaudit.types import Batch

HEAD = "score"


@in_forward_pass
def sequence_scores(model: PreTrainedModel, batch: Batch) -> Tensor:
    """A score for each sequence of a packed batch."""
    hidden_TD = packed_states(model.get_decoder(), batch)
    return scores_of(model, hidden_TD[batch.starts_S1[1:].long() - 1])


def scores_of(model: nn.Module, hidden_ND: Tensor) -> Tensor:
    """The head's score of each hidden state, in fp32 or finer."""
    head: Any = getattr(model, HEAD)
    return head(hidden_ND.to(head.weight.dtype))[:, 0]


def load_classifier(
    recipe: ModelSettings,
    template: ChatTemplate,
    device: torch.device,
    *,
    seed: int = 0,
    head_std: float = 1.0,
    section: str = "model",
) -> TrainableModel:
    """The recipe's model with a score head, ready to train: a new head for a causal model, the existing one for a reward model.

    `head_std`: standard deviation of a new head's scores. `section`: the recipe section that describes the model."""
    config = read_config(recipe.path, trust_remote_code=recipe.trust_remote_code)
    require_matching_tokenizer(recipe.path, config, template.tokenizer)
    has_head = is_classifier(recipe.path, config)
    model: Any = load_pretrained(
        AutoModelForSequenceClassification,
        recipe.path,
        resolve_dtype(recipe.dtype, device),
        trust_remote_code=recipe.trust_remote_code,
        new=() if has_head else (f"{HEAD}.",),
        num_labels=1,
    )
    head = getattr(model, HEAD, None)
    if type(head) is not nn.Linear or head.out_features != 1 or head.bias is not None:
        raise RecipeError(
            f"{recipe.path}: {type(model).__name__} has no linear head `{HEAD}` without a bias, so plaudit cannot train it"
        )
    head.float()
    if not has_head:
        _init_head(head, recipe.path, seed, head_std)
    quantise_base(model.get_decoder(), recipe.lora, device, section=section)
    model = model.to(device)
    fit_threads(model.config, device)
    prepare_layers(model.get_decoder(), liger=recipe.liger)
    verify_packed_states(model.get_decoder())
    verify_shared(model.get_decoder())
    peft = attach_lora(model, recipe.lora, seed, head=HEAD, section=section) if recipe.lora is not None else None
    if peft is not None:
        merge_adapters(model.get_decoder(), section=section)
    checkpoint_layers(model, recipe)
    model.train()
    return TrainableModel(model, template, recipe.lora, peft)


def is_classifier(path: str, config: PretrainedConfig) -> bool:
    """Whether the model already has a score head; a RecipeError if its head is for something else."""
    kind = architecture(config)
    if not kind.endswith("ForSequenceClassification"):
        return False
    if config.num_labels != 1:
        raise RecipeError(
            f"{path}: {kind} has {config.num_labels} labels, and a reward model has one, as a critic has: this one sorts texts "
            "into classes. Start from a causal model, or from a reward model."
        )
    return True


@torch.no_grad()
def _init_head(head: nn.Linear, path: str, seed: int, std: float) -> None:
    """Use a value head saved next to the model (without its bias, which pairs cannot determine and a critic soon relearns); else
    w ~ N(0, std² / (D + 1)), so that scores of normalised hidden states start about `std` from 0 (Stiennon et al. 2020: 1)."""
    known = read_value_head(path, head.in_features)
    if known is not None:
        head.weight.copy_(known[0])
        return
    generator = torch.Generator().manual_seed(stable_seed("head", seed))
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * (std / math.sqrt(head.in_features + 1)))


def set_pad_token(classifier: TrainableModel, last_tokens: Iterable[int]) -> None:
    """Set the padding token in the saved config and tokenizer.

    transformers takes the score from the rightmost token that is not padding. So a token that ends conversations must not pad them:
    where a tokenizer pads with its end token, as many do, scores would come from the token before it.
    """
    tokenizer: Any = classifier.template.tokenizer
    pad = _pad_token(tokenizer, set(last_tokens))
    if pad is None:
        raise RecipeError(
            f"{tokenizer.name_or_path}: every special token of the tokenizer ends some conversation, so none can pad "
            "a batch; choose another model.tokenizer"
        )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    classifier.model.config.pad_token_id = pad
    classifier.model.config.get_text_config().pad_token_id = pad


def _pad_token(tokenizer: Any, ends: set[int]) -> int | None:
    """The tokenizer's own padding token if allowed; else one of its special tokens, preferably one with no other purpose."""
    own = tokenizer.pad_token_id
    if own is not None and own not in ends:
        return own

    def unfit(token: int) -> tuple[bool, bool, int]:
        named = token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        return named, "pad" not in tokenizer.convert_ids_to_tokens(token), token

    return min(
        (t for t, added in tokenizer.added_tokens_decoder.items() if added.special and t not in ends), key=unfit, default=None
    )
