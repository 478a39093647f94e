"""A run that is killed and restarted ends with the same bits as an uninterrupted one."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from support.processes import Command, signalled
from support.recipes import exact_metrics, sft_recipe, train_sft, write_recipe

STEPS = 16
VARIANTS = {
    "float32": {},
    "bfloat16, LoRA with dropout, gradient checkpointing": {
        "dtype": "bfloat16",
        "lora": {"rank": 4, "dropout": 0.1},
        "gradient_checkpointing": True,
    },
}


def steps_logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return sum(1 for line in file.read_bytes().splitlines() if line) if file.exists() else 0


def assert_same_result(run: Path, reference: Path) -> None:
    last = f"checkpoints/step_{STEPS:06d}"
    for file in ("model/model.safetensors", f"{last}/trainer/00000.safetensors", f"{last}/state.json"):
        assert (run / file).read_bytes() == (reference / file).read_bytes(), file
    assert exact_metrics(run) == exact_metrics(reference)


def recipe_for(folder: Path, name: str, tiny_model: Path, rows_file: Path, model: dict) -> Path:
    recipe = sft_recipe(
        tiny_model,
        rows_file,
        folder / name,
        model=model,
        data={"val": str(rows_file)},
        run={"max_steps": STEPS, "epochs": 10, "save_every": 5, "validate_every": 7, "keep_last": 2},
    )
    return write_recipe(folder / f"{name}.yaml", recipe)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_model, rows_file) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_sft(recipe_for(folder, "run", tiny_model, rows_file, {}))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_kill_9_at_three_random_moments(tmp_path, tiny_model, rows_file, variant):
    reference = recipe_for(tmp_path, "reference", tiny_model, rows_file, VARIANTS[variant])
    train_sft(reference)
    killed = recipe_for(tmp_path, "killed", tiny_model, rows_file, VARIANTS[variant])
    seed = int(os.environ.get("PLAUDIT_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"PLAUDIT_TEST_SEED={seed}")
    moments = sorted(random.Random(seed).sample(range(1, STEPS), 3))
    exit_codes = []
    for moment in moments:
        process = Command("sft", killed)
        process.wait_for(lambda moment=moment: steps_logged(tmp_path / "killed") > moment)
        exit_codes.append(process.kill())
    assert -signal.SIGKILL in exit_codes
    train_sft(killed)
    assert_same_result(tmp_path / "killed", tmp_path / "reference")


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "moment",
    [
        "open .step_000010.aside/state.json",
        "open .step_000010.aside/manifest.json",
        "os.rename checkpoints/.step_000010.aside",
        "open trainer/00000.safetensors",  # of step 5, read for its checksum
    ],
)
def test_kill_9_while_a_checkpoint_is_written(tmp_path, tiny_model, rows_file, uninterrupted, moment):
    (tmp_path / "reference").symlink_to(uninterrupted)
    killed = recipe_for(tmp_path, "killed", tiny_model, rows_file, {})
    aside = tmp_path / f"killed/checkpoints/.step_{'000005' if 'trainer' in moment else '000010'}.aside"
    signalled(signal.SIGKILL, moment, "sft", killed)
    assert aside.exists()
    train_sft(killed)
    assert not aside.exists()
    assert_same_result(tmp_path / "killed", tmp_path / "reference")


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("number", "forked"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), pytest.param(signal.SIGINT, False, marks=pytest.mark.slow)],
    ids=["ctrl-c", "sigterm", "ctrl-c in a new interpreter"],
)
def test_a_graceful_stop_saves_and_says_how_to_resume(tmp_path, tiny_model, rows_file, uninterrupted, number, forked):
    (tmp_path / "reference").symlink_to(uninterrupted)
    stopped = recipe_for(tmp_path, "stopped", tiny_model, rows_file, {})
    output = signalled(number, "behind line 3", "sft", stopped, forked=forked)
    assert f"Resume with: plaudit sft {stopped}" in output
    assert "Traceback" not in output
    last = sorted((tmp_path / "stopped/checkpoints").iterdir())[-1]
    assert json.loads((last / "state.json").read_text())["step"] == exact_metrics(tmp_path / "stopped")[-1]["step"]
    train_sft(stopped)
    assert_same_result(tmp_path / "stopped", tmp_path / "reference")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.grid(1)
def test_saving_in_the_background_changes_no_file(tmp_path, tiny_model, rows_file, uninterrupted, variant):
    reference = uninterrupted
    if VARIANTS[variant]:
        train_sft(recipe_for(tmp_path, "reference", tiny_model, rows_file, VARIANTS[variant]))
        reference = tmp_path / "reference"
    train_sft(recipe_for(tmp_path, "waiting", tiny_model, rows_file, VARIANTS[variant]), "run.save_in_background=false")
    files = {str(file.relative_to(reference)) for file in reference.glob("checkpoints/**/*") if file.is_file()}
    assert sum(name.endswith(".safetensors") for name in files) == 4, "a model and a trainer's state, twice"
    for name in files:
        assert (tmp_path / "waiting" / name).read_bytes() == (reference / name).read_bytes(), name
    assert_same_result(tmp_path / "waiting", reference)


def test_a_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, tiny_model, rows_file, uninterrupted, capsys):
    (tmp_path / "reference").symlink_to(uninterrupted)
    damaged = recipe_for(tmp_path, "damaged", tiny_model, rows_file, {})
    train_sft(damaged)
    before, last = sorted((tmp_path / "damaged/checkpoints").iterdir())[-2:]
    state = last / "trainer/00000.safetensors"
    os.truncate(state, state.stat().st_size // 2)
    capsys.readouterr()
    train_sft(damaged)
    said = capsys.readouterr().err
    assert f"{last.name}.damaged: this checkpoint is damaged (trainer/00000.safetensors has" in said
    assert f"resuming from {before}" in said
    assert_same_result(tmp_path / "damaged", tmp_path / "reference")


def test_restarting_a_finished_run_changes_nothing(tmp_path, tiny_model, rows_file):
    recipe = recipe_for(tmp_path, "run", tiny_model, rows_file, {})
    model = train_sft(recipe)
    weights, metrics = (model / "model.safetensors").read_bytes(), (tmp_path / "run/metrics.jsonl").read_bytes()
    assert train_sft(recipe) == model
    assert (model / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics
