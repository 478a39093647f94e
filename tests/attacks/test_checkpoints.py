"""Damaged files of a run: each is detected, and the run ends with the bits of an undamaged one."""

import json
import random
import shutil
from pathlib import Path

import pytest

from plaudit.checkpoint import find_checkpoint, prune_checkpoints
from plaudit.errors import RunError
from plaudit.manifest import BLOCK, describe_files, files_in, find_damage, write_manifest
from plaudit.rewards.cache import ScoreCache
from plaudit.run_folder import RunFolder
from plaudit.types import Score
from support.damage import DAMAGES, flip_bit
from support.recipes import exact_metrics, pair_recipe, rl_recipe, sft_recipe, train_dpo, train_rl, train_sft, write_recipe

LAST = "checkpoints/step_000004"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model, rows_file) -> Path:
    """A finished run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    tree = sft_recipe(tiny_model, rows_file, folder / "run", run={"max_steps": 4, "save_every": 2, "keep_last": 2})
    train_sft(write_recipe(folder / "r.yaml", tree))
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it; its recipe is next to it."""
    shutil.copytree(finished / "run", tmp_path / "run", symlinks=True)
    tree = json.loads((finished / "r.yaml").read_text())
    tree["run"]["dir"] = str(tmp_path / "run")
    write_recipe(tmp_path / "r.yaml", tree)
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["recipe"]["run.dir"] = str(tmp_path / "run")
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    return tmp_path / "run"


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_detected(run):
    """In each file at its first and last byte and at random ones; every byte of the small ones."""
    folder, chosen = run / LAST, random.Random(0)
    names = [*files_in(folder), "manifest.json"]
    assert {"state.json", "trainer/00000.safetensors", "model/model.safetensors", "model/config.json"} <= set(names)
    for name in names:
        file, size = folder / name, (folder / name).stat().st_size
        places = range(size) if name in ("state.json", "manifest.json") else {0, size - 1, *chosen.choices(range(size), k=6)}
        for byte in places:
            bit = flip_bit(file, byte, chosen.randrange(8))
            assert find_damage(folder, content=True) is not None, f"{name}: byte {byte}, bit {bit}"
            flip_bit(file, byte, bit)
    assert find_damage(folder, content=True) is None


def test_damage_beyond_the_first_block_is_detected(tmp_path):
    (tmp_path / "large").write_bytes(bytes(2 * BLOCK + 3))
    write_manifest(tmp_path, describe_files(tmp_path, files_in(tmp_path)))
    for byte in (BLOCK - 1, BLOCK, 2 * BLOCK + 2):
        flip_bit(tmp_path / "large", byte, 0)
        assert find_damage(tmp_path, content=True) == "large: its checksum does not match"
        assert find_damage(tmp_path, content=False) is None
        flip_bit(tmp_path / "large", byte, 0)
    blocks = (tmp_path / "large").read_bytes()
    flip_bit(tmp_path / "large", 5, 0)
    moved = (tmp_path / "large").read_bytes()
    (tmp_path / "large").write_bytes(moved[BLOCK : 2 * BLOCK] + moved[:BLOCK] + moved[2 * BLOCK :])  # blocks in another order
    assert find_damage(tmp_path, content=True) is not None
    (tmp_path / "large").write_bytes(blocks)
    assert find_damage(tmp_path, content=True) is None


@pytest.mark.parametrize("name", ["trainer/00000.safetensors", "state.json", "manifest.json", "model/config.json"])
@pytest.mark.grid(2)
def test_a_run_with_a_flipped_bit_resumes_to_the_same_bits(finished, run, capsys, name):
    flip_bit(run / LAST / name, (run / LAST / name).stat().st_size // 2, 4)
    shutil.rmtree(run / "model")
    train_sft(run.parent / "r.yaml")
    said = capsys.readouterr().err
    assert f"{run / LAST}.damaged: this checkpoint is damaged ({name}" in said
    assert f"resuming from {run / 'checkpoints/step_000002'}" in said
    for file in ("model/model.safetensors", f"{LAST}/trainer/00000.safetensors", f"{LAST}/state.json", f"{LAST}/manifest.json"):
        assert (run / file).read_bytes() == (finished / "run" / file).read_bytes(), file
    assert exact_metrics(run) == exact_metrics(finished / "run")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_damaged_state_or_manifest_falls_back(run, name, damage):
    DAMAGES[damage](run / LAST / name)
    checkpoint, warnings = find_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 2
    [warning] = warnings
    assert name in warning
    assert "\n" not in warning


def test_a_state_that_does_not_belong_to_its_folder_falls_back(run):
    """Everything matches its checksum, but a folder was renamed by hand."""
    shutil.rmtree(run / LAST)
    shutil.copytree(run / "checkpoints/step_000002", run / LAST)
    checkpoint, [warning] = find_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert "state.json: it is not that of step 4" in warning


def test_weights_that_the_manifest_does_not_list_are_not_loaded(run):
    shutil.copy(run / LAST / "trainer/00000.safetensors", run / LAST / "trainer/00001.safetensors")
    assert find_damage(run / LAST, content=True) == "trainer/00001.safetensors is not in manifest.json"


def test_a_damaged_newer_checkpoint_does_not_push_out_the_intact_one(run):
    flip_bit(run / LAST / "trainer/00000.safetensors", 999, 0)
    find_checkpoint(run / "checkpoints")
    prune_checkpoints(run / "checkpoints", keep_last=1, keep_step=None)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.grid(2)
def test_without_an_intact_checkpoint_nothing_changes_and_one_line_says_so(run, plaudit, damage):
    shutil.rmtree(run / "checkpoints/step_000002")
    DAMAGES[damage](run / LAST / "state.json")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "checkpoints" in path.parts}
    code, _, err = plaudit("sft", run.parent / "r.yaml")
    assert code == 2
    assert "Traceback" not in err
    assert "No checkpoint is left to resume from" in err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "checkpoints" in path.parts}


# Other files of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", [b"[]", b"null", b"7", b'"step"', b"{}", b'{"step": "1"}', b'{"step": 1, "loss": "x"}', b"\xff\xfe", b"{", b"[" * 9999]
)
def test_a_damaged_line_of_metrics_is_one_line(run, line):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]))
    with pytest.raises(RunError, match=r"metrics.jsonl:3: the line is damaged") as caught:
        _ = RunFolder(run).metrics
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
@pytest.mark.grid(3)
def test_a_damaged_file_of_a_run_is_one_line(run, plaudit, name, damage):
    """Or, where it is all of the file's lines that are gone, none."""
    DAMAGES[damage](run / name)
    code, _, err = plaudit("sft", run.parent / "r.yaml")
    assert code in (0, 2)
    assert "Traceback" not in err
    assert code == 0 or name in err.splitlines()[-1]
    assert code == 2 or name == "metrics.jsonl"


def test_a_flipped_bit_in_the_reference_is_computed_again(tmp_path, tiny_model, pairs_file, capsys):
    recipe = write_recipe(tmp_path / "r.yaml", pair_recipe(tiny_model, pairs_file, tmp_path / "run", run={"max_steps": 1}))
    train_dpo(recipe)
    file = tmp_path / "run/reference.safetensors"
    intact, size = file.read_bytes(), file.stat().st_size
    header = 8 + int.from_bytes(intact[:8], "little")
    for byte in (0, header + 1, size - 1):
        flip_bit(file, byte, 2)
        capsys.readouterr()
        train_dpo(recipe)
        assert f"{file} is damaged" in capsys.readouterr().err
        assert file.read_bytes() == intact


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_of_scores_is_dropped_with_a_line(tmp_path, capsys, damage):
    file = tmp_path / "scores.sqlite"
    cache = ScoreCache(file)
    cache.put({f"key{i}": Score(value=float(i)) for i in range(2000)})
    cache.close()
    before = file.read_bytes()
    DAMAGES[damage](file)
    damaged = file.read_bytes()
    cache = ScoreCache(file)
    for i in range(2000):  # what it still has is right
        score = cache.get([f"key{i}"]).get(f"key{i}")
        assert score is None or score.value == i
    cache.put({"new": Score(value=3.0)})
    assert cache.get(["new"])["new"].value == 3.0
    cache.close()
    if damaged and damaged != before:
        assert "scores.sqlite is damaged" in capsys.readouterr().err
        assert (tmp_path / "scores.sqlite.damaged").read_bytes()[:99] == damaged[:99]


def test_a_flipped_bit_in_a_cached_score_is_not_trained_on(tmp_path):
    file = tmp_path / "scores.sqlite"
    cache = ScoreCache(file)
    cache.put({"key": Score(value=0.125)})
    cache.close()
    place = file.read_bytes().index(b"0.125")
    flip_bit(file, place + 2, 3)  # 0.925
    cache = ScoreCache(file)
    assert cache.get(["key"]) == {}
    cache.close()


def test_a_users_file_is_never_taken_for_a_damaged_cache(tmp_path):
    (tmp_path / "thesis.txt").write_text("all my work " * 99)
    with pytest.raises(RunError, match="scores cannot be cached there"):
        ScoreCache(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "all my work " * 99


@pytest.mark.slow
def test_an_rl_run_with_a_damaged_cache_and_checkpoint_ends_with_the_same_bits(tmp_path, tiny_model, prompts_file, reward_file):
    results = []
    for name in ("intact", "damaged"):
        tree = rl_recipe(
            tiny_model, prompts_file, tmp_path / name, reward_file, run={"max_steps": 3, "save_every": 1, "keep_last": 3}
        )
        recipe = write_recipe(tmp_path / f"{name}.yaml", tree)
        train_rl(recipe)
        if name == "damaged":
            shutil.rmtree(tmp_path / "damaged/model")
            flip_bit(tmp_path / "damaged/checkpoints/step_000003/trainer/00000.safetensors", 5000, 6)
            (tmp_path / "damaged/scores.sqlite").write_bytes(b"\0" * 4096)
            train_rl(recipe)
        results.append((tmp_path / name / "model/model.safetensors").read_bytes())
    assert results[0] == results[1]
    assert exact_metrics(tmp_path / "intact") == exact_metrics(tmp_path / "damaged")
