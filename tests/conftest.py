"""What tests share: rows, tiny models made from them, and where real data lies if it is there."""

import json
import os
from pathlib import Path

# Before torch starts: two threads are what small models can use, and results must not depend on the machine's core count.
os.environ.setdefault("OMP_NUM_THREADS", "2")
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
