"""`plaudit view` of a long run: how soon the first page and a step are there, and how much memory the viewer takes.

    python bench/view.py runs/large               10,000 steps of 512 samples, 8.8 GB; made if the folder does not exist

Every step has the same samples (64 prompts, 8 responses of 150 words, two rewards, one of them a judge with its prompt and answer).
The wall time is that of a client on the same machine, the CPU time that of the server.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from plaudit.report.pages import ASSETS
from support.made_runs import make_run, scored_group

METRICS = ["reward", "length", "entropy", "loss", "grad_norm", "lr", "mismatch", *(f"parts/p{i}" for i in range(8))]
METRICS += [*(f"time/t{i}_s" for i in range(20)), *(f"judge/j{i}" for i in range(15))]


def make(folder: Path, steps: int) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]

    def text(n: int) -> str:
        return " ".join(draw.choices(words, k=n))

    groups = [
        scored_group(
            f"p{g}", [text(150) for _ in range(8)], [draw.random() for _ in range(8)], prompt=text(80), tokens=[200] * 8,
            parts=[{"exact": float(draw.random() > 0.5), "tone": draw.random()} for _ in range(8)],
            trace={"prompt": text(60), "answer": text(20)},
        )
        for g in range(64)
    ]  # fmt: skip
    make_run(folder, {1: groups}, recipe={"run.max_steps": steps})
    content = (folder / "samples/train_000001.parquet").read_bytes()
    for step in range(2, steps + 1):
        (folder / f"samples/train_{step:06d}.parquet").write_bytes(content)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: draw.random() + step / steps for name in METRICS}
            file.write(json.dumps({"step": step, **values, "time/step_s": 30.0}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        make(arguments.folder, arguments.steps)
    command = [sys.executable, "-m", "plaudit", "view", str(arguments.folder), "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        process = psutil.Process(server.pid)
        print(f"start of the server: {time.perf_counter() - began:.2f} s, CPU {sum(process.cpu_times()[:2]):.2f} s")

        def measured(*paths: str) -> tuple[float, float]:
            wall, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
            for path in paths:
                urllib.request.urlopen(f"{address}/{path}").read()
            return time.perf_counter() - wall, sum(process.cpu_times()[:2]) - cpu

        def show(name: str, times: list[tuple[float, float]]) -> None:
            walls, cpus = zip(*times, strict=True)
            print(f"{name}: {statistics.median(walls):.3f} s (at most {max(walls):.3f}), CPU {statistics.median(cpus):.2f} s")

        show("first page", [measured("", *(f"page/{name}" for name in ASSETS), "api/runs", "api/runs/0/metrics")])
        steps = random.Random(1).sample(range(1, arguments.steps + 1), 21)
        show("first step", [measured("api/runs/0/steps", f"api/runs/0/train/{steps[0]}")])
        show("a step, of 20", [measured(f"api/runs/0/train/{step}") for step in steps[1:]])
        show("a sample, of 20", [measured(f"api/runs/0/train/{step}/{step % 512}") for step in steps[1:]])
        show("following a run, of 20", [measured("api/runs") for _ in range(20)])
        while True:
            found = json.loads(urllib.request.urlopen(f"{address}/api/runs/0/diagnostics").read())
            if found["done"] == found["of"]:
                break
        print(f"memory at the end: {process.memory_info().rss / 1e6:.0f} MB")
        server.terminate()


if __name__ == "__main__":
    main()
