"""How long processes wait for each other, by the rule that deals work to them.

    python bench/balance.py                                    # every distribution that is here
    python bench/balance.py --lengths gsm8k reasoning --data DIR
    python bench/balance.py --lengths lengths.txt              # a number of tokens per line
    python bench/balance.py --lengths runs/mine/samples        # (any .jsonl with `length`, `response` or `text`)

A step has `--prompts` prompts with `--samples` responses each; processes share it, and the step ends when the last one does:

    idle share = 1 − mean / max over processes

Sampling. A process decodes its prompts' samples together; a decode step costs a fixed time and a part per running sequence:

    cost of a process = Σ_t (c + r_t),   r_t = its sequences that are longer than t,  c = `--overhead` sequences

  round robin       prompt i to process i mod N
  expected length   prompts dealt by the length their responses are expected to have: longest first to the least loaded
                    (plaudit.balance.deal, as in rl/shares.py); the expectation is the prompt's previous visit: another
                    draw of its n samples
  known length      the same with this step's own lengths, which nobody has: a bound

`--overhead` is 44 at 7B and 340 at 0.5B, by what was measured on one H200 (bench/README.md): decode steps of 8.9 and 16.5 ms with
256 and 512 sequences, and of 0.96 and 3.54 ms with 32 and 1,024.

Training. Sequences are packed into micro-batches of at most `--budget` tokens; a micro-batch costs its tokens:

  round robin       as few as possible; micro-batch i to process i mod N
  by tokens         the same, dealt longest first to the least loaded, equal numbers
  evenly            a multiple of N, of nearly equal sizes (plaudit.data.pack.split_by_tokens); micro-batch i to process i mod N

Lengths are counted in tokens of about 4 characters where a file has text. This is arithmetic on lengths; no GPU is involved.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from plaudit.balance import deal, idle_share
from plaudit.data.pack import split_by_tokens

CHARACTERS_PER_TOKEN = 4
REAL = {  # file, and where its texts are
    "gsm8k": "gsm8k_train.jsonl",
    "llmbar": "llmbar",
    "translations": "mt_ranking_ende_train.parquet",
    "chat prompts": "wildchat_if_train.parquet",
    "maths prompts": "bigmath_tinyv.parquet",
}
WHAT = {
    "gsm8k": "answers of GSM8K's training set",
    "llmbar": "both outputs of LLMBar's pairs",
    "translations": "machine translations of TED sentences",
    "chat prompts": "WildChat prompts (prompts, as a stand-in for chat responses)",
    "maths prompts": "Big-Math prompts (prompts: the file has no responses)",
    "reasoning": "log-normal, median 2,000, σ = 1, cut at 16,384: long reasoning",
    "even": "all 1,000 tokens",
}


# Lengths --------------------------------------------------------------------------------------------------------------


def texts_of(name: str, data: Path) -> Iterator[str]:
    import pyarrow.parquet as parquet

    file = data / REAL[name]
    match name:
        case "gsm8k":
            yield from (json.loads(line)["answer"] for line in file.read_text().splitlines())
        case "llmbar":
            for part in ("natural", "neighbor", "gptinst", "gptout", "manual"):
                for pair in json.loads((file / f"{part}.json").read_text()):
                    yield from (pair["output_1"], pair["output_2"])
        case "translations":
            for texts in parquet.read_table(file)["mt_texts"].to_pylist():
                yield from texts
        case _:
            for messages in parquet.read_table(file)["prompt"].to_pylist():
                yield messages if isinstance(messages, str) else messages[-1]["content"]


def tokens_of(texts: Iterator[str]) -> np.ndarray:
    return np.array([max(1, -(-len(text) // CHARACTERS_PER_TOKEN)) for text in texts])


def read_lengths(file: Path) -> np.ndarray:
    """A number per line, or JSON with `length`, `response` or `text`."""
    files = sorted(file.glob("*.jsonl")) if file.is_dir() else [file]
    found: list[int] = []
    for line in (line for one in files for line in one.read_text().splitlines() if line.strip()):
        row = json.loads(line)
        if isinstance(row, dict):
            text = row["response"] if "response" in row else row.get("text", "")
            row = row["length"] if "length" in row else len(text) // CHARACTERS_PER_TOKEN
        found.append(max(1, int(row)))
    return np.array(found)


def load_lengths(name: str, data: Path, random: np.random.Generator) -> np.ndarray | str:
    """Lengths to draw from, or why there are none."""
    if name == "reasoning":
        return np.minimum(random.lognormal(np.log(2000), 1.0, 50_000), 16_384).astype(int)
    if name == "even":
        return np.full(1000, 1000)
    if name in REAL:
        return tokens_of(texts_of(name, data)) if (data / REAL[name]).exists() else f"{REAL[name]} is not in {data}"
    return read_lengths(Path(name)) if Path(name).exists() else f"{name} does not exist"


def draw_step(
    pool: np.ndarray, prompts: int, samples: int, spread: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a step, [prompts, samples], and those of the prompts' previous visit. A prompt's typical length is drawn from the
    pool, its samples are log-normal around it with `spread`."""
    typical = random.choice(pool, (prompts, 1)).astype(float)
    now, before = (typical * random.lognormal(0, spread, (prompts, samples)) for _ in range(2))
    most = pool.max()
    return np.clip(now, 1, most).astype(int), np.clip(before, 1, most).astype(int)


# Costs and rules ------------------------------------------------------------------------------------------------------


def sampling_cost(lengths: np.ndarray, overhead: float) -> float:
    """Σ_t (c + r_t) = c · longest + all tokens."""
    return overhead * lengths.max(initial=0) + lengths.sum()


Deal = list[list[int]]


def round_robin(count: int, size: int) -> Deal:
    return [list(range(rank, count, size)) for rank in range(size)]


def sampling_idle(now: np.ndarray, before: np.ndarray, size: int, overhead: float) -> dict[str, float]:
    dealt: dict[str, Deal] = {
        "round robin": round_robin(len(now), size),
        "expected length": deal([float(cost) for cost in before.sum(1)], size),
        "known length": deal([float(cost) for cost in now.sum(1)], size),
    }
    return {rule: idle_share([sampling_cost(now[hand], overhead) for hand in hands]) for rule, hands in dealt.items()}


def training_idle(lengths: Sequence[int], budget: int, size: int) -> dict[str, float]:
    def idle(split: list[list[int]], rule: Callable[[list[float]], Deal]) -> float:
        costs = [float(sum(lengths[i] for i in group)) for group in split]
        return idle_share([sum(costs[i] for i in hand) for hand in rule(costs)])

    def in_turn(costs: list[float]) -> Deal:
        return round_robin(len(costs), size)

    fewest, evenly = split_by_tokens(lengths, budget), split_by_tokens(lengths, budget, size)
    return {
        "round robin": idle(fewest, in_turn),
        "by tokens": idle(fewest, lambda costs: deal(costs, size, equal_counts=True)),
        "evenly": idle(evenly, in_turn),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", default=list(WHAT), help=f"{', '.join(WHAT)}, or a file")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PLAUDIT_DATA", "../shared/data")))
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--spread", type=float, default=0.3, help="σ of a prompt's samples around their typical length, in log space"
    )
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--overhead", type=float, default=44.0, help="fixed cost of a decode step, in sequences")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(
        f"{given.prompts} prompts × {given.samples} samples, σ {given.spread} within a prompt, micro-batches of {given.budget:,} "
        f"tokens, a decode step's fixed cost that of {given.overhead:g} sequences; mean of {given.steps} steps, seed {given.seed}\n"
    )
    rules = ["round robin", "expected length", "known length", "round robin", "by tokens", "evenly"]
    print(
        "| lengths | processes | sampling: "
        + " | sampling: ".join(rules[:3])
        + " | training: "
        + " | training: ".join(rules[3:])
        + " |"
    )
    print("| --- " * (2 + len(rules)) + "|", flush=True)
    missing = []
    for name in given.lengths:
        random = np.random.default_rng(given.seed)
        pool = load_lengths(name, given.data, random)
        if isinstance(pool, str):
            missing.append(f"{name}: skipped, {pool}")
            continue
        steps = [draw_step(pool, given.prompts, given.samples, given.spread, random) for _ in range(given.steps)]
        for size in given.sizes:
            shares: list[list[float]] = []
            for now, before in steps:
                sampled = sampling_idle(now, before, size, given.overhead)
                trained = training_idle([int(length) for length in now.reshape(-1)], given.budget, size)
                shares.append([*sampled.values(), *trained.values()])
            mean = " | ".join(f"{share:.1%}" for share in np.mean(shares, axis=0))
            label = f"{name}, median {np.median(pool):,.0f}, 99 % {np.quantile(pool, 0.99):,.0f}" if size == given.sizes[0] else ""
            print(f"| {label} | {size} | {mean} |", flush=True)
    print("\n" + "\n".join(f"{name}: {WHAT[name]}" for name in given.lengths if name in WHAT))
    print("\n".join(missing), file=sys.stderr)


if __name__ == "__main__":
    main()
