"""The run folder: its contents after a run, which runs may not resume in it, and that failures lose nothing."""

import errno
import fcntl
import io
import json
import math
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit import run as run_module
from plaudit import saving
from plaudit.config import flatten, load
from plaudit.errors import DataError, Interrupted, PeerLost, RunError, ServerGone, TrainingStopped
from plaudit.files import atomic_folder, remove_leftovers
from plaudit.loops import sft
from plaudit.manifest import describe_files, files_in, find_damage, write_manifest
from plaudit.report import progress
from plaudit.report.curves import draw_curves
from plaudit.run import Run
from plaudit.train.trainer import Trainer
from support.processes import Command
from support.recipes import Stopped, sft_recipe, stop_before, train_sft, write_recipe
from support.rows import arithmetic_rows, write_jsonl

EXACT = {"step", "loss", "grad_norm", "lr", "skipped_steps", "tokens", "epoch"}
SAVE_TIMES = {"time/save_s", "time/save_wait_s"}
TIMES = {"time/update_s", "time/step_s", "time/tokens_per_s", "time/validate_s"}


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints_of(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*"))


def assert_complete(checkpoint: Path) -> None:
    """The manifest names all files with their sizes, and all of them load."""
    files = {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}
    files.pop("manifest.json")
    listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == files
    assert find_damage(checkpoint, content=True) is None
    assert load_file(checkpoint / "trainer/00000.safetensors")
    assert json.loads((checkpoint / "state.json").read_text())["step"] == int(checkpoint.name.removeprefix("step_"))
    AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    AutoTokenizer.from_pretrained(checkpoint / "model")


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file in a folder with its modification time."""
    return {str(p.relative_to(folder)): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in folder.rglob("*")}


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


@pytest.fixture
def recipe(tmp_path, tiny_model, rows_file):
    """Writes a recipe with a run folder of the same name."""

    def write(name: str = "run", rows: Path = rows_file, **sections: dict) -> Path:
        return write_recipe(tmp_path / f"{name}.yaml", sft_recipe(tiny_model, rows, tmp_path / name, **sections))

    return write


# After a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model, rows_file) -> tuple[Path, Path]:
    """A recipe and its finished run. The learning rate is so high that an early checkpoint is the best."""
    root = tmp_path_factory.mktemp("finished")
    tree = sft_recipe(
        tiny_model,
        rows_file,
        root / "run",
        data={"val": str(rows_file)},
        optim={"lr": 0.1, "schedule": "constant"},
        run={"validate_every": 1, "save_every": 1, "keep_last": 2},
    )
    file = write_recipe(root / "r.yaml", tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plaudit.report.curves.draw_curves", draw_curves)
        train_sft(file, "seed=3")
    return file, root / "run"


def test_the_saved_recipe_is_the_one_that_ran(finished):
    file, run = finished
    assert load(run / "recipe.yaml").recipe == load(file, ["seed=3"]).recipe
    assert "seed: 3" in (run / "recipe.yaml").read_text()
    assert (run / "recipe.yaml").read_text().startswith(f"# plaudit {version('plaudit')}\n")


def test_run_json_records_the_recipe_and_versions(finished):
    file, run = finished
    record = json.loads((run / "run.json").read_text())
    assert record["recipe"] == flatten(load(file, ["seed=3"]).recipe)
    assert record["versions"] | {name: version(name) for name in ("torch", "transformers", "peft")} == record["versions"]
    assert record["versions"]["plaudit"] == version("plaudit")
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    git = record["git"]
    assert git is None or (set(git) == {"commit", "changed"} and len(git["commit"]) in (40, 64))
    for value in (os.environ.get("USER"), os.environ.get("HOSTNAME")):
        assert not value or f'"{value}"' not in json.dumps(record)


def test_metrics_have_a_line_per_step(finished):
    rows = metrics_of(finished[1])
    assert [row["step"] for row in rows] == list(range(9))
    assert set(rows[0]) == {"step", "val/loss", "time/step_s", "time/validate_s"}
    for row in rows[1:]:
        assert set(row) - SAVE_TIMES == EXACT | TIMES | {"val/loss"}
        assert (set(row) >= SAVE_TIMES) == (row["step"] > 1), "with the first line after a save"
        assert all(type(value) in (int, float) for value in row.values())
        assert row["epoch"] == pytest.approx(row["step"] * 6 / 60)


def test_curves_are_a_valid_png(finished):
    picture = (finished[1] / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 400
    assert height > 300


def test_the_newest_and_the_best_checkpoints_are_kept(finished):
    run = finished[1]
    losses = {row["step"]: row["val/loss"] for row in metrics_of(run) if row["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 7, "otherwise this test checks nothing"
    assert checkpoints_of(run) == [best, 7, 8]
    for step in checkpoints_of(run):
        assert_complete(run / f"checkpoints/step_{step:06d}")
    assert (run / "best").is_symlink()
    assert os.readlink(run / "best") == f"checkpoints/step_{best:06d}"
    assert json.loads((run / "best/state.json").read_text())["best"] == {"step": best, "val/loss": losses[best]}
    assert not leftovers(run)


def test_the_trained_model_loads_in_plain_transformers(finished):
    model = finished[1] / "model"
    assert (model / "model.safetensors").read_bytes() == (
        finished[1] / "checkpoints/step_000008/model/model.safetensors"
    ).read_bytes()
    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1 + 2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert loaded.generate(**chat, max_new_tokens=4, do_sample=False).shape[1] <= chat["input_ids"].shape[1] + 4


@pytest.mark.parametrize("which", ["model", "best/model"])
def test_the_validation_loss_is_the_mean_over_all_answer_tokens(finished, which):
    """Recomputed with plain transformers, from ChatML spelt out here."""
    run = finished[1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / which).eval(), AutoTokenizer.from_pretrained(run / which)
    total, count = 0.0, 0
    for row in arithmetic_rows():
        tokens: list[int] = []
        in_loss: list[bool] = []
        for message in row["messages"]:
            answers = message["role"] == "assistant"
            for text, counts in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", answers),
                ("\n", False),
            ):
                piece = tokenizer(text, add_special_tokens=False)["input_ids"]
                tokens += piece
                in_loss += [counts] * len(piece)
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        total -= sum(logprobs[i - 1, tokens[i]].item() for i in range(len(tokens)) if in_loss[i])
        count += sum(in_loss)
    step = json.loads((run / "best/state.json").read_text())["step"] if which == "best/model" else 8
    assert metrics_of(run)[step]["val/loss"] == pytest.approx(total / count, rel=1e-5)


# Steps and rows ------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("epochs", "max_steps", "epoch_after_each_step"),
    [
        (1, None, [0.4, 0.8, 1.0]),
        (1.5, None, [0.4, 0.8, 1.2, 1.5]),
        (2, None, [0.4, 0.8, 1.2, 1.6, 2.0]),
        (2, 3, [0.4, 0.8, 1.2]),
        (1, 30, [0.4, 0.8, 1.0]),
    ],
)
def test_the_last_step_of_a_run_may_be_short(tmp_path, recipe, epochs, max_steps, epoch_after_each_step):
    rows = write_jsonl(tmp_path / "ten.jsonl", arithmetic_rows(10))
    train_sft(recipe(rows=rows, train={"rows_per_step": 4}, run={"epochs": epochs, "max_steps": max_steps}))
    metrics = metrics_of(tmp_path / "run")
    assert [row["epoch"] for row in metrics] == pytest.approx(epoch_after_each_step)
    assert checkpoints_of(tmp_path / "run") == [len(epoch_after_each_step)]
    if epochs == 1:
        one_epoch = sum(row["tokens"] for row in metrics)
        train_sft(recipe("at_once", rows=rows, train={"rows_per_step": 10}, run={"max_steps": 1}))
        assert one_epoch == metrics_of(tmp_path / "at_once")[0]["tokens"]


def test_several_training_files_act_as_one(tmp_path, recipe, capsys):
    rows = arithmetic_rows(30)
    files = [write_jsonl(tmp_path / "a.jsonl", rows[:12]), write_jsonl(tmp_path / "b.jsonl", rows[12:])]
    joined = write_jsonl(tmp_path / "joined.jsonl", rows)
    train_sft(recipe("parts", data={"train": list(map(str, files))}, run={"max_steps": None}))
    assert "train: 30 of 30 rows" in capsys.readouterr().err
    train_sft(recipe("joined", rows=joined, run={"max_steps": None}))
    assert len(metrics_of(tmp_path / "parts")) == 5
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("parts", "joined")]
    assert weights[0] == weights[1]
    assert set(json.loads((tmp_path / "parts/run.json").read_text())["inputs"]) > set(map(str, files))


def test_validation_shows_its_progress(recipe, rows_file, capsys, monkeypatch):
    monkeypatch.setattr("plaudit.report.activity.FIRST_LINE_AFTER_S", 0.0)
    train_sft(recipe(data={"val": str(rows_file)}, train={"tokens_per_micro_batch": 256}, run={"max_steps": 1}))
    lines = capsys.readouterr().err.splitlines()
    total = len(rows_file.read_text().splitlines())
    counts = [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("validation: ")]
    assert counts[: counts.index(total) + 1] == sorted({*counts}), "it grows from batch to batch"
    assert len(counts) == 2 * len({*counts}) > 6, "before training, and after the last step"
    assert any(line.startswith("sft 0/1  val/loss ") for line in lines)


def test_validation_before_training_can_be_switched_off(tmp_path, recipe, rows_file):
    train_sft(recipe(data={"val": str(rows_file)}, run={"max_steps": 1, "validate_first": False}))
    assert [(row["step"], "val/loss" in row) for row in metrics_of(tmp_path / "run")] == [(1, True)]


@pytest.mark.parametrize("too_long", ["filter", "cut_left", "cut_right", "error"])
def test_handling_of_long_rows_is_reported(tmp_path, recipe, capsys, too_long):
    long = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "1 2 3 " * 60}]}] * 3
    hidden = [{"messages": [{"role": "user", "content": "1 2 3 " * 60}, {"role": "assistant", "content": "6"}]}] * 2
    rows = write_jsonl(tmp_path / "rows.jsonl", arithmetic_rows(20) + long + hidden)
    file = recipe(rows=rows, data={"max_tokens": 90, "too_long": too_long}, run={"max_steps": 1})
    if too_long == "error":
        with pytest.raises(DataError, match=r"row 21: \d+ tokens, more than data\.max_tokens = 90\. Raise it, or set"):
            train_sft(file)
        return
    train_sft(file)
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("train: "))
    kept = {"filter": 20, "cut_left": 25, "cut_right": 23}[too_long]
    assert line.startswith(f"train: {kept} of 25 rows, ")
    assert f"; 5 longer than 90 {'left out' if too_long == 'filter' else 'cut'}" in line
    assert ("2 left out because the cut removed all their answers" in line) == (too_long == "cut_right")


# Which folders are refused -------------------------------------------------------------------------------------------


@pytest.fixture
def copy_of_finished(tmp_path, finished) -> tuple[Path, list[str]]:
    """A copy that tests may modify, and the command that resumes it."""
    file, run = finished
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy", [str(file), "seed=3", f"run.dir={tmp_path / 'copy'}"]


def test_a_run_with_another_recipe_is_refused_and_left_untouched(copy_of_finished, plaudit):
    run, command = copy_of_finished
    before = snapshot(run)
    code, _, err = plaudit("sft", *command, "optim.lr=0.05", "optim.max_grad_norm=null", "model.lora.rank=4", "run.epochs=2")
    assert code == 2
    assert err.splitlines() == [
        f"{run} belongs to a run with another recipe:",
        "  model.lora.alpha: was not set, is now 32.0",
        "  model.lora.dropout: was not set, is now 0.0",
        "  model.lora.merge_on_save: was not set, is now true",
        "  model.lora.rank: was not set, is now 4",
        '  model.lora.targets: was not set, is now "all-linear"',
        "  optim.lr: was 0.1, is now 0.05",
        "  optim.max_grad_norm: was 1.0, is now null",
        "  run.epochs: was 1.0, is now 2.0",
        "Choose another run.dir, or undo the difference to resume that run.",
        "A run keeps its length, which its learning rates depend on. To train longer, start another run from its model: "
        f"model.path={run / 'model'} run.dir=…",
    ]
    assert snapshot(run) == before


def test_settings_that_do_not_affect_the_weights_may_change(copy_of_finished, plaudit):
    run, command = copy_of_finished
    before = snapshot(run)
    may_change = ["run.save_every=3", "run.keep_last=1", "run.project=other", "run.trackers=[tensorboard]"]
    code, _, err = plaudit("sft", *command, *may_change)
    assert code == 0
    assert f"resuming from {run / 'checkpoints/step_000008'}" in err
    after = snapshot(run)
    for name in before:
        if name.startswith("checkpoints/") or name in ("metrics.jsonl", "model/model.safetensors"):
            assert after[name][1] == before[name][1], name
    assert "was 1, is now 3" not in err


def test_changed_data_is_refused(tmp_path, recipe):
    rows = write_jsonl(tmp_path / "rows.jsonl", arithmetic_rows(20))
    file = recipe(rows=rows, run={"max_steps": 2})
    train_sft(file)
    before = snapshot(tmp_path / "run")
    write_jsonl(rows, arithmetic_rows(21))
    with pytest.raises(RunError, match=rf"belongs to a run with another recipe:\n  {rows}: its content has changed\n"):
        train_sft(file)
    assert snapshot(tmp_path / "run") == before


def test_another_file_under_the_same_data_set_name_is_refused(tmp_path, recipe):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", arithmetic_rows(20))
    info = tmp_path / "dataset_info.json"
    entry = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
    entry["tags"] = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info.write_text(json.dumps({"mine": {"file_name": "a.jsonl", **entry}}))
    file = recipe(data={"train": "mine", "dataset_info": str(info)}, run={"max_steps": 1})
    train_sft(file)
    info.write_text(json.dumps({"mine": {"file_name": "b.jsonl", **entry}}))
    with pytest.raises(RunError, match=r"a\.jsonl: is not part of both runs\n.*b\.jsonl: is not part of both runs\n"):
        train_sft(file)


def test_a_run_that_never_started_may_be_replaced(tmp_path, recipe, plaudit, monkeypatch):
    """It was killed as it read its rows, which have changed since; nothing had been trained yet."""
    long = {"messages": [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "yes"}]}
    rows = write_jsonl(tmp_path / "rows.jsonl", [*arithmetic_rows(20), long])
    file = recipe(rows=rows, run={"max_steps": 2})
    with monkeypatch.context() as patched:
        patched.setattr(Run, "_remove_unused", lambda *_: None)
        code, _, err = plaudit("sft", file, "data.too_long=error")
    assert code == 2
    assert "row 21" in err
    assert (tmp_path / "run/run.json").exists()
    write_jsonl(rows, arithmetic_rows(20))
    assert plaudit("sft", file, "optim.lr=1e-4")[0] == 0
    assert json.loads((tmp_path / "run/run.json").read_text())["recipe"]["optim.lr"] == 1e-4
    assert plaudit("sft", file)[0] == 2, "now there are results to lose"


def test_a_second_process_on_the_same_folder_is_refused(copy_of_finished, plaudit):
    run, command = copy_of_finished
    before = snapshot(run)
    with (run / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = plaudit("sft", *command)
    assert code == 2
    assert err == f"{run}: another process is training in this folder; wait for it, or choose another run.dir\n"
    assert snapshot(run) == before
    assert plaudit("sft", *command)[0] == 0, "a refused command does not hold the lock"


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "checkpoints/step_000001/x", "model/model.safetensors", "best"])
def test_files_not_written_by_a_run_are_not_replaced(tmp_path, recipe, plaudit, name):
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = snapshot(tmp_path / "run")
    code, _, err = plaudit("sft", recipe())
    top = name.partition("/")[0]
    assert code == 2
    assert err == (
        f"run.dir: {tmp_path / 'run'} is neither empty nor a run folder (it has {top}); name a new folder, for example "
        f"run.dir={tmp_path / 'run/run'}\n"
    )
    assert snapshot(tmp_path / "run") == before


def test_a_folder_with_other_files_is_refused_before_torch_starts(tmp_path, recipe, plaudit, monkeypatch):
    """`run.dir=.` where one works."""
    for name in ("a.txt", "b.py", "c.md", "d.csv"):
        (tmp_path / "work" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "work" / name).touch()
    file = recipe()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("plaudit.loops.train.train", None)
    code, _, err = plaudit("sft", file, "run.dir=.")
    assert code == 2
    assert err == "run.dir: . is neither empty nor a run folder (it has a.txt, b.py, c.md and 1 more); name a new folder, " + (
        "for example run.dir=run\n"
    )
    assert len(list(Path().iterdir())) == 4


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"recipe": {}, "data": null, "trackers": {}}'])
def test_a_foreign_run_json_is_not_replaced(tmp_path, recipe, plaudit, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(text)
    code, _, err = plaudit("sft", recipe())
    assert code == 2
    assert err.startswith(f"{tmp_path / 'run/run.json'}: cannot be read as the record of a plaudit run")
    assert err.endswith("; choose another run.dir\n")
    assert (tmp_path / "run/run.json").read_text() == text


def test_unrelated_files_in_the_folder_are_kept(tmp_path, recipe):
    """Logs and hidden files from before the run, and whatever is added to it later."""
    before, later = ["slurm-7.out", "train.log", ".bashrc.old", ".draft.aside", ".lock"], ["notes.txt", "checkpoints.txt"]
    (tmp_path / "run").mkdir()
    for name in before:
        (tmp_path / "run" / name).write_text(name)
    (tmp_path / "run/.backup.old").mkdir()
    train_sft(recipe(run={"max_steps": 2}))
    for name in later:
        (tmp_path / "run" / name).write_text(name)
    train_sft(recipe(run={"max_steps": 2}))
    for name in before + later:
        assert (tmp_path / "run" / name).read_text() == name
    assert (tmp_path / "run/.backup.old").is_dir()


REPLACE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from plaudit.files import atomic_folder

def replace_and_die_before(event, folder):
    counts = iter(range(1000))

    def die(name, arguments):
        if name in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and next(counts) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    with atomic_folder(folder) as new:
        (new / "content").write_text("new")
    os._exit(0)

for event in range(100):
    folder = Path(sys.argv[1]) / str(event) / "step_000001"
    folder.mkdir(parents=True)
    (folder / "content").write_text("old")
    pid = os.fork()
    if pid == 0:
        replace_and_die_before(event, folder)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        print(event)
        break
"""


def test_a_folder_that_is_being_replaced_survives_kill_9(tmp_path):
    """At any moment: the old one or the new one is found, complete."""
    done = subprocess.run([sys.executable, "-c", REPLACE_AND_DIE, tmp_path], capture_output=True, text=True, timeout=250)
    moments = int(done.stdout)
    found = []
    for moment in range(moments + 1):
        remove_leftovers(tmp_path / str(moment), ["step_*"])
        assert [path.name for path in (tmp_path / str(moment)).iterdir()] == ["step_000001"]
        found.append((tmp_path / str(moment) / "step_000001/content").read_text())
    assert found == sorted(found, reverse=True), "old until it is replaced"
    assert set(found[:-1]) == {"old", "new"}, "it was killed before and after that"


def test_a_folder_is_replaced_after_a_process_was_killed_while_it_replaced_it(tmp_path):
    """Commands that write one folder have no run that puts the old one back first."""
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "old").touch()
    with atomic_folder(tmp_path / "model") as new:
        assert (tmp_path / "model/old").exists()
        (new / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/new"]


def test_leftovers_of_a_killed_process_are_removed(copy_of_finished):
    run, command = copy_of_finished
    for name in (
        ".run.json.aside",
        ".metrics.jsonl.aside",
        ".curves.png.aside",
        "checkpoints/.step_000008.old/x",
        ".model.aside/x",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("half")
    (run / ".best.aside").symlink_to("checkpoints")
    assert len(leftovers(run)) == 6
    train_sft(Path(command[0]), *command[1:])
    assert not leftovers(run)
    assert checkpoints_of(run)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path, recipe, plaudit):
    (tmp_path / "file").write_text("")
    code, _, err = plaudit("sft", recipe(), f"run.dir={tmp_path / 'file/run'}")
    assert code == 2
    assert err.startswith(f"run.dir: {tmp_path / 'file/run'} cannot be created or written to: [Errno {errno.ENOTDIR}]")
    assert len(err.splitlines()) == 1


def test_a_read_only_folder_is_reported(tmp_path, recipe, plaudit):
    folder = tmp_path / "run"
    folder.mkdir()
    if os.geteuid() == 0:
        folder = Path("/proc/self/run")  # root can write everywhere else
        if not folder.parent.exists():
            pytest.skip("needs a user other than root")
    else:
        folder.chmod(0o555)
    code, _, err = plaudit("sft", recipe(), f"run.dir={folder}")
    assert code == 2
    assert err.startswith(f"run.dir: {folder} cannot be created or written to: ")
    assert len(err.splitlines()) == 1


def test_unreadable_data_is_reported(tmp_path, recipe, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("plaudit.data.conversations.fingerprint", refuse)
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read: .*Permission denied"):
        train_sft(recipe())


def test_a_damaged_metrics_line_is_located(copy_of_finished, plaudit):
    run, command = copy_of_finished
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], "\0\0\0", *lines[3:]]) + "\n")
    code, _, err = plaudit("sft", *command)
    assert code == 2
    assert f"{run / 'metrics.jsonl'}:4: the line is damaged (it is not JSON" in err
    assert "Traceback" not in err


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_the_best_link_is_repaired(copy_of_finished):
    """A process may be killed between a checkpoint and the link to it."""
    run, command = copy_of_finished
    right = os.readlink(run / "best")
    for wrong in (None, "checkpoints/step_000007", "checkpoints/step_000000"):
        (run / "best").unlink()
        if wrong:
            (run / "best").symlink_to(wrong)
        train_sft(Path(command[0]), *command[1:])
        assert os.readlink(run / "best") == right
    train_sft(Path(command[0]), *command[1:], "run.keep_best=false")
    assert not (run / "best").is_symlink()


def test_a_non_finite_loss_is_never_the_best(tmp_path, recipe, monkeypatch, rows_file):
    monkeypatch.setattr("plaudit.report.curves.draw_curves", draw_curves)
    losses = iter([6.0, 5.0, 4.0, math.nan, -math.inf, 4.5])
    monkeypatch.setattr(sft, "validate", lambda *_: {"val/loss": next(losses)})
    train_sft(recipe(data={"val": str(rows_file)}, run={"max_steps": 5, "validate_every": 1, "keep_last": 1}))
    assert os.readlink(tmp_path / "run/best") == "checkpoints/step_000002"
    assert checkpoints_of(tmp_path / "run") == [2, 5]
    assert (tmp_path / "run/curves.png").exists()


def test_without_keep_best_only_the_newest_are_kept(tmp_path, recipe, rows_file):
    train_sft(recipe(data={"val": str(rows_file)}, run={"max_steps": 4, "save_every": 1, "keep_last": 1, "keep_best": False}))
    assert checkpoints_of(tmp_path / "run") == [4]
    assert not (tmp_path / "run/best").is_symlink()


def test_all_checkpoints_are_kept_and_a_number_prunes_them_again(tmp_path, recipe):
    file = recipe(run={"max_steps": 4, "save_every": 1, "keep_last": "all"})
    train_sft(file)
    assert checkpoints_of(tmp_path / "run") == [1, 2, 3, 4]
    for folder in (tmp_path / "run/checkpoints").iterdir():
        assert_complete(folder)
    shutil.rmtree(tmp_path / "run/checkpoints/step_000004")
    train_sft(file, "run.keep_last=2")
    assert checkpoints_of(tmp_path / "run") == [3, 4]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path, recipe, monkeypatch):
    """With keep_last = 1, counting it would delete the only intact one."""
    file = recipe(run={"max_steps": 6, "save_every": 2, "keep_last": 2})
    train_sft(file)
    run = tmp_path / "run"
    (run / "checkpoints/step_000006/trainer/00000.safetensors").write_text("")
    stop_before(monkeypatch, step=6)
    with pytest.raises(Stopped):
        train_sft(file, "run.save_every=5", "run.keep_last=1")
    assert checkpoints_of(run) == [5]
    assert_complete(run / "checkpoints/step_000005")


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path, recipe):
    file = recipe(run={"max_steps": 4, "save_every": 1, "keep_last": 2})
    train_sft(file)
    run = tmp_path / "run"
    copy = run / "checkpoints/step_000004_good"
    shutil.copytree(run / "checkpoints/step_000004", copy)
    (run / "checkpoints/step_000004/manifest.json").unlink()
    train_sft(file)
    assert_complete(run / "checkpoints/step_000004")
    assert (copy / "manifest.json").exists()


def test_the_resume_command_can_be_pasted_into_a_shell(recipe, monkeypatch):
    file = recipe()
    update = Trainer.update
    monkeypatch.setattr(sys, "argv", ["/bin/plaudit", "sft", "my recipe.yaml", "run.project=a b"])
    monkeypatch.setattr(Trainer, "update", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM) or update(*arguments))
    with pytest.raises(Interrupted, match=r"^stopped after step 1 of 8, saved\. Resume with: plaudit sft 'my recipe.yaml' 'run"):
        train_sft(file)


def test_a_second_ctrl_c_says_what_is_saved_and_how_to_resume(recipe, monkeypatch, capsys):
    update, steps = Trainer.update, []

    def interrupted_twice(*arguments):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(sys, "argv", ["/bin/plaudit", "sft", "r.yaml"])
    monkeypatch.setattr(Trainer, "update", interrupted_twice)
    with pytest.raises(KeyboardInterrupt):
        train_sft(recipe(run={"save_every": 2}))
    assert "stopped at once; step_000002 is intact. Resume with: plaudit sft r.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [TrainingStopped, ServerGone, PeerLost])
def test_what_stops_a_step_keeps_its_class(kind):
    """It decides whether all processes are restarted."""
    run = SimpleNamespace(_write_failures=lambda what, failed: " The failed samples are in x")
    with pytest.raises(TrainingStopped) as raised, Run.save_before_stopping(run, "step 1", 0):  # pyright: ignore
        raise kind("it failed.")
    assert type(raised.value) is kind
    assert str(raised.value) == "step 1: it failed. The failed samples are in x"


def test_a_third_ctrl_c_does_not_wait_for_a_checkpoint(recipe, monkeypatch):
    """The second one does, and says so. The third reaches another thread, which does not end the training thread's wait."""
    update, waits, may_write, steps, written = Trainer.update, threading.Event(), threading.Event(), [], []

    def write_slowly(*arguments, **more) -> None:
        assert waits.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        written.append(may_write.wait(60))

    def interrupted_twice(*arguments):
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    def note_wait(text: str, style: str = "") -> None:
        if text == "waiting for the checkpoint of step 1 to be written (Ctrl-C to leave at once, without it)":
            waits.set()

    monkeypatch.setattr(saving, "write_checkpoint", write_slowly)
    monkeypatch.setattr(run_module, "print_line", note_wait)
    monkeypatch.setattr(Trainer, "update", interrupted_twice)
    with pytest.raises(KeyboardInterrupt):
        train_sft(recipe(run={"save_every": 1}))
    assert waits.is_set()
    assert not written, "it is still being written"
    may_write.set()


def test_a_signal_within_a_print_does_not_print_its_line_again(recipe, monkeypatch):
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "a line" in text and not progress.run.interrupted:
                progress.run._on_signal(signal.SIGINT, None)
            return written

    monkeypatch.setattr(progress.console, "_file", Interrupted())
    monkeypatch.setattr(progress, "run", SimpleNamespace(interrupted=False), raising=False)
    progress.run._on_signal = partial(Run._on_signal, progress.run)
    progress.print_line("a line")
    for thread in [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]:
        thread.join(10)
    assert progress.console.file.getvalue().count("a line") == 1
    assert "stopping as soon as" in progress.console.file.getvalue()


# A full disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing more fails as on a full disk, but with a different errno."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def assert_same_result(run: Path, reference: Path) -> None:
    rows, expected = ([{name: row[name] for name in row.keys() & EXACT} for row in metrics_of(r)] for r in (run, reference))
    assert rows == expected
    for path in sorted((reference / "model").iterdir()):
        assert (run / "model" / path.name).read_bytes() == path.read_bytes(), path.name
    last = checkpoints_of(reference)[-1]
    state = f"checkpoints/step_{last:06d}/trainer/00000.safetensors"
    assert (run / state).read_bytes() == (reference / state).read_bytes()


def test_disk_full_while_a_checkpoint_is_saved(tmp_path, recipe):
    """The command's file size is limited after its first checkpoint."""
    settings = {"max_steps": 4, "save_every": 2}
    train_sft(recipe("reference", run=settings))
    command = ["sft", str(recipe(run=settings))]
    script = (
        "import resource, sys; from plaudit.run import Run; from plaudit.cli import main; save = Run.save\n"
        "def save_then_limit(self, step):\n"
        "    save(self, step); self.saver.wait()\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))\n"
        "Run.save = save_then_limit; main()"
    )
    full = Command(*command, script=script)
    run = tmp_path / "run"
    assert full.wait() == 2, full.output
    assert full.output.splitlines()[-1].startswith(f"{run / 'checkpoints/step_000004'}: could not be written (")
    assert full.output.endswith("step_000002 is intact. Fix the cause, then run the same command to resume.\n")
    assert "Traceback" not in full.output
    assert checkpoints_of(run) == [2]
    assert_complete(run / "checkpoints/step_000002")
    assert not leftovers(run)
    train_sft(Path(command[1]))
    assert_same_result(run, tmp_path / "reference")


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("size", "model", "what"),
    [
        (250, {}, "metrics.jsonl"),
        (100_000, {}, "checkpoints/step_000004"),  # less than the model
        (1_000_000, {}, "checkpoints/step_000004"),  # more than the model, less than the moments
        (8_000, {"lora": {"rank": 1, "targets": ["q_proj"], "merge_on_save": False}}, "checkpoints/step_000004"),  # the tokenizer
    ],
)
def test_a_run_resumes_after_a_failed_write(tmp_path, recipe, plaudit, monkeypatch, size, model, what):
    settings = {"model": model, "run": {"max_steps": 4, "save_every": 2}}
    train_sft(recipe("reference", **settings))
    file, run = recipe(**settings), tmp_path / "run"
    stop_before(monkeypatch, step=3)
    with pytest.raises(Stopped):
        train_sft(file)
    if what == "metrics.jsonl":
        for module in ("run", "metrics_files"):  # those files are written first
            monkeypatch.setattr(f"plaudit.{module}.write_atomic", lambda *_: None)
    with file_size_limit(size):
        code, _, err = plaudit("sft", file)
    assert code == 2, err
    assert f"\n{run / what}: could not be written (" in err
    assert "File too large" in err
    assert err.endswith("step_000002 is intact. Fix the cause, then run the same command to resume.\n")
    assert checkpoints_of(run) == [2]
    if not model:
        assert_complete(run / "checkpoints/step_000002")
    assert not leftovers(run)
    monkeypatch.undo()
    train_sft(file)
    assert_same_result(run, tmp_path / "reference")


def test_disk_full_before_the_run_starts(tmp_path, recipe, plaudit):
    file = recipe(run={"max_steps": 1})
    with file_size_limit(10):
        code, _, err = plaudit("sft", file)
    assert code == 2
    assert err.startswith(f"{tmp_path / 'run'}: could not be written (")
    assert "no checkpoint exists yet" in err
    assert not leftovers(tmp_path / "run")
    assert plaudit("sft", file)[0] == 0


def test_disk_full_while_the_trained_model_is_saved(tmp_path, recipe, plaudit, monkeypatch):
    file, run, finish = recipe(run={"max_steps": 2}), tmp_path / "run", Run.finish

    def finish_on_a_full_disk(self):
        self.saver.wait()
        with file_size_limit(100_000):
            return finish(self)

    monkeypatch.setattr(Run, "finish", finish_on_a_full_disk)
    code, _, err = plaudit("sft", file)
    assert code == 2
    assert f"\n{run / 'model'}: could not be written (" in err
    assert "step_000002 is intact" in err
    assert not (run / "model").exists()
    monkeypatch.setattr(Run, "finish", finish)
    assert plaudit("sft", file)[0] == 0
    assert (run / "model/model.safetensors").exists()


def test_free_space_is_checked_before_saving(tmp_path, recipe, plaudit, monkeypatch):
    file, run = recipe(run={"max_steps": 4, "save_every": 2}), tmp_path / "run"
    free = iter([10**12, 10**6])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    code, _, err = plaudit("sft", file)
    assert code == 2
    assert err.splitlines()[-1] == (
        f"{run / 'checkpoints/step_000004'}: not enough disk space: a checkpoint takes 0.00 GB and 0.00 GB are free; "
        "step_000002 is intact. Free some space, then run the same command to resume."
    )
    assert_complete(run / "checkpoints/step_000002")
    assert not leftovers(run)


def test_a_failure_to_draw_curves_does_not_stop_the_run(tmp_path, recipe, plaudit, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("plaudit.report.curves.draw_curves", full)
    code, _, err = plaudit("sft", recipe(run={"max_steps": 2}))
    assert code == 0
    assert f"{tmp_path / 'run/curves.png'} could not be drawn: [Errno {errno.ENOSPC}] No space left" in err
    assert (tmp_path / "run/model/model.safetensors").exists()


# Divergence and resuming ---------------------------------------------------------------------------------------------


def test_a_diverging_run_stops_with_advice(tmp_path, recipe, plaudit, rows_file):
    file = recipe(
        data={"val": str(rows_file)},
        train={"max_skipped_steps": 2},
        optim={"lr": 1e30, "max_grad_norm": None, "warmup_steps": 0},
        run={"save_every": 1, "validate_every": 1, "keep_last": 9},
    )
    for again in range(2):
        code, _, err = plaudit("sft", file)
        assert code == 2
        last = err.splitlines()[-1]
        assert last.startswith("update 4: the loss or gradient was not finite (loss nan")
        assert "3 times so far; train.max_skipped_steps is 2" in last
        assert last.endswith("lower optim.lr, or set model.dtype=float32.")
        assert "Traceback" not in err
        rows = metrics_of(tmp_path / "run")
        assert [row.get("skipped_steps") for row in rows] == [None, 0, 1, 2]
        assert math.isfinite(rows[1]["loss"])
        assert all(row["loss"] is None for row in rows[2:])  # JSON has no NaN
        assert checkpoints_of(tmp_path / "run") == [1, 2, 3]
        assert again == ("resuming from" in err)
    for step in (1, 2, 3):
        state = json.loads((tmp_path / f"run/checkpoints/step_{step:06d}/state.json").read_text())
        assert state == {"step": step, "updates": step, "skipped_steps": step - 1, "best": None}
    assert not (tmp_path / "run/best").is_symlink()
    assert not (tmp_path / "run/model").exists()


@pytest.mark.slow
def test_a_large_trainer_state_is_split_over_files(tmp_path, tiny_model, rows_file, monkeypatch):
    """Only a file's worth of tensors passes through memory at a time; a run resumes from several files as from one."""
    single = write_recipe(tmp_path / "single.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "single", run={"save_every": 4}))
    train_sft(single)
    monkeypatch.setattr("plaudit.train.saved_state.FILE_BYTES", 50_000)
    split = write_recipe(tmp_path / "split.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "split", run={"save_every": 4}))
    train_sft(split)
    assert len(list((tmp_path / "split/checkpoints/step_000004/trainer").iterdir())) > 5
    shutil.rmtree(tmp_path / "split/checkpoints/step_000008")
    train_sft(split)
    weights = "model/model.safetensors"
    assert (tmp_path / "split" / weights).read_bytes() == (tmp_path / "single" / weights).read_bytes()


@pytest.mark.parametrize("what", ["the model", "the tokenizer", "the chat template"])
def test_another_model_under_the_same_name_is_refused(tmp_path, tiny_model, rows_file, what):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    file = write_recipe(tmp_path / "r.yaml", sft_recipe(model, rows_file, tmp_path / "run", run={"max_steps": 2}))
    train_sft(file)
    if what == "the model":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    elif what == "the tokenizer":
        tree = json.loads((model / "tokenizer.json").read_text())
        tree["model"]["merges"] = tree["model"]["merges"][:-1]
        (model / "tokenizer.json").write_text(json.dumps(tree))
    else:
        template = model / "chat_template.jinja"
        template.write_text(template.read_text() + "{# a remark #}")
    with pytest.raises(RunError, match=f"{what}: its content has changed"):
        train_sft(file)


def test_settings_that_only_affect_rounding_may_change_with_a_warning(tmp_path, recipe, monkeypatch, capsys):
    file = recipe(run={"max_steps": 4, "save_every": 2})
    with monkeypatch.context() as patch:
        stop_before(patch, 4)
        with pytest.raises(Stopped):
            train_sft(file)
    train_sft(file, "train.tokens_per_micro_batch=64", "model.gradient_checkpointing=true")
    err = capsys.readouterr().err
    assert "train.tokens_per_micro_batch: was 128, is now 64" in err
    assert "not that of an uninterrupted run to the last bit" in err


def test_a_setting_added_after_the_run_counts_as_its_default(copy_of_finished, plaudit):
    run, command = copy_of_finished
    record = json.loads((run / "run.json").read_text())
    assert record["recipe"].pop("optim.decay_ratio") == 0.1
    (run / "run.json").write_text(json.dumps(record))
    assert plaudit("sft", *command)[0] == 0


def test_nothing_is_deleted_when_no_checkpoint_is_intact(tmp_path, recipe):
    file = recipe(run={"max_steps": 2})
    train_sft(file)
    weights = tmp_path / "run/checkpoints/step_000002/trainer/00000.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)  # the right size, but all zeros
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"is damaged \(trainer/00000.safetensors: its checksum does not match\)[\s\S]*No checkpoint is left"
    ):
        train_sft(file)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


def test_an_incomplete_trainer_state_is_refused(tmp_path, recipe):
    """Otherwise a run would resume from the untrained model."""
    file = recipe(run={"max_steps": 2})
    train_sft(file)
    folder = tmp_path / "run/checkpoints/step_000002"
    (folder / "trainer/00000.safetensors").unlink()
    write_manifest(folder, describe_files(folder, files_in(folder)))
    with pytest.raises(RunError, match="trainer state is incomplete"):
        train_sft(file)


def test_save_every_minutes_saves_a_checkpoint(tmp_path, recipe):
    train_sft(recipe(run={"max_steps": 3, "keep_last": 9, "save_every_minutes": 1e-9}))
    assert checkpoints_of(tmp_path / "run") == [1, 2, 3]


def test_saved_models_have_default_permissions(tmp_path, finished):
    _, run = finished
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode & 0o777 for path in (run / "model").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}
