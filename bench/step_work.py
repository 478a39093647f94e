"""What gpu_step.py measures, for every system: rows, settings of each size, model FLOPs, and how a process reports its steps.

Needs only numpy: a peer's environment may lack plaudit.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from rollout_work import FULL, TINY, Work, end_with_parent, grid_prompts, kv_bytes, weight_bytes

PEAK_FLOPS = 989e12  # H200, bf16, dense
LORA_RANK, LORA_ALPHA = 16, 32.0
LR = {"full": 1e-6, "lora": 1e-4}
Tokens = list[int]


@dataclass(frozen=True)
class Steps:
    """Sizes of the steps of a section: of `rl` and `dpo`, prompts and responses; of `sft`, whole rows."""

    stage: str
    rows: int
    """Prompts, pairs or rows of a step."""
    n: int = 1
    """Samples per prompt."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Of an SFT row: all of them, or the most if rows are of all lengths."""
    shortest: int = 0
    """If not 0: lengths of rows are log-uniform from here on."""
    samples: bool = True
    """Whether the step samples; otherwise its responses are given."""

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.new_tokens


SECTIONS = {
    "grpo": Steps("rl", 64, 8, 256, 512),
    "long": Steps("rl", 32, 8, 1600, 512, samples=False),
    "sft": Steps("sft", 32, new_tokens=2048),
    "sft-mixed": Steps("sft", 64, new_tokens=2048, shortest=64),
    "dpo": Steps("dpo", 32, prompt_tokens=256, new_tokens=512),
}
TINY_SECTIONS = {
    "grpo": Steps("rl", 4, 4, 16, 16),
    "long": Steps("rl", 4, 4, 48, 16, samples=False),
    "sft": Steps("sft", 4, new_tokens=64),
    "sft-mixed": Steps("sft", 8, new_tokens=64, shortest=8),
    "dpo": Steps("dpo", 4, prompt_tokens=16, new_tokens=32),
}


def steps_of(job: dict) -> tuple[Steps, Work]:
    return (TINY_SECTIONS if job["tiny"] else SECTIONS)[job["section"]], TINY if job["tiny"] else FULL


# Rows: the same for every system --------------------------------------------------------------------------------------


def prompts_of(steps: Steps, vocabulary: int, step: int) -> list[Tokens]:
    return grid_prompts(vocabulary, steps.rows, steps.prompt_tokens, seed=step)


def responses_of(steps: Steps, vocabulary: int, step: int) -> list[list[Tokens]]:
    """Given responses, n per prompt."""
    return np.random.default_rng([6, step]).integers(0, vocabulary, (steps.rows, steps.n, steps.new_tokens)).tolist()


def sft_rows(steps: Steps, vocabulary: int, step: int) -> list[Tokens]:
    """In the order of their lengths, so that a system that pads has little to pad."""
    rng = np.random.default_rng([7, step])
    lengths = np.full(steps.rows, steps.new_tokens)
    if steps.shortest:
        lengths = np.exp(rng.uniform(np.log(steps.shortest), np.log(steps.new_tokens), steps.rows)).astype(int)
    return [rng.integers(0, vocabulary, length).tolist() for length in sorted(lengths)]


def pairs_of(steps: Steps, vocabulary: int, step: int) -> list[dict[str, Tokens]]:
    """Prompt, chosen and rejected answer; all of the same lengths, so that nobody has to pad."""
    rng = np.random.default_rng([8, step])
    lengths = {"prompt_ids": steps.prompt_tokens, "chosen_ids": steps.new_tokens, "rejected_ids": steps.new_tokens}
    return [{name: rng.integers(0, vocabulary, length).tolist() for name, length in lengths.items()} for _ in range(steps.rows)]


def random_rewards(count: int, step: int) -> list[float]:
    return np.random.default_rng([5, step]).random(count).tolist()


# Model FLOPs ----------------------------------------------------------------------------------------------------------


def lengths_of(steps: Steps, step: int) -> tuple[list[int], int]:
    """Lengths of the sequences that the step trains on, and the number of tokens in the loss."""
    if steps.stage == "sft":
        lengths = [len(row) for row in sft_rows(steps, 2, step)]
        return lengths, sum(lengths) - len(lengths)  # the first token of a row is no target
    count = steps.rows * (steps.n if steps.stage == "rl" else 2)
    return [steps.longest] * count, count * steps.new_tokens


def update_flops(config: dict, lengths: list[int], targets: int, *, lora: bool) -> float:
    """Of one forward and backward pass over the step's sequences, each with its own prompt; nothing recomputed, nothing padded.

    6 · (N · T + H · t) + 12 · L · D · Σ len² / 2      T tokens, of which t in the loss; N weights of the layers' matrices, H of
                                                       the head's; L layers; D = heads · head size; causal attention
    LoRA: 4 instead of 6, because no gradients of the N weights are computed; the adapters' own FLOPs are left out.
    """
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    head = config["vocab_size"] * hidden
    matrices = weight_bytes(config) / 2 - head  # with biases and norms: less than 0.1 %
    attention = 12 * layers * hidden * sum(length**2 for length in lengths) / 2
    return (4 if lora else 6) * (matrices * sum(lengths) + head * targets) + attention


def vllm_share(config: dict, sequences: int, length: int, total_bytes: float) -> float:
    """Of the GPU, for vLLM beside the trainer: weights, keys and values of all sequences, 10 GB for passes; in steps of 0.05."""
    needed = weight_bytes(config) + 1.1 * sequences * length * kv_bytes(config) + 10e9
    return max(0.15, -(-needed // (0.05 * total_bytes)) * 0.05)


# Reporting ------------------------------------------------------------------------------------------------------------


class Report:
    """Appends a process's lines to the results as they come: one with its settings, one per step, one at its end."""

    def __init__(self, job: dict, about: str):
        self._job, self._about = job, about

    def begin(self) -> None:
        self._write("began")

    def chosen(self, batch: int) -> None:
        """Rows per pass: the parent halves them if memory runs out."""
        self._write("chosen", rows=batch)

    def settings(self, settings: dict, search_s: float = 0.0) -> None:
        """Also notes the seconds since the parent started this process, without those of a search."""
        start_s = time.time() - self._job["began"] - search_s
        self._write("settings", about=self._about, settings=settings, start_s=start_s, search_s=search_s)

    def step(self, number: int, found: dict[str, float]) -> None:
        warm_up = number < self._job["warm_up"]
        print(f"step {number}{' (warm-up)' if warm_up else ''}: {found}", flush=True)
        self._write("warm-up" if warm_up else "step", number=number, **found)

    def profile(self, phases: dict[str, dict]) -> None:
        """The seconds of each phase, and of its kernels."""
        self._write("profile", phases=phases)

    def end(self, memory: dict[str, float]) -> None:
        self._write("end", memory=memory)

    def failed(self, error: str) -> None:
        self._write("failed", error=error)

    def _write(self, line: str, **found) -> None:
        append(self._job["results"], {"run": self._job["run"], "line": line, **found})


def append(file: str | Path, entry: dict) -> None:
    with Path(file).open("a") as lines:
        lines.write(json.dumps(entry) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def as_setting(text: str) -> tuple[str, object]:
    """`name=value`, the value as JSON if it is any."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} should be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def run_jobs(
    jobs_file: str,
    measure: Callable[[dict, "Report"], dict[str, float]],
    about: Callable[[dict], str],
    prepare: Callable[[list[dict]], None] = lambda jobs: None,
) -> NoReturn:
    """The jobs of one process, in order. If memory runs out or CUDA fails, the process ends: the parent starts another for the jobs
    that are left, and tries smaller settings if it was memory."""
    import torch

    end_with_parent()
    jobs = json.loads(Path(jobs_file).read_text())
    prepare(jobs)
    for number, job in enumerate(jobs):
        if number:
            job["began"] = time.time()
        report = Report(job, about(job))
        print(f"--- {job['run']}", flush=True)  # processes share a log
        report.begin()
        try:
            report.end(measure(job, report))
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, torch.OutOfMemoryError):
                report.failed("out of memory")
                leave(3)
            report.failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if "CUDA" in str(error):  # nothing works in this process any more
                leave(3)
        gc.unfreeze()  # vLLM's start freezes what exists by then: the trainer of the first job that samples
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        reset_memory()
    leave(0)


def leave(code: int) -> NoReturn:
    """At once: everything is reported, and to end an engine or to unpin memory may take half a minute."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reset_memory() -> None:
    """Peaks and counts of `memory_gb`, from here on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def memory_gb() -> dict[str, float]:
    """Peaks of what torch allocated and reserved, and what the driver says is in use now; how often torch returned what it had
    reserved because the driver had no more, and how often that did not help. None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    counts = torch.cuda.memory_stats()
    return {
        "allocated": allocated / 1e9, "reserved": reserved / 1e9, "driver": (total - free) / 1e9,
        "retries": counts["num_alloc_retries"], "ooms": counts["num_ooms"],
    }  # fmt: skip


def now() -> float:
    """Seconds, after all that was started on the GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
