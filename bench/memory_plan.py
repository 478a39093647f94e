"""The memory plan against what a run really takes: `plaudit doctor` prints the plan, `gradient_checkpointing: auto` relies on it.

    python bench/memory_plan.py --device cuda            # Qwen2.5 shapes from 0.5B to 7B; about ten minutes on an H200
    python bench/memory_plan.py --device cpu             # the shape of SmolLM2-135M; about ten minutes on two cores
    python bench/memory_plan.py --device cuda --only "7B LoRA" --out runs/memory    # these rows, also in memory_plan.jsonl

Each row is a run of two steps (7B: one) in a process of its own, with random weights, prompts of 256 tokens (CPU: 40) and responses
that never end before their limit. Peak: on a GPU what torch reserved and CUDA's own memory, on a CPU the process's resident memory.
A row fails if it runs out of memory, takes longer than --timeout, or the plan is more than 15 % off; the others are still measured.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from step_work import append

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # plaudit may be a checkout that nobody installed
from gpu_sft import SHAPES  # noqa: E402

TOLERANCE = 0.15
SHAPES = SHAPES | {"135M": (576, 30, 9, 3, 1536)}
# New tokens: 8 samples and a prompt of 272 tokens, which stay together, fill micro-batches of 2,048 and its multiples.
FILLING = 221
# Different for all samples of a group, whatever their texts: most of a random model's tokens have none, and groups of equal
# rewards have no backward pass.
REWARD = "def compute_scores(prompts, responses, ground_truths, extra_infos):\n    return list(range(len(responses)))\n"
CHECKPOINTED, LORA, QLORA = {"gradient_checkpointing": True}, {"lora": {"rank": 16}}, {"lora": {"rank": 16, "base_bits": 4}}


def rl(prompts: int, n: int, tokens: int, **sections: Any) -> dict[str, Any]:
    return {
        "stage": "rl",
        "rollout": {"n": n, "max_new_tokens": tokens},
        "train": {"prompts_per_step": prompts},
        **sections,
    }


def sft(rows: int, **sections: Any) -> dict[str, Any]:
    return {"stage": "sft", "train": {"rows_per_step": rows}, **sections}


CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "cuda": {
        "0.5B full": ("0.5B", rl(64, 8, FILLING)),
        "0.5B full, small step": ("0.5B", rl(4, 2, 128)),
        "0.5B full, checkpointed": ("0.5B", rl(64, 8, FILLING, model=CHECKPOINTED)),
        "0.5B LoRA": ("0.5B", rl(64, 8, FILLING, model=LORA)),
        "0.5B LoRA, checkpointed": ("0.5B", rl(64, 8, FILLING, model=LORA | CHECKPOINTED)),
        "0.5B full, SFT": ("0.5B", sft(64)),
        "0.5B LoRA, SFT": ("0.5B", sft(64, model=LORA)),
        "1.5B full, auto": ("1.5B", rl(64, 8, FILLING, model={"gradient_checkpointing": "auto"})),
        "1.5B LoRA": ("1.5B", rl(64, 8, FILLING, model=LORA)),
        "7B LoRA, checkpointed": ("7B", rl(64, 8, FILLING, model=LORA | CHECKPOINTED)),
        "7B LoRA, auto": ("7B", rl(64, 8, FILLING, model=LORA | {"gradient_checkpointing": "auto"})),
        "7B QLoRA, checkpointed": ("7B", rl(64, 8, FILLING, model=QLORA | CHECKPOINTED)),
        "7B QLoRA, auto": ("7B", rl(64, 8, FILLING, model=QLORA | {"gradient_checkpointing": "auto"})),
    },
    "cpu": {
        "135M full, small step": ("135M", rl(8, 4, 24)),
        "135M full, checkpointed": ("135M", rl(8, 4, 24, model=CHECKPOINTED)),
        "135M bfloat16": ("135M", rl(8, 4, 24, model={"dtype": "bfloat16"})),
        "135M LoRA": ("135M", rl(8, 4, 24, model=LORA)),
        "135M LoRA, checkpointed": ("135M", rl(8, 4, 24, model=LORA | CHECKPOINTED)),
        "135M QLoRA": ("135M", rl(8, 4, 24, model=QLORA)),
        "135M LoRA bfloat16": ("135M", rl(8, 4, 24, model=LORA | {"dtype": "bfloat16"})),
        "135M full, SFT": ("135M", sft(16)),
        "135M full, larger step": ("135M", rl(8, 8, 64)),
    },
}  # fmt: skip


# A run, in a process of its own ---------------------------------------------------------------------------------------


def run_one(recipe: Path) -> None:
    """Plan and train; prints both sizes as JSON."""
    import resource

    import torch

    from plaudit.cli import load_checked
    from plaudit.data.conversations import read_conversations
    from plaudit.data.prompts import load_prompts
    from plaudit.data.templates import load_model_template
    from plaudit.loops.train import train
    from plaudit.recipe import RLRecipe
    from plaudit.train.auto import resolve_auto
    from plaudit.train.memory_plan import plan_devices

    loaded, sources = load_checked(recipe, [], None)
    settings, template = loaded.recipe, load_model_template(loaded.recipe.model)
    if isinstance(settings, RLRecipe):
        read = load_prompts(sources["train"], template, max_prompt_tokens=settings.data.max_prompt_tokens, too_long="drop").prompts
        lengths = [len(prompt.tokens) for prompt in read]
    else:
        examples = (
            template.example(row, where, "assistant") for source in sources["train"] for where, row in read_conversations(source)
        )
        lengths = [len(example.tokens) for example in examples]
    resolved = resolve_auto(settings, lengths, report=lambda line: None)
    device = settings.run.device
    budget = plan_devices(resolved, lengths)[device]
    result: dict[str, Any] = {
        "planned": budget.at(budget.peak), "phase": budget.peak, "checkpointed": resolved.model.gradient_checkpointing,
        "micro_batch": resolved.train.tokens_per_micro_batch,
        "needs": {need.name: need.fixed + need.elastic for need in budget.needs if budget.peak in need.phases},
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    try:
        train(loaded, sources)
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            context = total - free - torch.cuda.memory_reserved()
            result["used"] = torch.cuda.max_memory_reserved() + context
        else:
            result["used"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    except torch.OutOfMemoryError:
        result["used"] = None
    print(json.dumps(result), flush=True)


# All of them ----------------------------------------------------------------------------------------------------------


def make_model(size: str, folder: Path, device: str) -> Path:
    """In a process of its own: what this one kept of the GPU would be counted as the run's."""
    process = multiprocessing.get_context("spawn").Process(target=write_model, args=(size, folder, device))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"making the {size} model failed")
    return folder / size


def write_model(size: str, folder: Path, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from plaudit.prepare.tiny_model import make_tiny_model

    hidden, layers, heads, kv_heads, mlp = SHAPES[size]
    vocabulary = 49152 if size == "135M" else 151936
    make_tiny_model([folder / "data.jsonl"], folder / size, vocabulary=320)  # for its tokenizer
    config = AutoConfig.for_model(
        "llama" if size == "135M" else "qwen2", vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=mlp, max_position_embeddings=32768,
        tie_word_embeddings=size != "7B", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / size)


def recipe_of(case: dict[str, Any], model: Path, folder: Path, device: str) -> Path:
    rl = case["stage"] == "rl"
    tree = {
        **case,
        "model": {"path": str(model), **case.get("model", {})},
        "data": {"train": str(folder / "data.jsonl"), ("max_prompt_tokens" if rl else "max_tokens"): 2048},
        "optim": {"lr": 1e-6},
        "run": {
            "dir": str(folder / "run"), "max_steps": 1 if model.name == "7B" else 2, "device": device,
            "save_in_background": False,  # no step here trains while a copy is written
        },
    }  # fmt: skip
    if rl:
        tree |= {
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "function", "path": str(folder / "reward.py"), "scores": "group"}],
        }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(tree))
    return file


def output_of(recipe: Path, timeout_s: float) -> str:
    """Of a run in a process of its own."""
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
    }
    command = [sys.executable, __file__, "--recipe", str(recipe)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            return process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{process.communicate()[0]}\nnot done in {timeout_s:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--only", help="Rows whose name starts with this.")
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds for each row (default 300).")
    parser.add_argument("--out", type=Path, help="A folder: rows are appended to memory_plan.jsonl there.")
    parser.add_argument("--verbose", action="store_true", help="Print what the plan consists of.")
    parser.add_argument("--recipe", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.recipe:
        return run_one(given.recipe)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="memory-plan-"))
    words = 40 if given.device == "cpu" else 250
    question = " ".join(["word"] * words)
    rows = [
        {
            "prompt": f"{i} {question}",
            "messages": [{"role": "user", "content": f"{i} {question}"}, {"role": "assistant", "content": question}],
        }
        for i in range(256)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    print("| run | tokens per micro-batch | layers checkpointed | planned GB | peak GB | plan / peak | |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    good, models = True, {}
    for name, (size, case) in CASES[given.device].items():
        if given.only and not name.startswith(given.only):
            continue
        if size not in models:
            for other in models.values():
                shutil.rmtree(other)
            models = {size: make_model(size, folder, given.device)}
        recipe = recipe_of(case, models[size], folder, given.device)
        shutil.rmtree(folder / "run", ignore_errors=True)
        output = output_of(recipe, given.timeout)
        found = [json.loads(line) for line in output.splitlines() if line.startswith('{"planned"')]
        if given.out is not None:
            append(given.out / "memory_plan.jsonl", {"run": name, **(found[-1] if found else {"output": output[-3000:]})})
        if not found or "used" not in found[-1]:
            print(f"| {name} | failed | | | | | ✗ |", flush=True)
            print(output[-3000:], file=sys.stderr)
            good = False
            continue
        result = found[-1]
        used, planned = result["used"], result["planned"]
        settings = f"{result['micro_batch']:,} | {result['checkpointed']}"
        if used is None:
            print(f"| {name} | {settings} | {planned / 1e9:.1f} | out of memory | | ✗ |", flush=True)
            good = False
            continue
        fits = abs(planned / used - 1) <= TOLERANCE
        good &= fits
        sizes = f"{planned / 1e9:.2f} | {used / 1e9:.2f} | {planned / used:.2f}"
        print(f"| {name} | {settings} | {sizes} | {'✓' if fits else '✗'} |", flush=True)
        if given.verbose:
            print(
                f"    while {result['phase']}:", {need: round(size / 1e9, 2) for need, size in result["needs"].items()}, flush=True
            )
    shutil.rmtree(folder)
    sys.exit(not good)


if __name__ == "__main__":
    main()
