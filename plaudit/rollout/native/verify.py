"""A model is tried before it is sampled: token by token it must compute what it computes on a whole sequence.

One that keeps more than keys and values of its past (a convolution, a state), or keeps them in another shape, is caught here.
"""

import torch

from plaudit.errors import RecipeError
from plaudit.rollout.engine import Request
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.forward import Forward

READ, WRITTEN = 5, 3
# Log-probs may differ by this share of their spread: rounding is far below it, another past far above.
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_HALF = 0.25


@torch.inference_mode()
def verify_decode(forward: Forward) -> None:
    """Raise a RecipeError unless a few tokens, one by one behind a prompt, have the log-probs they have in one pass."""
    model, name, device = forward.model, type(forward.model).__name__, forward.shape.device
    tokens = torch.arange(10, 10 + READ + WRITTEN).numpy()
    try:
        whole = [forward.read([Request("", tokens[: READ + i])])[0] for i in range(WRITTEN + 1)]
        cache = KVCache(forward.shape, rows=1, length=READ + WRITTEN)
        cache.fill(0, whole[0].prefix)
        stepwise = [whole[0].logits_V]
        for position in range(READ, READ + WRITTEN):
            at = torch.tensor([position], device=device)
            stepwise.append(forward.next_logits(cache, torch.tensor([tokens[position]], device=device), at, position + 1)[0])
        forward.end()
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"{model.name_or_path}: the native engine cannot sample {name}: {reason}") from None
    expected = torch.stack([read.logits_V for read in whole]).log_softmax(-1)
    found = torch.stack(stepwise).log_softmax(-1)
    apart = ((found - expected).abs().max() / expected.std()).item()
    if not apart <= TOLERANCE.get(model.dtype, TOLERANCE_HALF):
        raise RecipeError(
            f"{model.name_or_path}: {name} computes other log-probs token by token than on a whole sequence (they differ by "
            f"{apart:.2g} of their spread), so the native engine cannot sample it"
        )
