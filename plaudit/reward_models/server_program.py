"""placement: launch. The programs that serve a model: vLLM and SGLang. What they are started with, and how they sleep."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.recipe.reward_models import RewardModel
from plaudit.servers.process import HOST
from plaudit.servers.server_command import ServerCommand
from plaudit.servers.sglang_command import NO_WORK_FOR_HEALTH, SGLANG, key_arguments
from plaudit.servers.vllm_command import KEY_GATE, VLLM, vllm_environment


@dataclass(frozen=True)
class ControlRequest:
    """That a server does something: a POST."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    until_done: bool = False
    """Repeated while the server is too busy for it."""


@dataclass(frozen=True)
class ServerProgram:
    starts: ServerCommand
    model_option: str
    tokenizer_option: str
    scalar: Mapping[str, str | None]
    """Options of a server for a model that scores, or embeds."""
    sleeps: Mapping[str, str | None]
    """Options of one that can sleep."""
    sleep: Sequence[ControlRequest]
    """Weights to host memory, all else dropped, its GPU memory free."""
    wake: Sequence[ControlRequest]
    with_key: Callable[[str, Path, Mapping[str, str]], tuple[list[str], dict[str, str]]]
    """What makes a server refuse requests without the key, those to sleep and to wake too: arguments, and an environment. Given the
    key, a file that may hold it, and the environment that the server inherits."""

    def command(self, program: Sequence[str], model: RewardModel, port: int, *, scalar: bool, key: Sequence[str] = ()) -> list[str]:
        """The command line, from the model's settings and the user's arguments, which come last and win. `key`: arguments from
        `with_key`, which nothing replaces."""
        user_words = [word for argument in model.arguments for word in shlex.split(argument)]
        options: dict[str, str | None] = {self.model_option: str(model.path), "--host": HOST, "--port": str(port)}
        positional: list[str] = []
        if program[-1] == "serve":
            positional = [str(options.pop(self.model_option))]  # `vllm serve` has no --model option
        if model.tokenizer:
            options[self.tokenizer_option] = model.tokenizer
        if model.dtype != "auto":
            options["--dtype"] = model.dtype
        if model.trust_remote_code:
            options["--trust-remote-code"] = None
        options |= self.scalar if scalar else {}
        options |= self.sleeps if model.sleep else {}
        overridden = {word.partition("=")[0] for word in user_words if word.startswith("--")}
        words = [word for name, value in options.items() if name not in overridden for word in (name, value) if word is not None]
        return [*program, *positional, *words, *key, *user_words]


PROGRAMS = {
    "vllm": ServerProgram(
        VLLM,
        model_option="--model",
        tokenizer_option="--tokenizer",
        scalar={"--runner": "pooling"},
        sleeps={"--enable-sleep-mode": None},
        sleep=[ControlRequest("/sleep?level=1")],
        wake=[ControlRequest("/wake_up")],
        with_key=lambda key, _, inherited: (["--middleware", KEY_GATE], vllm_environment(key, inherited)),
    ),
    "sglang": ServerProgram(
        SGLANG,
        model_option="--model-path",
        tokenizer_option="--tokenizer-path",
        scalar={"--is-embedding": None},
        # Without the backup its weights would be lost.
        sleeps={"--enable-memory-saver": None, "--enable-weights-cpu-backup": None},
        sleep=[
            # It would not survive a request in flight, as one that was just cancelled may be.
            ControlRequest("/abort_request", {"rid": "", "abort_all": True}),
            ControlRequest("/flush_cache", until_done=True),
            ControlRequest("/release_memory_occupation"),
        ],
        wake=[ControlRequest("/resume_memory_occupation")],
        with_key=lambda key, file, _: (key_arguments(file, key), NO_WORK_FOR_HEALTH),
    ),
}
"""By the model's dialect."""
