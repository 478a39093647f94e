"""Trackers record the same values as metrics.jsonl, resume under the same id, and cannot stop a run.

No network is needed. Unless a test says otherwise, a run is interrupted after step 5, past the checkpoint of step 4, and resumed.
"""

import json
import logging
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plaudit.cli import load_checked
from plaudit.config import flatten
from plaudit.errors import RunError
from plaudit.report.samples import ShownSample
from plaudit.trackers import TRACKERS, Trackers
from support.recipes import Stopped, sft_recipe, stop_before, train_sft, write_recipe

STEPS = 6


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No key, no server, no files outside the test's folder."""
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "SWANLAB_SAVE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))


@pytest.fixture
def recipe(tmp_path, tiny_model, rows_file):
    def write(*trackers: str, **run: object) -> Path:
        settings = {"max_steps": STEPS, "save_every": 2, "trackers": trackers, **run}
        tree = sft_recipe(tiny_model, rows_file, tmp_path / "run", data={"val": str(rows_file)}, run=settings)
        return write_recipe(tmp_path / "r.yaml", tree)

    return write


def train_resumed(recipe: Path, monkeypatch, *overrides: str, stop_in_step: int = 6) -> list[dict]:
    """Interrupts a run and resumes it; returns the trackers' ids after each of the two processes."""
    ids = []
    stop_before(monkeypatch, stop_in_step)
    with pytest.raises(Stopped):
        train_sft(recipe)
    ids.append(ids_of(recipe))
    time.sleep(1.0)  # some trackers name their files by the second
    train_sft(recipe, *overrides)
    ids.append(ids_of(recipe))
    return ids


def ids_of(recipe: Path) -> dict:
    return json.loads((recipe.parent / "run/run.json").read_text())["trackers"]


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def series(run: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.jsonl by metric, which each tracker should match."""
    rows = metrics_of(run)
    names = {name for row in rows for name in row if name != "step"}
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}


# TensorBoard ---------------------------------------------------------------------------------------------------------


def tensorboard_series(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it announces what it purges
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def assert_same_series(found: dict, expected: dict, rel: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    # A step that is repeated after a resume may have had the times of a save before.
    for name in expected.keys() - {"time/save_s", "time/save_wait_s"}:
        assert [step for step, _ in found[name]] == [step for step, _ in expected[name]], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in expected[name]], rel=rel, abs=1e-6), name


def test_tensorboard_has_the_metrics(tmp_path, recipe):
    train_sft(recipe("tensorboard"))
    assert_same_series(tensorboard_series(tmp_path / "run"), series(tmp_path / "run"))


@pytest.mark.grid(1)
@pytest.mark.parametrize("stop_in_step", [6, 2, 1], ids=["after a checkpoint", "before any checkpoint", "before any step"])
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, recipe, monkeypatch, stop_in_step):
    train_resumed(recipe("tensorboard"), monkeypatch, stop_in_step=stop_in_step)
    found, expected = tensorboard_series(tmp_path / "run"), series(tmp_path / "run")
    assert [step for step, _ in found["loss"]] == list(range(1, STEPS + 1))
    assert_same_series(found, expected)


# Weights & Biases ----------------------------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator:
    """Records of an offline run: LevelDB's log format after a header, one message per record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, payload = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no record begins in the last bytes of a block
            at += left
            continue
        length, kind = struct.unpack_from("<4xHB", data, at)
        payload += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last chunk of one
            record = Record()
            record.ParseFromString(payload)
            yield record
            payload = b""


@pytest.mark.slow
def test_wandb_resumes_under_the_same_id(tmp_path, recipe, monkeypatch):
    before, after = train_resumed(recipe("wandb"), monkeypatch)
    assert before == after
    assert set(before) == {"wandb"}
    files = sorted((tmp_path / "run/wandb").glob(f"offline-run-*-{before['wandb']}/run-{before['wandb']}.wandb"))
    assert files
    records = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(before["wandb"], "plaudit", "run")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["optim.lr"] == 1e-3

    def logged() -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = {}  # if a step is logged twice, the later values count
        for record in (record for file in files for record in wandb_records(file)):
            if record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for name in row.keys() - {"step"}:
                    if not name.startswith("_"):
                        found.setdefault(name, {})[row["step"]] = row[name]
        return found

    deadline = time.monotonic() + 60.0  # a process of wandb's own writes the files, on a busy machine seconds later
    while 6 not in logged()["loss"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert_same_series({name: sorted(points.items()) for name, points in logged().items()}, series(tmp_path / "run"))


# MLflow --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_resumes_under_the_same_id(tmp_path, recipe, monkeypatch):
    """Even if run.project, which a resumed run may change, now names another experiment."""
    import mlflow
    from mlflow import MlflowClient

    file = recipe("mlflow")
    before, after = train_resumed(file, monkeypatch, "run.project=another")
    assert before == after
    assert (tmp_path / "run/mlflow.db").exists()
    client = MlflowClient(f"sqlite:///{tmp_path / 'run/mlflow.db'}")
    experiment = client.get_experiment_by_name("plaudit")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == before["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    expected_params = flatten(load_checked(file, [], "sft")[0].recipe)
    assert run.data.params == {name: str(value) for name, value in expected_params.items()}

    found = {}
    for name in run.data.metrics:
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda point: point.timestamp)
        found[name] = sorted({point.step: point.value for point in history}.items())
    assert_same_series(found, series(tmp_path / "run"))
    assert mlflow.active_run() is None
    assert "MLFLOW_TRACKING_URI" not in os.environ, "the next run of this process would log here"


# SwanLab -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_swanlab_resumes_under_the_same_id(tmp_path, recipe, monkeypatch):
    before, after = train_resumed(recipe("swanlab"), monkeypatch)
    assert before == after
    logs = sorted((tmp_path / "run/swanlab").glob(f"run-*-{before['swanlab']}"))
    assert logs
    content = b"".join(path.read_bytes() for path in logs[0].rglob("*") if path.is_file())
    assert b"optim.lr" in content
    assert b"grad_norm" in content


@pytest.mark.slow
def test_swanlab_can_be_offline_with_a_key(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("SWANLAB_API_KEY", "made0up1value2")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    train_sft(recipe("swanlab", max_steps=1))
    assert list((tmp_path / "run/swanlab").glob("run-*"))


# All of them ---------------------------------------------------------------------------------------------------------


class Broken:
    """A tracker whose service goes away."""

    closed = 0

    def __init__(self, *_):
        pass

    def log(self, step, metrics):
        if step == 2:
            raise ConnectionError("the server is gone, key hunter2000")

    def close(self):
        Broken.closed += 1
        raise ConnectionError("still gone")


def test_a_failing_tracker_is_disabled(tmp_path, recipe, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2000")
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    monkeypatch.setattr(Broken, "closed", 0)
    train_sft(recipe("wandb", "tensorboard"))
    err = capsys.readouterr().err
    assert err.count("wandb failed at step 2 and is disabled (metrics.jsonl has all metrics): the server is gone") == 1
    assert "key $WANDB_API_KEY" in err
    assert "hunter2000" not in err
    assert Broken.closed == 1
    assert len(metrics_of(tmp_path / "run")) == STEPS + 1
    assert_same_series(tensorboard_series(tmp_path / "run"), series(tmp_path / "run"))
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_tracker_that_cannot_be_closed_is_reported(tmp_path, recipe, monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "swanlab", Broken)
    train_sft(recipe("swanlab", "tensorboard", max_steps=1))
    assert "swanlab could not be closed; its last metrics may be missing" in capsys.readouterr().err
    assert_same_series(tensorboard_series(tmp_path / "run"), series(tmp_path / "run"))


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("swanlab", "swanlab")],
)
def test_a_tracker_that_is_not_installed_is_reported(recipe, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=rf"^run\.trackers: {name} is not installed .*pip install '.*'tensorboard>=.*'wandb>=.*'$"):
        train_sft(recipe(name))
    monkeypatch.undo()
    train_sft(recipe(max_steps=1))  # the folder is still usable


def test_a_tracker_that_cannot_start_closes_the_others(tmp_path, recipe, monkeypatch):
    """The message does not contain the server's password."""
    closed = []
    monkeypatch.setattr(TRACKERS["tensorboard"], "close", lambda self: closed.append(self.writer.close()))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2000@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RunError, match=r"^run\.trackers: mlflow could not start: .*remove it from run\.trackers\.$") as raised:
        train_sft(recipe("tensorboard", "mlflow"))
    assert "hunter2000" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert closed == [None]
    assert metrics_of(tmp_path / "run") == []


SAMPLES = [
    ShownSample("best", 1.0, "What is *2 + 2*?", "```\n<b>4</b>"),
    ShownSample("worst", -0.5, "x" * 10_000, "\x1b[2J" + "y" * 10_000),
]


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", TRACKERS)
def test_samples_of_a_validation_can_be_read(tmp_path, recipe, capsys, name):
    """Twice, as a resumed run does. MLflow writes nothing outside of the run's folder."""
    file, run = recipe(name), tmp_path / "run"
    run.mkdir()
    ids: dict[str, str] = {}
    loaded = load_checked(file, [], "sft")[0].recipe
    for _ in range(2):
        trackers = Trackers([name], run, loaded, ids, 0)
        trackers.log(1, {"step": 1, "val/reward": 0.25})
        trackers.log_samples(1, SAMPLES)
        trackers.close()
    assert "failed" not in capsys.readouterr().err
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert any(b"<b>4</b>" in content for content in written.values())
    assert not any(b"y" * 5000 in content for content in written.values())
    assert not Path("mlruns").exists()


def test_tensorboard_shows_a_sample_as_text_without_markup(tmp_path, recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "run").mkdir()
    trackers = Trackers(["tensorboard"], tmp_path / "run", load_checked(recipe("tensorboard"), [], "sft")[0].recipe, {}, 0)
    trackers.log_samples(7, SAMPLES[:1])
    trackers.close()
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    [event] = events.Tensors("samples/best/text_summary")
    [text] = event.tensor_proto.string_val
    assert event.step == 7
    assert text.decode() == "reward 1.0000\n\n    What is *2 + 2*?\n\n**→**\n\n    ```\n    <b>4</b>"


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", TRACKERS)
def test_non_finite_values_do_not_disable_a_tracker(tmp_path, recipe, capsys, name):
    file = recipe(name)
    (tmp_path / "run").mkdir()
    trackers = Trackers([name], tmp_path / "run", load_checked(file, [], "sft")[0].recipe, {}, 0)
    trackers.log(1, {"step": 1, "loss": math.nan, "grad_norm": math.inf})
    trackers.log(2, {"step": 2, "loss": 1.0, "grad_norm": 1.0})
    trackers.close()
    assert "failed" not in capsys.readouterr().err
