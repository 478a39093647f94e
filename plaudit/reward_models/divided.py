"""A scalar model whose layers several processes have: `model.rank: [0, 1]`.

    rank 0, the owner   tokens → block 1 → hidden states ┐
    rank 1                                               └→ block 2 → scores, which return to the owner

The owner has the model as any other: it batches the calls of all processes, and counts them. Each block computes in its process's
own thread for the model, whatever else that process is doing, and calls the process of the next block with its hidden states. The
last one's scores are the results of these calls. Several batches are in flight, so all blocks compute at the same time.

Hidden states travel through host memory, on the connections between processes (`peer_channel.py`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.errors import PeerLost, RecipeError
from plaudit.recipe.reward_models import RewardModel
from plaudit.types import Batch

if TYPE_CHECKING:
    import torch

CALL_LIMIT_S = 1800.0
"""How long a block and the batches before it may take. Minutes, if a large model runs on a CPU."""


@dataclass(frozen=True)
class BlockInput:
    """A batch on its way to the next block, as arrays in host memory."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    starts_S1: np.ndarray
    longest: int
    dtype: str
    bytes_TD: np.ndarray
    """Hidden states; numpy has no bfloat16."""

    @classmethod
    def of(cls, batch: Batch, states_TD: "torch.Tensor") -> "BlockInput":
        import torch

        tokens_T, positions_T, starts_S1 = (x.cpu().numpy() for x in (batch.tokens_T, batch.positions_T, batch.starts_S1))
        dtype, bytes_TD = str(states_TD.dtype).removeprefix("torch."), states_TD.contiguous().cpu().view(torch.uint8).numpy()
        return cls(tokens_T, positions_T, starts_S1, batch.longest, dtype, bytes_TD)

    def on(self, device: "torch.device") -> "tuple[Batch, torch.Tensor]":
        """The batch and its hidden states on a device."""
        import torch

        arrays = self.tokens_T, self.positions_T, self.starts_S1
        tokens_T, positions_T, starts_S1 = (torch.from_numpy(array).to(device) for array in arrays)
        states_TD = torch.from_numpy(self.bytes_TD).view(getattr(torch, self.dtype)).to(device)
        batch = Batch(tokens_T, positions_T, torch.zeros_like(tokens_T, dtype=torch.bool), starts_S1, self.longest)
        return batch, states_TD


def require_several_processes(model: RewardModel) -> None:
    """Called where there is only one."""
    if model.gpus is not None:
        raise RecipeError(
            f"{model.path}: model.gpus is for runs on several machines (cluster.nodes), where Ray finds them. Leave it out here"
        )
    if isinstance(model.rank, tuple):
        raise RecipeError(
            f"{model.path}: model.rank is {list(model.rank)}, but there is only one process. To train with it, set "
            f"cluster.gpus={max(model.rank) + 1}; to score, audit or serve, leave model.rank out, or use placement: server"
        )


class ModelPart:
    """Which block of a divided model this process has, and how the next one's process is called."""

    def __init__(self, number: int, ranks: tuple[int, ...], call: Callable[..., Coroutine[Any, Any, Any]] | None):
        """`number`: of the block. `call(method, *arguments)`: calls the process of the next block; None for the last."""
        self.number, self.ranks = number, ranks
        self._call, self._loop = call, asyncio.get_running_loop()

    @property
    def is_last(self) -> bool:
        return self._call is None

    async def call_next(self, method: str, *arguments: Any) -> Any:
        """The next block's process's result, which it may have from those after it."""
        assert self._call is not None, "the last block has no next one"
        # The process that waits for the one that hangs gives up first, and names it.
        limit, rank = CALL_LIMIT_S * (len(self.ranks) - self.number - 1), self.ranks[self.number + 1]
        try:
            async with asyncio.timeout(limit):
                return await self._call(method, *arguments)
        except TimeoutError:
            raise PeerLost(f"the process with rank {rank} has not computed its part of a reward model within {limit:g} s") from None

    def send(self, given: BlockInput) -> "Future[np.ndarray]":
        """The scores of a batch, when later blocks have computed them. From the model's thread."""
        return asyncio.run_coroutine_threadsafe(self.call_next("run_block", given), self._loop)
