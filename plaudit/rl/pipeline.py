"""Which weights sample which step, and when.

    rollout.lag 0     collect k (version k−1) │ train k │ sync k │ collect k+1 (version k) │ …
    rollout.lag 1     train k                        │ sync k │ train k+1                  │ …
                      collect k+1 (version k−1)      │        │ collect k+2 (version k)    │

With a lag, step 1 is collected alone, and both it and step 2 with version 0. Everything is joined before weights are synced, the
run is validated or a checkpoint is saved: which version samples a step is a function of the step alone, so that a run repeats.

The trainer's weights change while the engine samples, so it is given a copy of them (`held`), from which a server that has to be
started again gets the same ones.

A checkpoint of step k contains the collected groups of step k+1. If collecting them was cut short (by Ctrl-C, or a reward that
failed), it contains the weights of version k−1 instead, and a resumed run collects the step with them first.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from plaudit.checkpoint import Snapshot
from plaudit.rl.collect import Collected, Collector, exchange, rest
from plaudit.rl.collected_files import read_collected, write_collected
from plaudit.rl.learner import Learner
from plaudit.rollout.engine import Engine, Weights
from plaudit.rollout.faults import engine_faults
from plaudit.train.saved_state import save_tensors
from plaudit.world import SecondHeartbeat

POLL_S = 0.1
END_S = 10.0
"""How long the end of a run waits for its collecting thread, which may be waiting for processes that are gone."""
FOLDER = "next_step"


class Pipeline:
    """The steps of a run, each collected when it is due. It owns what a checkpoint contains (a `checkpoint.Saveable`): the state of
    the learner, and the next step if that is collected."""

    def __init__(
        self, engine: Engine, collector: Collector, learner: Learner, *,
        total_steps: int, held: nn.Module | None, ends: threading.Event,
    ):  # fmt: skip
        """`held`: with a lag, the model whose weights are the engine's. `ends` is set when what is being collected is no longer
        needed; the collector's activity checks it."""
        self.engine, self.collector, self.learner, self.total_steps = engine, collector, learner, total_steps
        self._held, self._ends = held, ends
        self._version = 0
        """Of the last sync."""
        self._next: Collected | None = None
        self._cut_short: int | None = None
        """The version that the next step has to be collected with, if that was begun and not completed."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    # A step ----------------------------------------------------------------------------------------------------------

    def take(self, step: int) -> Collected:
        """The groups of a step, which is trained next."""
        collected, self._next = self._next, None
        return collected or self.collector.collect(step, self._version)

    def begin_training(self, step: int) -> dict[str, float]:
        """From here on, the trainer uses its device. With a lag, collecting the step after this one begins. Returns metrics."""
        if self._held is None or step == self.total_steps:
            with engine_faults(type(self.engine)):
                self.engine.rest()
            return rest(self.collector.rewards)
        self._cut_short = self._version
        # A daemon: a process that has to end does not wait for it.
        self._thread = threading.Thread(target=self._collect, args=(step + 1,), name="collecting", daemon=True)
        self._thread.start()
        return {}

    def _collect(self, step: int) -> None:
        try:
            if (device := self.learner.world.device).type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            self._next = self.collector.collect(step, self._version)
            self._cut_short = None
        except BaseException as error:  # whatever it is, the training thread raises it
            self._error = error

    def wait(self) -> dict[str, float]:
        """Until the next step is collected. Raises what ended that early."""
        if self._thread is None:
            return {}
        began, heartbeat = time.perf_counter(), self.collector.shares.world.heartbeat
        assert isinstance(heartbeat, SecondHeartbeat)
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            heartbeat.pass_on()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return {"time/collect_wait_s": time.perf_counter() - began}

    def sync(self, version: int) -> None:
        """The engine samples with the trainer's current weights from here on."""
        weights = self.learner.weights()
        if self._held is not None:
            weights.copy_to(self._held)
            weights = Weights(self._held)
        self._sync(version, weights)

    def _sync(self, version: int, weights: Weights) -> None:
        def sync() -> None:
            with engine_faults(type(self.engine)):
                self.engine.sync(version, weights)

        exchange(self.learner.world, sync, f"sync after step {version}")
        self._version = version

    def close(self) -> None:
        if self._thread is not None:
            self._ends.set()
            self._thread.join(END_S)

    # Resuming --------------------------------------------------------------------------------------------------------

    def catch_up(self, step: int) -> None:
        """After a resume: collect the step that was cut short, with the weights that it was begun with."""
        if (version := self._cut_short) is None:
            return
        assert self._held is not None
        self._sync(version, Weights(self._held))
        self._next = self.collector.collect(step, version)
        self._cut_short = None

    def state_bytes(self) -> int:
        return self.learner.state_bytes() + sum(size for size in self._own_bytes() if self.learner.world.leads)

    def _own_bytes(self) -> list[int]:
        if self._next is not None:
            return [3 * sample.tokens.nbytes + len(sample.text) for one in self._next.sampled for sample in one.group.samples]
        return [tensor.nbytes for tensor in self._sampler_weights().values()]

    def snapshot(self, *, copy: bool) -> Snapshot:
        learner, collected, weights = self.learner.snapshot(copy=copy), self._next, self._sampler_weights()
        state: dict[str, Any] = {}
        if collected is not None:
            state = {"next_step": {"metrics": collected.metrics}}
        elif self._cut_short is not None:
            state = {"next_step": {"version": self._cut_short}}

        def write(folder: Path) -> list[Path]:
            files = learner.write(folder)
            if not self.learner.world.leads:
                return files
            if collected is not None:
                files += write_collected(collected, folder / FOLDER)
            elif weights:
                (folder / FOLDER).mkdir()
                files += save_tensors(weights, folder / FOLDER)
            return files

        return Snapshot(learner.state | state, write)

    def _sampler_weights(self) -> dict[str, Tensor]:
        """Those that the next step has to be collected with, if that was cut short. Tied ones once. They do not change before."""
        if self._cut_short is None or self._next is not None or self._held is None:
            return {}
        once = {tensor.data_ptr(): (name, tensor) for name, tensor in self._held.state_dict().items()}
        return dict(once.values())

    def load_state(self, folder: Path, state: dict[str, Any]) -> None:
        self.learner.load_state(folder, state)
        ahead = state.get("next_step")
        if ahead is None:
            return
        if "metrics" in ahead:
            self._next = read_collected(folder / FOLDER, self.collector, ahead["metrics"])
            return
        assert self._held is not None, "rollout.lag cannot change"
        self._cut_short = ahead["version"]
        own = self._held.state_dict()
        for file in sorted((folder / FOLDER).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    own[name].copy_(opened.get_tensor(name))

    def models(self) -> Mapping[str, Callable[[Path | None], None]]:
        return self.learner.models()
