"""What tests share: rows, tiny models made from them, and where real data lies if it is there."""

import json
import os
from pathlib import Path

# Before torch starts: one thread each, since tests run side by side and threads that wait for a core burn it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

REPOSITORY = Path(__file__).parent.parent
KINDS = ("llama", "qwen2", "qwen3", "mistral")


def arithmetic_rows(count: int = 60) -> list[dict]:
    """Single- and multi-turn conversations of different lengths, with and without a system prompt."""
    rows = []
    for i in range(count):
        a, b = i % 7, (i * 3) % 10
        messages = [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a + b}" if i % 2 else f"{a} + {b} makes {a + b}, so the answer is {a + b}."},
        ]
        if i % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Answer with a number."})
        if i % 5 == 0:
            messages += [{"role": "user", "content": "And twice that?"}, {"role": "assistant", "content": f"{2 * (a + b)}"}]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", arithmetic_rows())


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory, rows_file) -> dict[str, Path]:
    """A folder per architecture."""
    from plaudit.prepare.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_tiny_model([rows_file], root / kind, kind=kind, hidden_size=64, layers=2, vocabulary=320)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_model(tiny_models) -> Path:
    return tiny_models["llama"]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets beside the checkout (or $PLAUDIT_DATA); tests that need it skip without it."""
    folder = Path(os.environ.get("PLAUDIT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (or set PLAUDIT_DATA)")
    return folder


def write_recipe(path: Path, tree: dict) -> Path:
    """A recipe file; JSON is YAML."""
    path.write_text(json.dumps(tree))
    return path


def sft_recipe(model_path: Path, rows: Path, run_dir: Path, **sections: dict) -> dict:
    """A small SFT recipe; keyword arguments add to or replace settings of a section."""
    tree = {
        "model": {"path": str(model_path)},
        "data": {"train": str(rows), "max_tokens": 256},
        "train": {"rows_per_step": 6, "tokens_per_micro_batch": 128},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "run": {"dir": str(run_dir), "max_steps": 8, "device": "cpu"},
    }
    for section, settings in sections.items():
        tree[section] = {**tree.get(section, {}), **settings}
    return tree


def train_sft(recipe_file: Path, *overrides: str) -> Path:
    """`plaudit sft` in this process."""
    from plaudit.cli import load_checked
    from plaudit.loops.sft import train

    return train(*load_checked(recipe_file, list(overrides), "sft"))


class Stopped(Exception):
    """How `stop_before` ends a run."""


def stop_before(monkeypatch, step: int) -> None:
    """The next process ends, as if killed, when it comes to this step."""
    from plaudit.train.trainer import Trainer

    update = Trainer.update

    def update_or_stop(self, *arguments):
        if self.updates == step - 1:
            monkeypatch.setattr(Trainer, "update", update)
            raise Stopped
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", update_or_stop)
