"""Checks, before sampling, that a model computes token by token what its own modules compute on the full sequence.

This catches models whose past is more than keys and values (a convolution, a state) or has another shape, and models whose modules
do not do what their names suggest.
"""

from collections import deque

import numpy as np
import torch

from plaudit.data.pack import pack
from plaudit.errors import PlauditError, RecipeError
from plaudit.models.attention import packed_states
from plaudit.models.logprobs import logits_of
from plaudit.rollout.lengths import context_of
from plaudit.rollout.native.batch import COLUMNS, POSITION, TOKEN, BatchRows
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.forward import Forward
from plaudit.rollout.native.prefixes import SharedPrefixes
from plaudit.rollout.native.scheduler import PrefillChunk, PrefillJob
from plaudit.types import Example

BLOCK = 64
PREFILLED, WRITTEN = BLOCK - 2, 5  # crosses into a second block
# Log-probs may differ by this fraction of their standard deviation: rounding is far below it, a wrong past far above.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_HALF = 0.25


def verify_decode(forward: Forward) -> None:
    """Raise a RecipeError unless a few tokens, decoded one by one after a prompt, have the log-probs of a single pass."""
    model, name = forward.model, type(forward.model).__name__
    try:
        forward.begin(PREFILLED + WRITTEN)
        expected, decoded = _logprobs_both_ways(forward)
        forward.end()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"{model.name_or_path}: the native engine cannot sample {name}: {reason}") from None
    apart = ((decoded - expected).abs().max() / expected.std()).item()
    if not apart <= TOLERANCE.get(model.dtype, TOLERANCE_HALF):
        raise RecipeError(
            f"{model.name_or_path}: {name} computes other log-probs token by token than on a full sequence (they differ by "
            f"{apart:.2g} of their standard deviation), so the native engine cannot sample it"
        )


@torch.inference_mode()
def _logprobs_both_ways(forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    model, device = forward.model, forward.shape.device
    tokens = (10 + np.arange(PREFILLED + WRITTEN)) % len(forward.head)
    was_training = model.training
    model.eval()
    batch = pack([Example(tokens, np.zeros(len(tokens), dtype=bool))], device)
    hidden_TD = packed_states(model.get_decoder(), batch)
    expected = logits_of(hidden_TD, forward.head)[PREFILLED:]

    cache, rows = KVCache(forward.shape, 1, 2, block_tokens=BLOCK), BatchRows(1, device)
    cache.allocate(2)
    cache.set_block_tables([0], np.array([[1, 0]], dtype=np.int32))
    forward.prefill([PrefillChunk(PrefillJob(tokens, deque(), blocks=[1, 0]), 0, PREFILLED)], cache)
    decoded = []
    for position in range(PREFILLED, PREFILLED + WRITTEN):
        state = [0] * COLUMNS
        state[TOKEN], state[POSITION] = int(tokens[position]), position
        rows.state_RC.copy_(torch.tensor([state], device=device))
        decoded.append(forward.logits(rows, 1, cache, position + 1)[0])
    cache.release()
    model.train(was_training)
    return expected.log_softmax(-1), torch.stack(decoded).log_softmax(-1)


SHARED_LENGTHS = (200, 340, 1100)  # prompts that end in the first stretch, in the second, and in the second of two programs
ENOUGH_PROGRAMS = 512  # that attention does not split short sequences


def shared_prefixes_are_exact(forward: Forward, block: int) -> bool | None:
    """Whether reading a shared prompt by tiles gives the same states, to the bit, as reading it for every sample. It depends on the
    GPU's instructions, so it is tested before it is relied on. None if memory or the model's context is too small for the test."""
    context = context_of(forward.model.config)
    lengths = [length for length in SHARED_LENGTHS if context is None or length <= context]
    if not lengths:
        return None
    forward.begin(max(lengths))
    rows = -(-ENOUGH_PROGRAMS // forward.shape.heads.kv)
    try:
        return all(torch.equal(*_states_both_ways(forward, block, length, rows)) for length in lengths)
    except (PlauditError, torch.OutOfMemoryError):
        return None


@torch.inference_mode()
def _states_both_ways(forward: Forward, block: int, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the token after a prompt, a different one in each row."""
    shape, shared = forward.shape, (length - 1) // block
    tokens = (10 + np.arange(length)) % len(forward.head)
    # Each row has a block of its own, with a copy of what the prompt has in its last one.
    tables = np.concatenate([np.tile(np.arange(shared), (rows, 1)), shared + np.arange(rows)[:, None]], 1).astype(np.int32)
    cache, state = KVCache(shape, rows, shared + 1, block_tokens=block), BatchRows(rows, shape.device)
    try:
        cache.allocate(shared + rows, min_blocks=shared + rows)
        forward.prefill([PrefillChunk(PrefillJob(tokens, deque(), blocks=tables[0].tolist()), 0, length - 1)], cache)
        if rows > 1:
            cache.copy_blocks([(shared, shared + row) for row in range(1, rows)], block)
        cache.set_block_tables(range(rows), tables)
        state.state_RC[:rows, TOKEN] = torch.arange(rows, device=shape.device) % len(forward.head)
        state.state_RC[:rows, POSITION] = length - 1
        prefixes = SharedPrefixes(rows, shape.heads, shape.device)
        per_tile = prefixes.samples_per_tile
        prefixes.assign([(shared * block, range(first, min(first + per_tile, rows))) for first in range(0, rows, per_tile)])
        alone, together = (forward.hidden(state, rows, cache, length, given) for given in (None, prefixes))
        return alone, together
    finally:
        cache.release(to_driver=False)
