"""Rollouts on two CPU cores: tokens/s of HF `generate`, vLLM and plaudit's native engine.

    make .venv-vllm/installed       # vLLM for the CPU, in its own environment
    plaudit prepare smollm2 --out models/smollm2
    python bench/rollout_cpu.py     # about five minutes on two idle cores; --quick: one setting per engine
    python bench/rollout_cpu.py --dtype float32 --engine "plaudit native" vLLM --rounds 3    # to compare two engines

Each engine samples 64 tokens for each of 16 chat prompts at temperature 1, with the log-prob of every sampled token, in bf16
unless --dtype says otherwise. The end token is ignored, so that all generate the same number of tokens. Prompts are tokenised once,
in this script; loading, tokenising and detokenising are not timed. Each run is a separate process in its own environment, pinned to
the same cores: one warm-up run, then the timed ones.

The baselines are tuned in the same run: every setting in `HF` and `VLLM` is measured; the one with the best median represents its
engine in the table, the others are printed below. With --rounds, all of them are measured that often, in turn: a machine's speed
may change more from minute to minute than engines differ. A busy machine makes these numbers meaningless (threads that wait for
each other at every layer suffer most), so each row shows the other load it was measured under, in cores.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
NEW_TOKENS = 64
PROMPTS = [
    "Name three colours of the rainbow.",
    "What is 17 times 23? Show each step.",
    "Translate into French: the library closes at six o'clock on Sundays.",
    "Write a haiku about a lighthouse in winter.",
    "Why does ice float on water? Explain it to a child of eight in two sentences.",
    "List the planets of the solar system in order of their distance from the sun.",
    "Rewrite this sentence in the passive voice: The committee approved the new budget after a long debate.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey, in hours and minutes?",
    "Give me a short recipe for lentil soup. I have carrots, onions, garlic, cumin and a lemon, but no stock.",
    "What is the difference between a list and a tuple in Python? When would you use each of them? Give one example.",
    "Summarise in one line: The ship left harbour at dawn, met a storm before noon, lost its mast and came home under oars.",
    "Who wrote Pride and Prejudice?",
    "My neighbour plays the drums every evening. Write a friendly note that asks him to stop at nine, and offer tea.",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies? Answer yes or no, then explain your reasoning.",
    "Continue the story: The old clockmaker had one rule, never to open the green box. One morning it was open, and empty.",
    "Sort these numbers from small to large and say which is the median: 42, 7, 19, 88, 3, 61, 25.",
]

# Settings to try for each engine: "environment" is for the process, "mode" for the functions below, the rest for the engine.
# vLLM needs this to run in process on a CPU.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
VLLM_EAGER = {**VLLM_ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
VLLM_ARGUMENTS = {"distributed_executor_backend": "uni", "enable_prefix_caching": False, "max_model_len": 512, "max_num_seqs": 16}
HF = [
    {"attn_implementation": "sdpa", "cache_implementation": "dynamic"},
    {"attn_implementation": "sdpa", "cache_implementation": "static"},
    {"attn_implementation": "eager", "cache_implementation": "dynamic"},
    {"attn_implementation": "sdpa", "cache_implementation": "dynamic", "mode": "no log-probs"},
]
VLLM = [
    {"environment": VLLM_EAGER, "enforce_eager": True, **VLLM_ARGUMENTS},
    {"environment": VLLM_ENVIRONMENT, "enforce_eager": False, **VLLM_ARGUMENTS},
    {"environment": VLLM_EAGER, "enforce_eager": True, **VLLM_ARGUMENTS, "mode": "no log-probs"},
]
NATIVE = [{"environment": {"OMP_WAIT_POLICY": "passive"}}]  # what importing plaudit sets; here torch is imported before it
SETTINGS = {"HF generate": HF, "vLLM": VLLM, "plaudit native": NATIVE}

Rollout = tuple[list[list[int]], list[list[float]] | None]  # tokens and their log-probs, prompt by prompt


def hf(model_folder: str, prompts: list[list[int]], new_tokens: int, settings: dict, dtype: str) -> Callable[[], Rollout]:
    """One batch, padded on the left. Log-probs from the raw logits, which `generate` keeps."""
    import torch
    from transformers import AutoModelForCausalLM

    with_logprobs = settings.get("mode") != "no log-probs"
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation=settings["attn_implementation"]
    ).eval()
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = settings["cache_implementation"]
    arguments = {
        "max_new_tokens": new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "use_cache": True,
        "cache_implementation": None if cache == "dynamic" else cache,
        "return_dict_in_generate": True,
        "output_logits": with_logprobs,
    }
    # A model's own generation settings would otherwise come back through the values that are None here.
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def roll() -> Rollout:
        out = model.generate(ids_BT, attention_mask=mask_BT, **arguments)  # pyright: ignore[reportAttributeAccessIssue]
        tokens_BT = out.sequences[:, width:]
        if not with_logprobs:
            return tokens_BT.tolist(), None
        columns = [logits_BV.float().log_softmax(-1).gather(1, tokens_BT[:, t, None]) for t, logits_BV in enumerate(out.logits)]
        return tokens_BT.tolist(), torch.cat(columns, 1).tolist()

    return roll


def vllm(model_folder: str, prompts: list[list[int]], new_tokens: int, settings: dict, dtype: str) -> Callable[[], Rollout]:
    """In process, token ids in and out. `logprobs=0`: those of the sampled tokens and no others."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    with_logprobs = settings.get("mode") != "no log-probs"
    arguments = {name: value for name, value in settings.items() if name not in ("environment", "mode")}
    llm = LLM(model_folder, skip_tokenizer_init=True, dtype=dtype, generation_config="vllm", disable_log_stats=True, **arguments)
    sampling = SamplingParams(
        temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0 if with_logprobs else None, detokenize=False
    )

    def roll() -> Rollout:
        outs = [
            request.outputs[0] for request in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        ]
        tokens = [list(out.token_ids) for out in outs]
        if not with_logprobs:
            return tokens, None
        return tokens, [[step[token].logprob for token, step in zip(out.token_ids, out.logprobs, strict=True)] for out in outs]

    return roll


def native(model_folder: str, prompts: list[list[int]], new_tokens: int, settings: dict, dtype: str) -> Callable[[], Rollout]:
    """plaudit's own engine."""
    import numpy as np
    import torch

    from plaudit.data.templates import load_model_template
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.engine import Request, Sampling
    from plaudit.rollout.native.engine import NativeEngine

    recipe = ModelSettings.model_validate({"path": model_folder, "dtype": dtype})
    engine = NativeEngine(load_model(recipe, torch.device("cpu")), load_model_template(recipe).tokenizer)
    engine.end_tokens = frozenset()
    requests = [Request(str(i), np.array(tokens)) for i, tokens in enumerate(prompts)]

    def roll() -> Rollout:
        samples = sorted(engine.generate(requests, Sampling(new_tokens)), key=lambda sample: int(sample.prompt_id))
        return [sample.tokens.tolist() for sample in samples], [sample.sampler_logprobs.tolist() for sample in samples]

    return roll


ENGINES = {"HF generate": hf, "vLLM": vllm, "plaudit native": native}
PACKAGES = {
    "HF generate": ("transformers", "torch"),
    "vLLM": ("vllm-cpu", "transformers", "torch"),
    "plaudit native": ("plaudit", "torch"),
}


def measure(job: dict) -> dict:
    """Seconds of each timed run of one engine with one setting; runs in a separate process."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    started = time.perf_counter()
    try:
        roll = ENGINES[job["engine"]](job["model"], job["prompts"], NEW_TOKENS, job["settings"], job["dtype"])
    except NotImplementedError:
        return {"missing": "not built"}
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("plaudit"):
            raise
        return {"missing": "not built"}
    loaded = time.perf_counter()
    seconds = []
    for repeat in range(1 + job["repeats"]):
        start, used, system = time.perf_counter(), time.process_time(), busy_seconds()
        tokens, logprobs = roll()
        elapsed = time.perf_counter() - start
        assert [len(row) for row in tokens] == [NEW_TOKENS] * len(job["prompts"]), "an engine stopped early"
        if job["settings"].get("mode") != "no log-probs":
            assert logprobs is not None
            assert all(-1e4 < x <= 0 for row in logprobs for x in row), "a log-prob is missing or wrong"
        mine = time.process_time() - used
        others = max(0.0, busy_seconds() - system - mine) / elapsed
        if repeat:
            seconds.append({"seconds": elapsed, "processor_s": mine, "other_load": others})
    return {
        "runs": seconds,
        "load_s": loaded - started,
        "versions": {name: version(name) for name in PACKAGES[job["engine"]]},
    }


def busy_seconds() -> float:
    """CPU seconds used so far by all processes on the machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run(python: str, job: dict, timeout_s: float) -> dict:
    """`measure` in another process, with its own Python and environment."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(job["threads"]),
        **job["settings"].get("environment", {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job))
        try:
            done = subprocess.run(
                [python, __file__, "--job", job_file, result_file],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {"missing": f"not done in {timeout_s:g} s"}
        if done.returncode or not result_file.exists():
            lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            print(*lines[-20:], sep="\n", file=sys.stderr)
            return {"missing": f"failed: {lines[-1][:100]}"}
        return json.loads(result_file.read_text())


def tokenise(model_folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def machine(cores: list[int]) -> str:
    info = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), platform.processor()
    )
    found = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in info]
    return f"{model}, {os.cpu_count()} cores of which {len(cores)} are used; {' '.join(found)}"


def speeds(result: dict, num_tokens: int) -> tuple[float, float]:
    """Best and median tokens/s."""
    seconds = [run["seconds"] for run in result["runs"]]
    return num_tokens / min(seconds), num_tokens / statistics.median(seconds)


def described(settings: dict) -> str:
    parts = [f"{name}={value}" for name, value in settings.items() if name not in ("environment", "mode")]
    parts += [f"{name}={value}" for name, value in settings.get("environment", {}).items() if name != "VLLM_LOGGING_LEVEL"]
    return ", ".join(([settings["mode"]] if "mode" in settings else []) + parts) or "defaults"


def row(result: dict, num_tokens: int, base: float | None) -> str:
    if "missing" in result:
        return f"| {result['missing']} | | | | | | |"
    best, median = speeds(result, num_tokens)
    load = statistics.median(run["other_load"] for run in result["runs"])
    ratio = f"{median / base:.2f}×" if base else ""
    step_ms = 1e3 * num_tokens / median / NEW_TOKENS
    used = min(run["processor_s"] for run in result["runs"])
    return f"| {best:.0f} | {median:.0f} | {ratio} | {step_ms:.1f} | {used:.2f} | {load:.1f} | {result['load_s']:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REPOSITORY / "models/smollm2", type=Path)
    parser.add_argument("--vllm-python", default=REPOSITORY / ".venv-vllm/bin/python", help="Python of vLLM's environment")
    parser.add_argument("--engine", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="processes of each setting, all settings in turn (default 1)")
    parser.add_argument("--timeout-s", type=float, default=600, help="for each setting")
    parser.add_argument("--quick", action="store_true", help="only the first setting of each engine")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        args.job[1].write_text(json.dumps(measure(json.loads(args.job[0].read_text()))))
        return 0
    if not (args.model / "config.json").exists():
        sys.exit(f"{args.model} is no model folder: make it with `plaudit prepare smollm2 --out models/smollm2`, or use --model")
    if "vLLM" in args.engine and not Path(args.vllm_python).exists():
        sys.exit(f"{args.vllm_python} does not exist: make .venv-vllm/installed, or leave vLLM out with --engine")
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)  # the processes started here inherit it

    prompts = tokenise(str(args.model))
    num_tokens = len(prompts) * NEW_TOKENS
    lengths = sorted(map(len, prompts))
    print(f"{args.model.name}: {len(prompts)} prompts of {lengths[0]}…{lengths[-1]} tokens × {NEW_TOKENS} new tokens, {args.dtype}")
    print(f"{machine(cores)}; {args.threads} threads; {args.repeats} runs after one warm-up run", flush=True)

    results: dict[str, list[tuple[dict, dict]]] = {}
    measured = [(engine, settings) for engine in args.engine for settings in SETTINGS[engine][: 1 if args.quick else None]]
    for number in range(args.rounds):
        for engine, settings in measured:
            python = str(args.vllm_python) if engine == "vLLM" else sys.executable
            job = {"engine": engine, "settings": settings, "model": str(args.model.resolve()), "prompts": prompts}
            job |= {"dtype": args.dtype, "threads": args.threads, "repeats": args.repeats}
            result = run(python, job, args.timeout_s)
            before = next((found for tried, found in results.setdefault(engine, []) if tried is settings), None)
            if before is None:
                results[engine].append((settings, result))
            elif "runs" in before and "runs" in result:
                before["runs"] += result["runs"]
            elif "runs" in before:
                before |= {"missing": f"in round {number + 1}: {result['missing']}"}
                del before["runs"]
            print(
                f"… {engine}: {described(settings)}: {result.get('missing') or [round(r['seconds'], 2) for r in result['runs']]}",
                flush=True,
            )
    print_table(results, num_tokens)
    return 0


def print_table(results: dict[str, list[tuple[dict, dict]]], num_tokens: int) -> None:
    """The best setting with log-probs of each engine; below, its details and the other settings tried."""
    chosen = {}
    for engine, tried in results.items():
        usable = [pair for pair in tried if "runs" in pair[1] and "mode" not in pair[0]]
        chosen[engine] = max(usable, key=lambda pair: speeds(pair[1], num_tokens)[1]) if usable else tried[0]
    first = chosen.get("HF generate")
    base = speeds(first[1], num_tokens)[1] if first and "runs" in first[1] else None
    head = "| best tokens/s | median tokens/s | vs HF | ms per step | CPU s per run | other load | loading s |\n"
    print(f"\n| engine {head}| --- | --- | --- | --- | --- | --- | --- | --- |")
    for engine, (_, result) in chosen.items():
        print(f"| {engine} {row(result, num_tokens, base)}")
    for engine, (settings, result) in chosen.items():
        if "runs" in result:
            versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
            print(f"\n{engine}: {described(settings)} ({versions})")
            for other, its in results[engine]:
                if other is not settings:
                    print(f"  also tried: {described(other)}\n    {row(its, num_tokens, base)}")


if __name__ == "__main__":
    sys.exit(main())
