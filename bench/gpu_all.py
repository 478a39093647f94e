"""The measurements of a training step, sampling and memory on a GPU, one after another; those that need TRL and vLLM last.

    python bench/gpu_all.py                                        # an hour on an H200; with TRL, vLLM and a model two
    python bench/gpu_all.py --list                                 # names, minutes and commands, and what is done
    python bench/gpu_all.py --only tests,step,long --out DIR       # these, in this order
    nohup python bench/gpu_all.py --out DIR --trl-path PEERS/site-packages &     # where a shell may end first

Each measurement is a process of its own, its output is DIR/NAME.log, its results are in a folder of DIR for each script, so that a
table has all of its rows. One that ended well leaves DIR/NAME.done and is not repeated by the next call, so an interrupted call
continues where it ended; delete the file to measure again. One that failed is repeated, and the exit code is 1 if any failed.
Measurements of TRL and vLLM are left out without --trl-path or --trl-python (README.md says how to make either), and `learning`
without --model (`plaudit prepare smollm2`). `memory` also fails if a plan is too far from what was used.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Measurement:
    minutes: float
    """On an H200, about, by estimate; it is ended after three times as long."""
    commands: str
    """Lines of arguments to Python. OUT: the script's folder, PEERS: where TRL and vLLM are, MODEL: a chat model's folder."""


STEP = "bench/gpu_step.py --out OUT --systems plaudit --sections"
TRL = "bench/gpu_step.py --out OUT PEERS --systems trl --warm-up 1 --within 800 --timeout 800 --sections"
MEASUREMENTS = {
    # What a kernel computes comes before how fast it does.
    "tests": Measurement(3, "-m pytest -q -n 8 tests/models/test_attention_backward.py tests/models/test_merging_kernels.py "
                            "tests/models/test_quantised.py tests/rollout/native/test_exact.py"),
    "attention": Measurement(1, "bench/gpu_attention.py --out OUT"),
    "adapters": Measurement(1, "bench/gpu_lora.py --out OUT"),
    "draw": Measurement(1, "bench/gpu_draw.py --out OUT"),
    "prefixes": Measurement(5, "bench/gpu_prefixes.py --out OUT"),
    "step": Measurement(6, f"{STEP} grpo --lora --profile"),
    "sft": Measurement(4, f"{STEP} sft,dpo"),
    "long": Measurement(4, f"{STEP} long\n{STEP} long --set train.share_prompts=false"),
    "7B": Measurement(12, f"{STEP} grpo --sizes 7B --lora --no-full\n"
                         f"{STEP} grpo --sizes 7B --lora --no-full --set model.lora.base_bits=4\n"
                         f"{STEP} grpo --sizes 7B\n{STEP} sft --sizes 7B"),
    "memory": Measurement(10, "bench/memory_plan.py --device cuda --out OUT"),
    "check": Measurement(3, "bench/gpu_rollout.py --sections check --out OUT"),
    "cycles": Measurement(3, "bench/gpu_rollout.py --sections cycles --engines native --out OUT"),
    "grid": Measurement(5, "bench/gpu_rollout.py --sections grid --engines native --missing --out OUT"),
    "gradients": Measurement(5, "bench/gpu_sft.py"),
    "trl-0.5B": Measurement(7, f"{TRL} grpo --sizes 0.5B --lora"),
    "trl-1.5B": Measurement(9, f"{TRL} grpo --sizes 1.5B --lora"),
    "trl-float32": Measurement(10, f"{TRL} grpo --trl-dtype float32"),
    "trl-7B": Measurement(9, f"{TRL} grpo --sizes 7B --lora --no-full"),
    "trl-sft": Measurement(5, f"{TRL} sft,dpo"),
    "7B-alternate": Measurement(8, "bench/gpu_rollout.py --sections grid --models 7B --alternate --runs 5 PEERS --out OUT"),
    "learning": Measurement(20, "bench/learning.py --model MODEL PEERS --out OUT"),
}  # fmt: skip


def arguments(line: str, given: argparse.Namespace) -> list[str]:
    """Python's arguments of a line of a measurement's commands."""
    script, *_ = shlex.split(line)
    folder = str(given.out / Path(script).stem)
    engine = script.endswith("gpu_rollout.py")  # there the options are of vLLM alone
    peers = []
    if given.trl_path:
        peers += ["--vllm-path" if engine else "--trl-path", str(given.trl_path)]
    if given.trl_python:
        peers += ["--vllm-python" if engine else "--trl-python", str(given.trl_python)]
    known = {"OUT": [folder], "PEERS": peers or ["PEERS"], "MODEL": [str(given.model or "MODEL")]}
    return [word for name in shlex.split(line) for word in known.get(name, [name])]


def missing(measurement: Measurement, given: argparse.Namespace) -> str | None:
    if "PEERS" in measurement.commands and not (given.trl_path or given.trl_python):
        return "needs --trl-path or --trl-python"
    if "MODEL" in measurement.commands and not given.model:
        return "needs --model"
    return None


def run(name: str, given: argparse.Namespace) -> bool:
    """Whether all of its commands ended well."""
    ends = time.monotonic() + 180 * MEASUREMENTS[name].minutes
    environment, good = os.environ | {"PYTHONUNBUFFERED": "1"}, True
    with (given.out / f"{name}.log").open("a") as log:
        for line in MEASUREMENTS[name].commands.splitlines():
            command = [sys.executable, *arguments(line, given)]
            print(f"\n$ {shlex.join(command)}", file=log, flush=True)
            # In a session of its own: what a benchmark started ends with it.
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True, env=environment)
            try:
                code = process.wait(max(1.0, ends - time.monotonic()))
            except BaseException as error:
                end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                print(f"ended after {3 * MEASUREMENTS[name].minutes:g} minutes", file=log, flush=True)
                return False
            good &= code == 0
    if good:
        (given.out / f"{name}.done").touch()
    return good


def end(process: subprocess.Popen) -> None:
    """First in a way that lets a benchmark end what it started in sessions of their own."""
    for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def absolute(text: str) -> Path:
    return Path(text).absolute()  # measurements run in the repository's folder


def main() -> None:
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in MEASUREMENTS:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MEASUREMENTS)}")
        return found

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, metavar="NAMES", help=", ".join(MEASUREMENTS))
    parser.add_argument("--out", type=absolute, default=REPOSITORY / "runs/gpu", help="default runs/gpu")
    parser.add_argument("--list", action="store_true", help="print them, and end")
    parser.add_argument("--trl-python", type=absolute, help="the Python that has TRL and vLLM")
    parser.add_argument("--trl-path", type=absolute, help="…/site-packages: TRL's and vLLM's wheels, unpacked")
    parser.add_argument("--model", type=absolute, help="a chat model's folder, for `learning`")
    given = parser.parse_args()
    for name in given.only or ():
        if needed := missing(MEASUREMENTS[name], given):
            parser.error(f"{name} {needed}")
    if not given.list:
        given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a benchmark is ended too

    failed = []
    for name in given.only or MEASUREMENTS:
        one = MEASUREMENTS[name]
        state = "done" if (given.out / f"{name}.done").exists() else missing(one, given)
        if given.list:
            print(f"{name} ({one.minutes:g} min){f': {state}' if state else ''}")
            for line in one.commands.splitlines():
                print(f"    python {shlex.join(arguments(line, given))}")
        elif state:
            print(f"{name}: {state}", flush=True)
        else:
            started = time.monotonic()
            ended = run(name, given)
            took = time.monotonic() - started
            print(f"{name}: {'done' if ended else 'FAILED'} after {took:.0f} s: {given.out / name}.log", flush=True)
            if not ended:
                failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
