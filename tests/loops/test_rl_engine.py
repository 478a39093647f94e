"""RL with a user's engine, and with another model as the KL's reference."""

import json
import re
from pathlib import Path

import pytest

from plaudit.errors import TrainingStopped
from support.paths import REPOSITORY
from support.recipes import rl_recipe, train_rl, write_recipe

EXAMPLE = REPOSITORY / "docs/transformers_engine.py"
SMALL = {"rollout": {"n": 2, "max_new_tokens": 4}, "train": {"prompts_per_step": 2}, "run": {"max_steps": 2}}


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file, reward_file):
    def write(**sections) -> Path:
        return write_recipe(
            tmp_path / "r.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, **SMALL, **sections)
        )

    return write


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_users_engine_trains_and_an_exception_in_it_loses_no_step(tmp_path, recipe, capsys):
    engine, example, begins = tmp_path / "engine.py", EXAMPLE.read_text(), "        for request in requests:\n"
    engine.write_text(example.replace(begins, f"        assert sampling.step < 2, 'lost'\n{begins}", 1))
    file = recipe()
    with pytest.raises(
        TrainingStopped, match=r"step 2: rollout\.engine TransformersEngine: AssertionError: lost \(.*engine\.py:\d+\)"
    ):
        train_rl(file, f"rollout.engine={engine}:TransformersEngine")
    assert (tmp_path / "run/checkpoints/step_000001").is_dir()
    engine.write_text(example)
    train_rl(file, f"rollout.engine={engine}:TransformersEngine")
    assert f"resumes although {engine} has changed" in re.sub(r"\s+", " ", capsys.readouterr().err)
    steps = {row["step"]: row for row in metrics_of(tmp_path / "run")}
    assert steps.keys() == {1, 2}
    assert all(row["mismatch"] < 1e-5 for row in steps.values()), [row["mismatch"] for row in steps.values()]


def test_a_sync_that_fails_loses_no_step(tmp_path, recipe):
    engine, example, begins = tmp_path / "engine.py", EXAMPLE.read_text(), "    def sync(self, version, weights):\n"
    engine.write_text(example.replace(begins, f"{begins}        assert version != 1, 'gone'\n"))
    file, setting = recipe(), f"rollout.engine={engine}:TransformersEngine"
    with pytest.raises(TrainingStopped, match=r"sync after step 1: rollout\.engine TransformersEngine: AssertionError: gone"):
        train_rl(file, setting)
    engine.write_text(example)
    train_rl(file, setting)
    train_rl(recipe(), f"run.dir={tmp_path / 'uninterrupted'}", setting)
    ours, expected = (
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in metrics_of(tmp_path / run)]
        for run in ("run", "uninterrupted")
    )
    assert ours == expected


def test_samples_of_older_weights_are_refused(tmp_path, recipe):
    engine = tmp_path / "engine.py"
    engine.write_text(EXAMPLE.read_text().replace("        self.version = version\n", ""))
    with pytest.raises(TrainingStopped, match="version is 0, and the weights of the last sync are version 1"):
        train_rl(recipe(), f"rollout.engine={engine}:TransformersEngine")


def test_capabilities_are_checked_before_anything_is_loaded(tmp_path, recipe, plaudit):
    engine, begins = tmp_path / "engine.py", "class TransformersEngine(Engine):\n"
    text = EXAMPLE.read_text().replace("import Engine, EngineSetup", "import Capabilities, Engine, EngineSetup")
    engine.write_text(text.replace(begins, f"{begins}    capabilities = Capabilities(truncated_logprobs=False)\n"))
    settings = [f"rollout.engine={engine}:TransformersEngine", "rollout.top_p=0.9", "algorithm.old_logprobs=sampler"]
    for verb, expected in (("rl", 2), ("doctor", 1)):
        code, out, err = plaudit(verb, recipe(), *settings)
        assert code == expected
        assert "old_logprobs: sampler needs the sampler's log-probs" in " ".join((out + err).split())
    assert not (tmp_path / "run").exists()


def test_an_unusable_engine_is_reported_before_anything_starts(tmp_path, recipe, plaudit):
    for reference, message in (
        (f"{EXAMPLE.with_name('transformers_engin.py')}:TransformersEngine", "transformers_engin.py is not a file. Did you mean"),
        ("mine", "should be native, vllm, sglang, or your own engine as file.py:Class"),
    ):
        code, _, err = plaudit("rl", recipe(), f"rollout.engine={reference}")
        assert code == 2
        assert message in " ".join(err.split())
    code, out, _ = plaudit("doctor", recipe(), f"rollout.engine={EXAMPLE}:Transformers")
    assert code == 1
    assert "transformers_engine.py has no Transformers. Did you mean" in " ".join(out.split())
    code, out, _ = plaudit("doctor", recipe(), f"rollout.engine={EXAMPLE}:TransformersEngine")
    assert code == 0
    assert "this one's is not known" in " ".join(out.split())


def test_kl_is_measured_against_the_model_at_reference_path(tmp_path, recipe, tiny_models, tiny_model):
    """0 in the first step if that is the policy itself, and clearly not for another model."""
    first = {}
    for name, reference in (("itself", tiny_model), ("another", tiny_models["qwen3"])):
        file = recipe(algorithm={"kl_coefficient": 0.1}, reference={"path": str(reference)})
        train_rl(file, f"run.dir={tmp_path / name}")
        first[name] = metrics_of(tmp_path / name)[0]["kl"]
    assert first["itself"] == pytest.approx(0.0, abs=1e-6)
    assert first["another"] > 1e-4
