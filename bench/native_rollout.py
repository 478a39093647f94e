"""plaudit's side of gpu_rollout.py, run in a separate process: the sections of one model, reported as they are measured."""

import copy
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from rollout_cpu import PROMPTS
from rollout_work import (
    FOLDER_OF,
    RANDOM,
    Turns,
    Work,
    config_of,
    grid_prompts,
    kv_bytes,
    mismatch_prompts,
    mix_of,
    reporter,
    run_sections,
    wanted,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Config

import plaudit
from plaudit.data.pack import micro_batches
from plaudit.data.templates import load_model_template, load_template, load_tokenizer
from plaudit.files import text_digest
from plaudit.models import attention
from plaudit.models.fused import prepare_layers
from plaudit.models.logprobs import target_logprobs
from plaudit.models.lora import merged_weights
from plaudit.models.merged import has_merged
from plaudit.models.trainable import TrainableModel, load_model, load_policy
from plaudit.objectives.supervised import nll
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import LoraSettings, ModelSettings, OptimSettings, RLRecipe
from plaudit.rl.experience import PackedSequences, Update
from plaudit.rl.learner import Learner
from plaudit.rollout.engine import Request, Sampling, Weights
from plaudit.rollout.native import engine as native
from plaudit.rollout.native import forward, sampler
from plaudit.rollout.native.decoder import FusedDecoder, ModuleDecoder
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.noise import position_keys
from plaudit.rollout.native.sampler import draw_scores
from plaudit.seeding import stable_seed
from plaudit.train.trainer import Trainer
from plaudit.types import Example, Experience, Group, Prompt, Sample, Score, ScoredGroup
from plaudit.world import World

SFT_LR = 5e-4


def build(model: str, work: Work, device: str, *, training: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(
            Qwen2Config(**config_of(model, work)), dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    made.generation_config = GenerationConfig(eos_token_id=None)
    prepare_layers(made)  # as plaudit's own loading does
    # Sampling alone needs no room for gradients and moments; vLLM leaves none either.
    return made.train() if training else made.eval().requires_grad_(False)


def requests_of(prompts: Sequence[Sequence[int]], n: int = 1, limits: Sequence[int] | None = None) -> list[Request]:
    limits = limits or [None] * len(prompts)  # pyright: ignore
    return [Request(f"p{i}", np.array(p), n, limit) for i, (p, limit) in enumerate(zip(prompts, limits, strict=True))]  # pyright: ignore


def timed(engine: NativeEngine, requests: list[Request], sampling: Sampling) -> tuple[float, list[Sample]]:
    synchronize()
    began = time.perf_counter()
    samples = list(engine.generate(requests, sampling))
    synchronize()
    assert len(samples) == sum(request.n for request in requests)
    return time.perf_counter() - began, samples


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, float]:
    """GB: live tensors now and at peak, reserved by torch, and in use on the device as reported by the driver."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("allocated", "peak", "reserved", "driver"), 1.0)  # a CPU run is only a smoke test
    free, total = torch.cuda.mem_get_info()
    numbers = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free)
    return dict(zip(("allocated", "peak", "reserved", "driver"), (n / 1e9 for n in numbers), strict=True))


# The sections ---------------------------------------------------------------------------------------------------------


def bandwidth(job: dict, work: Work, report) -> None:
    """Bytes read and written per second when one buffer is copied to another."""
    source = torch.ones(work.copy_bytes, dtype=torch.uint8, device=job["device"])
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronize()
        began = time.perf_counter()
        target.copy_(source)
        synchronize()
        seconds.append(time.perf_counter() - began)
    report("bandwidth", "native", "copy", bytes=work.copy_bytes, bytes_per_s=2 * work.copy_bytes / statistics.median(seconds[2:]))


def grid(job: dict, work: Work, report) -> None:
    bandwidth(job, work, report)
    model = build(job["model"], work, job["device"])
    for sequences in work.grid[job["model"]]:
        if not wanted(job, "grid", "native", job["model"], str(sequences)):
            continue
        forget()
        began = time.perf_counter()
        engine = NativeEngine(model, None, max_sequences=sequences)
        made_s = time.perf_counter() - began
        requests = requests_of(grid_prompts(model.config.vocab_size, sequences, work.prompt_tokens))
        seconds, turns = [], Turns(job, "native", str(sequences))
        for run in range(1 + job["runs"]):
            if run == 1:
                turns.ready()
            with turns.turn() if run else nullcontext():
                spent, samples = timed(engine, requests, Sampling(work.new_tokens, seed=0, step=run))
            assert all(len(sample) == work.new_tokens for sample in samples), "a response ended early"
            assert all(np.isfinite(sample.sampler_logprobs).all() for sample in samples)
            seconds.append(spent)
        turns.end()
        tokens = sequences * work.new_tokens
        report(
            "grid", "native", job["model"], str(sequences), tokens=tokens, rates=[tokens / s for s in seconds[1:]],
            start_s=made_s, first_run_s=seconds[0], peak_gb=memory()["peak"], settings={"max_sequences": sequences},
        )  # fmt: skip
        del engine


def mix(job: dict, work: Work, report) -> None:
    if not wanted(job, "mix", "native", job["model"]):
        return
    forget()
    model = build(job["model"], work, job["device"])
    model.generation_config.eos_token_id = mix_of(model.config.vocab_size, work, 0).ends
    engine = NativeEngine(model, None, max_sequences=work.max_sequences)
    rates, tokens = [], []
    for run in range(1 + job["runs"]):
        workload = mix_of(model.config.vocab_size, work, run)
        spent, samples = timed(
            engine, requests_of(workload.prompts, work.mix_n, workload.limits), Sampling(max(workload.limits), seed=0, step=run)
        )
        tokens.append(sum(map(len, samples)))
        rates.append(tokens[-1] / spent)
    found = {"rates": rates[1:], "tokens": tokens[1:], "peak_gb": memory()["peak"], "preempted": getattr(engine, "preempted", 0)}
    report("mix", "native", job["model"], **found, settings={"max_sequences": work.max_sequences})


def sweep(job: dict, work: Work, report) -> None:
    """Decoding alone: of two calls with the same prompts, the second generates more tokens; the time difference is for these."""
    model = build(job["model"], work, job["device"])
    few, many = work.sweep_new
    for sequences in work.sweep_sequences:
        engine = None
        for length in work.sweep_lengths:
            case = f"{sequences}x{length}"
            if not wanted(job, "sweep", "native", job["model"], case):
                continue
            needed = sequences * length * kv_bytes(config_of(job["model"], work))
            settings = {"sequences": sequences, "length": length, "n": work.sweep_n, "cache_gb": needed / 1e9}
            if needed > work.sweep_bytes:
                report("sweep", "native", job["model"], case, rate=None, settings=settings)
                continue
            if engine is None:
                forget()
                engine = NativeEngine(model, None, max_sequences=sequences)
            prompts = grid_prompts(model.config.vocab_size, sequences // work.sweep_n, length - many, seed=length)
            requests = requests_of(prompts, work.sweep_n)
            try:
                # The first call compiles and captures what this batch and length need; it must be as long as the last.
                calls = [Sampling(new, seed=0, step=step) for step, new in enumerate((many, few, many))]
                _, short, long = (timed(engine, requests, call)[0] for call in calls)
            except torch.OutOfMemoryError as error:
                report("sweep", "native", job["model"], case, rate=None, settings={**settings, "error": str(error)[:200]})
                engine = None
                forget()
                continue
            rate = sequences * (many - few) / max(long - short, 1e-9)
            found = {"rate": rate, "seconds": [short, long], "preempted": getattr(engine, "preempted", 0)}
            report("sweep", "native", job["model"], case, **found, settings=settings)
        del engine


def mismatch(job: dict, work: Work, report) -> None:
    """Difference between the sampler's and the trainer's log-probs of the sampled tokens."""
    name = job["model"]
    if job["model_path"] and name == Path(job["model_path"]).name:
        recipe = ModelSettings(path=job["model_path"], dtype="bfloat16")
        template = load_model_template(recipe)
        policy = load_policy(recipe, template, torch.device(job["device"]))
        prompts = [template.prompt_tokens([{"role": "user", "content": text}]) for text in PROMPTS[:8]]
        engine = NativeEngine(policy.model, template.tokenizer, max_sequences=work.mismatch_samples)
        measure_mismatch(policy.model, engine, prompts, work, report, name, "as it is")
        return
    model = build(name, work, job["device"], training=True)
    engine = NativeEngine(model, None, max_sequences=work.mismatch_samples)
    vocabulary = model.config.vocab_size
    prompts = mismatch_prompts(vocabulary, work)
    measure_mismatch(model, engine, prompts, work, report, name, RANDOM)

    # A few tokens make up most of the text, as in language, so a few training steps give a peaked distribution.
    length = work.mismatch_prompt_tokens[1] + work.mismatch_new_tokens
    rows_ST = (np.random.default_rng(5).zipf(2.0, (64, length)) - 1) % vocabulary
    examples = [Example(row.astype(np.int32), np.arange(length) > 0) for row in rows_ST]
    policy = TrainableModel(model, template=None)  # pyright: ignore
    trainer = Trainer(policy, OptimSettings(lr=SFT_LR), seed=0, max_skipped_steps=0, world=World.alone(model.device))
    targets, loss = sum(e.num_targets for e in examples), float("nan")
    for step in range(work.mismatch_sft_steps):
        batches = micro_batches(examples, work.tokens_per_micro_batch, job["device"])
        lr = SFT_LR * min(1.0, (step + 1) / 5)
        loss = trainer.update(batches, lambda b: (nll(target_logprobs(model, b).logprobs_N, targets), {}), lr)["loss"]
    engine.sync(work.mismatch_sft_steps, Weights(model))
    prompts = [row[: len(prompt)].tolist() for row, prompt in zip(rows_ST, prompts, strict=False)]
    case = f"after {work.mismatch_sft_steps} steps of SFT"
    measure_mismatch(model, engine, prompts, work, report, name, case, sft_loss=loss)


def measure_mismatch(model, engine: NativeEngine, prompts: list[list[int]], work: Work, report, *name: str, **more) -> None:
    requests = requests_of(prompts, work.mismatch_samples // len(prompts))
    prompts = {request.prompt_id: request.tokens for request in requests}
    samples = list(engine.generate(requests, Sampling(work.mismatch_new_tokens, seed=0, step=0)))
    training_samples = [experience_of(prompts[sample.prompt_id], sample.tokens, sample.sampler_logprobs) for sample in samples]
    report("mismatch", "native", *name, **distances(model, training_samples, work), **more)


def experience_of(prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> Experience:
    full = np.concatenate([prompt, tokens])
    return Experience(
        full, np.arange(len(full)) >= len(prompt), reward=0.0, advantages=np.zeros(len(tokens)), sampler_logprobs=logprobs
    )


@torch.no_grad()
def distances(model: PreTrainedModel, training_samples: list[Experience], work: Work) -> dict[str, float]:
    """Between the sampler's log-probs, the trainer's, and those of the same weights in fp32."""
    model.eval()
    precise = in_fp32(model)
    columns: dict[str, list[Tensor]] = defaultdict(list)
    update = Update(training_samples, [1.0] * len(training_samples))
    packed = PackedSequences(training_samples, work.tokens_per_micro_batch, World.alone(model.device), share=True)
    for batch in update.micro_batches(packed):
        logprobs_N, entropy_N = target_logprobs(model, batch, entropy="value")
        assert batch.targets is not None
        assert entropy_N is not None
        columns["trainer"].append(logprobs_N.float().cpu())
        columns["sampler"].append(batch.targets.sampler_logprobs_N.float().cpu())
        columns["fp32"].append(target_logprobs(precise, batch).logprobs_N.cpu())
        columns["entropy"].append(entropy_N.float().cpu())
    trainer_N, sampler_N, fp32_N, entropy_N = (torch.cat(columns[name]) for name in ("trainer", "sampler", "fp32", "entropy"))
    apart_N = trainer_N - sampler_N
    return {
        "mean": apart_N.abs().mean().item(), "largest": apart_N.abs().max().item(), "bias": apart_N.mean().item(),
        "from_fp32": (sampler_N - fp32_N).abs().mean().item(), "trainer_from_fp32": (trainer_N - fp32_N).abs().mean().item(),
        "entropy": entropy_N.mean().item(), "tokens": len(apart_N), "samples": len(training_samples),
    }  # fmt: skip


def in_fp32(model: PreTrainedModel, how: str = attention.NAME, weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """Another model with the same weights. (Not a copy, whose fp32-residual hooks would round rotary embeddings.)"""
    assert torch.get_float32_matmul_precision() == "highest", "matrix products would not be fp32"
    with torch.device(model.device):
        made = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32, attn_implementation=how)
    made.load_state_dict({name: weight.float() for name, weight in (weights or model.state_dict()).items()})
    return made.eval().requires_grad_(False)


def judge(job: dict, work: Work, report) -> None:
    """The trainer's log-probs of samples that vLLM drew from the folder's model."""
    model = load_model(ModelSettings(path=job["folder"], dtype="bfloat16"), torch.device(job["device"]))
    own = build(job["model"], work, job["device"]).state_dict()
    same = all(torch.equal(weight, own[name]) for name, weight in model.state_dict().items())  # the same as native's
    given = json.loads(Path(job["samples"]).read_text())
    training_samples = [
        experience_of(np.array(prompt), np.array(sample["tokens"]), np.array(sample["logprobs"], dtype=np.float32))
        for prompt, sample in zip(given["prompts"], given["samples"], strict=True)
    ]
    more = {name: given[name] for name in ("about", "settings", "start_s")}
    found = distances(model, training_samples, work)
    found["from_transformers"] = from_transformers(job["folder"], training_samples, job["device"])
    report("mismatch", "vllm", job["model"], RANDOM, **found, same_weights=same, **more)


@torch.no_grad()
def from_transformers(folder: str, training_samples: list[Experience], device: str) -> float:
    """Mean abs. difference from transformers' own model and logits in bf16: the mismatch of an unmodified trainer."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    plain.to(device)  # pyright: ignore[reportArgumentType]
    apart = []
    for one in training_samples:
        tokens_T = torch.tensor(one.tokens, dtype=torch.long, device=device)
        logits_TV = plain(tokens_T[None]).logits[0, :-1].float()
        logprobs_T = torch.log_softmax(logits_TV, -1).gather(1, tokens_T[1:, None])[:, 0]
        made = len(one.sampler_logprobs)
        apart.append((logprobs_T[-made:].cpu() - torch.from_numpy(one.sampler_logprobs)).abs())
    return torch.cat(apart).mean().item()


def step(job: dict, work: Work, report) -> None:
    """Seconds of a GRPO step."""
    size = {} if work.tiny else {"cycle_prompts": 64, "cycle_prompt_tokens": 256, "cycle_new_tokens": 512}
    cycles(job, replace(work, cycles=10, cycle_warm=2, **size), report, "step")


def cycles(job: dict, work: Work, report, section: str = "cycles") -> None:
    """Whether time and memory per cycle of sampling and training grow over many cycles."""
    bare = memory()
    model = build(job["model"], work, job["device"], training=True)
    recipe = RLRecipe.model_validate(
        {
            "model": {"path": job["model"]},
            "data": {"train": "none"},
            "rollout": {"n": work.cycle_n, "max_new_tokens": work.cycle_new_tokens},
            "rewards": [{"kind": "exact"}],
            "train": {
                "prompts_per_step": work.cycle_prompts,
                "tokens_per_micro_batch": work.tokens_per_micro_batch,
                "keep_logits": False,
            },
            "run": {"dir": "none"},
        }
    )
    policy, world = TrainableModel(model, template=None), World.alone(model.device)  # pyright: ignore
    learner = Learner(policy, recipe, total_steps=work.cycle_warm + work.cycles, world=world)
    engine = NativeEngine(model, None, max_sequences=work.max_sequences, returns_memory=False)
    rows: list[dict[str, float]] = []
    for cycle in range(work.cycle_warm + work.cycles):
        forget_peak()
        row = {}
        prompts = grid_prompts(model.config.vocab_size, work.cycle_prompts, work.cycle_prompt_tokens, seed=cycle)
        requests = requests_of(prompts, work.cycle_n)
        synchronize()
        began = time.perf_counter()
        samples = []
        for sample in engine.generate(requests, Sampling(work.cycle_new_tokens, seed=0, step=cycle)):
            if not samples:
                row |= {f"sampling {name}": value for name, value in memory().items()}  # its KV cache is still allocated
            samples.append(sample)
        synchronize()
        sampled = time.perf_counter()
        row |= {"sample_s": sampled - began, **{f"sampled {name}": value for name, value in memory().items()}}

        forget_peak()
        began = time.perf_counter()
        row["mismatch"] = learner.learn(scored(requests, samples, seed=cycle), step=cycle + 1)["mismatch"]
        synchronize()
        row |= {"update_s": time.perf_counter() - began, **{f"trained {name}": value for name, value in memory().items()}}
        engine.sync(cycle + 1, learner.weights())
        rows.append(row)
        print(f"cycle {cycle}: {row}", flush=True)  # to the log
        if cycle >= work.cycle_warm and (cycle + 1 - work.cycle_warm) % 10 == 0:  # so that an interrupted run has results
            done = rows[work.cycle_warm :]
            columns = {name: [row[name] for row in done] for name in done[0]}
            report(section, "native", job["model"], cycles=len(done), bare=bare, columns=columns)


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def scored(requests: list[Request], samples: list[Sample], seed: int) -> list[ScoredGroup]:
    """Groups with random rewards."""
    rng, by_prompt = np.random.default_rng([5, seed]), defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt_id].append(sample)
    groups = []
    for request in requests:
        members = tuple(sorted(by_prompt[request.prompt_id], key=lambda sample: sample.index))
        group = Group(Prompt(request.prompt_id, []), request.tokens, members)
        groups.append(ScoredGroup(group, tuple(Score(float(value)) for value in rng.random(len(members))), {}))
    return groups


def folder(job: dict, work: Work, report) -> None:
    """A model folder for `start` and for vLLM: the measured random weights with a matching tokenizer."""
    out, source = Path(job["folder"]), job["model_path"]
    if not source:
        rows = Path(__file__).parent.parent / "recipes/first/train.jsonl"
        make_tiny_model([rows], source := out.with_name("tokenizer"))
    tokenizer = load_tokenizer(str(source))
    model = build(FOLDER_OF, work, job["device"])
    assert len(tokenizer) <= model.config.vocab_size, "the tokenizer has more tokens than the model"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    aside = out.with_name("unfinished")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(out)
    report("folder", "native", FOLDER_OF)


# Correctness ----------------------------------------------------------------------------------------------------------

KINDS = ("llama", "qwen2", "qwen3", "mistral")
CLOSE = {"float32": (1e-4, 1e-3), "bfloat16": (0.03, 0.15)}  # log-probs: mean, maximum
WINDOWED = "mistral with a window of 24"
LENGTHS = (3, 120, 1, 33, 70, 8, 57)
Verdict = tuple[bool, str]


@dataclass(frozen=True)
class Subject:
    policy: TrainableModel
    engine: NativeEngine
    exact: PreTrainedModel
    """The same weights in fp32, in transformers' modules with its own attention."""
    dtype: str

    @property
    def close(self) -> float:
        return CLOSE[self.dtype][1]

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[Request, Sample]]:
        """(request, sample) pairs, by request and then by index."""
        samples = {(s.prompt_id, s.index): s for s in self.engine.generate(requests, sampling)}
        assert len(samples) == sum(request.n for request in requests), "samples are missing"
        return [(request, samples[request.prompt_id, index]) for request in requests for index in range(request.n)]


def subject_of(
    folder: Path,
    dtype: str,
    device: torch.device,
    *,
    lora: Literal["merged", "modules"] | None = None,
    modules: bool = False,
    ends: int = 5,
    **settings,
) -> Subject:  # fmt: skip
    """Freshly initialised weights hardly depend on the input and rarely end: scale them up and add end tokens."""
    adapters = LoraSettings(rank=4, alpha=8.0, dropout=0.5 if lora == "modules" else 0.0) if lora else None
    recipe = ModelSettings(path=str(folder), dtype=dtype, lora=adapters)  # pyright: ignore
    policy = load_policy(recipe, load_template(load_tokenizer(str(folder)), None), device)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
            elif parameter.ndim == 2:
                parameter.mul_(6.0)
    policy.model.generation_config.eos_token_id = list(range(40, 40 + ends)) or None  # pyright: ignore
    exact, can_fuse = exact_model_of(policy), forward.can_fuse
    if modules:
        forward.can_fuse = lambda model: False
    try:
        engine = NativeEngine(policy.model, policy.template.tokenizer, **settings)
    finally:
        forward.can_fuse = can_fuse
    assert isinstance(engine.forward.decoder, ModuleDecoder if modules or (lora and not has_merged(policy.model)) else FusedDecoder)
    return Subject(policy, engine, exact, dtype)


def exact_model_of(policy: TrainableModel) -> PreTrainedModel:
    exact = in_fp32(policy.model, "eager", merged_weights(policy.model) if policy.peft else None)
    exact.generation_config = copy.deepcopy(policy.model.generation_config)
    return exact


def prompts_of(lengths: Sequence[int], n: int = 1) -> list[Request]:
    rng = np.random.default_rng(6)
    return [Request(f"p{i}", rng.integers(50, 300, length).astype(np.int32), n) for i, length in enumerate(lengths)]


@torch.no_grad()
def exact_logits(exact: PreTrainedModel, request: Request, tokens: np.ndarray) -> Tensor:
    """[t, V], from one pass over prompt and response."""
    full = torch.from_numpy(np.concatenate([request.tokens, tokens]).astype(np.int64)).to(exact.device)
    return exact(input_ids=full[None], use_cache=False).logits[0, len(request.tokens) - 1 : -1].float().cpu()  # pyright: ignore


def at(values_TV: Tensor, tokens: np.ndarray) -> Tensor:
    return values_TV.gather(-1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]


def perturbed_logits(exact: PreTrainedModel, request: Request, index: int, tokens: np.ndarray, sampling: Sampling) -> Tensor:
    """[t, V]: logits plus noise, whose argmax each token must be."""
    key = stable_seed(sampling.seed, sampling.step, request.prompt_id, index)
    keys = torch.tensor(key - (1 << 64) if key >> 63 else key).expand(len(tokens))
    return draw_scores(exact_logits(exact, request, tokens), position_keys(keys, torch.arange(len(tokens))), sampling)


def off(subject: Subject, drawn: list[tuple[Request, Sample]], sampling: Sampling, exact: PreTrainedModel | None = None) -> Verdict:
    """Check log-probs against a full pass, and tokens against their keyed noise."""
    errors, short, truncated = [], [], bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)
    for request, s in drawn:
        logits = exact_logits(exact or subject.exact, request, s.tokens)
        for found, temperature in ((s.sampler_logprobs, sampling.temperature or 1.0), (s.untempered_logprobs, 1.0)):
            errors.append((at((logits / temperature).log_softmax(-1), s.tokens) - torch.from_numpy(found)).abs())
        perturbed = perturbed_logits(exact or subject.exact, request, s.index, s.tokens, sampling)
        short.append(perturbed.max(-1).values - at(perturbed, s.tokens))
    mean, largest, missed = torch.cat(errors).mean().item(), torch.cat(errors).max().item(), torch.cat(short).max().item()
    passed, words = (
        mean <= CLOSE[subject.dtype][0] and largest <= subject.close,
        f"{len(torch.cat(short))} tokens: log-probs off by",
    )
    words = f"{words} {mean:.1e}, at most {largest:.1e}"
    if truncated and subject.dtype != "float32":  # rounding may swap the last token kept and the first one cut
        return passed, words
    return passed and missed <= subject.close, f"{words}; keys by {missed:.1e}"


def other_tokens(
    subject: Subject, request: Request, index: int, a: np.ndarray, b: np.ndarray, sampling: Sampling
) -> tuple[bool, bool]:
    """Whether two responses differ, and whether rounding explains their first difference."""
    if np.array_equal(a, b):
        return False, False
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if first is None:
        return True, True
    best = perturbed_logits(subject.exact, request, index, a[: first + 1], sampling)[first]
    return True, bool((best.max() - best[torch.tensor([int(a[first]), int(b[first])])]).max() > subject.close)


def alike(subject: Subject, pairs: Sequence[tuple[Request, int, np.ndarray, np.ndarray]], sampling: Sampling) -> Verdict:
    found = [other_tokens(subject, request, index, a, b, sampling) for request, index, a, b in pairs]
    ties, wrong = sum(differs and not bad for differs, bad in found), sum(bad for _, bad in found)
    return not wrong, f"{len(found) - ties - wrong} of {len(found)} equal" + (f", {ties} differ from a tie on" if ties else "")


def check_samples(make: Callable[..., Subject]) -> Verdict:
    """Greedy tokens against `generate`; log-probs of sampled tokens against a full pass."""
    subject, requests = make(max_sequences=7), prompts_of(LENGTHS, n=2)
    greedy, pairs = Sampling(max_new_tokens=20, temperature=0.0), []
    drawn = subject.sample(requests, greedy)
    by_prompt = {request.prompt_id: s for request, s in drawn}
    for request in requests:
        given = torch.from_numpy(request.tokens.astype(np.int64))[None].to(subject.exact.device)
        more = {"attention_mask": torch.ones_like(given), "pad_token_id": 0}
        out: Tensor = subject.exact.generate(given, do_sample=False, max_new_tokens=20, **more)  # pyright: ignore
        written = out[0, len(request.tokens) :].cpu().numpy()
        pairs.append((request, 0, written, by_prompt[request.prompt_id].tokens))
    same, words = alike(subject, pairs, greedy)
    sampling = Sampling(max_new_tokens=24, temperature=0.7)
    near_greedy, found_greedy = off(subject, drawn, greedy)
    near, found = off(subject, subject.sample(requests, sampling), sampling)
    return same and near_greedy and near, f"greedy: {words}, {found_greedy}; sampled: {found}"


def check_repeats(make: Callable[..., Subject], how: dict) -> Verdict:
    """Bitwise equal tokens and log-probs on a second call and from another engine."""
    torch.use_deterministic_algorithms(True)
    try:
        requests, sampling, subject = prompts_of(LENGTHS, n=3), Sampling(max_new_tokens=24, temperature=0.9, **how), make()
        runs = [one.sample(requests, sampling) for one in (subject, subject, make())]
    finally:
        torch.use_deterministic_algorithms(False)
    equal = [
        all(
            np.array_equal(a.tokens, b.tokens) and np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
            for (_, a), (_, b) in pairs
        )
        for pairs in (list(zip(runs[0], run, strict=True)) for run in runs[1:])
    ]
    near, words = off(subject, runs[0], sampling)
    return all(
        equal
    ) and near, f"again: {'equal' if equal[0] else 'NOT EQUAL'}, by another engine: {'equal' if equal[1] else 'NOT EQUAL'}; {words}"


def check_stops(make: Callable[..., Subject]) -> Verdict:
    """Responses end with the token that completes a stop string; others in the batch continue."""
    subject, requests, sampling = make(max_sequences=5), prompts_of(LENGTHS, n=2), Sampling(max_new_tokens=40, temperature=0.8)
    tokenizer, full = subject.policy.template.tokenizer, subject.sample(requests, sampling)
    pieces = [[s.text[i : i + size] for _, s in full for i in range(3, len(s.text) - size)] for size in (1, 2)]
    plain = [[piece for piece in some if piece.isascii() and piece.isprintable()] for some in pieces]  # no partial characters
    stop = tuple(Counter(some).most_common(1)[0][0] for some in plain)
    stopped = subject.sample(requests, Sampling(max_new_tokens=40, temperature=0.8, stop=stop))
    pairs, ended, wrong = [], 0, []
    for (request, a), (_, b) in zip(full, stopped, strict=True):
        how: dict = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        written = [str(tokenizer.decode(a.tokens[: i + 1], **how)) for i in range(len(a))]
        end = next((i + 1 for i, text in enumerate(written) if any(s in text for s in stop)), None)
        pairs.append((request, a.index, a.tokens[:end], b.tokens))
        if end and np.array_equal(a.tokens[:end], b.tokens):
            ended += 1
            if b.status != "finished" or not b.text.endswith(stop):
                wrong.append(b.text)
    same, words = alike(subject, pairs, sampling)
    return same and ended > 0 and not wrong, f"{words}; {ended} ended by {stop}" + (f"; wrong: {wrong}" if wrong else "")


def check_preempted(make: Callable[..., Subject]) -> Verdict:
    """The same responses with memory for only the longest sequence."""
    requests, sampling = prompts_of((40, 33, 8, 57, 3, 70), n=3), Sampling(max_new_tokens=150, temperature=0.9)
    subject = make(ends=0)
    plenty, before = subject.sample(requests, sampling), subject.engine.preempted
    subject.engine._cache_budget = lambda: 0
    scarce = subject.sample(requests, sampling)
    near, found = off(subject, scarce, sampling)
    pairs = [(request, a.index, a.tokens, b.tokens) for (request, a), (_, b) in zip(plenty, scarce, strict=True)]
    same, words = alike(subject, pairs, sampling)
    preempted = subject.engine.preempted
    return same and near and preempted > before == 0, f"preempted {preempted} times (before: {before}): {words}; {found}"


def check_training(make: Callable[..., Subject]) -> Verdict:
    """Alternate sampling and updates: samples always come from the latest weights."""
    subject, requests = make(max_sequences=7), prompts_of(LENGTHS, n=2)
    trainer = Trainer(subject.policy, OptimSettings(lr=3e-3), seed=0, max_skipped_steps=0, world=World.alone(subject.policy.device))
    model, passed, words = subject.policy.model, True, []
    written = prompts_of((40,))[0].tokens  # arbitrary tokens, only to see that the weights change

    def logprobs_now() -> Tensor:
        return at(exact_logits(exact_model_of(subject.policy), requests[0], written).log_softmax(-1), written)

    at_first = logprobs_now()
    for step in range(4):
        sampling = Sampling(max_new_tokens=24, step=step)
        drawn = subject.sample(requests, sampling)
        near, found = off(subject, drawn, sampling, exact_model_of(subject.policy))
        training_samples = [experience_of(request.tokens, s.tokens, s.sampler_logprobs) for request, s in drawn]
        targets = sum(e.num_targets for e in training_samples)
        for _ in range(3):
            batches = micro_batches(training_samples, 512, model.device)
            trainer.update(batches, lambda b, n=targets: (nll(target_logprobs(model, b).logprobs_N, n), {}), 3e-3)
        changed = (logprobs_now() - at_first).abs().mean().item()
        subject.engine.sync(step + 1, Weights(model))
        passed = passed and near and changed > CLOSE[subject.dtype][0] and {s.version for _, s in drawn} == {step}
        words.append(f"{found.split('; keys')[0]}; weights of {3 * step} updates; then changed by {changed:.2f}")
    return passed, " | ".join(words)


def checks(folder: Path, device: torch.device) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    def making(kind: str, dtype: str, **more) -> Callable[..., Subject]:
        return partial(subject_of, folder / kind, dtype, device, **more)

    small_blocks = {} if device.type == "cuda" else {"block_tokens": 8}  # blocks are small on a GPU anyway
    for dtype in CLOSE:
        for kind in (*KINDS, WINDOWED):
            yield f"{kind}, {dtype}", partial(check_samples, making(kind, dtype))
        for lora in ("merged", "modules"):
            yield f"LoRA, {lora}, {dtype}", partial(check_samples, making("qwen2", dtype, lora=lora))
        yield f"modules as they are, {dtype}", partial(check_samples, making("qwen3", dtype, modules=True))
        for how in ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01}):
            name = " ".join(f"{name}={value}" for name, value in how.items())
            yield f"{name} twice, {dtype}", partial(check_repeats, making("llama", dtype), how)
        yield f"stop strings, {dtype}", partial(check_stops, making("llama", dtype))
        yield f"little memory, {dtype}", partial(check_preempted, making("qwen2", dtype, **small_blocks))
        yield f"training in between, {dtype}", partial(check_training, making("qwen3", dtype))
        for lora in ("merged", "modules"):
            yield f"training in between, LoRA, {lora}, {dtype}", partial(check_training, making("llama", dtype, lora=lora))


def check(job: dict, work: Work, report) -> None:
    """Correctness of the engine's samples on this device, for tiny models of every kind."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode requires it for cuBLAS
    sampler.TILE = 128  # so that these small vocabularies have several tiles, as large ones do
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            rows = Path(__file__).parent.parent / "recipes/first/train.jsonl"
            make_tiny_model([rows], folder / kind, kind=kind, hidden_size=64, vocabulary=320)
        shutil.copytree(folder / "mistral", folder / WINDOWED)
        config = json.loads((folder / WINDOWED / "config.json").read_text())
        (folder / WINDOWED / "config.json").write_text(json.dumps({**config, "sliding_window": 24}))
        for case, look in checks(folder, torch.device(job["device"])):
            began = time.perf_counter()
            try:
                passed, found = look()
            except Exception as error:  # the other checks still run
                traceback.print_exc()
                passed, found = False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            report("check", "native", job["model"], case, passed=bool(passed), found=found, seconds=time.perf_counter() - began)


SECTIONS = {
    "grid": grid, "mix": mix, "sweep": sweep, "mismatch": mismatch, "judge": judge, "cycles": cycles, "step": step,
    "folder": folder, "check": check,
}  # fmt: skip


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    files = sorted(Path(native.__file__).parent.rglob("*.py"))
    code = text_digest("".join(file.read_text(encoding="utf-8") for file in files))[:8]
    device = torch.cuda.get_device_name() if job["device"] == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    about = f"{device}, plaudit {plaudit.__version__} (engine {code}), {versions}"
    print(about, flush=True)
    run_sections(job, SECTIONS, reporter(job, about), "native")


if __name__ == "__main__":
    main()
