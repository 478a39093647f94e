"""Supervised training on one GPU: correctness of packed attention, determinism of a step, and speed.

    python bench/gpu_sft.py [--sizes 0.5B 1.5B] [--steps 5]

Random weights of Qwen2.5 shapes, bf16 with fp32 master weights, rows of 64…4096 tokens (seeded log-normal, median 600). The peer is
the same transformers model on padded batches with SDPA and full logits, rows sorted by length within a step to minimise padding,
with the same optimiser and token budget and the kind of gradient checkpointing that is faster for it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Both sides see a new mix of shapes every step; without this the allocator would free and reallocate memory all the time.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # plaudit may be a checkout that nobody installed
from plaudit.data.pack import micro_batches, pack
from plaudit.models import attention
from plaudit.models.fused import prepare_layers
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel
from plaudit.models.verify import verify_packed
from plaudit.objectives.supervised import nll
from plaudit.recipe import OptimSettings
from plaudit.train.trainer import Trainer
from plaudit.types import Example
from plaudit.world import World

SHAPES = {  # hidden, layers, heads, kv heads, MLP
    "tiny": (256, 4, 8, 2, 704),
    "0.5B": (896, 24, 14, 2, 4864),
    "1.5B": (1536, 28, 12, 2, 8960),
    "7B": (3584, 28, 28, 4, 18944),
}
VOCABULARY = 151936
ROWS_PER_STEP, TOKENS_PER_MICRO_BATCH = 64, 16384


def build(size: str, *, attn: str, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = True, vocabulary: int = VOCABULARY):
    hidden, layers, heads, kv_heads, mlp = SHAPES[size]
    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=mlp, max_position_embeddings=32768, tie_word_embeddings=size != "7B",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn)
    if attn == attention.NAME:
        prepare_layers(model)  # as plaudit's own loading does
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": attn != attention.NAME})  # reentrant is a third faster for the peer
    return model.train()


def rows(count: int, seed: int, vocabulary: int = VOCABULARY, longest: int = 4096) -> list[Example]:
    rng = np.random.RandomState(seed)
    lengths = np.clip(rng.lognormal(np.log(600), 0.8, count), 64, longest).astype(int)
    examples = []
    for length in lengths:
        mask = np.zeros(length, bool)
        mask[length // 3 :] = True  # the first third is the prompt
        examples.append(Example(rng.randint(0, vocabulary, length).astype(np.int32), mask))
    return examples


def trainer_for(model) -> Trainer:
    policy = TrainableModel(model, template=None)  # pyright: ignore (nothing is saved here)
    return Trainer(policy, OptimSettings(lr=1e-5), seed=0, max_skipped_steps=0, world=World.alone(policy.device))


def packed_step(trainer: Trainer, examples: list[Example]) -> dict[str, float]:
    targets = sum(e.num_targets for e in examples)
    batches = micro_batches(examples, TOKENS_PER_MICRO_BATCH, "cuda")
    return trainer.update(batches, lambda b: (nll(target_logprobs(trainer.trained.model, b).logprobs_N, targets), {}), 1e-5)


class PaddedBatch(list[Example]):
    has_signal = True  # what the trainer asks of a batch


def padded_batches(examples: list[Example]) -> list[PaddedBatch]:
    """Batches of similar lengths within the token budget, including padding."""
    batches: list[PaddedBatch] = []
    for example in sorted(examples, key=len):
        if batches and len(example) * (len(batches[-1]) + 1) <= TOKENS_PER_MICRO_BATCH:
            batches[-1].append(example)
        else:
            batches.append(PaddedBatch([example]))
    return batches


def padded_nll(model, examples: list[Example], targets: int) -> torch.Tensor:
    longest = max(map(len, examples))
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    keep = torch.zeros_like(tokens)
    for i, e in enumerate(examples):
        tokens[i, : len(e)] = torch.from_numpy(e.tokens.astype(np.int64))
        labels[i, : len(e)] = torch.where(torch.from_numpy(e.loss_mask), tokens[i, : len(e)], -100)
        keep[i, : len(e)] = 1
    tokens, labels, keep = tokens.cuda(), labels.cuda(), keep.cuda()
    logits = model(input_ids=tokens, attention_mask=keep, use_cache=False).logits
    return (
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum") / targets
    )


def check_correct() -> None:
    print("\n## Packed attention against the same weights in fp32, sequence by sequence (8 rows of 64…700 tokens, 4 layers)")
    examples = rows(8, seed=1, vocabulary=4096, longest=700)
    half = build("tiny", attn=attention.NAME, checkpointing=False, vocabulary=4096)
    verify_packed(half)
    exact = build("tiny", attn="eager", dtype=torch.float32, checkpointing=False, vocabulary=4096)
    exact.load_state_dict(half.state_dict())
    single = build("tiny", attn=attention.NAME, dtype=torch.float32, checkpointing=False, vocabulary=4096)
    single.load_state_dict(half.state_dict())
    targets = sum(e.num_targets for e in examples)
    padded_nll(exact, examples, targets).backward()
    for name, model in (("bf16, fused layers", half), ("fp32, one by one", single)):
        loss = nll(target_logprobs(model, pack(examples, "cuda")).logprobs_N, targets)
        loss.backward()
        apart = total = 0.0
        for (_, p), (_, q) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
            apart += (p.grad.float() - q.grad).square().sum().item()  # pyright: ignore
            total += q.grad.square().sum().item()  # pyright: ignore
        print(f"{name:30} gradient differs by {(apart / total) ** 0.5:.2e} of its norm")


def check_repeatable() -> None:
    print("\n## Does a step repeat bit for bit? (0.5B, 6 steps twice from the same weights)")
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        torch.utils.deterministic.fill_uninitialized_memory = False
        finals, seconds = [], []
        for _ in range(2):
            trainer = trainer_for(build("0.5B", attn=attention.NAME))
            for step in range(6):
                started = time.perf_counter()
                packed_step(trainer, rows(ROWS_PER_STEP, seed=step))
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            finals.append([p.detach().clone() for p in trainer.trained.model.parameters()])
            del trainer
        same = all(torch.equal(a, b) for a, b in zip(*finals, strict=True))
        print(
            f"run.deterministic={repeatable}: {'the same bits' if same else 'DIFFERENT'}; {sum(seconds[-4:]) / 4:.3f} s per step",
            flush=True,
        )
    torch.use_deterministic_algorithms(False)


def flops_per_token(model) -> float:
    """6 per weight in a matrix product (forward and backward), 8 with the recomputed forward pass."""
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n)
    head = model.get_output_embeddings().weight.numel() if model.config.tie_word_embeddings else 0
    return (matrices + head) * (8 if model.is_gradient_checkpointing else 6)


def measure(size: str, kind: str, checkpointing: bool, steps: int) -> tuple[float, float, float]:
    """Median over steps of tokens/s and TFLOP/s (real tokens only; the head counted on all of them), and peak GB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(size, attn=attention.NAME if kind == "plaudit" else "sdpa", checkpointing=checkpointing)
    trainer = trainer_for(model)
    rates = []
    for step in range(steps + 3):
        examples = rows(ROWS_PER_STEP, seed=100 + step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        if kind == "plaudit":
            packed_step(trainer, examples)
        else:
            targets = sum(e.num_targets for e in examples)
            trainer.update(padded_batches(examples), lambda b, t=targets: (padded_nll(model, b, t), {}), 1e-5)  # pyright: ignore
        torch.cuda.synchronize()
        rates.append(sum(map(len, examples)) / (time.perf_counter() - started))
    rate = float(np.median(rates[3:]))
    return rate, rate * flops_per_token(model) / 1e12, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "1.5B"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only-speed", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this needs a CUDA GPU, and torch sees none\n")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS_PER_STEP} rows per step, "
        f"{TOKENS_PER_MICRO_BATCH} tokens per micro-batch"
    )
    if not arguments.only_speed:
        check_correct()
        check_repeatable()
    print("\n## Speed\n| size | gradient checkpointing | | tokens/s | TFLOP/s | peak GB | ratio |\n|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        for checkpointing in (True, False):
            peer = 0.0
            for kind in ("transformers, padded, SDPA", "plaudit"):
                try:
                    rate, tflops, peak = measure(size, kind, checkpointing, arguments.steps)
                except torch.OutOfMemoryError:
                    print(f"| {size} | {checkpointing} | {kind} | out of memory | | | |", flush=True)
                    continue
                ratio = f"{rate / peer:.2f}×" if peer and kind == "plaudit" else ""
                peer = peer or rate
                print(f"| {size} | {checkpointing} | {kind} | {rate:,.0f} | {tflops:.0f} | {peak:.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
