"""Experiment trackers, fed alongside metrics.jsonl: one small class per service. A resumed run keeps its id.

Keys come from the environment, as each service documents (WANDB_API_KEY, MLFLOW_TRACKING_URI, SWANLAB_API_KEY, …).
"""

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from plaudit.config import flatten
from plaudit.errors import RunError
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import print_line


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides steps that a killed process logged after the checkpoint; without a checkpoint, all of them.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        import wandb

        self.run = wandb.init(
            project=recipe.run.project,
            name=folder.name,
            id=ids.setdefault("wandb", uuid.uuid4().hex[:12]),
            resume="allow",
            dir=folder,
            config=flatten(recipe),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """Uses its own client: `mlflow.start_run` keeps global state that the next run in this process would inherit."""

    def __init__(self, folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}")
        if "mlflow" in ids:
            self.client.update_run(ids["mlflow"], status="RUNNING")
        else:
            ids["mlflow"] = self.client.create_run(self._experiment(recipe.run.project), run_name=folder.name).info.run_id
            self.client.log_batch(ids["mlflow"], params=[Param(name, str(value)) for name, value in flatten(recipe).items()])
        self.run_id = ids["mlflow"]

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self.client.create_experiment(name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in metrics.items() if name != "step"])

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Swanlab:
    def __init__(self, folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        import swanlab

        self.run = swanlab.init(
            project=recipe.run.project,
            experiment_name=folder.name,
            id=ids.setdefault("swanlab", uuid.uuid4().hex[:21]),
            resume="allow",
            logdir=str(folder / "swanlab"),
            config=flatten(recipe),
            mode=None if "SWANLAB_MODE" in os.environ else "online" if "SWANLAB_API_KEY" in os.environ else "offline",
        )
        self.swanlab = swanlab

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.swanlab.log({name: value for name, value in metrics.items() if name != "step"}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab}


class Trackers:
    """All trackers of a run. One that cannot start stops the run before it begins; one that fails later is dropped."""

    def __init__(self, names: Sequence[str], folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        self.open: dict[str, Tracker] = {}
        for name in names:
            try:
                self.open[name] = TRACKERS[name](folder, recipe, ids, step)
            except ImportError as error:
                self.close()
                raise RunError(
                    f"run.trackers: {name} is not installed ({error}). Install it with: pip install 'plaudit[track]'"
                ) from None
            except Exception as error:
                self.close()
                raise RunError(
                    f"run.trackers: {name} could not start: {error}. Fix that, or remove it from run.trackers."
                ) from None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:  # a tracker's network failure must not end a training run
                print_line(f"{name} failed at step {step} and is disabled (metrics.jsonl has all metrics): {error}", "yellow")
                del self.open[name]
                with suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        for name, tracker in self.open.items():
            try:
                tracker.close()
            except Exception as error:
                print_line(
                    f"{name} could not be closed; its last metrics may be missing (metrics.jsonl has them): {error}",
                    "yellow",
                )
        self.open.clear()
