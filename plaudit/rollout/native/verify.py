"""A model is tried before it is sampled: token by token it must compute what its own modules compute on a whole sequence.

One that keeps more than keys and values of its past (a convolution, a state), or keeps them in another shape, is caught here, and
so is one whose modules are not what their names say.
"""

from collections import deque

import numpy as np
import torch

from plaudit.data.pack import pack
from plaudit.errors import RecipeError
from plaudit.models.attention import packed_arguments
from plaudit.models.logprobs import logits_of
from plaudit.rollout.native.cache import CacheView
from plaudit.rollout.native.forward import Forward
from plaudit.rollout.native.rows import COLUMNS, POSITION, TOKEN, Rows
from plaudit.rollout.native.scheduler import Job, Piece
from plaudit.types import Example

BLOCK = 64
READ, WRITTEN = BLOCK - 2, 5  # into a second block
# Log-probs may differ by this share of their spread: rounding is far below it, another past far above.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_HALF = 0.25


def verify_decode(forward: Forward) -> None:
    """Raise a RecipeError unless a few tokens, one by one behind a prompt, have the log-probs they have in one pass."""
    model, name = forward.model, type(forward.model).__name__
    try:
        forward.begin(READ + WRITTEN)
        expected, found = _both_ways(forward)
        forward.end()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"{model.name_or_path}: the native engine cannot sample {name}: {reason}") from None
    apart = ((found - expected).abs().max() / expected.std()).item()
    if not apart <= TOLERANCE.get(model.dtype, TOLERANCE_HALF):
        raise RecipeError(
            f"{model.name_or_path}: {name} computes other log-probs token by token than on a whole sequence (they differ by "
            f"{apart:.2g} of their spread), so the native engine cannot sample it"
        )


@torch.inference_mode()
def _both_ways(forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    model, device = forward.model, forward.shape.device
    tokens = (10 + np.arange(READ + WRITTEN)) % len(forward.head)
    was_training = model.training
    model.eval()
    batch = pack([Example(tokens, np.zeros(len(tokens), dtype=bool))], device)
    hidden_TD = model.get_decoder()(**packed_arguments(batch), use_cache=False).last_hidden_state[0]  # pyright: ignore
    expected = logits_of(hidden_TD, forward.head)[READ:]

    cache, rows = CacheView(forward.shape, 1, 2, block_tokens=BLOCK), Rows(1, device)
    cache.take_memory(2)
    cache.set_tables([0], np.array([[1, 0]], dtype=np.int32))
    forward.read([Piece(Job(tokens, deque(), blocks=[1, 0]), 0, READ)], cache)
    found = []
    for position in range(READ, READ + WRITTEN):
        state = [0] * COLUMNS
        state[TOKEN], state[POSITION] = int(tokens[position]), position
        rows.state_RC.copy_(torch.tensor([state], device=device))
        found.append(forward.logits(rows, 1, cache, position + 1)[0])
    cache.release_memory()
    model.train(was_training)
    return expected.log_softmax(-1), torch.stack(found).log_softmax(-1)
