"""Small recipes, and commands that run them in this process."""

import json
from pathlib import Path


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
    from plaudit.loops.train import train

    return train(*load_checked(recipe_file, list(overrides), "sft"))


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
    from plaudit.loops.train import train

    return train(*load_checked(recipe_file, list(overrides), "dpo"))


def train_reward_model(recipe_file: Path, *overrides: str) -> Path:
    """`plaudit reward-model` in this process."""
    from plaudit.cli import load_checked
    from plaudit.loops.train import train

    return train(*load_checked(recipe_file, list(overrides), "reward-model"))


def rl_recipe(model_path: Path, prompts: Path, run_dir: Path, reward: Path | dict, **sections: dict) -> dict:
    """A small RL recipe; `reward` is a function's file or a reward's settings. Keyword arguments as in `sft_recipe`."""
    function = (
        reward if isinstance(reward, dict) else {"kind": "function", "path": str(reward), "workers": 1, "limits": {"timeout_s": 60}}
    )
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
    from plaudit.loops.train import train

    return train(*load_checked(recipe_file, list(overrides), "rl"))


class Stopped(Exception):
    """Raised by `stop_before` to end a run."""


def stop_before(monkeypatch, step: int) -> None:
    """The next run ends, as if killed, when it reaches this step."""
    from plaudit.train.trainer import Trainer

    update = Trainer.update

    def update_or_stop(self, *arguments):
        if self.updates == step - 1:
            monkeypatch.setattr(Trainer, "update", update)
            raise Stopped
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", update_or_stop)


def exact_metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
