"""What it saves that attention reads a prompt for several of its samples at once: one layer of it, and whole rollouts.

    python bench/gpu_prefixes.py                          # one GPU
    python bench/gpu_prefixes.py --out runs/prefixes      # also appends its lines to runs/prefixes/gpu_prefixes.jsonl
    TRITON_INTERPRET=1 python bench/gpu_prefixes.py --device cpu --tiny      # a smoke test, of attention alone

Attention: one decode step of Qwen2.5's heads in bf16, random keys; medians of CUDA graphs, with the GPU's cache filled with other
memory before each run. "Not read" are the megabytes that a tile's rows no longer read, "tiles" how many programs times key-value
heads read for them; from WORTHWHILE_BYTES on (plaudit/rollout/native/prefixes.py) the engine uses tiles, so that is where the ratio
should pass 1. Rollouts: random weights, temperature 1, 512 new tokens, or at most 512 where one token in 200 ends a response; three
runs of each in turn after one to warm up; medians (lowest–highest), and how many CUDA graphs were captured, some of them in timed
runs where responses end.

The exit code is 1 if an output, a token or a log-prob differs in one bit, or a case fails.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import numpy as np
import torch
from gpu_draw import append, microseconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # plaudit may be a checkout that nobody installed
from plaudit.models.heads import Heads, block_tokens
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import kernels
from plaudit.rollout.native.cache import CacheShape, KVCache
from plaudit.rollout.native.kernels import attention as attention_kernels
from plaudit.rollout.native.prefixes import WORTHWHILE_BYTES, SharedPrefixes

HEADS = {"0.5B": Heads(14, 2, 64), "1.5B": Heads(12, 2, 128), "7B": Heads(28, 4, 128)}
WORK = [(1, 8), (8, 8), (64, 8), (32, 16)]  # prompts, samples of each
LENGTHS = [(100, 256), (256, 256), (1600, 256), (256, 2048), (8000, 256)]  # of prompts, and tokens of each sample
ROLLOUTS = [(64, 8, 256, False), (64, 8, 256, True), (32, 8, 1600, False), (32, 8, 1600, True)]
"""Prompts, samples of each, tokens of a prompt, and whether responses end at a token."""
NEW_TOKENS, END_EVERY, RUNS = 512, 200, 3


def filled(heads: Heads, prompts: int, samples: int, length: int, own: int, device: torch.device) -> tuple[KVCache, SharedPrefixes]:
    """A cache of one layer: all samples of a prompt have its full blocks, and `own` tokens after its last."""
    block, rows = block_tokens(heads.size), prompts * samples
    shared, per_row = (length - 1) // block, -(-(length + own) // block)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    cache = KVCache(CacheShape(1, heads, dtype, device), rows, per_row, block_tokens=block)
    cache.allocate(prompts * shared + rows * (per_row - shared))
    assert cache.memory is not None
    cache.memory.normal_()
    of_prompts = np.arange(prompts * shared).reshape(prompts, shared).repeat(samples, 0)
    of_rows = prompts * shared + np.arange(rows * (per_row - shared)).reshape(rows, -1)
    cache.set_block_tables(range(rows), np.concatenate([of_prompts, of_rows], 1).astype(np.int32))
    prefixes = SharedPrefixes(rows, heads, device)
    parts = -(-samples // prefixes.samples_per_tile)
    at = [[prompt * samples + part * samples // parts for part in range(parts + 1)] for prompt in range(prompts)]
    tiles = [(shared * block, range(begin, end)) for edges in at for begin, end in pairwise(edges)]
    if shared:
        prefixes.assign(tiles)
        prefixes.unread_tokens = sum((len(rows) - 1) * tokens for tokens, rows in tiles)
    return cache, prefixes


def attention(
    model: str, prompts: int, samples: int, prompt_tokens: int, own_tokens: int, device: torch.device, runs: int
) -> tuple[dict, list[str]]:  # fmt: skip
    heads, B, longest = HEADS[model], prompts * samples, prompt_tokens + own_tokens
    cache, prefixes = filled(heads, prompts, samples, prompt_tokens, own_tokens, device)
    query_BHD = torch.randn(B, heads.query, heads.size, device=device).to(cache.shape.dtype)
    positions_B = torch.full((B,), longest - 1, dtype=torch.int64, device=device)
    options = {"scale": heads.size**-0.5, "window": None, "longest": longest}
    compute = partial(kernels.attend, query_BHD, cache, 0, positions_B, **options)
    by_tiles = partial(compute, prefixes=prefixes)
    unread_mb, tiles = prefixes.unread_tokens * cache.shape.bytes_per_token / 1e6, prefixes.tile_count * heads.kv
    equal = torch.equal(compute(), by_tiles())
    us, tiles_us = microseconds(compute, device, runs), microseconds(by_tiles, device, runs)
    row = [model, f"{prompts} × {samples}", f"{prompt_tokens} + {own_tokens}", f"{unread_mb:.1f}", str(tiles)]
    row += [f"{us:.1f}", f"{tiles_us:.1f}", f"{us / tiles_us:.2f}", "yes" if equal else "NO"]
    return {"unread_mb": unread_mb, "tiles": tiles, "us": us, "tiles_us": tiles_us, "equal": equal}, row


def rollout(model: str, prompts: int, samples: int, prompt_tokens: int, ends: bool) -> tuple[dict, list[str]]:
    from native_rollout import build, forget, timed
    from rollout_work import FULL

    from plaudit.rollout.native.engine import NativeEngine

    forget()
    made, rng = build(model, FULL, "cuda"), np.random.default_rng(0)
    vocabulary = made.config.vocab_size
    if ends:
        end_tokens = rng.choice(vocabulary, vocabulary // END_EVERY, replace=False)
        made.generation_config.eos_token_id = end_tokens.tolist()  # pyright: ignore
    requests = [Request(f"p{i}", rng.integers(0, vocabulary, prompt_tokens), samples) for i in range(prompts)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    engines = {shares: NativeEngine(made, None, shares_prefixes=shares) for shares in rates}
    equal = True
    for run in range(RUNS + 1):
        found = {}
        for shares, engine in engines.items():
            seconds, drawn = timed(engine, requests, Sampling(max_new_tokens=NEW_TOKENS, step=run))
            found[shares] = {(sample.prompt_id, sample.index): sample for sample in drawn}
            if run:
                rates[shares].append(sum(map(len, drawn)) / seconds)
        for key, sample in found[False].items():
            other = found[True][key]
            equal &= np.array_equal(sample.tokens, other.tokens)
            equal &= np.array_equal(sample.sampler_logprobs.view(np.int32), other.sampler_logprobs.view(np.int32))
    equal = bool(equal and engines[True].shares_prefixes)  # not if it gave other bits when it was tried
    graphs = [len(engine.forward.graphs._graphs) for engine in engines.values()]
    row = [model, f"{prompts} × {samples}", f"{prompt_tokens:,}", "yes" if ends else "no", *map(spread, rates.values())]
    row += [f"{median(rates[True]) / median(rates[False]):.2f}", ", ".join(map(str, graphs)), "yes" if equal else "NO"]
    return {"rates": rates[False], "tiles_rates": rates[True], "graphs": graphs, "equal": equal}, row


def spread(rates: Sequence[float]) -> str:
    return f"{median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one small case of attention")
    parser.add_argument("--runs", type=int, default=21, help="of each attention")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also append each line to FOLDER/gpu_prefixes.jsonl")
    args = parser.parse_args()
    device, on_gpu = torch.device(args.device), args.device.startswith("cuda")
    if not on_gpu and not args.tiny:
        parser.error("on a CPU there is only the smoke test: --tiny")
    about = f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}"
    good = True

    def row_of(what: dict, measure: Callable[[], tuple[dict, list[str]]]) -> None:
        """One row of a table; a case that fails leaves the others to run."""
        nonlocal good
        try:
            found, row = measure()
            good &= found["equal"]
        except Exception as error:
            traceback.print_exc()
            found, good = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}, False
            row = [*map(str, what.values()), found["error"]]
        print(f"| {' | '.join(row)} |", flush=True)
        if args.out is not None:
            append(args.out / "gpu_prefixes.jsonl", {"about": about, **what, **found})

    tuned = f"{attention_kernels.PREFIX_WARPS} warps, {attention_kernels.PREFIX_STAGES} stages"
    print(f"{about}; {tuned}; worthwhile from {WORTHWHILE_BYTES / 1e6:g} MB on\n\n## Attention of one layer, µs\n")
    print("| | prompts × samples | prompt + own tokens | MB not read | tiles | row by row | by tiles | ratio | same bits |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model, (prompts, samples), (length, own) in [("0.5B", (2, 3), (80, 20))] if args.tiny else product(HEADS, WORK, LENGTHS):
        case = {"model": model, "prompts": prompts, "samples": samples, "prompt_tokens": length, "own_tokens": own}
        row_of(case, partial(attention, **case, device=device, runs=1 if args.tiny else args.runs))
    if on_gpu and not args.tiny:
        print("\n## Rollouts, tokens/s\n")
        print("| | prompts × samples | prompt tokens | responses end | row by row | by tiles | ratio | graphs | same bits |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for model, (prompts, samples, length, ends) in product(("0.5B", "1.5B"), ROLLOUTS):
            case = {"model": model, "prompts": prompts, "samples": samples, "prompt_tokens": length, "ends": ends}
            row_of(case, partial(rollout, **case))
    sys.exit(not good and on_gpu)


if __name__ == "__main__":
    main()
