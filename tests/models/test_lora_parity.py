"""LoRA trains as peft does: 20 steps of `plaudit sft`, computed by peft's modules and by merged weights, against a plain loop."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plaudit.data.order import RowOrder
from plaudit.models.lora import Adapters
from plaudit.types import Example
from support.merged import compute_by_peft
from support.peft_training import load_peft, padded, saved_adapters, train_with_peft
from support.recipes import exact_metrics, sft_recipe, train_sft, write_recipe
from support.rows import arithmetic_rows, write_jsonl
from support.training import load, rows_of

STEPS, ROWS, ROWS_PER_STEP, ALPHA = 20, 40, 4, 24.0
OPTIM = {"lr": 5e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}


def train_by_plaudit(folder: Path, model: Path, rows: Path, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and the adapters after them."""
    tree = sft_recipe(
        model,
        rows,
        folder / "run",
        model={"dtype": "float32", "lora": {"rank": rank, "alpha": ALPHA, "merge_on_save": False}},
        train={"rows_per_step": ROWS_PER_STEP},
        optim={**OPTIM, "schedule": "linear", "warmup_steps": 0},
        run={"max_steps": STEPS, "epochs": STEPS * ROWS_PER_STEP / ROWS},
    )
    saved = train_sft(write_recipe(folder / "lora.yaml", {"stage": "sft", **tree}))
    return [row["loss"] for row in exact_metrics(folder / "run")], load_file(saved / "adapter_model.safetensors")


def steps_and_adapters(model: Path, rank: int) -> tuple[list[list[Example]], dict[str, Tensor]]:
    """The rows of every step, and the adapters before the first."""
    policy = load(model, dtype="float32", lora={"rank": rank, "alpha": ALPHA})
    rows, adapters = rows_of(policy, ROWS), Adapters.of(policy.model)
    assert adapters is not None
    order = RowOrder(ROWS, per_step=ROWS_PER_STEP, epochs=STEPS * ROWS_PER_STEP / ROWS, seed=0)
    return [[rows[row] for row in order.rows(step)] for step in range(STEPS)], dict(adapters)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", arithmetic_rows(ROWS))


def assert_parity(ours: tuple[list[float], dict[str, Tensor]], losses: list[float], adapters: dict[str, Tensor]) -> None:
    """Losses differ by up to 1.5e-6. So do most adapters; where a gradient is next to nothing, Adam turns its rounding errors into
    a part of a step, up to 1e-4."""
    assert len(ours[0]) == len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.3, "it learns"
    assert ours[0] == pytest.approx(losses, abs=1e-5)
    assert ours[1].keys() == adapters.keys()
    for name, expected in adapters.items():
        assert (ours[1][name] - expected).norm() < 1e-3 * expected.norm(), name


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("kind", "rank", "path"),
    [
        ("llama", 8, "peft's modules"),
        ("qwen2", 16, "peft's modules"),
        ("qwen3", 8, "peft's modules"),
        ("llama", 16, "merged weights"),
        ("qwen2", 8, "merged weights"),
        ("qwen3", 16, "merged weights"),
    ],
)
def test_twenty_steps_are_those_of_peft(tmp_path, monkeypatch, tiny_models, rows, kind, rank, path):
    if path == "peft's modules":
        monkeypatch.setattr("plaudit.models.trainable.merge_adapters", compute_by_peft)
    ours = train_by_plaudit(tmp_path, tiny_models[kind], rows, rank)
    steps, adapters = steps_and_adapters(tiny_models[kind], rank)
    peft = load_peft(tiny_models[kind], adapters, rank=rank, alpha=ALPHA)
    losses = train_with_peft(peft, steps, **OPTIM)
    assert_parity(ours, losses, saved_adapters(peft))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 16])
def test_twenty_steps_are_those_of_transformers_trainer(tmp_path, tiny_model, rows, rank):
    from transformers import Trainer, TrainingArguments

    steps, adapters = steps_and_adapters(tiny_model, rank)
    peft, losses = load_peft(tiny_model, adapters, rank=rank, alpha=ALPHA), []

    class InOrder(Trainer):
        """One batch a step, as it is; losses are kept unrounded."""

        def get_train_dataloader(self):
            return torch.utils.data.DataLoader([padded(step) for step in steps], batch_size=None, shuffle=False)

        def training_step(self, *arguments, **settings):
            losses.append(super().training_step(*arguments, **settings).item())
            return torch.tensor(losses[-1])

    settings = TrainingArguments(
        str(tmp_path / "theirs"), max_steps=STEPS, learning_rate=OPTIM["lr"], weight_decay=OPTIM["weight_decay"],
        max_grad_norm=OPTIM["max_grad_norm"], lr_scheduler_type="linear", warmup_steps=0, optim="adamw_torch", use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    InOrder(peft, settings).train()
    assert_parity(train_by_plaudit(tmp_path, tiny_model, rows, rank), losses, saved_adapters(peft))
