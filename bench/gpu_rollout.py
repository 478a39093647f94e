"""Rollouts on one GPU: throughput compared with vLLM, log-prob mismatch with the trainer, stability and start-up time.

    python bench/gpu_rollout.py                                            # every section, both engines
    python bench/gpu_rollout.py --sections grid,mix --engines native --models 0.5B,1.5B --out DIR
    python bench/gpu_rollout.py --sections sweep --missing --out DIR       # only what DIR lacks
    python bench/gpu_rollout.py --report --out DIR                         # tables and plot again, without a GPU
    python bench/gpu_rollout.py --sections grid --models 7B --alternate --runs 5   # both engines loaded, their runs in turn
    python bench/gpu_rollout.py --sections check                           # correctness of the native engine
    python bench/gpu_rollout.py --device cpu --tiny --out DIR              # smoke test; its numbers mean nothing

Every number is written to DIR/gpu_rollout.json under its own key as soon as it is measured; measuring it again replaces only that
number. So sections can be run one by one, a few minutes each, and an interrupted run loses only the measurement in progress. Each
engine and model runs in a separate process, with its output in DIR/logs; a failure is reported, the others
continue, and the exit code is 1.

vLLM is whichever `--vllm-python` imports; `--vllm-path` (for example a folder with unpacked wheels) is added to the PYTHONPATH of
its processes only. Without vLLM its columns stay empty. Its environment (VLLM_USE_V2_MODEL_RUNNER=1, …) is passed on and recorded.

Random weights of Qwen2.5 shapes in bf16; temperature 1; the log-prob of every sampled token; no text on either side.

    grid      256-token prompts, all different, 512 new tokens, no end token: new tokens divided by the time of the call,
              including prefill. native: one warm-up run of the same shape, then --runs: median, lowest and highest;
              vLLM: a short warm-up run, then --runs with the faster of two ways to return log-probs. Floor: decode steps that
              read every weight once, and keys and values of all sequences at their mean length, at a copy's bandwidth.
    mix       256 prompts of 32…2048 tokens × 8 samples, limits of 16…2048 new tokens (all log-uniform), and end tokens that end a
              response with probability 1/500 per token. Each run has different prompts. vLLM: with prefix caching; a short warm-up
              run, one with half of the prompts for each of two ways to end responses, then --runs with the faster one.
    sweep     native, 0.5B: decoding alone by batch and length, from the difference of two calls. A plot.
    mismatch  native: mean |sampler's log-prob − trainer's log-prob| for random weights, after 30 steps of SFT, and for --model.
              vLLM, 0.5B: the same for its samples of the same random weights and prompts, against plaudit's trainer. Also the
              distance of sampler and trainer from the same weights in fp32, which is bf16 rounding.
    cycles    native, 0.5B: 50 × (32 prompts × 8 samples × 128 tokens, then a GRPO update on all of them with random rewards):
              seconds and memory of the last five against the first five, after 10 warm-up cycles.
    step      native, 0.5B and 1.5B: GRPO steps of 64 prompts of 256 tokens × 8 samples × 512 tokens with random rewards: the median
              of 10 after 2 to warm up.
    start     from the start of the process `plaudit sample` to its first line (8 prompts, one token each) with empty compilation
              caches, and again with warm ones; vLLM: a process that makes an LLM with default settings for the same folder.
    check     native (not a default section): tiny models of four kinds, with LoRA and as plain modules, in fp32 and bf16:
              greedy tokens against `generate`, log-probs against full passes, repeatability, stop strings, little memory,
              training in between. One line per check; the exit code is 1 if any failed.

`start` and vLLM's `mismatch` need a model folder on disk. The first native process also makes it, or a separate one does (which
also ensures that the process timed by `start` is not the first to read torch from disk).
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rollout_cpu import PROMPTS, VLLM_EAGER
from rollout_tables import NAMES, draw, line_of, tables
from rollout_work import ENGINES, FAILED, FOLDER_OF, FULL, TINY, Work, keys_of

REPOSITORY = Path(__file__).resolve().parent.parent
SECTIONS = ("grid", "mix", "sweep", "mismatch", "cycles", "step", "start")
CHECKED = "tiny"  # model name of `check`
VLLM_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM_SHARE = 0.5  # of the GPU's memory when both engines are loaded: room for all sequences of 7B several times over
LINGER_S = 30  # for a process to exit after its last measurement


class Results:
    """DIR/gpu_rollout.json: entries by key."""

    def __init__(self, folder: Path, tiny: bool):
        self.file, self.tiny = folder / "gpu_rollout.json", tiny
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(self.file.read_text()) if self.file.exists() else {"tiny": tiny, "entries": {}}
        if found["tiny"] != tiny:
            kind = "of --tiny" if found["tiny"] else "without --tiny"
            sys.exit(f"{self.file} holds results {kind}; choose another --out")
        self.entries: dict[str, dict] = found["entries"]
        self.lock, self.complete = threading.Lock(), True

    def add(self, entry: dict) -> None:
        with self.lock:
            self.entries[entry["key"]] = {**entry, "when": time.strftime("%Y-%m-%d %H:%M:%S")}
            self._write()
        print(f"  {line_of(self.entries[entry['key']])}", flush=True)

    def failed(self, sections: list[str], engine: str, model: str, cause: str | None) -> None:
        """Remember that these could not be measured, or (no cause) that they now could."""
        with self.lock:
            self.complete &= not cause
            for section in sections:
                key = f"failed/{section}/{engine}/{model}"
                self.entries.pop(key, None)
                if cause:
                    self.entries[key] = {"key": key, "section": "failed", "cause": cause}
            self._write()

    def forget(self, section: str) -> None:
        self.entries = {key: entry for key, entry in self.entries.items() if entry["section"] != section}

    def _write(self) -> None:
        temporary = self.file.with_name(f".{self.file.name}.temporary")
        temporary.write_text(json.dumps({"tiny": self.tiny, "entries": self.entries}, indent=1))
        os.replace(temporary, self.file)


# Processes ------------------------------------------------------------------------------------------------------------


def environment_of(args: argparse.Namespace, engine: str, more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine's process."""
    environment = dict(os.environ)
    if engine == "vllm":
        environment |= VLLM_ENVIRONMENT | (VLLM_EAGER if args.device == "cpu" else {})
    paths = [str(args.vllm_path or "") if engine == "vllm" else "", environment.get("PYTHONPATH", ""), str(REPOSITORY)]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", **(more or {})}


def follow(
    command: list[str], environment: dict[str, str], log: Path, timeout_s: float, look: Callable[[], bool]
) -> str | None:  # fmt: skip
    """Run a command, polling `look`, until it ends or `look` returns true; returns the cause of a failure. The log is continued."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began, seen = time.monotonic(), None
    with log.open("a") as output:
        output.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n")
        output.flush()
        start = output.tell()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.02)
                if look() and seen is None:
                    seen = time.monotonic()
                if time.monotonic() - began > timeout_s or (seen is not None and time.monotonic() - seen > LINGER_S):
                    break
            look()
        finally:
            # The whole process group: vLLM's engine is another process and must release the GPU's memory.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if code == 0 or seen is not None:
        return None
    if time.monotonic() - began > timeout_s:
        return f"not done in {timeout_s:g} s"
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    print(*(f"    {line[:300]}" for line in lines[-15:]), sep="\n", file=sys.stderr)
    return f"exit code {code}: {lines[-1].strip()[:200] if lines else 'no output'}"


def measure(args: argparse.Namespace, results: Results, engine: str, model: str, sections: list[str], **more) -> str | None:
    """Run the sections of one model in a process of that engine; numbers are added to the results as they arrive."""
    began = time.monotonic()
    print(f"{NAMES[engine]} {model}: {', '.join(sections)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job_file, found, read = Path(folder) / "job.json", Path(folder) / "results.jsonl", 0
        job = {
            "sections": sections, "model": model, "device": args.device, "tiny": args.tiny, "results": str(found),
            "skip": list(results.entries) if args.missing else [], "model_path": str(args.model) if args.model else None,
            "runs": args.runs, **more,
        }  # fmt: skip
        job_file.write_text(json.dumps(job))
        found.touch()

        def look() -> bool:
            nonlocal read
            with found.open() as file:
                file.seek(read)
                while (line := file.readline()).endswith("\n"):
                    read = file.tell()
                    entry = json.loads(line)
                    if entry["section"] == "done":
                        return True
                    if entry["section"] == "spent":
                        print(f"  {entry['case']}: {entry['seconds']:.0f} s", flush=True)
                    else:
                        results.add(entry)
            return False

        python = str(args.vllm_python) if engine == "vllm" else sys.executable
        log = args.out / "logs" / f"{'-'.join(sections)}-{engine}-{model}.log"
        command = [python, str(Path(__file__).with_name(f"{engine}_rollout.py")), str(job_file)]
        failure = follow(command, environment_of(args, engine), log, args.timeout_s, look)
    results.failed(sections, engine, model, failure)
    print(f"  {f'FAILED: {failure}' if failure else 'done'}, {time.monotonic() - began:.0f} s", flush=True)
    return failure


def alternate(args: argparse.Namespace, results: Results, model: str) -> None:
    """`grid` of both engines, each in its process with the model loaded, run by run in turn. vLLM starts first: it measures how
    much memory its own start takes, and fails if another process takes some meanwhile."""
    with tempfile.TemporaryDirectory() as turns, ThreadPoolExecutor(len(ENGINES)) as pool:

        def one(engine: str) -> None:
            share = {"memory_share": VLLM_SHARE} if engine == "vllm" else {}
            if measure(args, results, engine, model, ["grid"], turns=turns, **share):
                (Path(turns) / FAILED).touch()

        first = pool.submit(one, "vllm")
        while not first.done() and not any(Path(turns).iterdir()):
            time.sleep(0.1)
        pool.submit(one, "native").result()
        first.result()


def has_folder(args: argparse.Namespace, results: Results, folder: Path) -> bool:
    """Make sure that the model folder exists."""
    return folder.exists() or not measure(args, results, "native", FOLDER_OF, ["folder"], folder=str(folder))


def mismatch_of_vllm(args: argparse.Namespace, results: Results, folder: Path) -> None:
    """vLLM samples the folder's model; another process computes the trainer's log-probs of these samples."""
    given = {"folder": str(folder), "samples": str(folder.with_name("samples.json"))}
    if has_folder(args, results, folder) and not measure(args, results, "vllm", FOLDER_OF, ["mismatch"], **given):
        measure(args, results, "native", FOLDER_OF, ["judge"], **given)


def start(args: argparse.Namespace, results: Results, folder: Path) -> None:
    """Seconds to the first token, cold and warm."""
    model, prompts = FOLDER_OF, PROMPTS[:8]
    if not has_folder(args, results, folder):
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
        (scratch / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for engine in args.engines:
            caches = {
                variable: str(scratch / engine / variable)
                for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
            }
            for case in ("cold", "warm"):
                began, out, first = time.time(), scratch / f"{engine}-{case}.jsonl", []
                if engine == "native":
                    command = [
                        sys.executable, "-m", "plaudit", "sample", str(folder), str(scratch / "prompts.jsonl"),
                        "--out", str(out), "--max-new-tokens", "1", "--device", args.device,
                    ]  # fmt: skip
                else:
                    job = {"sections": ["start"], "model": model, "device": args.device, "tiny": args.tiny, "results": str(out)}
                    job |= {"skip": [], "folder": str(folder), "prompts": prompts}
                    (scratch / "job.json").write_text(json.dumps(job))
                    command = [str(args.vllm_python), str(Path(__file__).with_name("vllm_rollout.py")), str(scratch / "job.json")]

                def look(out: Path = out, first: list[float] = first) -> bool:
                    if not first and out.exists() and out.stat().st_size:
                        first.append(time.time())
                    return False

                log = args.out / "logs" / f"start-{engine}-{case}.log"
                failure = follow(command, environment_of(args, engine, caches), log, args.timeout_s, look)
                results.failed([f"start ({case})"], engine, model, failure)
                if failure or not first:
                    print(f"  {NAMES[engine]} {case}: FAILED: {failure or 'no samples'}", flush=True)
                    break
                about = json.loads(out.read_text().splitlines()[0])["about"] if engine == "vllm" else about_of(results, engine)
                entry = {"section": "start", "engine": engine, "model": model, "case": case, "about": about}
                found = {"first_token_s": first[0] - began, "whole_s": time.time() - began}
                results.add({"key": f"start/{engine}/{model}/{case}", **entry, **found})


def about_of(results: Results, engine: str) -> str:
    """Machine and versions, from that engine's other entries."""
    latest = sorted((e for e in results.entries.values() if e.get("engine") == engine and e.get("about")), key=lambda e: e["when"])
    return latest[-1]["about"] if latest else ""


# Plan and command line ------------------------------------------------------------------------------------------------


def jobs(args: argparse.Namespace, work: Work) -> list[tuple[str, str, list[str]]]:
    """Engine, model and sections of each process."""
    planned = []
    for model in work.grid:
        both = [section for section in ("grid", "mix") if section in args.sections]
        both = [section for section in both if section == "grid" or model in work.mix_models]
        if "native" in args.engines:
            planned.append(("native", model, both))
        if "vllm" in args.engines:
            planned += [("vllm", model, [section]) for section in both]  # with prefix caching and without
    planned += [("native", "0.5B", ["sweep"]), ("native", "0.5B", ["mismatch"]), ("native", "1.5B", ["mismatch"])]
    if args.model:
        planned.append(("native", args.model.name, ["mismatch"]))
    planned += [("vllm", FOLDER_OF, ["mismatch"]), ("native", "0.5B", ["cycles"])]
    planned += [("native", model, ["step"]) for model in ("0.5B", "1.5B")]
    known = [*args.models, CHECKED, args.model.name if args.model else ""]
    planned = [job for job in [("native", CHECKED, ["check"]), *planned] if job[0] in args.engines and job[1] in known and job[2]]
    return [(engine, model, sections) for engine, model, sections in planned if set(sections) <= set(args.sections)]


def main() -> int:
    def names(of: tuple[str, ...]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            for name in text.split(","):
                if name not in of:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(of)}")
            return text.split(",")

        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections", type=names((*SECTIONS, "check")), default=list(SECTIONS), help=f"of {','.join(SECTIONS)},check"
    )
    parser.add_argument("--engines", type=names(ENGINES), default=list(ENGINES), help="of native,vllm")
    parser.add_argument("--models", type=names(tuple(FULL.grid)), default=list(FULL.grid), help="of 0.5B,1.5B,7B")
    parser.add_argument("--model", type=Path, help="a model folder: also measured in mismatch, its tokenizer used in start")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results", help="folder for results and plot")
    parser.add_argument("--missing", action="store_true", help="measure only what --out lacks")
    parser.add_argument("--report", action="store_true", help="only print tables and plot of the results in --out")
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python with vLLM")
    parser.add_argument("--vllm-path", help="folders to put on its PYTHONPATH")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and counts, for a smoke test")
    parser.add_argument("--runs", type=int, default=3, help="timed runs in grid and mix")
    parser.add_argument("--alternate", action="store_true", help="grid: both engines loaded, their runs in turn")
    parser.add_argument("--timeout-s", type=float, default=1800, help="time limit per process")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended too
    if args.alternate and (args.sections != ["grid"] or args.engines != list(ENGINES)):
        parser.error("--alternate is for both engines and --sections grid")
    work, results, began = TINY if args.tiny else FULL, Results(args.out, args.tiny), time.monotonic()
    passed = True
    if not args.report:
        with tempfile.TemporaryDirectory() as scratch:
            passed = measure_all(args, results, work, Path(scratch) / "model")
        print(f"total: {time.monotonic() - began:.0f} s", flush=True)
    print(tables(results.entries, work))
    if picture := draw(results.entries, work, args.out / "gpu_rollout.png"):
        print(f"\n{picture}")
    return 0 if passed and results.complete else 1


def measure_all(args: argparse.Namespace, results: Results, work: Work, folder: Path) -> bool:
    """False if a check failed."""
    planned = []
    for engine, model, sections in jobs(args, work):
        keys = [key for section in sections for key in keys_of(section, engine, model, work)]
        if not (args.missing and all(key in results.entries for key in keys)):
            planned.append((engine, model, sections))
    if args.alternate:
        planned = [job for job in planned if job[2] != ["grid"]]
        for model in args.models:
            alternate(args, results, model)
    starts, passed = "start" in args.sections and FOLDER_OF in args.models, True
    needs_folder = starts or any((engine, sections) == ("vllm", ["mismatch"]) for engine, _, sections in planned)
    for engine, model, sections in planned:
        if (engine, sections) == ("vllm", ["mismatch"]):
            mismatch_of_vllm(args, results, folder)
            continue
        if sections == ["check"]:
            results.forget("check")
        makes_folder = engine == "native" and needs_folder and not folder.exists()
        more = {"folder": str(folder)} if makes_folder else {}
        failure = measure(args, results, engine, model, [*sections, *(["folder"] if makes_folder else [])], **more)
        if sections == ["check"]:
            passed = not failure and all(entry["passed"] for entry in results.entries.values() if entry["section"] == "check")
    if starts:
        start(args, results, folder)
    return passed


if __name__ == "__main__":
    sys.exit(main())
