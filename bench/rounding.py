"""Which bf16 roundings make a sampler's log-probs differ from the trainer's; emulated in fp32 on a CPU.

    python bench/rounding.py [--tokens 512]             # a few minutes, 4 GB

Random weights of Qwen2.5-0.5B's shape, random tokens. A pass rounds to bf16 at the places named in its table row. Three
such passes differ as kernels do: every matrix product is perturbed (3e-7 relative: another order of summation), and attention
probabilities are rounded at another scale (a flash kernel's running maximum). Printed is the mean absolute difference of the
log-probs of sampled tokens, between two passes and from fp32. Logits are always fp32.
"""

import argparse
import math
from itertools import combinations
from statistics import fmean, stdev

import torch
from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, MLP, VOCABULARY = 896, 24, 14, 2, 64, 4864, 151936
INPUTS = {"normed", "heads", "probabilities", "attended", "gated"}
"""Roundings of the inputs of matrix products, which any bf16 implementation has."""
OUTPUTS = {"qkv", "out", "gate_up", "silu", "down"}
"""Roundings of the outputs of matrix products, and between two products."""
TRIED: dict[str, tuple[set[str], set[str]]] = {
    "as transformers rounds": (INPUTS | OUTPUTS | {"residual"}, set()),
    "as plaudit rounds: the residual stream stays fp32": (INPUTS | OUTPUTS, set()),
    "MLP in fp32 between its products": (INPUTS | {"qkv", "out", "down"}, set()),
    "no product's result rounded": (INPUTS, set()),
    "attention in fp16": (INPUTS | OUTPUTS, {"heads", "probabilities"}),
    "attention in fp16, no product's result rounded": (INPUTS, {"heads", "probabilities"}),
}
"""Places that are rounded, and those rounded to fp16 instead of bf16; from the third on, each varies plaudit's rounding."""


class Model:
    def __init__(self, tokens: int):
        torch.manual_seed(0)
        widths = {"q": (HEADS * SIZE, HIDDEN), "k": (KV_HEADS * SIZE, HIDDEN), "v": (KV_HEADS * SIZE, HIDDEN)}
        widths |= {"o": (HIDDEN, HEADS * SIZE), "gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}
        self.layers = [{name: weight(*shape) for name, shape in widths.items()} for _ in range(LAYERS)]
        self.embedding = weight(VOCABULARY, HIDDEN)
        self.ids_T = torch.randint(0, VOCABULARY, (tokens,))
        angles = torch.arange(tokens)[:, None] / 1e6 ** (torch.arange(0, SIZE, 2) / SIZE)
        self.cos, self.sin = (torch.cat([f(angles)] * 2, -1)[:, None].bfloat16().float() for f in (torch.cos, torch.sin))
        self.causal_mask = torch.full((tokens, tokens), -math.inf).triu(1)

    @torch.no_grad()
    def logprobs(self, rounded: set[str], in_fp16: set[str], way: int | None) -> Tensor:
        """Log-probs of the second half of the tokens: [T / 2, vocabulary]. `way` picks an order of summation; None is exact."""
        rng, T = torch.Generator().manual_seed(way or 0), len(self.ids_T)

        def at(place: str, x: Tensor) -> Tensor:
            if place not in rounded:
                return x
            return (x.half() if place in in_fp16 else x.bfloat16()).float()

        def product(x: Tensor, w: Tensor) -> Tensor:
            y = x @ w.T
            return y if way is None else y + 3e-7 * y.abs().mean() * torch.randn(y.shape, generator=rng)

        def norm(x: Tensor) -> Tensor:
            return at("normed", x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

        def rotate(x: Tensor) -> Tensor:
            other = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
            return at("heads", at("qkv", x * self.cos) + at("qkv", other * self.sin))

        x = self.embedding[self.ids_T]
        for layer in self.layers:
            normed = norm(x)
            q, k, v = (at("qkv", product(normed, layer[name])).view(T, -1, SIZE) for name in "qkv")
            q, k, v = (
                rotate(q),
                rotate(k).repeat_interleave(HEADS // KV_HEADS, 1),
                at("heads", v).repeat_interleave(HEADS // KV_HEADS, 1),
            )
            scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5 + self.causal_mask
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            if way is not None:
                weights = weights * (1 + torch.rand(HEADS, T, 1, generator=rng))
            attended = torch.einsum("hqk,khd->qhd", at("probabilities", weights), v) / weights.sum(-1).T[..., None]
            x = at("residual", x + at("out", product(at("attended", attended.reshape(T, -1)), layer["o"])))
            normed = norm(x)
            gate, up = (at("gate_up", product(normed, layer[name])) for name in ("gate", "up"))
            gated = at("gated", at("silu", torch.nn.functional.silu(gate)) * up)
            x = at("residual", x + at("down", product(gated, layer["down"])))
        return (norm(x)[T // 2 :] @ self.embedding.T).log_softmax(-1)


def weight(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 0.02).bfloat16().float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    model = Model(parser.parse_args().tokens)
    exact = model.logprobs(set(), set(), None)
    drawn = torch.multinomial(exact.exp(), 1)

    def apart(one: Tensor, other: Tensor) -> float:
        return (one - other).abs().mean().item()

    right = exact.gather(1, drawn)
    print(f"{len(drawn)} tokens, difference between two passes: ± the standard deviation over the three pairs of passes")
    print("| rounded to bf16 | between two passes | from fp32 |\n| --- | --- | --- |")
    for name, (rounded, in_fp16) in TRIED.items():
        found = [model.logprobs(rounded, in_fp16, way).gather(1, drawn) for way in range(3)]
        pairs = [apart(*pair) for pair in combinations(found, 2)]
        print(f"| {name} | {fmean(pairs):.4f} ± {stdev(pairs):.4f} | {fmean(apart(one, right) for one in found):.4f} |", flush=True)


if __name__ == "__main__":
    main()
