"""Check a model before it trains or scores: packed batches must give the same results as unpacked sequences, also where sequences
share their first tokens.

A model that ignores sequence starts, numbers positions its own way or scales its logits is caught here, not after a training run.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.data.pack import FEWEST_SHARED, pack
from plaudit.errors import RecipeError
from plaudit.models import attention
from plaudit.models.attention import packed_states
from plaudit.models.logprobs import target_logprobs
from plaudit.types import Batch, Example


def verify_packed(model: PreTrainedModel) -> None:
    """Raise a RecipeError unless two short sequences have the same log-probs packed as alone, and do not see each other."""
    _verify(model, _packed_logprobs, _plain_logprobs, "log-probs", skipped=1)


def verify_packed_states(decoder: PreTrainedModel, states: Callable[[Batch], Tensor] | None = None) -> None:
    """The same for a model without an output head, on its final hidden states; `states`: another implementation to check."""
    another = None if states is None else (lambda _, first, second: states(_batch(first, second)).float())
    _verify(decoder, another or _packed_states, _plain_states, "hidden states", skipped=0)


@torch.no_grad()
def _verify(
    model: PreTrainedModel,
    packed_values: Callable[[PreTrainedModel, Tensor, Tensor], Tensor],
    plain_values: Callable[[PreTrainedModel, Tensor], Tensor],
    what: str,
    skipped: int,
) -> None:
    """`skipped`: tokens of each sequence that have no value."""
    was_training = model.training
    model.eval()
    first, second, other = (torch.arange(start, end, device=model.device) for start, end in ((10, 17), (40, 45), (20, 27)))
    try:
        packed = packed_values(model, first, second)
        beside_another = packed_values(model, other, second)
    except NotImplementedError as error:
        raise RecipeError(f"{model.name_or_path}: {error}") from None
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise RecipeError(f"{model.name_or_path}: {type(model).__name__} cannot run on packed batches: {error}") from None
    model.set_attn_implementation("eager")
    alone = torch.cat([plain_values(model, sequence) for sequence in (first, second)])
    # How far two correct implementations differ: considerably for a deep model in half precision, hardly at all in fp32.
    model.set_attn_implementation("sdpa")
    rounding = (torch.cat([plain_values(model, sequence) for sequence in (first, second)]) - alone).abs().max().item()
    model.set_attn_implementation(attention.NAME)
    model.train(was_training)
    if not alone.isfinite().all():
        raise RecipeError(f"{model.name_or_path}: its weights give {what} that are not finite; the model is damaged")
    apart = (packed - alone).abs().max().item()
    seen = (packed - beside_another)[len(first) - skipped :].abs().max().item()
    if not apart <= max(1e-3, 4 * rounding) or seen > 1e-6:
        raise RecipeError(
            f"{model.name_or_path}: {type(model).__name__} computes other {what} on packed batches than on its own "
            f"(they differ by {max(apart, seen):.3g}), so plaudit cannot use it"
        )


@torch.no_grad()
def verify_shared(decoder: Any) -> None:
    """Raise a RecipeError unless two sequences that share their first tokens have the same hidden states as apart. Layers that do
    not only attend (recurrent ones, convolutions) would not."""
    was_training = decoder.training
    decoder.eval()
    prompt = np.arange(10, 10 + FEWEST_SHARED)
    ends = np.array([30, 31]), np.array([40, 41, 42])
    examples = [Example(np.r_[prompt, end], np.r_[prompt < 0, end > 0]) for end in ends]
    batches = [pack(examples, decoder.device, share=share) for share in (True, False)]
    shared, apart = (packed_states(decoder, batch)[batch.predictors_N].float() for batch in batches)
    decoder.train(was_training)
    # Rounding in half precision is below 1 %; where tokens are not seen, states differ by tens of percent.
    if not (shared - apart).norm() <= 0.05 * apart.norm():
        raise RecipeError(
            f"{decoder.name_or_path}: {type(decoder).__name__} computes other hidden states where sequences share their first "
            "tokens, so plaudit cannot use it"
        )


def _batch(first: Tensor, second: Tensor) -> Batch:
    lengths = [len(first), len(second)]
    positions = torch.cat([torch.arange(n, device=first.device) for n in lengths])
    return Batch(
        tokens_T=torch.cat([first, second]),
        positions_T=positions,
        loss_mask_T=positions > 0,
        starts_S1=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=first.device),
        longest=max(lengths),
    )


def _packed_logprobs(model: PreTrainedModel, first: Tensor, second: Tensor) -> Tensor:
    return target_logprobs(model, _batch(first, second)).logprobs_N


def _packed_states(decoder: PreTrainedModel, first: Tensor, second: Tensor) -> Tensor:
    return packed_states(decoder, _batch(first, second)).float()


def _plain_states(decoder: PreTrainedModel, sequence: Tensor) -> Tensor:
    return decoder(input_ids=sequence[None], use_cache=False).last_hidden_state[0].float()


def _plain_logprobs(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]
