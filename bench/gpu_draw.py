"""Time to draw a token for each row of logits, and for how many rows our torch version draws the same token.

    python bench/gpu_draw.py                              # one GPU
    python bench/gpu_draw.py --out runs/draw              # also appends its lines to runs/draw/gpu_draw.jsonl
    TRITON_INTERPRET=1 python bench/gpu_draw.py --device cpu --rows 4 --vocabulary 9000 --runs 1     # a smoke test

Logits are normal with a deviation of 3, which is harder for top-p than a language model's. The peer does what samplers in torch
do: topk, or a sort and a cumulative sum, softmax, and an exponential race for the token; without log-probs, which the kernels' time
includes. Both are captured in CUDA graphs; medians, with the GPU's cache filled with other memory before each run. The engine draws
for at most 256 rows at a time.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # plaudit may be a checkout that nobody installed
from plaudit.rollout.engine import Sampling
from plaudit.rollout.native import kernels, torch_ops
from plaudit.rollout.native.batch import COLUMNS, KEY, LIMIT, POSITION, device_sampling

KINDS = {
    "plain": {},
    "temperature 0.6": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k 1": {"top_k": 1},
    "top-k 20": {"top_k": 20},
    "top-k 128": {"top_k": 128},
    "top-k 129 (torch.topk)": {"top_k": 129},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.95, temperature 0.6": {"top_p": 0.95, "temperature": 0.6},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 20, top-p 0.95, temperature 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "top-k 50, top-p 0.95, min-p 0.01": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


def in_torch(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    scaled_BV = logits_BV if sampling.temperature == 1.0 else logits_BV / sampling.temperature
    if sampling.top_k is not None:
        scaled_BV = scaled_BV.masked_fill(scaled_BV < scaled_BV.topk(sampling.top_k).values[:, -1:], -math.inf)
    if sampling.min_p > 0.0:
        scaled_BV = scaled_BV.masked_fill(scaled_BV < scaled_BV.amax(-1, keepdim=True) + math.log(sampling.min_p), -math.inf)
    tokens_BV = None
    if sampling.top_p < 1.0:
        scaled_BV, tokens_BV = scaled_BV.sort(descending=True)
        probs_BV = scaled_BV.softmax(-1)
        scaled_BV = scaled_BV.masked_fill(probs_BV.cumsum(-1) - probs_BV >= sampling.top_p, -math.inf)
    at_B = (scaled_BV.softmax(-1) / torch.empty_like(scaled_BV).exponential_()).argmax(-1)
    return at_B if tokens_BV is None else tokens_BV.gather(1, at_B[:, None])[:, 0]


def microseconds(compute: Callable[[], object], device: torch.device, runs: int) -> float:
    """The median, of a CUDA graph on a GPU."""
    compute()
    if device.type != "cuda":
        taken = []
        for _ in range(runs):
            start = time.perf_counter()
            compute()
            taken.append((time.perf_counter() - start) * 1e6)
        return median(taken)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    other, taken = torch.empty(1 << 28, dtype=torch.uint8, device=device), []
    for _ in range(runs):
        other.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return median(taken)


def measured(logits_BV: Tensor, sampling: Sampling, runs: int) -> dict[str, Any]:
    """Both times, and for how many rows the tokens are those of `torch_ops`."""
    rows, device = len(logits_BV), logits_BV.device
    state_BC = torch.zeros(rows, COLUMNS, dtype=torch.int64, device=device)
    state_BC[:, KEY] = torch.arange(rows, device=device) * 7919
    state_BC[:, POSITION], state_BC[:, LIMIT] = 3, 1 << 40
    results_B4 = torch.zeros(rows, 4, dtype=torch.int32, device=device)
    on_device = device_sampling(sampling, frozenset(), device, {})
    ours = state_BC.clone()
    kernels.draw_and_advance(logits_BV, ours, results_B4, on_device)
    tokens_B = results_B4[:, 1].clone()
    torch_ops.draw_and_advance(logits_BV, state_BC.clone(), results_B4, on_device)
    same = int((tokens_B == results_B4[:, 1]).sum())

    draw = partial(kernels.draw_and_advance, logits_BV, ours, results_B4, on_device)
    peer = partial(in_torch, logits_BV, sampling)
    us, torch_us = (microseconds(compute, device, runs) for compute in (draw, peer))
    return {"us": us, "torch_us": torch_us, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also append each line to FOLDER/gpu_draw.jsonl")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    about = f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}"
    print(f"{about}\n")
    print("| rows | settings | µs | torch, µs | ratio | same token as torch_ops |\n| --- | --- | --- | --- | --- | --- |")
    failures = 0
    for rows in args.rows:
        torch.manual_seed(0)
        logits_BV = torch.randn(rows, args.vocabulary, device=device) * 3
        for name, settings in KINDS.items():
            try:
                found = measured(logits_BV, Sampling(max_new_tokens=1, **settings), args.runs)
                us, torch_us, same = found.values()
                print(f"| {rows} | {name} | {us:.0f} | {torch_us:.0f} | {torch_us / us:.1f} | {same} of {rows} |", flush=True)
            except Exception as error:  # the other kinds are still measured
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
                print(f"| {rows} | {name} | {found['error']} | | | |", flush=True)
                failures += 1
            if args.out is not None:
                append(args.out / "gpu_draw.jsonl", {"about": about, "rows": rows, "settings": name, **found})
    sys.exit(failures > 0)


def append(file: Path, entry: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
