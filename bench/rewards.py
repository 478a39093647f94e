"""Speed and accuracy of math rewards: plaudit's `kind: math`, verl's reward loop, TRL's `accuracy_reward`.

    make .venv-verl/installed .venv-trl/installed
    python bench/rewards.py                    # a few minutes on two cores; --parts plaudit,trl for a subset

All score the same 10,000 answers (bench/rewards_mix.py), timed after a warm-up on a few of them. Peers run in separate
environments, one after the other. verl runs as in training: `RewardLoopManager`, ray actors, responses as token ids that its
managers decode; with each of its math rewards and the number of workers that is best for it. TRL's function is called as its
trainer calls it, in one process: it has no parallel mode.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rewards_mix import math_mix, timed

REPOSITORY = Path(__file__).parent.parent
VERL = {
    "verl, math-verify": [{"function": "math_verify", "manager": "naive", "workers": n} for n in (1, 2)],
    "verl, prime_math (numina_*)": [
        {"function": "numina_olympiads", "manager": "remote", "workers": n, "answers": 2000} for n in (1, 2)
    ],
    "verl, its default for MATH (text only)": [{"function": "lighteval/MATH", "manager": "naive", "workers": n} for n in (1, 2)],
}
"""Its math rewards, with the settings to try: `naive` is its default manager, `remote` the one with a process per worker.
prime_math forks for each answer, so it gets the first 2,000 only."""
TRIAL = 300
"""Answers used to try each setting."""


def measure_plaudit(mix: Sequence[dict[str, Any]], workers: int) -> dict[str, Any]:
    from plaudit.scoring import Scorer

    def score(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        with Scorer([{"kind": "math", "workers": workers}]) as scorer:  # a new one each time, so that nothing is cached
            scorer.score(mix[:50])
            return timed(scorer.score, rows)

    results, whole = score(mix)
    _, symbolic = score([row for row in mix if row["symbolic"]])
    failures = Counter(result["failure"]["cause"] for result in results if result["failure"])
    if failures:
        print(f"plaudit: failures {dict(failures)}")
    return {"scores": [result["reward"] for result in results], "all": whole, "symbolic": symbolic}


def run_peer(environment: str, script: str, job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Run a peer's script with its own Python; None if that is not installed."""
    python = REPOSITORY / environment / "bin/python"
    if not python.exists():
        print(f"{environment} does not exist: make {environment}/installed")
        return None
    job_file, out_file = folder / "job.json", folder / "out.json"
    job_file.write_text(json.dumps(job))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([python, Path(__file__).with_name(script), job_file, out_file], env=variables, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{script} failed")
    return json.loads(out_file.read_text())


def tokenizer_for(mix: Sequence[dict[str, Any]], folder: Path) -> str:
    """A model folder with a tokenizer trained on the mix, for verl, which takes token ids."""
    from plaudit.prepare.tiny_model import make_tiny_model

    rows = folder / "rows.jsonl"
    conversations = [{"messages": [*row["prompt"], {"role": "assistant", "content": row["response"]}]} for row in mix[:2000]]
    rows.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    make_tiny_model([rows], folder / "model", kind="llama", hidden_size=32, layers=1, vocabulary=4096)
    return str(folder / "model")


def table(mix: Sequence[dict[str, Any]], measured: dict[str, dict[str, Any]]) -> None:
    columns = ["answers/s", "plaudit's speed-up", "CPU ms each", "symbolic only: answers/s", "plaudit's speed-up", "CPU ms each"]
    columns += ["right accepted", "wrong accepted", "symbolic only: right accepted", "wrong accepted", "no score"]
    print(f"| | {' | '.join(columns)} |\n| ---{' | ---' * len(columns)} |")
    for name, result in measured.items():
        cells = []
        for part in ("all", "symbolic"):
            cost = result[part]
            rate = cost["answers"] / cost["seconds"]
            ours = measured.get("plaudit", result)[part]
            cells += [
                f"{rate:,.0f}",
                f"{ours['answers'] / ours['seconds'] / rate:.1f}×",
                f"{1000 * cost['processor_s'] / cost['answers']:.2f}",
            ]
        cells += [accepted(mix, result["scores"], right=right, symbolic=only) for only in (False, True) for right in (True, False)]
        print(f"| {name} | {' | '.join(cells)} | {sum(score is None for score in result['scores'])} |")


def accepted(
    mix: Sequence[dict[str, Any]], scores: Sequence[float | None], *, right: bool, symbolic: bool = False, part: str = ""
) -> str:
    """The share of right (or wrong) answers that are accepted."""
    these = [
        score is not None and score > 0.5
        for row, score in zip(mix, scores, strict=False)  # a slow peer scores only the first rows
        if row["right"] == right and (row["symbolic"] or not symbolic) and part in ("", row["part"])
    ]
    return f"{sum(these) / len(these):.2%}" if these else "–"


def by_part(mix: Sequence[dict[str, Any]], measured: dict[str, dict[str, Any]]) -> None:
    """Right and wrong answers accepted, by part of the mix."""
    print(f"\n| right, wrong accepted | answers | {' | '.join(measured)} |\n| --- | --- |{' --- |' * len(measured)}")
    for part, count in sorted(Counter(row["part"] for row in mix).items()):
        shares = [
            f"{accepted(mix, result['scores'], right=True, part=part)}, {accepted(mix, result['scores'], right=False, part=part)}"
            for result in measured.values()
        ]
        print(f"| {part} | {count:,} | {' | '.join(shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="plaudit,trl,verl", help="libraries to measure")
    parser.add_argument("--workers", type=int, default=2, help="plaudit's worker processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, help="use only this many of the 10,000, for a smoke test")
    parser.add_argument("--data", type=Path, default=os.environ.get("PLAUDIT_DATA", REPOSITORY.parent / "shared/data"))
    parser.add_argument("--show", type=int, default=0, help="print this many answers that plaudit misjudges")
    args = parser.parse_args()
    parts = args.parts.split(",")

    mix = math_mix(Path(args.data), args.seed)[: args.answers]
    undecided = sum(row["symbolic"] for row in mix)
    counts = dict(Counter(row["part"].split(":")[0] for row in mix))
    real = "" if (Path(args.data) / "bigmath_tinyv.parquet").is_file() else " (data files are missing: generated numbers instead)"
    print(f"{len(mix):,} answers, {sum(row['right'] for row in mix):,} of them right: {counts}{real}")
    print(f"text and numbers alone cannot decide {undecided:,} of them ({undecided / len(mix):.1%})")
    versions = {name: version(name) for name in ("math-verify", "sympy")}
    print(
        f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.2f}; plaudit with {args.workers} workers, {versions}\n"
    )

    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "plaudit" in parts:
            measured["plaudit"] = measure_plaudit(mix, args.workers)
        if "trl" in parts and (out := run_peer(".venv-trl", "rewards_trl.py", {"samples": mix}, folder)):
            measured["TRL, accuracy_reward"] = out
            print(out["versions"])
        if "verl" in parts:
            job = {"samples": mix, "model": tokenizer_for(mix, folder), "settings": VERL, "trial": TRIAL}
            if out := run_peer(".venv-verl", "rewards_verl.py", job, folder):
                measured |= out["results"]
                print(out["versions"])
                for called, result in out["results"].items():
                    print(f"{called}: {result['tried']}")
    table(mix, measured)
    by_part(mix, measured)
    if "plaudit" in measured:
        wrongly = [
            (row, score) for row, score in zip(mix, measured["plaudit"]["scores"], strict=True) if row["right"] != (score == 1.0)
        ]
        for row, score in wrongly[: args.show]:
            print(f"{score} for {row['response'].splitlines()[-1]!r}, reference {row['ground_truth']!r} ({row['part']})")


if __name__ == "__main__":
    main()
