"""One thread or all cores, by the size of the model: where `plaudit.threads` draws the line.

    OMP_WAIT_POLICY=passive python bench/threads.py [--widths 96 256 576] [--repeats 5]

For each width, a two-layer Llama with random weights: an update on 2,048 packed tokens, and 16 tokens for each of 256 and of 32
sequences. Shown: the fastest of all repeats in wall time, and the least CPU time. Thread counts alternate, so that other load on
the machine disturbs both alike.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from plaudit.data.pack import pack
from plaudit.data.templates import load_model_template
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import load_policy
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Example

ROWS = Path(__file__).parent.parent / "recipes/first/train.jsonl"


def tasks(folder: Path, width: int) -> dict[str, Callable[[], object]]:
    make_tiny_model([ROWS], folder, hidden_size=width, layers=2, vocabulary=300)
    settings = ModelSettings(path=str(folder))
    policy = load_policy(settings, load_model_template(settings), torch.device("cpu"))
    engine = NativeEngine(policy.model, policy.template.tokenizer)
    tokens = np.arange(64, dtype=np.int32) % 250 + 3
    batch = pack([Example(tokens, np.arange(64) > 0)] * 32, torch.device("cpu"))

    def update() -> None:
        policy.model.train()
        (-target_logprobs(policy.model, batch).logprobs_N.mean()).backward()
        policy.model.zero_grad()

    def sample(n: int) -> None:
        for _ in engine.generate([Request("prompt", tokens[:24], n)], Sampling(16)):
            pass

    return {"update, 2,048 tokens": update, "sample, 256 × 16": lambda: sample(256), "sample, 32 × 16": lambda: sample(32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 96, 128, 256, 384, 576, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 2])
    options = parser.parse_args()
    print(f"{'width':>5}  {'':22}" + "".join(f"{n:>3} threads: wall, CPU ms   " for n in options.threads))
    for width in options.widths:
        with tempfile.TemporaryDirectory() as folder:
            for name, task in tasks(Path(folder) / "model", width).items():
                best = {n: [float("inf"), float("inf")] for n in options.threads}
                for repeat in range(options.repeats + 1):
                    for n in options.threads:
                        torch.set_num_threads(n)
                        wall, cpu = time.perf_counter(), time.process_time()
                        task()
                        spent = time.perf_counter() - wall, time.process_time() - cpu
                        if repeat:  # the first is warm-up
                            best[n] = [min(a, b) for a, b in zip(best[n], spent, strict=True)]
                print(
                    f"{width:>5}  {name:22}"
                    + "".join(f"{wall * 1e3:>12.0f} {cpu * 1e3:>10.0f}     " for wall, cpu in best.values())
                )


if __name__ == "__main__":
    main()
