"""How prompts are continued: the engine, and how tokens are drawn, in training and in validation."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from plaudit.recipe.section import BelowOne, Section, zero_or_more

SERVED_ENGINES = ("vllm", "sglang")
ENGINES = ("native", *SERVED_ENGINES)


class EngineServerSettings(Section):
    """The server that samples, for an engine that is one."""

    program: str | None = None
    """If vLLM or SGLang is installed elsewhere, as it should be: its command (`vllm`, `sglang`), or the Python that has it
    (`.venv-vllm/bin/python`). Default: the Python that runs plaudit."""
    arguments: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """Further arguments of the server, as on its command line."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one server divides the model's weights among."""
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """The share of the GPU's memory that the server may use, weights and cache."""
    sleep: bool = True
    """On a GPU: the server gives its memory back while the trainer computes."""
    weights: Literal["auto", "stream", "files"] = "auto"
    """How new weights reach it. auto: through memory of the GPU that both use, else stream; SGLang: files. stream: through a
    connection. files: through a folder; slow, and works wherever the server sees it."""
    restarts: NonNegativeInt = 3
    """How often it may be started again in a run, after it died or fell silent."""
    start_timeout_s: PositiveFloat = 900.0
    """Time limit for its start: a large model takes minutes."""
    call_timeout_s: PositiveFloat = 600.0
    """Time limit for one call that is no sample: new weights, sleep, waking."""
    silence_s: PositiveFloat = 1800.0
    """It is taken for dead if no sample arrives for so long."""


class RolloutSettings(Section):
    engine: str = "native"
    """The engine that samples. native: plaudit's own, on the trainer's weights. vllm, sglang: a vLLM or SGLang server, started for
    it, that gets new weights after every step. Or a class of yours, path/to/file.py:Class."""
    server: EngineServerSettings = EngineServerSettings()
    """engine: vllm or sglang. Its server."""
    lag: Literal[0, 1] = 0
    """1: the next step is sampled and scored while this one is trained, so with weights that are one step older. It saves time
    if the engine has another GPU than the trainer (docs/engine.md)."""
    n: PositiveInt = 8
    """Samples per prompt: the group size."""
    max_new_tokens: PositiveInt = 1024
    """Longest response; longer ones are truncated and counted."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Log-probs in training use the same temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: PositiveInt | None = None
    """Sample from this many of the most likely tokens."""
    min_p: BelowOne = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    stop: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """Strings that end a response, besides the end token. They are kept in the response."""
    max_sequences: PositiveInt | None = None
    """Sequences sampled concurrently; default: 256 on a CPU, 1024 on a GPU. Fewer if memory runs short."""

    @property
    def files(self) -> list[Path]:
        """The file of a user's engine."""
        return [] if self.engine in ENGINES else [Path(self.engine.rpartition(":")[0]).expanduser()]

    def ineffective_settings(self) -> dict[str, str]:
        return {} if self.engine in SERVED_ENGINES else {"server": f"rollout.engine is {self.engine}, which has no server"}

    @field_validator("engine")
    @classmethod
    def _require_engine(cls, engine: str) -> str:
        if engine not in ENGINES and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", engine):
            raise ValueError(f"should be {', '.join(ENGINES)}, or your own engine as file.py:Class, not {engine!r}")
        return engine

    @field_validator("stop")
    @classmethod
    def _refuse_empty_strings(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("an empty string would end every response immediately")
        return stop


class ValidationSettings(Section):
    n: PositiveInt = 1
    """Samples per validation prompt."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; default: rollout.max_new_tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As rollout.top_p."""
    top_k: PositiveInt | None = None
    """As rollout.top_k."""
    min_p: BelowOne = 0.0
    """As rollout.min_p."""
    max_prompts: PositiveInt | None = None
    """Validate on the first n prompts only; default: all."""

    def ineffective_settings(self) -> dict[str, str]:
        reason = "sampling is greedy at temperature 0; set a temperature"
        return dict.fromkeys(("top_p", "top_k", "min_p"), reason) if self.temperature == 0 else {}
