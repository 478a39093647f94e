"""How prompts are continued: the engine, and how tokens are drawn, in training and in validation."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from plaudit.errors import did_you_mean
from plaudit.recipe.section import BelowOne, Credential, Section, ServerArguments, Urls, strings_or_null, zero_or_more

SERVED_ENGINES = ("vllm", "sglang")
ENGINES = ("native", *SERVED_ENGINES)
METRIC_OF_K = re.compile(r"(?:pass|majority|best_of)@[1-9][0-9]{0,4}")


class EngineServerSettings(Section):
    """The server that samples, for an engine that is one."""

    program: str | None = None
    """If vLLM or SGLang is installed elsewhere, as it should be: its command (`vllm`, `sglang`), or the Python that has it
    (`.venv-vllm/bin/python`). Default: the Python that runs plaudit."""
    arguments: ServerArguments = ()
    """Further arguments of the server, as on its command line."""
    url: Urls = ()
    """Servers that run already, instead of one that is started for each process: http://node2:8000. Started as `plaudit
    engine-command` prints. With fewer servers than processes, processes share them."""
    credential: Credential = None
    """With url: the NAME of the environment variable that holds the servers' key; the key itself never appears in a recipe."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """Numbers of GPUs of this machine that are the servers' alone, not the trainer's; tensor_parallel of them for each process.
    Default: a server uses the GPU of the process that it samples for."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one server divides the model's weights among."""
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """The share of the GPU's memory that the server may use, weights and cache. Default: 0.5; with gpus, 0.9."""
    sleep: bool = True
    """On a GPU that it shares with the trainer: the server gives its memory back while the trainer computes."""
    weights: Literal["auto", "stream", "files"] = "auto"
    """How new weights reach it. auto: through memory of the GPU that both use, else stream; SGLang: files. stream: through a
    connection. files: through a folder; slow, and works wherever the server sees it."""
    weights_folder: Path | None = None
    """For weights that go through files: a folder that plaudit writes and the servers read, under the same path. Default: a
    temporary one on this machine."""
    lora: Literal["auto", "adapters", "merged"] = "auto"
    """With model.lora. adapters: the base's weights are sent once, then only the adapters, after every step. merged: all weights,
    with the adapters merged in. auto: adapters, if the server can use them."""
    restarts: NonNegativeInt = 3
    """How often it may be started again in a run, after it died or fell silent; with url, how often it may be lost."""
    start_timeout_s: PositiveFloat = 900.0
    """Time limit for its start: a large model takes minutes."""
    call_timeout_s: PositiveFloat = 600.0
    """Time limit for one call that is no sample: new weights, sleep, waking."""
    silence_s: PositiveFloat | None = None
    """It is taken for dead if it computes no token for so long. Default: 300; for a server that only says when a sample is complete
    (sglang), 1800."""

    @property
    def resolved_memory_share(self) -> float:
        return self.memory_share or (0.9 if self.gpus or self.url else 0.5)

    def ineffective_settings(self) -> dict[str, str]:
        if self.url:
            names = ("program", "arguments", "gpus", "tensor_parallel", "memory_share", "sleep")
            return dict.fromkeys(names, "url names servers that run already; it belongs on their command line")
        without_url = {"credential": "a server that plaudit starts gets a key of its own; it applies to url"}
        return without_url | ({"sleep": "servers with gpus of their own keep their memory"} if self.gpus else {})

    @model_validator(mode="after")
    def _require_places(self) -> "EngineServerSettings":
        if self.url and self.weights == "files" and self.weights_folder is None:
            raise ValueError("weights: files with url needs weights_folder, a folder that plaudit and the servers see")
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus names a GPU twice: {list(self.gpus)}")
        if len(self.gpus) % self.tensor_parallel:
            raise ValueError(
                f"{len(self.gpus)} gpus cannot be divided among servers that need {self.tensor_parallel} each (tensor_parallel)"
            )
        return self


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
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(strings_or_null)] = None
    """Strings that end a response, besides the end token. They are kept in the response. Default: the lines of stop.txt in the
    model's folder, if there is one; [] for none."""
    max_sequences: PositiveInt | None = None
    """Sequences sampled concurrently; default: 256 on a CPU, 1024 on a GPU. Fewer if memory runs short."""
    drafts: bool = True
    """engine: native, on a CPU. While fewer than 8 sequences run, guess next tokens from text that repeats and check several in one
    step. The samples are the same; there are fewer steps (docs/engine.md)."""

    @property
    def files(self) -> list[Path]:
        """The file of a user's engine."""
        return [] if self.engine in ENGINES else [Path(self.engine.rpartition(":")[0]).expanduser()]

    def ineffective_settings(self) -> dict[str, str]:
        found = {} if self.engine in SERVED_ENGINES else {"server": f"rollout.engine is {self.engine}, which has no server"}
        return found | ({} if self.engine == "native" else {"drafts": f"rollout.engine is {self.engine}, and drafts are native's"})

    @field_validator("engine")
    @classmethod
    def _require_engine(cls, engine: str) -> str:
        if engine not in ENGINES and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", engine):
            raise ValueError(f"should be {', '.join(ENGINES)}, or your own engine as file.py:Class, not {engine!r}")
        return engine

    @field_validator("stop")
    @classmethod
    def _refuse_empty_strings(cls, stop: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if stop is not None and "" in stop:
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
    metrics: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """What k of a prompt's n samples are worth: [pass@4, majority@4, best_of@4], logged as val/pass@4, also by data source."""
    gold: str | None = None
    """With metrics: the reward, by its name, that says what a sample is worth; default: all of them combined. best_of@k is the
    value by this one of the sample that the combined reward prefers."""
    threshold: float = 0.5
    """With metrics: a sample passes if its value is at least this."""

    def ineffective_settings(self) -> dict[str, str]:
        reason = "sampling is greedy at temperature 0; set a temperature"
        ineffective: dict[str, str] = {}
        if self.temperature == 0:
            ineffective |= dict.fromkeys(("top_p", "top_k", "min_p"), reason)
        if not self.metrics:
            ineffective |= dict.fromkeys(("gold", "threshold"), "validation.metrics is empty")
        return ineffective

    @field_validator("metrics")
    @classmethod
    def _require_known_metrics(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if not METRIC_OF_K.fullmatch(name):
                raise ValueError(f"{name!r} is not one of pass@k, majority@k and best_of@k, with a number for k, such as pass@4")
        return metrics

    @model_validator(mode="after")
    def _require_samples_for_metrics(self) -> "ValidationSettings":
        for name, (_, k) in zip(self.metrics, self.metrics_of_k, strict=True):
            if k > self.n:
                raise ValueError(f"metrics: {name} needs {k} samples per prompt, and validation.n is {self.n}: raise it")
            if k > 1 and self.temperature == 0:
                raise ValueError(f"metrics: {name} of greedy samples, which are all the same: set validation.temperature")
        return self

    def require_rewards(self, reads_answers: Mapping[str, bool]) -> None:
        """What metrics need. `reads_answers`: the rewards by name, and whether each reads answers."""
        if self.gold is not None and self.gold not in reads_answers:
            near = did_you_mean(self.gold, reads_answers)
            raise ValueError(f"validation.gold: no reward is called {self.gold!r} (found: {', '.join(reads_answers)}).{near}")
        votes = next((name for name in self.metrics if name.startswith("majority")), None)
        if votes is not None and not any(reads for name, reads in reads_answers.items() if self.gold in (None, name)):
            by = "no reward" if self.gold is None else self.gold
            raise ValueError(
                f"validation.metrics: {votes} counts equal answers, and {by} reads none. math, gsm8k and exact do, and any reward "
                "with view.extract"
            )

    @property
    def metrics_of_k(self) -> list[tuple[str, int]]:
        """('pass', 4) for pass@4."""
        return [(name.partition("@")[0], int(name.partition("@")[2])) for name in self.metrics]
