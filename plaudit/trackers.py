"""Experiment trackers, fed alongside metrics.jsonl: one small class per service. A resumed run keeps its id.

Keys come from the environment, as each service documents (WANDB_API_KEY, MLFLOW_TRACKING_URI, SWANLAB_API_KEY, …).
"""

import os
import re
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from plaudit.config import flatten
from plaudit.errors import RunError, install_extra
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import print_line
from plaudit.report.samples import ShownSample

MAX_CHARACTERS = 4000
"""Of a sample's prompt, and of its response."""


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Samples of a validation, as text to read."""
        ...

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

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        for sample in samples:
            self.writer.add_text(f"samples/{sample.which}", _as_markdown(sample), step)

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

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        import wandb

        table = wandb.Table(["sample", "reward", "prompt", "response"])
        for sample in samples:
            table.add_data(sample.which, sample.reward, _shorten(sample.prompt), _shorten(sample.response))
        self.run.log({"val/samples": table}, step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """Uses its own client: `mlflow.start_run` keeps global state that the next run in this process would inherit."""

    def __init__(self, folder: Path, recipe: TrainingRecipe, ids: dict[str, str], step: int):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(server or f"sqlite:///{(folder / 'mlflow.db').absolute()}")
        # By default a local store's files would be written to the current folder.
        self._artifacts = None if server else (folder / "mlartifacts").absolute().as_uri()
        if "mlflow" in ids:
            self.client.update_run(ids["mlflow"], status="RUNNING")
        else:
            ids["mlflow"] = self.client.create_run(self._experiment(recipe.run.project), run_name=folder.name).info.run_id
            self.client.log_batch(ids["mlflow"], params=[Param(name, str(value)) for name, value in flatten(recipe).items()])
        self.run_id = ids["mlflow"]

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self.client.create_experiment(name, self._artifacts)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # Other characters, as in pass@4, are refused.
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items() if name != "step"}
        self.client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in named.items()])

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """A text file per validation, which a step that is repeated writes again; tables can only be appended to."""
        text = "\n\n".join(f"## {sample.which}\n{_as_markdown(sample)}" for sample in samples)
        self.client.log_text(self.run_id, text, f"samples/val_{step:06d}.md")

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

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        texts = [self.swanlab.Text(_as_markdown(sample), caption=sample.which) for sample in samples]
        self.swanlab.log({"val/samples": texts}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


def _as_markdown(sample: ShownSample) -> str:
    """Its texts are indented: code, in which nothing is markup."""
    prompt, response = (textwrap.indent(_shorten(text), "    ", lambda line: True) for text in (sample.prompt, sample.response))
    return f"reward {sample.reward:.4f}\n\n{prompt}\n\n**→**\n\n{response}"


def _shorten(text: str) -> str:
    """Long texts, repeated in every validation, would fill a tracker."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS // 2]}\n…\n{text[-MAX_CHARACTERS // 2 :]}"


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
                    f"run.trackers: {name} is not installed ({error}). Install it with: {install_extra('track')}"
                ) from None
            except Exception as error:
                self.close()
                raise RunError(
                    f"run.trackers: {name} could not start: {error}. Fix that, or remove it from run.trackers."
                ) from None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._each(step, lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        if samples:
            self._each(step, lambda tracker: tracker.log_samples(step, samples))

    def _each(self, step: int, log: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                log(tracker)
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
