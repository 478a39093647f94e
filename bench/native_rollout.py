"""plaudit's side of gpu_rollout.py, in a process of its own: the sections of one model, handed over as they are measured."""

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from rollout_cpu import PROMPTS
from rollout_work import Work, config_of, grid_prompts, kv_bytes, mix_of, reporter, run_sections, wanted
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Config

import plaudit
from plaudit.data.pack import micro_batches
from plaudit.files import digest_of
from plaudit.models import attention
from plaudit.models.logprobs import target_logprobs
from plaudit.models.policy import Policy, load_policy
from plaudit.models.residual import keep_residual_precise
from plaudit.objectives.supervised import nll
from plaudit.recipe import Algorithm, Model, Optim
from plaudit.recipe.rl import RLTrain
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import engine as native
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train.experience import experiences, updates
from plaudit.train.policy_loss import policy_loss
from plaudit.train.trainer import Trainer
from plaudit.types import Example, Experience, Group, Prompt, Sample, Score, ScoredGroup

SFT_LR = 5e-4


def build(model: str, work: Work, device: str, *, training: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(
            Qwen2Config(**config_of(model, work)), dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    made.generation_config = GenerationConfig(eos_token_id=None)
    keep_residual_precise(made)  # as plaudit's own loading does
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
    """GB: of live tensors now and at the most, held by torch, in use on the whole device as its driver says."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("allocated", "peak", "reserved", "driver"), 1.0)  # a CPU only tries the script
    free, total = torch.cuda.mem_get_info()
    numbers = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free)
    return dict(zip(("allocated", "peak", "reserved", "driver"), (n / 1e9 for n in numbers), strict=True))


# The sections ---------------------------------------------------------------------------------------------------------


def bandwidth(job: dict, work: Work, report) -> None:
    """Bytes read and written a second when one half of the memory in question is copied to the other."""
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
        seconds = []
        for run in range(1 + job["runs"]):
            spent, samples = timed(engine, requests, Sampling(work.new_tokens, seed=0, step=run))
            assert all(len(sample) == work.new_tokens for sample in samples), "a response ended early"
            assert all(np.isfinite(sample.sampler_logprobs).all() for sample in samples)
            seconds.append(spent)
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
        asked = mix_of(model.config.vocab_size, work, run)
        spent, samples = timed(
            engine, requests_of(asked.prompts, work.mix_n, asked.limits), Sampling(max(asked.limits), seed=0, step=run)
        )
        tokens.append(sum(map(len, samples)))
        rates.append(tokens[-1] / spent)
    found = {"rates": rates[1:], "tokens": tokens[1:], "peak_gb": memory()["peak"], "preempted": getattr(engine, "preempted", 0)}
    report("mix", "native", job["model"], **found, settings={"max_sequences": work.max_sequences})


def sweep(job: dict, work: Work, report) -> None:
    """Decoding alone: the second of two calls with the same prompts makes more tokens, and the difference in time is theirs."""
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
    """How far the log-probs that tokens were sampled with are from those that the trainer gives them."""
    name = job["model"]
    if job["model_path"] and name == Path(job["model_path"]).name:
        from plaudit.data.templates import template_of

        recipe = Model(path=job["model_path"], dtype="bfloat16")
        template = template_of(recipe)
        policy = load_policy(recipe, template, torch.device(job["device"]))
        prompts = [template.prompt_tokens([{"role": "user", "content": text}]) for text in PROMPTS[:8]]
        engine = NativeEngine(policy.model, template.tokenizer, max_sequences=work.mismatch_samples)
        measure_mismatch(policy.model, engine, prompts, work, report, name, "as it is")
        return
    model = build(name, work, job["device"], training=True)
    engine = NativeEngine(model, None, max_sequences=work.mismatch_samples)
    rng, vocabulary = np.random.default_rng(4), model.config.vocab_size
    lengths = rng.integers(work.mismatch_prompt_tokens[0], work.mismatch_prompt_tokens[1] + 1, work.mismatch_samples)
    prompts = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    measure_mismatch(model, engine, prompts, work, report, name, "random weights")

    # A few tokens are most of the text, as in language: so what is learnt in a few steps is a distribution with peaks.
    whole = work.mismatch_prompt_tokens[1] + work.mismatch_new_tokens
    rows_ST = (rng.zipf(2.0, (64, whole)) - 1) % vocabulary
    examples = [Example(row.astype(np.int32), np.arange(whole) > 0) for row in rows_ST]
    trainer = Trainer(Policy(model, template=None), Optim(lr=SFT_LR), seed=0, max_skipped_steps=0)  # pyright: ignore
    targets, loss = sum(e.num_targets for e in examples), float("nan")
    for step in range(work.mismatch_sft_steps):
        batches = micro_batches(examples, work.tokens_per_micro_batch, job["device"])
        lr = SFT_LR * min(1.0, (step + 1) / 5)
        loss = trainer.update(batches, lambda b: (nll(target_logprobs(model, b).logprobs_N, targets), {}), lr)["loss"]
    engine.sync(work.mismatch_sft_steps)
    prompts = [row[:length].tolist() for row, length in zip(rows_ST, lengths, strict=False)]
    case = f"after {work.mismatch_sft_steps} steps of SFT"
    measure_mismatch(model, engine, prompts, work, report, name, case, sft_loss=loss)


@torch.no_grad()
def measure_mismatch(model, engine: NativeEngine, prompts: list[list[int]], work: Work, report, *name: str, **more) -> None:
    requests = requests_of(prompts, work.mismatch_samples // len(prompts))
    asked = {request.prompt_id: request.tokens for request in requests}
    samples = list(engine.generate(requests, Sampling(work.mismatch_new_tokens, seed=0, step=0)))
    learnt = []
    for sample in samples:
        prompt = asked[sample.prompt_id]
        tokens = np.concatenate([prompt, sample.tokens])
        mask = np.arange(len(tokens)) >= len(prompt)
        learnt.append(Experience(tokens, mask, np.zeros(len(sample)), sample.sampler_logprobs))
    model.eval()
    apart, entropies = [], []
    for batch in micro_batches(learnt, work.tokens_per_micro_batch, model.device):
        logprobs_N, entropy_N = target_logprobs(model, batch, entropy="measured")
        assert batch.targets is not None
        assert entropy_N is not None
        apart.append((logprobs_N - batch.targets.sampler_logprobs_N).float().cpu())
        entropies.append(entropy_N.float().cpu())
    apart_N = torch.cat(apart)
    report(
        "mismatch", "native", *name, mean=apart_N.abs().mean().item(), largest=apart_N.abs().max().item(),
        bias=apart_N.mean().item(), entropy=torch.cat(entropies).mean().item(), tokens=len(apart_N), samples=len(samples), **more,
    )  # fmt: skip


def cycles(job: dict, work: Work, report) -> None:
    """Sample, learn, sample, …: does a cycle take longer, or more memory, as they go on?"""
    bare = memory()
    model = build(job["model"], work, job["device"], training=True)
    trainer = Trainer(Policy(model, template=None), Optim(lr=1e-6), seed=0, max_skipped_steps=0)  # pyright: ignore
    engine = NativeEngine(model, None, max_sequences=work.max_sequences)
    algorithm = Algorithm()
    train = RLTrain(prompts_per_step=work.cycle_prompts, tokens_per_micro_batch=work.tokens_per_micro_batch)
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
                row |= {f"sampling {name}": value for name, value in memory().items()}  # its cache is still there
            samples.append(sample)
        synchronize()
        sampled = time.perf_counter()
        row |= {"sample_s": sampled - began, **{f"sampled {name}": value for name, value in memory().items()}}

        forget_peak()
        began = time.perf_counter()
        learnt = [experiences(group, algorithm) for group in scored(requests, samples, seed=cycle)]
        for chosen in updates(learnt, train, algorithm, horizon=work.cycle_new_tokens, seed=0, step=cycle):
            loss = policy_loss(model, chosen, algorithm, 1.0)
            found = trainer.update(micro_batches(chosen, train.tokens_per_micro_batch, model.device), loss, 1e-6)
            row["mismatch"] = found["mismatch"]
        synchronize()
        row |= {"update_s": time.perf_counter() - began, **{f"trained {name}": value for name, value in memory().items()}}
        engine.sync(cycle + 1)
        rows.append(row)
        print(f"cycle {cycle}: {row}", flush=True)  # to the log
        if cycle >= work.cycle_warm and (cycle + 1 - work.cycle_warm) % 10 == 0:  # a run that is cut short has measured something
            done = rows[work.cycle_warm :]
            columns = {name: [row[name] for row in done] for name in done[0]}
            report("cycles", "native", job["model"], cycles=len(done), bare=bare, columns=columns)


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
    """A model folder for `start`: random weights with a tokenizer that fits."""
    from plaudit.data.templates import load_tokenizer
    from plaudit.prepare.tiny_model import make_tiny_model

    out, source = Path(job["folder"]), job["model_path"]
    if not source:
        rows = Path(__file__).parent.parent / "recipes/first/train.jsonl"
        make_tiny_model([rows], source := out.with_name("tokenizer"))
    tokenizer = load_tokenizer(str(source))
    model = build(job["model"], work, job["device"])
    assert len(tokenizer) <= model.config.vocab_size, "the tokenizer has more tokens than the model"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    report("folder", "native", job["model"])


SECTIONS = {"grid": grid, "mix": mix, "sweep": sweep, "mismatch": mismatch, "cycles": cycles, "folder": folder}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    files = sorted(Path(native.__file__).parent.rglob("*.py"))
    code = digest_of("".join(file.read_text(encoding="utf-8") for file in files))[:8]
    device = torch.cuda.get_device_name() if job["device"] == "cuda" else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    about = f"{device}, plaudit {plaudit.__version__} (engine {code}), {versions}"
    print(about, flush=True)
    run_sections(job, SECTIONS, reporter(job, about), "native")


if __name__ == "__main__":
    main()
