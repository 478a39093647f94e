"""What tests share: rows, tiny models made from them, and where real data lies if it is there."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch starts: one thread each, since tests run side by side and threads that wait for a core burn it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pytest
from processes import Command

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


def with_other_tokens(model: Path, folder: Path) -> Path:
    """The same model, but for its tokenizer: as many tokens, with other numbers."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


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


def pair_rows(count: int = 40) -> list[dict]:
    """Sums with a plain answer that is preferred to one that guesses; some behind an earlier turn, some with a system prompt."""
    rows = []
    for i in range(count):
        a, b = i % 7, (i * 3) % 10
        prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
        if i % 3 == 0:
            prompt.insert(0, {"role": "system", "content": "Answer with a number."})
        if i % 5 == 0:
            prompt += [{"role": "assistant", "content": f"{a + b}"}, {"role": "user", "content": "And twice that?"}]
        rejected = f"I guess {a + b}" if i % 2 else f"I guess that it may be {a + b} or more"
        rows.append({"prompt": prompt, "chosen": f"the answer is {a + b}." if i % 4 else f"{a + b}.", "rejected": rejected})
    return rows


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pair_rows())


def pair_recipe(model_path: Path, pairs: Path, run_dir: Path, **sections: dict) -> dict:
    """A small recipe for `plaudit dpo` or `plaudit reward-model`; keyword arguments as in `sft_recipe`."""
    tree = {
        "model": {"path": str(model_path)},
        "data": {"train": str(pairs), "max_tokens": 256},
        "train": {"pairs_per_step": 6, "tokens_per_micro_batch": 256},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "run": {"dir": str(run_dir), "epochs": 10, "max_steps": 8, "device": "cpu"},
    }
    for section, settings in sections.items():
        tree[section] = {**tree.get(section, {}), **settings}
    return tree


def train_dpo(recipe_file: Path, *overrides: str) -> Path:
    """`plaudit dpo` in this process."""
    from plaudit.cli import load_checked
    from plaudit.loops.dpo import train

    return train(*load_checked(recipe_file, list(overrides), "dpo"))


def train_reward_model(recipe_file: Path, *overrides: str) -> Path:
    """`plaudit reward-model` in this process."""
    from plaudit.cli import load_checked
    from plaudit.loops.reward_model import train

    return train(*load_checked(recipe_file, list(overrides), "reward-model"))


def prompt_rows(count: int = 12) -> list[dict]:
    """Questions with one right answer, of different lengths."""
    sums = [(i % 7, (i * 3) % 10) for i in range(count)]
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?{'' if i % 3 else ' Answer with a number.'}"}],
            "data_source": "sums",
            "reward_model": {"ground_truth": str(a + b)},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(sums)
    ]


# 1 per token-like character that is written: it differs from sample to sample, and a random model can raise it.
DIGITS_AND_LETTERS = """
def compute_score(solution_str):
    written = sum(c.isascii() and c.isalnum() for c in solution_str)
    return {"score": written / max(1, len(solution_str)), "written": written}
"""


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", prompt_rows())


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    """A reward function that a random model can learn to please."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(DIGITS_AND_LETTERS)
    return path


def rl_recipe(model_path: Path, prompts: Path, run_dir: Path, reward: Path | dict, **sections: dict) -> dict:
    """A small RL recipe; `reward` is a function's file or a reward's settings. Keyword arguments as in `sft_recipe`."""
    function = reward if isinstance(reward, dict) else {"kind": "function", "path": str(reward), "workers": 1, "timeout_s": 60}
    tree = {
        "model": {"path": str(model_path)},
        "data": {"train": str(prompts), "max_prompt_tokens": 64},
        "rollout": {"n": 4, "max_new_tokens": 12, "stop": ["e", "."]},  # without which a random model hardly ever ends
        "rewards": [function],
        "train": {"prompts_per_step": 3, "tokens_per_micro_batch": 256},
        "optim": {"lr": 3e-3},
        "run": {"dir": str(run_dir), "epochs": 100, "max_steps": 2, "device": "cpu"},
    }
    for section, settings in sections.items():
        tree[section] = {**tree.get(section, {}), **settings}
    return tree


def train_rl(recipe_file: Path, *overrides: str) -> Path:
    """`plaudit rl` in this process."""
    from plaudit.cli import load_checked
    from plaudit.loops.rl import train

    return train(*load_checked(recipe_file, list(overrides), "rl"))


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


@pytest.fixture
def plaudit(monkeypatch, capsys):
    """The command in this process: exit code, stdout, stderr."""
    from plaudit.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plaudit", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_interrupts():
    """Also where the tests were started in the background, whose processes ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is slow has more time than the rest."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(autouse=True)
def no_command_outlives_its_test() -> Iterator[None]:
    yield
    Command.kill_all()


@pytest.fixture
def no_curves(monkeypatch):
    """A picture of twenty panels takes longer than the runs of most tests."""
    monkeypatch.setattr("plaudit.run.draw_curves", lambda *_: None)


@pytest.fixture(scope="module")
def relative_prompts(tmp_path_factory) -> Iterator[Path]:
    """By a relative path: it is part of a prompt's id, and so of what is drawn, which should be the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("prompts"))
        yield write_jsonl(Path("prompts.jsonl"), prompt_rows())


def gone(*pids: int | None, within_s: float = 20.0) -> bool:
    """Whether these processes end in time. One that nobody has waited for yet has ended, once its last thread has: until then its
    files and ports are open."""

    def runs(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + within_s
    while any(pid is not None and runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
