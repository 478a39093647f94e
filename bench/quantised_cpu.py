"""Sampling with LoRA on a base in 4 or 8 bits on a CPU: weights dequantised for every step, or once per call; or not quantised.

    plaudit prepare smollm2 --out models/smollm2
    python bench/quantised_cpu.py       # five minutes on one core

SmolLM2-135M, adapters of rank 16 with random numbers, 16 prompts of 40 tokens, which are not text, × 32 new tokens. CPU seconds of
whole calls, prefill included, without packed weights, which change the last bits; the kinds of runs take turns, and the best of
each counts. Samples must be the same to the bit, however weights are made.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from rollout_cpu import REPOSITORY

from plaudit.data.templates import load_model_template
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import engine as native
from plaudit.rollout.native.engine import NativeEngine

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 40, 32


def engine_of(folder: Path, dtype: str, bits: int | None) -> NativeEngine:
    settings = ModelSettings.model_validate({"path": str(folder), "dtype": dtype, "lora": {"rank": 16, "base_bits": bits}})
    policy = load_policy(settings, load_model_template(settings), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in policy.trainable():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    engine = NativeEngine(policy.model, None, drafts=False, packs=False)
    engine.end_tokens = frozenset()
    return engine


def run(engine: NativeEngine, share: float) -> tuple[float, list]:
    native.COPIES_SHARE = share
    requests = [Request(str(i), np.arange(10 + i, 10 + i + PROMPT_TOKENS)) for i in range(PROMPTS)]
    began = time.process_time()
    samples = sorted(engine.generate(requests, Sampling(NEW_TOKENS)), key=lambda sample: int(sample.prompt_id))
    return time.process_time() - began, [(sample.tokens.tobytes(), sample.sampler_logprobs.tobytes()) for sample in samples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REPOSITORY / "models/smollm2", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    usual = native.COPIES_SHARE
    print("| base | dtype | for every step, CPU s | once, CPU s | ratio |\n| --- | --- | --- | --- | --- |")
    for dtype in ("float32", "bfloat16"):
        for bits in (4, 8, None):
            engine = engine_of(args.model, dtype, bits)
            shares = [usual] if bits is None else [0.0, usual]
            runs = {share: [] for share in shares}
            for _ in range(args.repeats):
                for share in shares:
                    runs[share].append(run(engine, share))
            assert len({str(tokens) for took in runs.values() for _, tokens in took}) == 1, "samples differ"
            best = {share: min(seconds for seconds, _ in took) for share, took in runs.items()}
            name = "not quantised" if bits is None else f"{bits} bits"
            ratio = f"{best[0.0] / best[usual]:.1f}" if bits else ""
            every = f"{best[0.0]:.1f}" if bits else ""
            print(f"| {name} | {dtype} | {every} | {best[usual]:.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
