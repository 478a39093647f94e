"""Time to draw a token for each row of logits, and for how many rows torch would draw the same token.

    python bench/gpu_draw.py                              # one GPU, under a minute
    TRITON_INTERPRET=1 python bench/gpu_draw.py --device cpu --rows 4 --vocabulary 9000 --runs 1     # a smoke test

Logits are normal with a deviation of 3, which is harder for top-p than a language model's. The peer does what samplers in torch
do: sort (or topk) the logits, mask, softmax, and an exponential race for the token; without log-probs, which the kernel's time
includes. Both are captured in CUDA graphs; median of --runs, each over other logits than the last.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from plaudit.rollout.engine import Sampling
from plaudit.rollout.native import kernels, torch_ops
from plaudit.rollout.native.batch import COLUMNS, KEY, LIMIT, POSITION, device_sampling
from plaudit.rollout.native.sampler import keep_likely

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
    kept_BV = keep_likely(logits_BV / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return (kept_BV.softmax(-1) / torch.empty_like(kept_BV).exponential_()).argmax(-1)


def microseconds(compute: Callable[[], object], logits_BV: Tensor, runs: int) -> float:
    """Median over runs; as a CUDA graph, on a GPU."""
    compute()
    if logits_BV.device.type != "cuda":
        start = time.perf_counter()
        compute()
        return (time.perf_counter() - start) * 1e6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    taken = []
    for _ in range(runs):
        logits_BV.copy_(logits_BV.roll(1, 0))  # also fills the cache with other memory
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--runs", type=int, default=21)
    args = parser.parse_args()
    device = torch.device(args.device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}\n")
    print("| rows | settings | µs | torch, µs | ratio | same token as torch_ops |\n| --- | --- | --- | --- | --- | --- |")
    for rows in args.rows:
        torch.manual_seed(0)
        logits_BV = torch.randn(rows, args.vocabulary, device=device) * 3
        state_BC = torch.zeros(rows, COLUMNS, dtype=torch.int64, device=device)
        state_BC[:, KEY] = torch.arange(rows, device=device) * 7919
        state_BC[:, POSITION], state_BC[:, LIMIT] = 3, 1 << 40
        results_B4 = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        for name, settings in KINDS.items():
            sampling = Sampling(max_new_tokens=1, **settings)
            on_device = device_sampling(sampling, frozenset(), device, {})
            ours = state_BC.clone()
            kernels.draw_and_advance(logits_BV, ours, results_B4, on_device)
            tokens_B = results_B4[:, 1].clone()
            torch_ops.draw_and_advance(logits_BV, state_BC.clone(), results_B4, on_device)
            same = int((tokens_B == results_B4[:, 1]).sum())

            draw = partial(kernels.draw_and_advance, logits_BV, ours, results_B4, on_device)
            peer = partial(in_torch, logits_BV, sampling)
            us, torch_us = (microseconds(compute, logits_BV, args.runs) for compute in (draw, peer))
            print(f"| {rows} | {name} | {us:.0f} | {torch_us:.0f} | {torch_us / us:.1f} | {same} of {rows} |", flush=True)


if __name__ == "__main__":
    main()
