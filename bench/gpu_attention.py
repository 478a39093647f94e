"""The backward pass of packed attention: plaudit's kernels next to torch's flash attention.

    python bench/gpu_attention.py                              # one GPU, about a minute, most of it compilation
    python bench/gpu_attention.py --tiles                      # every tile that the kernels could have, instead of the chosen ones

Heads of Qwen2.5's models in bf16, packed as training packs them:

    rl      prompts of 256 tokens and 8 answers of 512 each; the first answer's sequence contains the prompt's queries, the others
            only attend to its keys
    sft     rows of 2,048 tokens
    long    prompts of 1,600 tokens and 8 answers of 512 each

Milliseconds are medians of `triton.testing.do_bench`. TFLOP/s: five products of 2 · size · (queries × keys seen) each. Flash
attention is `torch.ops.aten._flash_attention_backward`, with `torch.use_deterministic_algorithms` as in training, and without.
Errors are relative to autograd in fp32, of the first two sequences: in `rl` and `long`, the one with the prompt's queries and one
without. The letters q, k, v: of which gradients a second call gave the same bits; then, whether all numbers are finite.
"""

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # plaudit may be a checkout that nobody installed
from plaudit.models.kernels import attention, attention_backward

HEADS = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128)}
TOKENS = 16_384


def lengths_of(kind: str, tokens: int) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence of a micro-batch."""
    if kind == "sft":
        return [2048] * (tokens // 2048), [2048] * (tokens // 2048)
    prompt = 256 if kind == "rl" else 1600
    groups = max(1, tokens // (prompt + 8 * 512))
    return [prompt + 512, *[512] * 7] * groups, [prompt + 512] * 8 * groups


class Batch:
    def __init__(self, model: str, kind: str, tokens: int = TOKENS):
        heads, kv, size = HEADS[model]
        self.queries, self.keys = lengths_of(kind, tokens)
        g = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16)

        T, U = sum(self.queries), sum(self.keys)
        self.query = random(T, heads + 2 * kv, size)[:, :heads]
        self.key, self.value, self.grad = random(U, kv, size), random(U, kv, size), random(T, heads, size)
        starts = [
            torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
            for n in (self.queries, self.keys)
        ]
        self.starts, self.longest, self.scale = starts, (max(self.queries), max(self.keys)), size**-0.5
        self.out, self.logsum = attention.attend(self.query, self.key, self.value, *starts, self.longest[0], self.scale)
        seen = sum(q * (k - q) + q * (q + 1) / 2 for q, k in zip(self.queries, self.keys, strict=True))
        self.flops = 5 * 2 * size * heads * seen

    def ours(self, **options: Any) -> tuple[Tensor, ...]:
        inputs = self.grad, self.query, self.key, self.value, self.out, self.logsum, *self.starts, *self.longest, self.scale
        return attention_backward.attend_backward(*inputs, **options)

    def flash(self) -> tuple[Tensor, ...]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.empty(0, device="cuda")
        return torch.ops.aten._flash_attention_backward(
            self.grad, self.query, self.key, self.value, self.out, self.logsum, *self.starts, *self.longest, 0.0, True, *no_dropout,
            scale=self.scale,
        )  # fmt: skip

    def exact(self) -> tuple[Tensor, ...]:
        """Of the first two sequences."""
        group = self.query.shape[1] // self.key.shape[1]
        found = []
        for i in range(2):
            q, k = (slice(sum(n[:i]), sum(n[: i + 1])) for n in (self.queries, self.keys))
            inputs = [x.float().detach().requires_grad_() for x in (self.query[q], self.key[k], self.value[k])]
            keys, values = (x.repeat_interleave(group, 1) for x in inputs[1:])
            scores = torch.einsum("qhd,khd->hqk", inputs[0], keys) * self.scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").triu(len(keys) - len(inputs[0]) + 1)
            out = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -float("inf")).softmax(-1), values)
            found.append(torch.autograd.grad(out, inputs, self.grad[q].float()))
        return tuple(torch.cat(gradients) for gradients in zip(*found, strict=True))


def error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    pairs = [(ours[: len(right)].float(), right) for ours, right in zip(found, exact, strict=True)]
    return max(((ours - right).norm() / right.norm()).item() for ours, right in pairs)


def milliseconds(compute: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(compute, warmup=5, rep=30, return_mode="median")  # pyright: ignore


def candidates(size: int) -> dict[str, list[attention_backward.Tiling]]:
    Tiling = attention_backward.Tiling
    shapes = [(64, 64, 4), (128, 64, 8), (64, 128, 4), (64, 128, 8), (128, 128, 8)] + (
        [(128, 64, 4), (128, 32, 4)] if size == 64 else [(128, 32, 8), (64, 32, 4)]
    )
    stages = (2, 3)
    query = [Tiling(*shape, n) for shape, n in product(shapes, stages)]
    key = [Tiling(*shape, n, late) for shape, n, late in product(shapes, stages, (False, True))]
    return {"query_tiling": query, "key_tiling": key}


def compile_tile(size: int, name: str, tile: attention_backward.Tiling) -> None:
    """In a process of its own, into Triton's cache."""
    model = next(model for model, heads in HEADS.items() if heads[2] == size)
    try:
        Batch(model, "sft", 2048).ours(**{name: tile})
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{size} {name} {tuple(tile)}: {type(error).__name__} {str(error)[:100]}", flush=True)


def measure_tiles(report: Callable[..., None]) -> None:
    work = [(size, name, tile) for size in (64, 128) for name, tiles in candidates(size).items() for tile in tiles]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_tile, *zip(*work, strict=True)))
    for model, kind in (("0.5B", "rl"), ("0.5B", "sft"), ("1.5B", "rl"), ("1.5B", "sft")):
        batch = Batch(model, kind)
        exact = batch.exact()
        usual, usual_error = milliseconds(batch.ours), error(batch.ours(), exact)
        report(model=model, kind=kind, of="both", tile="chosen", ms=usual)
        for name, tiles in candidates(HEADS[model][2]).items():
            times = []
            for tile in tiles:
                try:
                    wrong = error(batch.ours(**{name: tile}), exact)
                    if not wrong <= 2 * usual_error:
                        report(model=model, kind=kind, of=name, tile=tuple(tile), ms=None, error=wrong)
                        continue
                    times.append((milliseconds(partial(batch.ours, **{name: tile})), wrong, tile))
                except Exception:
                    continue
            for ms, wrong, tile in sorted(times)[:6]:
                report(model=model, kind=kind, of=name, tile=tuple(tile), ms=ms, error=wrong)


def measure(report: Callable[..., None]) -> None:
    for model, kind in product(HEADS, ("rl", "sft", "long")):
        batch = Batch(model, kind)
        exact = batch.exact()
        systems: dict[str, tuple[Callable[[], tuple[Tensor, ...]], bool]] = {
            "plaudit": (batch.ours, True),
            "flash, deterministic": (batch.flash, True),
            "flash": (batch.flash, False),
        }
        for system, (compute, deterministic) in systems.items():
            torch.use_deterministic_algorithms(deterministic)
            wrong = error(compute(), exact)
            found = compute()
            same = [name for name, a, b in zip("qkv", found, compute(), strict=True) if torch.equal(a, b)]
            finite = all(bool(gradient.isfinite().all()) for gradient in found)
            ms = milliseconds(compute)
            tflops = batch.flops / ms / 1e9
            report(model=model, kind=kind, system=system, ms=ms, tflops=tflops, error=wrong, same="".join(same), finite=finite)
        forward = milliseconds(
            lambda batch=batch: attention.attend(batch.query, batch.key, batch.value, *batch.starts, batch.longest[0], batch.scale)
        )
        report(model=model, kind=kind, system="forward pass", ms=forward, tflops=batch.flops * 0.4 / forward / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="time candidates of the kernels' tiles")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also append each line to FOLDER/gpu_attention.jsonl")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)

    def report(**line: Any) -> None:
        line = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in line.items()}
        print(*line.values(), sep="  ", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            with (args.out / "gpu_attention.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    (measure_tiles if args.tiles else measure)(report)


if __name__ == "__main__":
    main()
