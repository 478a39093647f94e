"""A real pretrained chat model: prepared once, it generates, and its recipe trains it on a CPU in fewer and smaller steps."""

import json
from pathlib import Path

import pytest
import torch

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.trainable import load_policy
from plaudit.prepare.arithmetic import make_arithmetic
from plaudit.prepare.smollm2 import make_smollm2
from plaudit.recipe import ModelSettings
from plaudit.types import Conversation
from support.paths import REPOSITORY
from support.recipes import train_rl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    model = tmp_path_factory.mktemp("smollm2") / "model"
    assert make_smollm2(model) == 134_515_008
    return model


def test_it_generates_and_can_be_trained(smollm2, capfd):
    tokenizer = load_tokenizer(str(smollm2))
    template = load_template(tokenizer, None)
    policy = load_policy(ModelSettings(path=str(smollm2)), template, torch.device("cpu"))  # also verifies packing
    assert "%|" not in capfd.readouterr().err  # no progress bars from transformers
    assert policy.model.generation_config is not None
    assert policy.model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert getattr(policy.model.config, "quantization_config", None) is None
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = template.render(question, None, generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    example = template.example(Conversation([*question, {"role": "assistant", "content": "Paris."}]), "row", "all")
    assert tokenizer.decode(example.tokens[example.loss_mask]) == "Paris.<|im_end|>"

    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    policy.model.set_attn_implementation("sdpa")
    answer = policy.model.eval().generate(**tokens, do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_grpo(smollm2, tmp_path, monkeypatch):
    """In float32: few CPUs have instructions for bf16, and the tests of the engine cover it."""
    monkeypatch.chdir(REPOSITORY)  # the recipe's path to its reward is relative to it
    make_arithmetic(tmp_path / "data", train=64, val=16, digits=1, operators="+", seed=0)
    train_rl(
        REPOSITORY / "recipes/smollm2/grpo.yaml",
        f"model.path={smollm2}", "model.dtype=float32", "run.device=cpu", f"run.dir={tmp_path / 'run'}",
        f"data.train={tmp_path / 'data/train.parquet'}", f"data.val={tmp_path / 'data/val.parquet'}",
        "train.prompts_per_step=2", "rollout.n=4", "run.max_steps=2", "run.validate_every=2", "run.save_every_minutes=null",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["val/reward"] > 0.3, "the pretrained model can add small numbers"
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch"] < 1e-4 for row in rows[1:])
    assert not [name for row in rows for name in row if name.startswith("failures/")]
    assert all(0 < row["length"] <= 24 and row["grad_norm"] > 0 for row in rows[1:] if row["groups_without_signal"] < 1)
