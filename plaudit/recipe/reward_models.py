"""The model behind a reward: which one, where it lives, how it is asked."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

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

from plaudit.errors import redact
from plaudit.recipe.section import Section, zero_or_more


class CallLimits(Section):
    """How hard a model's servers are pressed, all of them together, and when a call is given up. A call asks one question."""

    at_once: PositiveInt = 512
    """Calls under way at the same time."""
    per_s: PositiveFloat | None = None
    """Calls begun in a second, repeated ones included."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens in a minute, of prompts and answers together: a call waits while the last minute's are used up."""
    connect_timeout_s: PositiveFloat = 10.0
    """How long a server may take to accept a connection."""
    read_timeout_s: PositiveFloat | None = None
    """How long a server may be silent. An answer comes whole, so this is also the longest that one may take to write."""
    call_timeout_s: PositiveFloat | None = None
    """The longest that one try may take; default: what is left until the deadline."""
    deadline_s: PositiveFloat = 120.0
    """The longest that one number may take, all tries included; of an answer, sampling.timeout_s says it. Waiting for its turn does
    not count."""
    retries: NonNegativeInt = 4
    """Further tries of a call that failed in a way that may pass."""
    backoff_s: NonNegativeFloat = 0.5
    """The wait before the first of them, about; it doubles each time."""


class RewardModel(Section):
    path: str | None = None
    """A folder in Hugging Face format, or a name on the hub. With placement: server, the name it is served under, which may be left
    out where it serves one model only."""
    placement: Literal["resident", "offload", "server", "launch"] = "resident"
    """resident: in this process, always there. offload: in this process, on the device only while it scores. server: behind `url`.
    launch: a vLLM server that is started for it, and stopped when we end."""
    url: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """placement: server. Where it listens (http://127.0.0.1:8000); several: replicas of the same model, asked by load."""
    dialect: Literal["vllm", "sglang", "openai"] = "vllm"
    """placement: server. Whose server it is: how scalar models are asked differs."""
    credential: str | None = None
    """placement: server. The NAME of the environment variable that holds its key; the key itself never stands in a recipe."""
    tokenizer: str | None = None
    """Another folder or model whose tokenizer to use."""
    chat_template: str | None = None
    """chatml, llama3, qwen or plain; a .jinja file; or another model's folder or name. Default: the tokenizer's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of its weights, in this process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes, in this process."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; what is longer is malformed (default reward), not cut. Default: what the model's context leaves."""
    program: str | None = None
    """placement: launch. Where vLLM is installed elsewhere: its `vllm` command, or the Python that has it
    (`.venv-vllm/bin/python`). `env CUDA_VISIBLE_DEVICES=1 …` before it works. Default: the Python that runs plaudit."""
    arguments: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """placement: launch. Further arguments of the server, as they would stand on its command line."""
    port: PositiveInt | None = None
    """placement: launch. Default: a free one."""
    start_timeout_s: PositiveFloat = 500.0
    """placement: launch. How long it may take until it answers."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""
    limits: CallLimits = CallLimits()
    """placement: server or launch. How hard its servers are pressed: calls at once, rates, timeouts, retries."""
    prompt_price: NonNegativeFloat | None = None
    """What a million tokens of prompts cost; with it, what the model costs is counted (judge/cost)."""
    answer_price: NonNegativeFloat | None = None
    """What a million tokens of answers cost."""

    @field_validator("url")
    @classmethod
    def _leads_somewhere(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            try:
                parts = urlsplit(url)
                fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
            except ValueError:
                fine = False
            if not fine:
                raise ValueError(f"{redact(url)} should look like http://127.0.0.1:8000")
        return urls

    @field_validator("arguments")
    @classmethod
    def _hold_no_key(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if any("--api-key" in argument or "--api_key" in argument for argument in arguments):
            raise ValueError("should not hold a key: set VLLM_API_KEY in the environment, which the server and we read both")
        return arguments

    @model_validator(mode="after")
    def _fits_together(self) -> "RewardModel":
        if self.placement == "server" and not self.url:
            raise ValueError("placement: server needs a url, such as http://127.0.0.1:8000")
        if self.placement != "server" and self.url:
            raise ValueError("url belongs to placement: server")
        if self.placement != "server" and self.path is None:
            raise ValueError("path is missing: a folder in Hugging Face format, or a name on the hub")
        if self.placement != "launch" and (self.program or self.arguments or self.port is not None):
            raise ValueError("program, arguments and port belong to placement: launch")
        if self.placement not in ("server", "launch") and self.limits != CallLimits():
            raise ValueError("limits belong to placement: server and launch; a model in this process is asked in batches")
        return self

    @property
    def local_paths(self) -> list[str]:
        """Folders and files on this machine that its answers may depend on; a server's model is known by its name alone."""
        own = None if self.placement == "server" else self.path
        return [given for given in (own, self.tokenizer, self.chat_template) if given is not None]

    def cost(self, prompt_tokens: int, new_tokens: int) -> float | None:
        """Of so many tokens, in the prices' money; None if it has no prices."""
        if self.prompt_price is None and self.answer_price is None:
            return None
        return (prompt_tokens * (self.prompt_price or 0.0) + new_tokens * (self.answer_price or 0.0)) / 1e6


class JudgeSampling(Section):
    """How a judge writes its answers."""

    max_new_tokens: PositiveInt = 1024
    """Longest answer."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    retry_temperature: NonNegativeFloat = 1.0
    """An answer that cannot be read is asked for again at this temperature …"""
    retry: NonNegativeInt = 2
    """… so many times."""
    timeout_s: PositiveFloat | None = None
    """The longest that one answer may take, all retries of the connection included. Default: 120 s, or as long as max_new_tokens
    take at 20 tokens a second, if that is longer."""
    seed: NonNegativeInt = 0
    """Of the sampling."""

    @property
    def longest_s(self) -> float:
        return max(120.0, self.max_new_tokens / 20) if self.timeout_s is None else self.timeout_s
