"""The model behind a reward: which one, where it lives, how it is asked."""

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from plaudit.recipe.section import Section, any_number


class RewardModel(Section):
    path: str | None = None
    """A folder in Hugging Face format, or a name on the hub. With placement: server, the name it is served under (default: the
    first that the server names)."""
    placement: Literal["resident", "offload", "server", "launch"] = "resident"
    """resident: in this process, always there. offload: in this process, on the device only while it scores. server: behind `url`.
    launch: a vLLM server that is started for it, and stopped when we end."""
    url: Annotated[tuple[str, ...], BeforeValidator(any_number)] = ()
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
    arguments: Annotated[tuple[str, ...], BeforeValidator(any_number)] = ()
    """placement: launch. Further arguments of the server, as they would stand on its command line."""
    port: PositiveInt | None = None
    """placement: launch. Default: a free one."""
    start_timeout_s: PositiveFloat = 500.0
    """placement: launch. How long it may take until it answers."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""

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
        return self


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
    timeout_s: PositiveFloat = 120.0
    """The longest that one answer may take, all retries of the connection included."""
    seed: NonNegativeInt = 0
    """Of the sampling."""
