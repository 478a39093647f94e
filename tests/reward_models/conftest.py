"""Tiny reward models, and which of them are loaded when; a program that serves one."""

import shutil
from pathlib import Path

import pytest

from plaudit.models.weights import RESIDENT_MODELS, OffloadableWeights
from plaudit.reward_models import launch
from support.models import make_classifier, make_grader
from support.paths import TESTS


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """A copy of `launched_judge.py`, in a folder of its own. Restarts do not pause."""
    monkeypatch.setattr(launch, "PAUSE_S", 0.01)
    return Path(shutil.copy(TESTS / "support/launched_judge.py", tmp_path / "server.py"))


@pytest.fixture(scope="module")
def folders(tiny_models, tmp_path_factory) -> dict[str, Path]:
    """Two scalar models and two generative ones."""
    root = tmp_path_factory.mktemp("reward_models")
    return {
        "kind": make_classifier(tiny_models["llama"], root / "kind"),
        "short": make_classifier(tiny_models["qwen3"], root / "short"),
        "grader": make_grader(tiny_models["llama"], root / "grader", seed=0),
        "rider": make_grader(tiny_models["llama"], root / "rider", seed=1),
    }


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The models whose weights were loaded onto the device, in order."""
    loaded, load = [], OffloadableWeights.load
    assert RESIDENT_MODELS.models() == []
    RESIDENT_MODELS.max_offloaded = 0

    def load_and_record(self):
        if not self.on_device:
            loaded.append(Path(self._name).name)
        load(self)

    monkeypatch.setattr(OffloadableWeights, "load", load_and_record)
    return loaded
