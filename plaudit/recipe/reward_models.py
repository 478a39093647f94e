"""The model behind a reward: which one, where it runs, and how it generates."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from plaudit.recipe.section import Credential, Section, ServerArguments, Urls

DIVIDED_BY_SERVER = "--tensor-parallel-size"
"""vLLM's argument."""


class RewardModel(Section):
    path: str | None = None
    """A folder in Hugging Face format (or a LoRA adapter's, which is merged into its base), or a name on the hub. With placement:
    server, the served name, which may be left out if the server has only one model."""
    placement: Literal["resident", "offload", "server", "launch"] = "resident"
    """resident: in this process, always on the device. offload: in this process, on the device only while it scores. server: behind
    `url`. launch: a server started for it (`dialect`: vLLM, or SGLang), and stopped at the end."""
    url: Urls = ()
    """placement: server. Its address (http://127.0.0.1:8000); several: replicas of the same model, balanced by load."""
    dialect: Literal["vllm", "sglang", "openai"] = "vllm"
    """placement: server or launch. The server's API. openai: for services that reject fields of vLLM's, such as top_k; they have no
    scalar models."""
    credential: Credential = None
    """placement: server. The NAME of the environment variable that holds its key; the key itself never appears in a recipe."""
    tokenizer: str | None = None
    """Folder or name of another model whose tokenizer to use."""
    chat_template: str | None = None
    """chatml, llama3, qwen or plain; a .jinja file; or another model's folder or name. Default: the tokenizer's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of its weights, in this process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device it runs on, in this process."""
    rank: NonNegativeInt | Literal["all"] | tuple[NonNegativeInt, ...] | None = None
    """placement: resident, offload or launch, with several processes (cluster.gpus). The one that has the model and answers the
    calls of all, from 0; all: a copy in each; a list ([0, 1]): a scalar model that is too large for one GPU, its layers divided
    among these. Default: models are dealt to the processes in turn."""
    gpus: PositiveInt | None = None
    """placement: resident or launch, on several machines (cluster.nodes). GPUs of its own (CPUs, if the machines have no GPUs),
    wherever Ray finds that many free on one machine: a process there has only this model and answers the calls of all. Default: it
    shares the GPU of a rank."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt; a response that makes it longer is malformed, not truncated. Default: what the model's context leaves."""
    program: str | None = None
    """placement: launch. If vLLM or SGLang is installed elsewhere: the Python that has it (`.venv-vllm/bin/python`), or its `vllm`
    command, with `env CUDA_VISIBLE_DEVICES=1 …` before it if needed. Default: the Python that runs plaudit."""
    arguments: ServerArguments = ()
    """placement: launch. Further arguments of the server, as on its command line."""
    port: PositiveInt | None = None
    """placement: launch. The server's port; default: a free one."""
    sleep: bool = False
    """placement: launch, on the trainer's GPU. The server gives its GPU memory back while the trainer computes; its weights wait in
    host memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Turn it on only after reading that code."""
    prompt_price: NonNegativeFloat | None = None
    """Price of a million prompt tokens; with it, the model's cost is a metric (judge/cost)."""
    answer_price: NonNegativeFloat | None = None
    """Price of a million answer tokens."""

    @model_validator(mode="after")
    def _check_placement(self) -> "RewardModel":
        if self.placement == "server" and not self.url:
            raise ValueError("placement: server needs a url, such as http://127.0.0.1:8000")
        if self.placement != "server" and self.url:
            raise ValueError("url belongs to placement: server")
        if self.placement != "server" and self.path is None:
            raise ValueError("path is missing: a folder in Hugging Face format, or a name on the hub")
        if self.placement != "launch" and (self.program or self.arguments or self.port is not None or self.sleep):
            raise ValueError("program, arguments, port and sleep belong to placement: launch")
        if self.placement == "launch" and self.dialect == "openai":
            raise ValueError("placement: launch starts vLLM or SGLang: set dialect to vllm or sglang")
        if self.placement == "server" and self.rank is not None:
            raise ValueError("rank belongs to placement: resident, offload and launch; a server is reached by all processes")
        if self.gpus is not None and (self.placement not in ("resident", "launch") or self.sleep):
            raise ValueError("gpus are the model's own: they belong to placement: resident, and to launch without sleep")
        if self.gpus is not None and self.rank is not None:
            raise ValueError("rank: a process that trains has the model; gpus: another one has it. Give one of them")
        if self.gpus is not None and self.gpus > 1 and self.placement == "resident":
            raise ValueError(
                f"gpus: a resident model uses one. Divide it with placement: launch, arguments: {DIVIDED_BY_SERVER} {self.gpus}"
            )
        if isinstance(self.rank, tuple):
            self._check_ranks(self.rank)
        return self

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        if self.placement == "launch":
            raise ValueError(
                f"rank: one, or all, with placement: launch. Its server divides a model with arguments: {DIVIDED_BY_SERVER} "
                f"{max(2, len(ranks))}"
            )
        if len(ranks) < 2 or len(set(ranks)) < len(ranks):
            raise ValueError("rank: a list divides the model among at least two ranks, each named once, such as [0, 1]")

    @property
    def is_served(self) -> bool:
        """On a server, so that calls take requests; otherwise the model is in this process."""
        return self.placement in ("server", "launch")

    @property
    def on_device(self) -> Literal["always", "collecting", "scoring"]:
        """When it takes memory on the device that it shares with others: while a step's groups are sampled and scored, so not
        while the trainer computes; or only while they are scored, in turn with other such models."""
        return "scoring" if self.placement == "offload" else "collecting" if self.sleep else "always"

    @property
    def local_paths(self) -> list[str]:
        """Folders and files on this machine that its answers depend on; a model on a server is identified by its name alone."""
        own = None if self.placement == "server" else self.path
        return [given for given in (own, self.tokenizer, self.chat_template) if given is not None]

    def cost(self, prompt_tokens: int, new_tokens: int) -> float | None:
        """Cost of that many tokens, in the currency of the prices; None without prices."""
        if self.prompt_price is None and self.answer_price is None:
            return None
        return (prompt_tokens * (self.prompt_price or 0.0) + new_tokens * (self.answer_price or 0.0)) / 1e6


class EmbeddingModel(RewardModel):
    """A model that embeds texts."""

    @model_validator(mode="after")
    def _check_embedding(self) -> "EmbeddingModel":
        if self.placement == "offload":
            raise ValueError("an embedding model is resident, or on a server (placement: server or launch)")
        if self.chat_template is not None:
            raise ValueError("an embedding model reads texts as they are: it has no chat_template")
        if self.tokenizer is not None and self.placement != "launch":
            raise ValueError("tokenizer belongs to placement: launch; elsewhere an embedding model uses its own")
        if isinstance(self.rank, tuple):
            raise ValueError("rank: one, or all: an embedding model is not divided")
        return self


class JudgeSampling(Section):
    """How a judge generates its answers."""

    max_new_tokens: PositiveInt = 1024
    """Maximum length of an answer."""
    temperature: NonNegativeFloat = 0.0
    """0 for greedy decoding."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this total probability."""
    seed: NonNegativeInt = 0
    """Seed of the sampling."""
