"""Sampling with and without drafts on a CPU: where they pay, and what they cost where they do not.

    plaudit prepare smollm2 --out models/smollm2
    python bench/drafts_cpu.py       # about ten minutes on two idle cores

Three kinds of text: `copy` (a text stands twice in the prompt and begins a third time), `arithmetic` and `open` (chat prompts),
greedy and at temperature 1, with 1, 4 and 16 sequences at a time. The end token is ignored. Times are CPU seconds, which other load
changes less than seconds; runs with and without drafts alternate, and the best of each counts. Samples must be the same to the bit.

--free-rows N makes all drafts that are found, however unlikely they are right, up to N for each of the most sequences that a run
has: the steps that are left are what drafts could gain where further rows cost nothing, as on a GPU that reads its weights for a
few sequences. The seconds then say nothing, and bits are not compared.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollout_cpu import PROMPTS, REPOSITORY

from plaudit.data.templates import load_model_template
from plaudit.models.trainable import load_model
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import drafts
from plaudit.rollout.native import engine as native
from plaudit.rollout.native.engine import NativeEngine

NEW_TOKENS = 64
COUNTS = {1: 4, 4: 4, 16: 16}  # sequences at a time: prompts of a run


def texts_of(kind: str, count: int) -> list[str]:
    if kind == "arithmetic":
        return [f"What is {17 + 6 * i} times {23 + 4 * i}? Show each step." for i in range(count)]
    if kind == "open":
        return PROMPTS[:count]
    texts = [" ".join((PROMPTS * 2)[i : i + 4]) for i in range(count)]
    return [f"{text}\n\n{text}\n\n{text[:20]}" for text in texts]


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)


def run(engine: NativeEngine, prompts: list[np.ndarray], at_a_time: int, sampling: Sampling) -> dict:
    began, samples, steps, drafted, accepted = time.process_time(), [], [], 0, 0
    engine.on_step = steps.append
    for start in range(0, len(prompts), at_a_time):
        requests = [Request(str(start + i), prompt) for i, prompt in enumerate(prompts[start : start + at_a_time])]
        samples += engine.generate(requests, sampling)
        drafted, accepted = drafted + engine.drafted, accepted + engine.accepted
    samples.sort(key=lambda sample: int(sample.prompt_id))
    bits = [(sample.tokens.tobytes(), sample.sampler_logprobs.tobytes()) for sample in samples]
    return {"s": time.process_time() - began, "steps": len(steps), "drafted": drafted, "accepted": accepted, "bits": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REPOSITORY / "models/smollm2", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kinds", nargs="+", default=["copy", "arithmetic", "open"])
    parser.add_argument("--sequences", nargs="+", type=int, default=list(COUNTS), choices=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--free-rows", type=int, metavar="N", help="make all drafts, up to N times as many as sequences")
    args = parser.parse_args()
    if args.free_rows:
        drafts.STEP_ROWS = native.STEP_ROWS = max(args.sequences) * (1 + args.free_rows)
        drafts.READ_COST = 1e9
    torch.set_num_threads(args.threads)
    settings = ModelSettings(path=str(args.model), dtype=args.dtype)
    tokenizer = load_model_template(settings).tokenizer
    engine = NativeEngine(load_model(settings, torch.device("cpu")), None)
    engine.end_tokens = frozenset()
    print("| text | temperature | sequences | CPU s without | with | ratio | steps without | with | drafted | accepted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in args.kinds:
        texts = texts_of(kind, max(COUNTS.values()))
        encode = tokenizer.encode if kind == "copy" else partial(chat_tokens, tokenizer)
        prompts = [np.array(encode(text)) for text in texts]
        for temperature in (0.0, 1.0):
            for at_a_time in args.sequences:
                runs: dict[bool, list[dict]] = {False: [], True: []}
                for _ in range(args.repeats):
                    for engine.drafts in runs:
                        sampling = Sampling(NEW_TOKENS, temperature=temperature)
                        runs[engine.drafts].append(run(engine, prompts[: COUNTS[at_a_time]], at_a_time, sampling))
                same = all(one["bits"] == runs[False][0]["bits"] for both in runs.values() for one in both)
                assert same or args.free_rows, "samples differ"  # products of more rows than drafts ever make have other bits
                without, with_drafts = (min(runs[drafts], key=lambda one: one["s"]) for drafts in (False, True))
                found = (without["s"], with_drafts["s"], without["s"] / with_drafts["s"])
                counts = (without["steps"], with_drafts["steps"], with_drafts["drafted"], with_drafts["accepted"])
                print(f"| {kind} | {temperature:g} | {at_a_time} | {found[0]:.2f} | {found[1]:.2f} | {found[2]:.2f}× | ", end="")
                print(" | ".join(map(str, counts)), "|", flush=True)


if __name__ == "__main__":
    main()
