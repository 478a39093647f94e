"""The workload of gpu_rollout.py for both engines (shapes, prompts, limits) and how their processes report results.

Needs only numpy: vLLM's environment may lack plaudit.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SHAPES = {  # Qwen2.5: layers, hidden, heads, kv heads, MLP, vocabulary, tied embeddings
    "0.5B": (24, 896, 14, 2, 4864, 151936, True),
    "1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "7B": (28, 3584, 28, 4, 18944, 152064, False),
}
ENGINES = ("native", "vllm")
TINY_SHAPE = (2, 128, 4, 2, 256, 1000)
RANDOM = "random weights"
FOLDER_OF = "0.5B"  # the model of `start` and of vLLM's `mismatch`, which need it on disk


@dataclass(frozen=True)
class Work:
    """Sizes of the workload. `FULL` is measured; `TINY` is a smoke test on a CPU."""

    tiny: bool = False
    # grid: random prompts, all different
    grid: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"0.5B": (256, 1024), "1.5B": (256, 1024), "7B": (256, 512)})
    prompt_tokens: int = 256
    new_tokens: int = 512
    # mix: lengths and limits are log-uniform; one token of `mix_end_every` ends a response
    mix_models: tuple[str, ...] = ("0.5B", "1.5B")
    mix_prompts: int = 256
    mix_n: int = 8
    mix_prompt_tokens: tuple[int, int] = (32, 2048)
    mix_new_tokens: tuple[int, int] = (16, 2048)
    mix_end_every: int = 500
    mix_warm_prompts: int = 32
    mix_warm_tokens: int = 64
    # sweep: the time of `sweep_new[1]` new tokens less that of `sweep_new[0]`
    sweep_sequences: tuple[int, ...] = (32, 128, 512, 1024, 2048)
    sweep_lengths: tuple[int, ...] = (256, 1024, 4096, 8192)
    sweep_n: int = 8
    sweep_new: tuple[int, int] = (16, 80)
    sweep_bytes: float = 110e9
    # mismatch
    mismatch_samples: int = 64
    mismatch_prompt_tokens: tuple[int, int] = (64, 256)
    mismatch_new_tokens: int = 256
    mismatch_sft_steps: int = 30
    # cycles
    cycles: int = 50
    cycle_warm: int = 10
    cycle_prompts: int = 32
    cycle_n: int = 8
    cycle_prompt_tokens: int = 128
    cycle_new_tokens: int = 128
    tokens_per_micro_batch: int = 16384
    max_sequences: int = 1024
    """Unless a section sets it; this is vLLM's default on such a GPU."""
    copy_bytes: int = 4 << 30


FULL = Work()
TINY = Work(
    tiny=True,
    grid={"0.5B": (4, 8), "1.5B": (4,), "7B": (4,)},
    prompt_tokens=16,
    new_tokens=8,
    mix_prompts=6,
    mix_n=2,
    mix_prompt_tokens=(4, 32),
    mix_new_tokens=(2, 16),
    mix_end_every=10,
    mix_warm_prompts=2,
    mix_warm_tokens=4,
    sweep_sequences=(2, 4, 8),
    sweep_lengths=(32, 64, 128),
    sweep_n=2,
    sweep_new=(2, 10),
    sweep_bytes=500_000,
    mismatch_samples=8,
    mismatch_prompt_tokens=(4, 16),
    mismatch_new_tokens=16,
    mismatch_sft_steps=5,
    cycles=20,
    cycle_warm=1,
    cycle_prompts=4,
    cycle_n=2,
    cycle_prompt_tokens=8,
    cycle_new_tokens=8,
    tokens_per_micro_batch=64,
    max_sequences=16,
    copy_bytes=4 << 20,
)


def config_of(model: str, work: Work) -> dict:
    """The config.json of a model with random weights."""
    layers, hidden, heads, kv_heads, mlp, vocabulary, tied = SHAPES[model]
    if work.tiny:
        layers, hidden, heads, kv_heads, mlp, vocabulary = TINY_SHAPE
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "hidden_act": "silu",
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": mlp, "vocab_size": vocabulary, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 32768,
        "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


# Minimum memory reads of a decode step --------------------------------------------------------------------------------


def weight_bytes(config: dict) -> int:
    """Every bf16 weight once; of the embedding table only what the head reads (all of it, if they are tied)."""
    hidden, mlp, kv = config["hidden_size"], config["intermediate_size"], key_size(config)
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * kv + kv)  # q, o; q's bias; k and v with theirs
    layer = attention + 3 * hidden * mlp + 2 * hidden
    return 2 * (config["num_hidden_layers"] * layer + hidden + config["vocab_size"] * hidden)


def kv_bytes(config: dict) -> int:
    """Keys and values of one token, bf16."""
    return 2 * 2 * config["num_hidden_layers"] * key_size(config)


def key_size(config: dict) -> int:
    return config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]


def floor_tokens_per_s(model: str, work: Work, sequences: int, bytes_per_s: float) -> float:
    """Decoding at copy bandwidth: weights once per step, keys and values of all sequences at their mean length."""
    config, mean_length = config_of(model, work), work.prompt_tokens + work.new_tokens / 2
    return sequences * bytes_per_s / (weight_bytes(config) + sequences * mean_length * kv_bytes(config))


# Prompts --------------------------------------------------------------------------------------------------------------


def grid_prompts(vocabulary: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng([1, seed]).integers(0, vocabulary, (count, length)).tolist()


@dataclass(frozen=True)
class Mix:
    prompts: list[list[int]]
    limits: list[int]
    """Longest response, by prompt."""
    ends: list[int]
    """Tokens that end a response."""
    drawn: list[list[int]]
    """Lengths of the samples, drawn from the distribution that limits and end tokens give."""


def mix_of(vocabulary: int, work: Work, run: int) -> Mix:
    """New prompts for every run, so that none is in a prefix cache."""
    rng = np.random.default_rng([2, run])
    lengths = log_uniform(rng, *work.mix_prompt_tokens, work.mix_prompts)
    limits = log_uniform(rng, *work.mix_new_tokens, work.mix_prompts)
    ends = np.random.default_rng(3).choice(vocabulary, vocabulary // work.mix_end_every, replace=False)
    geometric = rng.geometric(len(ends) / vocabulary, (work.mix_prompts, work.mix_n))
    return Mix(
        prompts=[rng.integers(0, vocabulary, length).tolist() for length in lengths],
        limits=limits.tolist(),
        ends=sorted(ends.tolist()),
        drawn=np.minimum(geometric, limits[:, None]).tolist(),
    )


def mismatch_prompts(vocabulary: int, work: Work) -> list[list[int]]:
    """The same for every engine."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(work.mismatch_prompt_tokens[0], work.mismatch_prompt_tokens[1] + 1, work.mismatch_samples)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).round().astype(int)


# Reporting to the parent process --------------------------------------------------------------------------------------


def reporter(job: dict, about: str) -> Callable[..., None]:
    """A function that reports one entry; a later entry with the same key replaces it."""

    def report(section: str, engine: str, model: str, case: str = "", **found) -> None:
        key = "/".join(part for part in (section, engine, model, case) if part)
        entry = {"key": key, "section": section, "engine": engine, "model": model, "case": case, "about": about, **found}
        with Path(job["results"]).open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return report


def run_sections(job: dict, sections: dict[str, Callable], report: Callable[..., None], engine: str) -> None:
    """Run the job's sections and report the seconds each took."""
    end_with_parent()
    for section in job["sections"]:
        began = time.perf_counter()
        sections[section](job, TINY if job["tiny"] else FULL, report)
        report("spent", engine, job["model"], section, seconds=time.perf_counter() - began)
    report("done", engine, job["model"])


FAILED = "failed"
"""File by which each of two processes learns that the other will have no further turn."""


class Turns:
    """Two processes that are measured in turn, each with its model loaded: runs of one alternate with runs of the other. Without a
    folder there is no other process, and every turn comes at once."""

    def __init__(self, job: dict, engine: str, case: str):
        self.folder, self.engine = job.get("turns"), engine
        self.case, self.taken = case, 0

    def ready(self) -> None:
        """Warmed up: the first turn comes when the other is, too."""
        self._say("ready")
        self._wait_for(*ENGINES, what="ready")

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self.engine == ENGINES[0] and self.taken:
            self._wait_for(ENGINES[1], what=f"ran-{self.taken}")
        elif self.engine == ENGINES[1]:
            self._wait_for(ENGINES[0], what=f"ran-{self.taken + 1}")
        self.taken += 1
        yield
        self._say(f"ran-{self.taken}")

    def end(self) -> None:
        """All runs are done: those of the other, too, which nothing may disturb."""
        self._wait_for(*ENGINES, what=f"ran-{self.taken}")

    def _file(self, engine: str, what: str) -> Path:
        return Path(self.folder or "") / f"{engine}-{self.case}-{what}"

    def _say(self, what: str) -> None:
        if self.folder is not None:
            self._file(self.engine, what).touch()

    def _wait_for(self, *engines: str, what: str) -> None:
        while self.folder is not None and not all(self._file(engine, what).exists() for engine in engines):
            if (Path(self.folder) / FAILED).exists():
                raise RuntimeError("the other engine's process has failed")
            time.sleep(0.02)


def end_with_parent() -> None:
    """If the parent process is killed, end this process and its children, so that the GPU is freed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def wanted(job: dict, *key: str) -> bool:
    return "/".join(part for part in key if part) not in job["skip"]


def keys_of(section: str, engine: str, model: str, work: Work) -> list[str]:
    """Keys of the entries of a section, engine and model."""
    mismatch = [RANDOM, f"after {work.mismatch_sft_steps} steps of SFT"] if engine == "native" else [RANDOM]
    cases = {
        "grid": [str(sequences) for sequences in work.grid.get(model, ())],
        "sweep": [f"{sequences}x{length}" for sequences in work.sweep_sequences for length in work.sweep_lengths],
        "mismatch": mismatch if model in work.grid else ["as it is"],
    }.get(section, [""])
    return ["/".join(part for part in (section, engine, model, case) if part) for case in cases]
