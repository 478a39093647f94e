"""What training with LoRA saves is read by vLLM from the folder: a complete model, one that `plaudit merge` wrote, an adapter."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from plaudit.loops.merge import merge_adapter
from plaudit.lora_folder import read_lora_folder
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import LoraSettings
from support.engine_contract import sharpen
from support.training import load
from support.vllm import ENVIRONMENT, PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm]

PROMPTS = [[5, 9, 200, 31], [7, 60, 12, 12, 80, 3, 41]]
# One process for all: importing vLLM takes longer than everything else.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

folders, prompts = json.loads(sys.argv[1]), [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "distributed_executor_backend": "uni"}
greedy, found = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True), {}
for name, folder in folders.items():
    if name == "adapter":
        llm, lora = LLM(folders["base"], enable_lora=True, max_lora_rank=8, **settings), LoRARequest("mine", 1, folder)
    else:
        llm, lora = LLM(folder, **settings), None
    found[name] = [
        [[token, one[token].logprob] for token, one in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]
        for output in llm.generate(prompts, greedy, lora_request=lora, use_tqdm=False)
    ]
    del llm
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, rows_file) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    make_tiny_model([rows_file], root / "random", hidden_size=128, layers=2, vocabulary=320)
    base = load(root / "random", dtype="float32")
    sharpen(base.model)
    base.save(root / "base")
    policy = load(root / "base", dtype="float32", lora=LoraSettings(rank=4, alpha=8.0))
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.normal_(std=0.1)
    policy.save(root / "saved merged")
    policy.lora = LoraSettings(rank=4, alpha=8.0, merge_on_save=False)
    policy.save(root / "adapter")
    lora = read_lora_folder(root / "adapter")
    assert lora is not None
    merge_adapter(lora, root / "merged by the command")
    return {name: root / name for name in ("base", "saved merged", "merged by the command", "adapter")}


def continued(folder: Path) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their log-probs, by transformers."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for prompt in PROMPTS:
        tokens, drawn = list(prompt), []
        for _ in range(12):
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            drawn.append((tokens[-1], float(logprobs.max())))
        found.append(drawn)
    return found


def test_vllm_computes_what_transformers_does(folders):
    command = [PYTHON, "-c", SCRIPT, json.dumps({name: str(folder) for name, folder in folders.items()}), json.dumps(PROMPTS)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    base, adapted = continued(folders["base"]), continued(folders["saved merged"])
    assert [[token for token, _ in row] for row in base] != [[token for token, _ in row] for row in adapted]
    for name, rows in found.items():
        for row, expected in zip(rows, base if name == "base" else adapted, strict=True):
            assert [token for token, _ in row] == [token for token, _ in expected], name
            assert [logprob for _, logprob in row] == pytest.approx([logprob for _, logprob in expected], abs=1e-4), name
