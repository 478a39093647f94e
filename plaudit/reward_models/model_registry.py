"""The models that a run's rewards use: each is opened once, however many rewards use it.

Rewards with equal `model` sections that use the model in the same way (to score, or to generate) share one backend: one copy of the
weights, one server, one pool of connections with its limits. The first reward opens it, the last one closes it. Its own usage
counts every call; each reward's handle counts that reward's calls as well. With several processes, a model is opened by one of them
(`peers.py`).
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import EmbeddingModel, RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.divided import ModelPart, require_several_processes
from plaudit.reward_models.peers import ModelPeers
from plaudit.types import Message

if TYPE_CHECKING:
    import torch

GENERIC_NAMES = ("model", "best", "final", "latest", "last", "hf")
"""Folder names that identify a model only together with their parent folder."""


def build_backend(
    settings: RewardModel,
    limits: ModelLimits,
    *,
    scalar: bool,
    independent: bool = False,
    device: "torch.device | None" = None,
    part: ModelPart | None = None,
) -> Backend:
    """The backend for the model's placement, not opened yet. Each is imported on use: a judge behind a URL needs no torch.

    `scalar`: the model scores and does not generate. `independent`: a model in this process computes each call as its own batch, so
    its scores are bit-identical whatever else is scored at the same time. `device`: this process's, if it is one of several.
    `part`: what this process has of a divided model.
    """
    if isinstance(settings, EmbeddingModel) and settings.placement != "launch":
        from plaudit.reward_models.embeddings import EmbeddingClient, LocalEmbeddings

        return EmbeddingClient(settings, limits) if settings.placement == "server" else LocalEmbeddings(settings, device)
    match settings.placement:
        case "server":
            from plaudit.reward_models.server_client import ServerClient

            return ServerClient(settings, limits, scalar=scalar)
        case "launch":
            from plaudit.reward_models.launch import LaunchedModel

            return LaunchedModel(settings, limits, scalar=scalar)
        case _:
            from plaudit.reward_models.local import LocalModel

            return LocalModel(settings, scalar=scalar, independent=independent, device=device, part=part)


class SharedModel:
    """A backend with the handles of the rewards that use it."""

    def __init__(self, settings: RewardModel, backend: Backend, *, scalar: bool):
        self.settings, self.backend, self.scalar = settings, backend, scalar
        self.handles: list[ModelHandle] = []
        self._opening = asyncio.Lock()
        self._opened = False
        self._error: Exception | None = None

    async def open(self) -> None:
        """Opens the backend once. If that failed, every later caller gets the same error."""
        async with self._opening:
            if self._error is not None:
                raise self._error
            if not self._opened:
                try:
                    await self.backend.open()
                except Exception as error:
                    self._error = error
                    raise
                self._opened = True

    async def release(self, handle: "ModelHandle") -> None:
        """Closes the backend with its last handle."""
        if handle in self.handles:
            self.handles.remove(handle)
            if not self.handles:
                _registry().models.pop((self.settings, self.scalar), None)
                await self.backend.close()

    @property
    def name(self) -> str:
        """Short name for metrics: the folder's name, or the served name."""
        *parents, last = PurePath(self.backend.name).parts or ("model",)
        generic = last in GENERIC_NAMES or last.startswith(("step_", "checkpoint", "global_step"))
        return f"{parents[-1]}-{last}" if generic and parents and parents[-1] != "/" else last


class ModelHandle(Backend):
    """One reward's access to a shared model. `usage` counts this reward's requests, each once however often it was retried."""

    def __init__(self, model: SharedModel, label: str):
        self.model, self.label, self.usage = model, label, Usage()
        model.handles.append(self)

    @property
    def name(self) -> str:
        return self.model.backend.name

    @property
    def weights(self) -> Backend:
        return self.model.backend

    async def open(self) -> None:
        try:
            await self.model.open()
        except RecipeError as error:
            raise RecipeError(f"reward '{self.label}': {error}") from None

    async def close(self) -> None:
        await self.model.release(self)

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        answers = await self.model.backend.generate(requests, params)
        self.usage.new_tokens += sum(answer.new_tokens for answer in answers)
        self._count(answers)
        return answers

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        scores = await self.model.backend.score(conversations)
        self._count(scores)
        return scores

    def _count(self, results: Sequence[Answer | ScalarScore]) -> None:
        self.usage.calls += sum(not result.too_long for result in results)
        self.usage.prompt_tokens += sum(result.prompt_tokens for result in results if not result.too_long)
        for failure in (result.failure for result in results if result.failure is not None):
            self.usage.failures[failure.cause] = self.usage.failures.get(failure.cause, 0) + 1

    async def load(self) -> None:
        await self.model.backend.load()

    async def unload(self) -> None:
        await self.model.backend.unload()

    def info(self) -> ModelInfo:
        return self.model.backend.info()


# One registry per event loop -----------------------------------------------------------------------------------------


@dataclass
class ModelRegistry:
    models: dict[tuple[RewardModel, bool], SharedModel] = field(default_factory=dict)
    independent: bool = False
    peers: ModelPeers | None = None

    def build(self, settings: RewardModel, limits: ModelLimits, *, scalar: bool) -> Backend:
        """The backend of a model that this process opens itself, or another one's."""
        peers = self.peers

        def build(limits: ModelLimits, part: ModelPart | None = None) -> Backend:
            device = None if peers is None else peers.device
            return build_backend(settings, limits, scalar=scalar, independent=self.independent, device=device, part=part)

        if peers is None:
            require_several_processes(settings)
            return build(limits)
        return peers.backend((settings, scalar), limits, build)


# Every reward runner has its own event loop, so a loop's models belong to one recipe.
_REGISTRIES: WeakKeyDictionary[asyncio.AbstractEventLoop, ModelRegistry] = WeakKeyDictionary()


def use_independent_batches() -> None:
    """Models acquired on this event loop from now on give bit-identical scores, whatever else is scored at the same time."""
    _registry().independent = True


def use_peers(peers: ModelPeers) -> None:
    """Models acquired on this event loop from now on are those of all processes."""
    _registry().peers = peers


def acquire_model(settings: RewardModel, limits: ModelLimits, *, scalar: bool, label: str) -> ModelHandle:
    """A handle for the reward called `label` on the model, which another reward may have opened already.

    The limits are those of the first reward; reading a recipe checks that the others agree with them.
    """
    registry, key = _registry(), (settings, scalar)
    if key not in registry.models:
        registry.models[key] = SharedModel(settings, registry.build(settings, limits, scalar=scalar), scalar=scalar)
    return ModelHandle(registry.models[key], label)


def collecting_models(loop: asyncio.AbstractEventLoop) -> list[Backend]:
    """The models that leave the device to the trainer while it computes."""
    models = _REGISTRIES.get(loop, ModelRegistry()).models.values()
    return [model.backend for model in models if model.settings.on_device == "collecting"]


def _registry() -> ModelRegistry:
    return _REGISTRIES.setdefault(asyncio.get_running_loop(), ModelRegistry())


# Usage ---------------------------------------------------------------------------------------------------------------

UsageTotals = dict[str, float]
"""calls, retries, prompt_tokens, new_tokens; cost, if the model has prices."""


def usage_by_model(loop: asyncio.AbstractEventLoop) -> dict[str, UsageTotals]:
    """Each model's totals since it was opened, by its name; for a model that several rewards use, also by `model/reward`."""
    totals: dict[str, UsageTotals] = {}
    seen: Counter[str] = Counter()
    # Sorted by settings, not by who came first: a resumed run must use the same names.
    models = _REGISTRIES.get(loop, ModelRegistry()).models.values()
    for model in sorted(models, key=lambda model: (model.name, model.scalar, model.settings.model_dump_json())):
        seen[model.name] += 1
        name = f"{model.name}-{seen[model.name]}" if seen[model.name] > 1 else model.name
        totals[name] = usage_totals(model.backend.usage, model.settings)
        if len(model.handles) > 1:
            for handle in sorted(model.handles, key=lambda handle: handle.label):
                totals[f"{name}/{handle.label}"] = usage_totals(handle.usage, model.settings)
    return totals


def usage_totals(usage: Usage, settings: RewardModel) -> UsageTotals:
    counts = {"calls": usage.calls, "retries": usage.retries, "prompt_tokens": usage.prompt_tokens, "new_tokens": usage.new_tokens}
    cost = settings.cost(usage.prompt_tokens, usage.new_tokens)
    return {name: float(count) for name, count in counts.items()} | ({} if cost is None else {"cost": cost})


def describe_usage(totals: UsageTotals) -> str:
    """'120 calls (3 retries), 12,345 + 678 tokens, cost 0.02': for a line in the terminal."""
    retries = f" ({totals['retries']:,.0f} retries)" if totals["retries"] else ""
    cost = f", cost {totals['cost']:.4g}" if "cost" in totals else ""
    return f"{totals['calls']:,.0f} calls{retries}, {totals['prompt_tokens']:,.0f} + {totals['new_tokens']:,.0f} tokens{cost}"
