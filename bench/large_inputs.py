"""How long `plaudit sft` takes to start on many rows, and how much memory: the first time, and again.

    python bench/large_inputs.py --rows 200000 1000000
    git worktree add ../before COMMIT; python bench/large_inputs.py --rows 200000 --checkout ../before

A start is the whole command with one training step of a tiny model: imports, digests of the files, tokenising or the cache, and
the step. Rows are a question and an answer of about 100 tokens together. Memory is the resident memory of all its processes
together, at its peak, which counts what they share several times; and that of the largest of them.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from plaudit.prepare.tiny_model import make_tiny_model

SYLLABLES = [a + b for a in "bcdfglmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "in")]


def write_rows(file: Path, count: int, seed: int = 0) -> Path:
    """Sentences of made-up words."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(2000)]
    with file.open("w", encoding="utf-8") as out:
        for i in range(count):
            question, answer = (" ".join(draw.choices(words, k=draw.randint(24, 44))) for _ in range(2))
            messages = [{"role": "user", "content": f"{i}: {question}?"}, {"role": "assistant", "content": f"{answer}."}]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def start(folder: Path, rows: Path, checkout: Path) -> dict[str, float]:
    """One start of `plaudit sft`."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    overrides = ["run.max_steps=1", "train.rows_per_step=1", "model.gradient_checkpointing=false", "run.device=cpu"]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        json.dumps({"model": {"path": str(folder / "model")}, "data": {"train": str(rows)}, "run": {"dir": str(folder / "run")}})
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout.resolve()),
        "PLAUDIT_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.perf_counter()
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "plaudit", "sft", str(recipe), *overrides]
        process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        together = 0
        while process.poll() is None:
            together = max(together, memory_of(process))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit((folder / "log").read_text())
    usage = os.times()
    largest = resource_peak()
    return {
        "seconds": time.perf_counter() - began,
        "cpu": usage.children_user + usage.children_system,
        "together": together,
        "largest": largest,
    }


def memory_of(process: psutil.Popen) -> int:
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def resource_peak() -> int:
    """Bytes of the largest process that this one has waited for."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(folder: Path, rows: Path, checkout: Path) -> dict[str, float]:
    """`start` in a process of its own, whose children are counted apart."""
    command = [sys.executable, __file__, "--start", str(folder), str(rows), str(checkout)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000])
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent, help="the plaudit to measure")
    parser.add_argument("--start", type=Path, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(*options.start)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_model([write_rows(folder / "sample.jsonl", 2000)], folder / "model", hidden_size=32, layers=1, vocabulary=4096)
        print(f"{psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print("| rows | file, MB | start | seconds | CPU seconds | peak memory together, MB | largest process, MB |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for count in options.rows:
            rows = write_rows(folder / f"{count}.jsonl", count)
            for when in ("first", "second"):
                m = measure(folder, rows, options.checkout)
                numbers = f"{m['seconds']:.1f} | {m['cpu']:.1f} | {m['together'] / 1e6:,.0f} | {m['largest'] / 1e6:,.0f}"
                print(f"| {count:,} | {rows.stat().st_size / 1e6:,.0f} | {when} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
