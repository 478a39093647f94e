"""Groups are made of valid samples only: whatever else an engine returns stops the run and names the sample."""

from dataclasses import replace

import numpy as np
import pytest

from plaudit.data.prompts import EncodedPrompt
from plaudit.errors import PlauditError, RecipeError, StopRequested, TrainingStopped
from plaudit.rollout.build import engine_class
from plaudit.rollout.engine import Engine, Sampling
from plaudit.rollout.groups import sample_groups
from plaudit.types import Prompt, Sample

VALID = Sample("a", 0, np.array([5, 2]), "x", "finished", np.array([-1.0, -2.0]), None, version=3)


class Scripted(Engine):
    """Returns the given samples; an exception among them is raised."""

    def __init__(self, *samples: Sample | Exception):
        self.samples, self.version = samples, 3

    def generate(self, requests, sampling):
        for sample in self.samples:
            if isinstance(sample, Exception):
                raise sample
            yield sample

    def sync(self, version, weights):
        self.version = version


def groups(*samples: Sample | Exception, prompts: str = "a", n: int = 2):
    encoded = [EncodedPrompt(Prompt(name, [{"role": "user", "content": name}]), np.array([1])) for name in prompts]
    return list(sample_groups(Scripted(*samples), encoded, n, Sampling(max_new_tokens=4), version=3))


def test_groups_come_as_they_finish_with_samples_by_index():
    order = [("b", 1), ("a", 1), ("b", 0), ("a", 0)]
    found = groups(*(replace(VALID, prompt_id=name, index=index) for name, index in order), prompts="ab")
    assert [(group.prompt.id, [sample.index for sample in group.samples]) for group in found] == [("b", [0, 1]), ("a", [0, 1])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_id": "z"}, "prompt z, sample 1: no sample of this prompt was requested"),
        ({"index": 0}, "prompt a, sample 0: indices are 0 to 1, each once"),
        ({"index": 2}, "prompt a, sample 2: indices are 0 to 1, each once"),
        ({"tokens": np.array([], dtype=int)}, "prompt a, sample 1 has no tokens"),
        ({"sampler_logprobs": np.array([-1.0])}, "prompt a, sample 1: sampler_logprobs has one entry per token: 2, not 1"),
        ({"sampler_logprobs": None}, "sampler_logprobs has one entry per token: 2, not none"),
        ({"untempered_logprobs": np.zeros(3)}, "untempered_logprobs has one entry per token: 2, not 3; or is None"),
        ({"status": "stop"}, "status is one of finished, truncated, not 'stop'"),
        ({"version": 2}, "version is 2, and the weights of the last sync are version 3"),
    ],
    ids=str,
)
def test_an_invalid_sample_stops_the_run(change, message):
    with pytest.raises(TrainingStopped, match=r"rollout\.engine Scripted: ") as stopped:
        groups(VALID, replace(VALID, **{"index": 1} | change))
    assert message in str(stopped.value)


def test_missing_and_surplus_samples_stop_the_run():
    with pytest.raises(TrainingStopped, match="prompt a: 1 of 2 samples returned"):
        groups(VALID)
    with pytest.raises(TrainingStopped, match="prompt b: 0 of 2 samples returned"):
        groups(VALID, replace(VALID, index=1), prompts="ab")
    with pytest.raises(TrainingStopped, match=r"prompt a, sample 2: .*all 2 were returned before"):
        groups(VALID, replace(VALID, index=1), replace(VALID, index=2))


def test_an_exception_in_a_users_engine_stops_the_run():
    with pytest.raises(TrainingStopped, match=r"Scripted: OSError: connection lost \(.*test_groups\.py:\d+\)\. Fix it"):
        groups(VALID, OSError("connection lost"))
    with pytest.raises(TrainingStopped, match="Scripted: prompt a is too long"):
        groups(PlauditError("prompt a is too long"))


def test_a_requested_stop_passes_through_a_users_engine():
    """Even one that handles every exception."""

    class Careless(Scripted):
        def generate(self, requests, sampling):
            while True:
                try:
                    self.on_step(1)
                except Exception:
                    continue

    def stop(new_tokens: int) -> None:
        raise StopRequested

    engine = Careless()
    engine.on_step = stop
    prompt = EncodedPrompt(Prompt("a", [{"role": "user", "content": "a"}]), np.array([1]))
    with pytest.raises(StopRequested):
        list(sample_groups(engine, [prompt], 1, Sampling(max_new_tokens=4), version=3))


def test_something_else_than_samples_stops_the_run(monkeypatch):
    with pytest.raises(TrainingStopped, match="generate yielded 'text', not a Sample"):
        groups("text")  # pyright: ignore
    monkeypatch.setattr(Scripted, "generate", lambda *_: None)
    with pytest.raises(TrainingStopped, match="generate returned None, not an iterator of samples"):
        groups()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Mine: pass", r"mine.py:Mine is not a subclass of plaudit\.rollout\.engine\.Engine"),
        ("class Mine(Engine):\n    def generate(self, requests, sampling): ...", "mine.py:Mine does not implement sync"),
        (
            "class Mine(Engine):\n    def __init__(self): ...\n    def generate(self, r, s): ...\n    def sync(self, v, w): ...",
            r"mine.py:Mine is built with one argument, Mine\(setup\)",
        ),
        ("class Mime: pass", r"mine.py has no Mine\. Did you mean Mime\?"),
        ("1 / 0", r"mine\.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_classes_that_cannot_be_used_are_reported(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(f"from plaudit.rollout.engine import Engine\n{code}\n")
    with pytest.raises(RecipeError, match=f"^rollout.engine: .*{message}"):
        engine_class(f"{tmp_path / 'mine.py'}:Mine")
