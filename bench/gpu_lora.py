"""What LoRA and biases add to the large products of an update, one operation at a time.

    python bench/gpu_lora.py                              # one GPU, less than a minute
    python bench/gpu_lora.py --out runs/lora              # also appends its lines to runs/lora/gpu_lora.jsonl
    TRITON_INTERPRET=1 python bench/gpu_lora.py --device cpu --tiny          # a smoke test

    merge, NF4, int8     W' of one matrix by one kernel, for tiles of several heights; bound: what is read and written once, at the
                         speed of a large copy measured here
    sum of A, of B       an adapter's gradient added to its fp32 sum by the product that computes it; next to a product in half
                         precision and an addition; and its error from float64, relative
    bias                 ones · grad, in fp32 as training computes it, next to half precision and to a sum over the rows

Times are medians of `triton.testing.do_bench`, which clears the GPU's cache before each run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rollout_work import SHAPES, TINY_SHAPE
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # plaudit may be a checkout that nobody installed
from plaudit.models.gradient_sums import add_product
from plaudit.models.kernels import merging
from plaudit.models.quantised import nf4_levels, quantise

TOKENS, SCALE = 16_384, 2.0
RANKS = (1, 3, 16, 64)  # 3: rows of 6 bytes, which few fast kernels take
TILES = ((32, 8), (64, 4), (64, 8), (128, 4), (128, 8))  # rows, warps


def milliseconds(compute: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(compute, warmup=10, rep=50, return_mode="median")  # pyright: ignore
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        compute()
        taken.append(1000 * (time.perf_counter() - began))
    return median(taken)


def bytes_per_ms(device: torch.device, size: int) -> float:
    """Read and written by a large copy."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    copy = torch.empty_like(source)
    return 2 * size / milliseconds(lambda: copy.copy_(source), device)


def random_matrix(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def matrices(size: str, tiny: bool) -> dict[str, tuple[int, int]]:
    """Rows and columns of the products that have adapters, those of the same input together."""
    _, hidden, heads, kv_heads, mlp, *_ = TINY_SHAPE if tiny else SHAPES[size]
    head = hidden // heads
    return {"qkv": (hidden + 2 * kv_heads * head, hidden), "gate, up": (2 * mlp, hidden), "down": (hidden, mlp)}


# Operations -----------------------------------------------------------------------------------------------------------


def merges(shape: tuple[int, int], device: torch.device, speed: float) -> Iterator[dict[str, Any]]:
    rank = 16
    weight, out = random_matrix(shape, device), random_matrix(shape, device)
    a, b = random_matrix((rank, shape[1]), device, torch.float32), random_matrix((shape[0], rank), device, torch.float32)
    levels = nf4_levels(device)
    kinds: dict[str, tuple[Callable[[], object], int]] = {"merge": (lambda: merging.merge(out, weight, a, b, SCALE), weight.nbytes)}
    for bits, name in ((4, "NF4"), (8, "int8")):
        codes, scales = quantise(weight, bits)
        kinds[name] = (
            lambda c=codes, s=scales: merging.dequantise_merged(out, c, s, levels, a, b, SCALE),
            codes.nbytes + scales.nbytes,
        )
    usual = merging.ROWS, merging.WARPS
    for name, (compute, read) in kinds.items():
        for tile in TILES:
            merging.ROWS, merging.WARPS = tile
            took = milliseconds(compute, device)
            chosen = "chosen" if tile == usual else ""
            bound = (read + out.nbytes) / speed
            what = f"{name}, tiles of {tile[0]}, {tile[1]} warps"
            yield {"what": what, "ms": took, "peer": "memory", "peer_ms": bound, "note": chosen}
    merging.ROWS, merging.WARPS = usual


def adapter_sums(shape: tuple[int, int], device: torch.device, tokens: int) -> Iterator[dict[str, Any]]:
    rows, columns = shape
    grad, x = random_matrix((tokens, rows), device), random_matrix((tokens, columns), device)
    for rank in RANKS:
        inner = random_matrix((tokens, 3 * rank), device)[:, rank : 2 * rank]  # of three adapters side by side, the second
        for what, left, right in ((f"sum of A, rank {rank}", inner, x), (f"sum of B, rank {rank}", grad, inner)):
            total = random_matrix((left.shape[1], right.shape[1]), device, torch.float32)
            exact = total.double() + left.double().T @ right.double()
            add_product(total, left, right)
            error = ((total - exact).norm() / exact.norm()).item()
            took = milliseconds(lambda t=total, one=left, two=right: add_product(t, one, two), device)
            half = milliseconds(lambda t=total, one=left, two=right: t.add_(one.T @ two), device)
            yield {"what": what, "ms": took, "peer": "half precision", "peer_ms": half, "note": f"error {error:.1e}"}


def biases(shape: tuple[int, int], device: torch.device, tokens: int) -> Iterator[dict[str, Any]]:
    grad, ones = random_matrix((tokens, shape[0]), device), torch.ones(1, tokens, dtype=torch.bfloat16, device=device)

    def in_fp32() -> Tensor:
        return torch.mm(ones, grad, out_dtype=torch.float32) if device.type == "cuda" else ones @ grad

    took = milliseconds(in_fp32, device)
    for peer, compute in (("half precision", lambda: ones @ grad), ("sum", lambda: grad.sum(0, dtype=torch.float32))):
        yield {"what": "bias", "ms": took, "peer": peer, "peer_ms": milliseconds(compute, device), "note": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["0.5B", "7B"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a smoke test; its numbers mean nothing")
    parser.add_argument("--out", type=Path, help="a folder for gpu_lora.jsonl")
    args = parser.parse_args()
    device, tokens = torch.device(args.device), 64 if args.tiny else TOKENS
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    speed = bytes_per_ms(device, 1 << (20 if args.tiny else 30))
    print(f"{name}, torch {torch.__version__}, {tokens:,} tokens in bf16; a copy moves {speed / 1e9:.2f} TB/s\n")
    print("| size | matrix | operation | ms | peer | peer, ms | ratio | |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in args.sizes:
        for matrix, shape in matrices(size, args.tiny).items():
            lines = [*merges(shape, device, speed), *adapter_sums(shape, device, tokens)]
            lines += biases(shape, device, tokens) if matrix == "qkv" else ()
            for line in lines:
                ratio = f"{line['ms'] / line['peer_ms']:.2f}"
                print(
                    f"| {size} | {matrix} | {line['what']} | {line['ms']:.3f} | {line['peer']} | {line['peer_ms']:.3f} | {ratio} | "
                    f"{line['note']} |",
                    flush=True,
                )
                if args.out:
                    args.out.mkdir(parents=True, exist_ok=True)
                    with (args.out / "gpu_lora.jsonl").open("a") as file:
                        file.write(json.dumps({"size": size, "matrix": matrix, **line}) + "\n")


if __name__ == "__main__":
    main()
