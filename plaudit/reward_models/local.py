"""placement: resident or offload. A reward model in this process, scalar or generative.

Its own thread computes all waiting requests as one batch (`model_thread.py`); its weights stay on the device or are moved there on
demand (`weights.py`). A request that fails is a failure with its cause, next to the results of the others. Time limits do not
apply: nothing here can hang, and an answer ends at max_new_tokens.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn

from plaudit.errors import PeerLost, PlauditError, RecipeError
from plaudit.models.devices import resolve_device
from plaudit.models.weights import OffloadableWeights, release_memory
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.batch_bisection import failure_of, is_out_of_memory
from plaudit.reward_models.divided import BlockInput, ModelPart
from plaudit.reward_models.inference import Inference
from plaudit.reward_models.model_thread import Closed, ModelThread
from plaudit.reward_models.scalar_inference import BlockByBlockInference, ScalarInference
from plaudit.reward_models.text_generation import TextGeneration
from plaudit.types import Failure, Message


class LocalModel(Backend):
    def __init__(
        self,
        settings: RewardModel,
        *,
        scalar: bool,
        independent: bool = False,
        device: torch.device | None = None,
        part: ModelPart | None = None,
    ):
        """`independent`: a scalar model computes each call as its own batch. What is packed with a sequence changes its score in
        the last bits, and which calls wait at the same moment is a matter of timing. `device`: this process's own, if it is one of
        several; torch's current one belongs to the thread that chose it. `part`: this process has a block of its layers."""
        assert scalar or part is None, "only scalar models are divided"
        assert settings.placement in ("resident", "offload")
        self.settings, self.scalar, self.independent, self.usage = settings, scalar, independent and scalar, Usage()
        self._device, self._part = device, part
        self._thread: ModelThread[Any, Any] | None = None
        self._preparing: ThreadPoolExecutor | None = None
        """One thread: requests keep their order, and tokenizers are not made for several."""
        self._inference: Inference[Any, Any] | None = None
        self._weights: OffloadableWeights[nn.Module] | None = None
        self._not_loaded = Failure("not_loaded", f"{settings.path} is offloaded, and was not loaded before it was called")

    @property
    def name(self) -> str:
        return str(self.settings.path)

    @property
    def batches(self) -> int:
        """Batches computed so far."""
        return self._thread.batches if self._thread is not None else 0

    # Opening and loading ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        assert self._thread is None, "already open"
        device = resolve_device(self.settings.device, "model.device")
        if self._device is not None and self._device.type == device.type:
            device = self._device
        divided = self._part is None and isinstance(self.settings.rank, tuple)
        kind = BlockByBlockInference if divided else ScalarInference if self.scalar else TextGeneration
        thread = self._thread = ModelThread(
            f"model {self.settings.path}",
            self._compute_batch,
            device,
            gather_s=kind.gather_s,
            most_items=kind.most_items if self._part is None else None,
        )
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix=f"prepare {self.settings.path}")
        inference = self._inference = kind(self.settings, device, thread.closing.is_set)
        if isinstance(inference, ScalarInference):
            inference.part = self._part
        offload = self.settings.placement == "offload"
        self._weights = OffloadableWeights(inference.path, inference.load, device, offload=offload)
        await thread.do(inference.open)
        if not offload:
            await thread.do(self._load_or_raise)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close(self._drop)
        if self._preparing is not None:
            self._preparing.shutdown(wait=False)

    async def load(self) -> None:
        """If loading fails, so do the requests that follow."""
        if self.settings.placement == "offload":
            await self._in_all_parts("load", self._load_or_keep_failure)

    async def unload(self) -> None:
        if self.settings.placement == "offload":
            await self._in_all_parts("unload", self._unload)

    async def _in_all_parts(self, method: str, do: Callable[[], None]) -> None:
        """Of a divided model, in this process and in those with later blocks."""
        assert self._thread is not None
        others = [] if self._part is None or self._part.is_last else [self._part.call_next(method)]
        thread = self._thread
        await asyncio.gather(self._in_turn(lambda: thread.put_task(do)), *others)

    def info(self) -> ModelInfo:
        inference = self._inference
        assert isinstance(inference, ScalarInference | TextGeneration), "open it first"
        template = inference.transcript if isinstance(inference, ScalarInference) else inference.template
        return ModelInfo(template, inference.context)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        assert not self.scalar, "a scalar model does not generate"
        answers: list[Answer] = await self._compute([(request, params) for request in requests])
        self.usage.new_tokens += sum(answer.new_tokens for answer in answers)
        return answers

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        assert self.scalar, "a generative model does not score"
        return await self._compute(conversations)

    async def run_block(self, given: BlockInput) -> np.ndarray:
        """The scores of a batch of a divided model, from the hidden states of the block before this one."""
        assert self._part is not None
        if self._thread is None:
            raise Closed("the model has been closed")
        result: Any = await self._thread.do(lambda: self._run_block(given))
        return result if self._part.is_last else await self._part.call_next("run_block", result)

    async def _compute(self, items: Sequence[Any]) -> list[Any]:
        thread, usage = self._thread, self.usage
        assert self._inference is not None, "open it first"
        began = time.monotonic()
        try:
            if thread is None:
                raise Closed("the model has been closed")
            results = await self._in_turn(lambda: self._prepare_and_put(thread, items))
            results = results[0] if self.independent else results
        except PeerLost:
            raise
        except Exception as error:
            results = [self._inference.failed(failure_of(error)) for _ in items]
        usage.calls += len(items)
        usage.seconds += len(items) * (time.monotonic() - began)
        usage.prompt_tokens += sum(result.prompt_tokens for result in results if not result.too_long)
        for failure in (result.failure for result in results if result.failure is not None):
            for counts in (usage.failures, usage.faults):
                counts[failure.cause] = counts.get(failure.cause, 0) + 1
        return results

    async def _in_turn(self, put: Callable[[], Future[Any]]) -> Any:
        """What the model's thread makes of something that is put into its queue once all that came before has been prepared."""
        return await asyncio.wrap_future(await asyncio.get_running_loop().run_in_executor(self._preparing, put))

    def _prepare_and_put(self, thread: ModelThread[Any, Any], items: Sequence[Any]) -> Future[list[Any]]:
        assert self._inference is not None
        prepared = [self._inference.prepare(item) for item in items]
        return thread.put([prepared] if self.independent else prepared)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _compute_batch(self, waiting: list[Any]) -> list[Any]:
        return [self._results(list(items)) for items in waiting] if self.independent else self._results(waiting)

    def _results(self, items: list[Any]) -> list[Any]:
        assert self._inference is not None
        assert self._weights is not None
        if not self._weights.on_device:
            return [self._inference.failed(self._not_loaded) for _ in items]
        return self._inference.compute(items)

    def _run_block(self, given: BlockInput) -> Any:
        assert isinstance(self._inference, ScalarInference)
        assert self._weights is not None
        if not self._weights.on_device:
            raise RuntimeError(self._not_loaded.message)
        try:
            return self._inference.run_block(given)
        except Exception as error:
            if is_out_of_memory(error):
                release_memory()
            raise

    def _load(self) -> None:
        assert self._inference is not None
        assert self._weights is not None
        if self._weights.on_device:
            return
        try:
            self._weights.load()
            self._inference.attach(self._weights.model)
        except BaseException:
            self._drop()
            raise

    def _load_or_raise(self) -> None:
        try:
            self._load()
        except PlauditError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            where = "the GPU's memory" if self.settings.device != "cpu" else "memory"
            divide = " With several GPUs, model.rank: [0, 1] divides it among them." if self.scalar else ""
            raise RecipeError(
                f"{self.settings.path} does not fit into the free part of {where}: {failure_of(error).message}. Choose placement: "
                f"offload, or a server on another machine.{divide}"
            ) from None

    def _load_or_keep_failure(self) -> None:
        try:
            self._load()
        except Exception as error:
            failure = failure_of(error)
            self._not_loaded = Failure(failure.cause, f"{self.settings.path} could not be loaded: {failure.message}")

    def _unload(self) -> None:
        assert self._inference is not None
        assert self._weights is not None
        self._inference.detach()
        self._weights.unload()

    def _drop(self) -> None:
        if self._inference is not None and self._weights is not None:
            self._inference.detach()
            self._weights.drop()
