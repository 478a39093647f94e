"""Scored translations, and a small judge trained on them."""

import json
from pathlib import Path

from support.paths import REPOSITORY
from support.recipes import train_rl, train_sft
from support.rows import write_jsonl

MINI = REPOSITORY / "recipes/grrm"


GROUP = {
    "src_text": "Good morning.",
    "src_lang": "en",
    "trg_lang": "de",
    "mt_texts": ["Guten Abend.", "Guten Morgen.", "Gut Morgen.", "Schönen Morgen."],
    "scores": [2, 9, 7, 7],
    "analysis": "Translation A: wrong time of day.\nTranslation B: no error.\nTranslation C: grammar.\nTranslation D: style.",
}


def groups(folder: Path, *changes: dict) -> Path:
    """A JSONL file of groups: GROUP with changes."""
    folder.mkdir(exist_ok=True)
    return write_jsonl(folder / "groups.jsonl", [GROUP | change for change in changes or ({},)])


def before_and_after_rl(folder: Path, sft_overrides: list[str], rl_overrides: list[str]) -> tuple[dict, dict]:
    """Validation metrics of a small model before and after RL, trained on the folder's rows with the miniature recipes."""
    from plaudit.prepare.tiny_model import make_tiny_model

    make_tiny_model([folder / "sft.parquet"], folder / "base", hidden_size=96, layers=2, vocabulary=1000)
    rows = [f"model.path={folder / 'base'}", f"data.train={folder / 'sft.parquet'}", f"run.dir={folder / 'sft'}"]
    model = train_sft(MINI / "mini_sft.yaml", *rows, *sft_overrides)
    rows = [f"model.path={model}", f"data.train={folder / 'rl.parquet'}", f"data.val={folder / 'val.parquet'}"]
    steps = ["run.max_steps=20", "run.validate_every=20", "validation={n: 4, temperature: 1.0}"]
    train_rl(MINI / "mini_rl.yaml", *rows, f"run.dir={folder / 'rl'}", *steps, *rl_overrides)
    before, *_, after = [json.loads(line) for line in (folder / "rl/metrics.jsonl").read_text().splitlines()]
    return before, after
