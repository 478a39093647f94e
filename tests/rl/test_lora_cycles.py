"""RL with LoRA, step after step: it resumes to the bit, sampler and trainer stay together, and nothing piles up in memory."""

import gc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from plaudit.data.pack import pack
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import load_sampled
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling, Weights
from plaudit.rollout.native.decoder import FusedDecoder
from plaudit.rollout.native.engine import NativeEngine
from plaudit.run import Run
from plaudit.types import Example
from support.merged import compute_by_peft
from support.recipes import Stopped, exact_metrics, rl_recipe, stop_before, train_rl, write_recipe
from support.training import load, make_trainer, nll_of, rows_of

SHORT = {"kind": "length", "unit": "characters", "at_most": 1, "slack": 8}
LORA = {"rank": 4, "alpha": 16.0}
MODELS: dict[str, dict[str, Any]] = {
    "merged, bf16": {"dtype": "bfloat16", "lora": LORA},
    "merged": {"dtype": "float32", "lora": LORA},
    "peft's modules": {"dtype": "float32", "lora": LORA},
    "all weights": {"dtype": "float32"},
}


@pytest.fixture
def model(request, monkeypatch) -> dict[str, Any]:
    if request.param == "peft's modules":
        monkeypatch.setattr("plaudit.models.trainable.merge_adapters", compute_by_peft)
    return MODELS[request.param]


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file):
    """Writes a recipe whose run folder has the same name."""

    def write(name: str, **sections: dict) -> Path:
        small = {"rollout": {"n": 2, "max_new_tokens": 6}, "train": {"prompts_per_step": 2}, "optim": {"lr": 1e-2}}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, SHORT, **small | sections)
        return write_recipe(tmp_path / f"{name}.yaml", tree)

    return write


@pytest.mark.grid(1)
@pytest.mark.parametrize("model", ["merged", "merged, bf16", "peft's modules"], indirect=True)
def test_killed_after_three_of_six_steps_a_run_resumes_to_the_bit(tmp_path, recipe, monkeypatch, model):
    """What is merged again after the resume is what was merged before, rounding included: samples, adapters and moments."""
    sections = {"model": model, "algorithm": {"kl_coefficient": 0.05}, "run": {"max_steps": 6, "save_every": 3}}
    train_rl(recipe("expected", **sections))
    killed = recipe("run", **sections)
    stop_before(monkeypatch, 4)
    with pytest.raises(Stopped):
        train_rl(killed)
    assert [row["step"] for row in exact_metrics(tmp_path / "run")] == [1, 2, 3]
    train_rl(killed)
    assert exact_metrics(tmp_path / "run") == exact_metrics(tmp_path / "expected")
    files = [file.relative_to(tmp_path / "expected") for file in (tmp_path / "expected").rglob("*.*")]
    files = [file for file in files if file.suffix in (".safetensors", ".parquet")]
    assert {file.name for file in files} > {"00000.safetensors", "model.safetensors", "train_000006.parquet"}
    for file in files:
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes(), file


class Alive(NamedTuple):
    tensors: int
    bytes: int
    objects: int

    @classmethod
    def now(cls) -> "Alive":
        """Without what was there before this file's tests (`fast_gc`)."""
        gc.collect()
        objects, storages = gc.get_objects(), {}
        for one in objects:
            if issubclass(type(one), torch.Tensor):
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return cls(len(storages), sum(storages.values()), len(objects))


def assert_no_growth(alive: Sequence[Alive]) -> None:
    """Of five counts, ten steps apart. Buffers for results have the size of the longest response so far, a row of metrics is kept
    for each step, and something may be made once in the middle: a leak grows in every interval."""
    assert len({one.tensors for one in alive}) == 1
    assert max(one.bytes for one in alive) < 1.01 * alive[0].bytes
    growth = sorted(now.objects - before.objects for before, now in pairwise(alive))
    assert growth[1] <= 30, alive


def assert_no_drift(apart: Sequence[float], model: dict[str, Any]) -> None:
    """Mean differences of log-probs, step by step."""
    assert max(apart) < (3e-3 if model["dtype"] == "bfloat16" else 3e-6), "weights that are one update old are 7e-3 apart or more"
    assert max(apart[25:]) < 4 * max(apart[:25])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_fifty_steps(tmp_path, recipe, monkeypatch, model):
    """The log-probs of sampler and trainer differ as little in the last steps as in the first, and no tensor is left behind."""
    alive, log = [], Run.log

    def log_and_count(self, step, *arguments, **settings):
        if step % 10 == 0:
            alive.append(Alive.now())
        return log(self, step, *arguments, **settings)

    monkeypatch.setattr(Run, "log", log_and_count)
    settings = {"rollout": {"n": 4, "max_new_tokens": 6}, "algorithm": {"kl_coefficient": 1e-4}}
    train_rl(recipe("run", model=model, **settings, run={"max_steps": 50, "save_every": 100}))
    rows = exact_metrics(tmp_path / "run")
    assert len(rows) == 50
    assert len(alive) == 5
    assert_no_growth(alive)
    assert_no_drift([row["mismatch"] for row in rows], model)
    assert rows[0]["kl"] < 1e-6
    assert rows[-1]["kl"] > 1e-2, "the weights have changed"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_fifty_syncs_of_an_engine_with_its_own_weights(tiny_model, model):
    """Sample, update, sync: the engine's log-probs are always those of the trainer's model."""
    policy = load(tiny_model, **model)
    sampled = load_sampled(ModelSettings(path=str(tiny_model), **model), policy, copy=True)
    engine, trainer, prompt = NativeEngine(sampled, None), make_trainer(policy, lr=5e-3), np.array([5, 9, 200, 31])
    assert isinstance(engine.forward.decoder, FusedDecoder)
    batches = [pack(rows_of(policy))]
    apart, alive, losses = [], [], []
    for step in range(50):
        engine.sync(step, Weights(policy.model))
        samples = list(engine.generate([Request("p", prompt, 4)], Sampling(12, seed=0, step=step)))
        rows = [np.concatenate([prompt, sample.tokens]).astype(np.int32) for sample in samples]
        with torch.no_grad():
            batch = pack([Example(tokens, np.arange(len(tokens)) >= len(prompt)) for tokens in rows])
            expected = target_logprobs(policy.model.eval(), batch).logprobs_N.numpy()
        apart.append(np.abs(np.concatenate([sample.sampler_logprobs for sample in samples]) - expected).mean())
        losses.append(trainer.update(batches, nll_of(policy, batches))["loss"])
        if step % 10 == 9:
            alive.append(Alive.now())
    assert losses[-1] < losses[0] - 1, "the weights have changed"
    assert_no_growth(alive)
    assert_no_drift(apart, model)
