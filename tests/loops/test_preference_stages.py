"""`plaudit dpo` and `plaudit reward-model`: training, saved models, resuming, and their use in the next stage."""

import json
import math
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from plaudit.config import load
from plaudit.data.conversations import Source
from plaudit.data.pairs import read_pairs
from plaudit.errors import RecipeError, RunError
from plaudit.models.scalar import load_scalar, transcript_of
from plaudit.preference import reference
from plaudit.preference.reference import with_reference
from plaudit.recipe.reward_models import RewardModel
from plaudit.scoring import Scorer
from plaudit.types import Example, Group, Pair, Prompt, Sample, Score, ScoredGroup
from support.models import with_other_tokens
from support.processes import signalled
from support.recipes import (
    Stopped,
    exact_metrics,
    pair_recipe,
    rl_recipe,
    sft_recipe,
    stop_before,
    train_dpo,
    train_reward_model,
    train_sft,
    write_recipe,
)
from support.rows import arithmetic_rows, pair_rows, prompt_rows, write_jsonl

TRAIN = {"dpo": train_dpo, "reward-model": train_reward_model}
LOW_MEMORY = {"dtype": "bfloat16", "lora": {"rank": 4, "dropout": 0.1}, "gradient_checkpointing": True}


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_stage(folder: Path, stage: str, start: Path, pairs: Path, name: str = "run", /, **sections) -> Path:
    recipe = pair_recipe(start, pairs, folder / name, **sections)
    return TRAIN[stage](write_recipe(folder / f"{name}.yaml", {"stage": stage, **recipe}))


def conversations(pairs_file: Path) -> list[list[dict]]:
    return [side.messages for _, pair in read_pairs(Source(pairs_file)) for side in (pair.chosen, pair.rejected)]


def plaudit_scores(folder: Path, pairs_file: Path) -> torch.Tensor:
    settings = RewardModel(path=str(folder), dtype="float32", device="cpu")
    transcript = transcript_of(settings)
    model = load_scalar(settings, torch.device("cpu"))
    return torch.from_numpy(model.score([transcript.tokens(messages) for messages in conversations(pairs_file)])).double()


def transformers_scores(folder: Path, pairs_file: Path, side: str = "right") -> torch.Tensor:
    """With plain transformers: a padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations(pairs_file)]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    if side == "left":  # transformers counts positions from the padding by default
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(**{name: batch[name] for name in batch if name != "token_type_ids"}).logits[:, 0].double()


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("loss", [{}, {"label_smoothing": 0.1, "nll_coefficient": 0.1}, {"kind": "ipo"}, {"kind": "hinge"}])
def test_dpo_learns(tmp_path, tiny_model, pairs_file, loss):
    model = run_stage(tmp_path, "dpo", tiny_model, pairs_file, data={"val": str(pairs_file)}, loss=loss, run={"validate_every": 4})
    rows = metrics_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert [row["step"] for row in rows] == list(range(9))
    if loss == {}:
        assert first["val/loss"] == pytest.approx(math.log(2), abs=1e-6), "the policy still equals its reference"
    assert first["val/margin"] == pytest.approx(0.0, abs=1e-4)
    assert last["val/loss"] < first["val/loss"]
    assert last["val/accuracy"] == 1.0
    assert last["val/margin"] > 0.1
    assert last["val/reward_chosen"] > last["val/reward_rejected"]
    names = {"loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected", "nll"}
    assert names <= last.keys()
    assert {f"val/{name}" for name in names} <= last.keys()
    assert AutoModelForCausalLM.from_pretrained(model)
    assert (tmp_path / "run/best").exists()


def test_a_reward_model_learns(tmp_path, tiny_model, pairs_file):
    run_stage(
        tmp_path, "reward-model", tiny_model, pairs_file,
        data={"val": str(pairs_file)}, loss={"centring_coefficient": 0.01}, run={"validate_every": 4, "max_steps": 12},
    )  # fmt: skip
    rows = metrics_of(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert last["val/loss"] < 0.2 < 0.5 < first["val/loss"]
    assert last["val/accuracy"] == 1.0
    assert last["val/margin"] == pytest.approx(last["val/reward_chosen"] - last["val/reward_rejected"])
    assert 0 <= last["val/calibration_error"] < 0.5
    assert {"loss", "accuracy", "margin", "reward_chosen", "reward_rejected"} <= last.keys()


@pytest.mark.parametrize("stage", TRAIN)
@pytest.mark.grid(1)
def test_validation_shows_its_progress(tmp_path, tiny_model, pairs_file, stage, capsys, monkeypatch):
    monkeypatch.setattr("plaudit.report.activity.FIRST_LINE_AFTER_S", 0.0)
    run_stage(tmp_path, stage, tiny_model, pairs_file, data={"val": str(pairs_file)}, run={"max_steps": 1, "validate_first": False})
    shown = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("validation: ")]
    total = len(pairs_file.read_text().splitlines())
    assert (shown[0], shown[-1]) == (f"validation: 0/{total} rows", f"validation: {total}/{total} rows")


def test_margins_widen_the_score_gap(tmp_path, tiny_model):
    """The same pairs without a margin and with one of 3, where the loss starts higher and the scores end further apart."""
    files = {by: write_jsonl(tmp_path / f"{by}.jsonl", [{**row, "by": by} for row in pair_rows()]) for by in (0.0, 3.0)}
    last = {}
    for by, file in files.items():
        run_stage(tmp_path, "reward-model", tiny_model, file, f"run{by}", data={"margin_column": "by"}, run={"max_steps": 12})
        last[by] = metrics_of(tmp_path / f"run{by}")
    assert last[3.0][0]["loss"] > last[0.0][0]["loss"] + 2
    assert last[3.0][0]["margin"] == last[0.0][0]["margin"], "the target margin does not change the reported one"
    assert last[3.0][-1]["margin"] > last[0.0][-1]["margin"]


# Saved models --------------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("kind", "lora"), [("llama", None), ("qwen2", None), ("qwen3", None), ("mistral", None), ("qwen2", {"rank": 4})]
)
def test_a_reward_model_scores_the_same_everywhere(tmp_path, tiny_models, pairs_file, kind, lora):
    folder = run_stage(tmp_path, "reward-model", tiny_models[kind], pairs_file, model={"dtype": "float32", "lora": lora})
    ours = plaudit_scores(folder, pairs_file)
    assert ours.std() > 0.1
    for side in ("right", "left"):
        torch.testing.assert_close(transformers_scores(folder, pairs_file, side), ours, rtol=0, atol=1e-5)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert config["pad_token_id"] is not None
    assert list(load_file(folder / "model.safetensors")["score.weight"].shape) == [1, 64]
    rewards = write_recipe(tmp_path / "rewards.yaml", {"rewards": [{"kind": "scalar_model", "model": {"path": str(folder)}}]})
    [row, *_] = pair_rows()
    with Scorer(rewards) as scorer:
        [scored] = scorer.score([{"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"]]}])
    assert scored["reward"] == pytest.approx(ours[:2].tolist(), abs=1e-5)


def test_a_reward_model_does_not_pad_with_its_end_token(tmp_path, tiny_model, pairs_file):
    """transformers takes the score from the last non-padding token. That must be the end token, so another one has to pad."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    (tmp_path / "ends.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    settings = {"chat_template": str(tmp_path / "ends.jinja"), "dtype": "float32"}
    trained = run_stage(tmp_path, "reward-model", folder, pairs_file, model=settings)
    saved = AutoTokenizer.from_pretrained(trained)
    assert saved.pad_token == "<|endoftext|>" != saved.eos_token
    assert json.loads((trained / "config.json").read_text())["pad_token_id"] == saved.pad_token_id
    torch.testing.assert_close(transformers_scores(trained, pairs_file), plaudit_scores(trained, pairs_file), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_reward_model_can_start_from_a_reward_model(tmp_path, tiny_model, pairs_file):
    first = run_stage(tmp_path, "reward-model", tiny_model, pairs_file, "first", model={"dtype": "float32"})
    run_stage(tmp_path, "reward-model", first, pairs_file, "second", data={"val": str(pairs_file)})
    chosen, rejected = plaudit_scores(first, pairs_file).view(-1, 2).unbind(1)
    first_row = metrics_of(tmp_path / "second")[0]
    assert first_row["val/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)


def test_a_reward_model_can_start_from_a_value_head(tmp_path, tiny_model, pairs_file):
    """LLaMA-Factory's format: a causal model with the head in its own file. The bias is the same for both answers, and dropped."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weight = torch.linspace(-1, 1, 64)[None]
    save_file({"v_head.summary.weight": weight, "v_head.summary.bias": torch.ones(1)}, folder / "value_head.safetensors")
    chosen, rejected = plaudit_scores(folder, pairs_file).view(-1, 2).unbind(1)
    run_stage(tmp_path, "reward-model", folder, pairs_file, data={"val": str(pairs_file)}, run={"max_steps": 1})
    first_row = metrics_of(tmp_path / "run")[0]
    assert first_row["val/margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert first_row["val/reward_chosen"] == pytest.approx(chosen.mean().item() - 1, abs=1e-5)


def test_lora_on_the_score_head_is_refused(tmp_path, tiny_model, pairs_file):
    with pytest.raises(RecipeError, match="score is trained in full"):
        run_stage(tmp_path, "reward-model", tiny_model, pairs_file, model={"lora": {"targets": ["q_proj", "score"]}})


def test_classifiers_with_several_labels_are_refused(tmp_path, tiny_model, pairs_file):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    model.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "classifier")
    with pytest.raises(RecipeError, match="has 3 labels, and a reward model has one"):
        run_stage(tmp_path, "reward-model", tmp_path / "classifier", pairs_file)


@pytest.mark.slow
def test_an_adapter_saved_alone_includes_the_head(tmp_path, tiny_model, pairs_file):
    from peft import PeftModel

    lora = {"rank": 4, "merge_on_save": False}
    adapter = run_stage(tmp_path, "reward-model", tiny_model, pairs_file, "a", model={"dtype": "float32", "lora": lora})
    merged = run_stage(tmp_path, "reward-model", tiny_model, pairs_file, "m", model={"dtype": "float32", "lora": {"rank": 4}})
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = AutoTokenizer.from_pretrained(adapter).pad_token_id
    combined = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    combined.save_pretrained(tmp_path / "combined")
    AutoTokenizer.from_pretrained(adapter).save_pretrained(tmp_path / "combined")
    ours = plaudit_scores(merged, pairs_file)
    torch.testing.assert_close(transformers_scores(tmp_path / "combined", pairs_file), ours, rtol=0, atol=1e-5)


# The reference -------------------------------------------------------------------------------------------------------


def test_the_reference_is_computed_once_and_cached(tmp_path, tiny_model, pairs_file, monkeypatch, capsys):
    sections = {"data": {"val": str(pairs_file)}, "run": {"save_every": 2}}
    stop_before(monkeypatch, 4)
    with pytest.raises(Stopped):
        run_stage(tmp_path, "dpo", tiny_model, pairs_file, **sections)
    assert "reference: log-probs of 80 pairs under the untrained model" in capsys.readouterr().err
    file = tmp_path / "run/reference.safetensors"
    before, written = file.read_bytes(), file.stat().st_mtime_ns
    run_stage(tmp_path, "dpo", tiny_model, pairs_file, **sections)
    assert "reference:" not in capsys.readouterr().err
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (before, written)
    with safe_open(file, "pt") as tensors:
        assert tensors.get_tensor("chosen").shape == (80,)
        assert tensors.get_tensor("chosen").dtype == torch.float64


def test_only_the_leading_process_hashes_the_pairs(tmp_path, tiny_model, pairs_file, monkeypatch):
    """The others are given what it found."""
    recipe = load(write_recipe(tmp_path / "r.yaml", pair_recipe(tiny_model, pairs_file, tmp_path / "run")), (), "dpo").recipe
    sides = [Example(np.array([1, 2]), np.array([False, True])) for _ in range(2)]
    found = {"chosen": torch.tensor([-1.0]), "rejected": torch.tensor([-2.0])}
    monkeypatch.setattr(reference, "_key", None)
    other = SimpleNamespace(leads=False, agree=lambda value, what: found)
    [pair] = with_reference([Pair(*sides)], recipe, None, tmp_path, other)
    assert (pair.ref_chosen, pair.ref_rejected) == (-1.0, -2.0)


def test_a_stale_or_damaged_reference_is_recomputed(tmp_path, tiny_model, pairs_file, capsys):
    run_stage(tmp_path, "dpo", tiny_model, pairs_file, "good")
    good = (tmp_path / "good/reference.safetensors").read_bytes()
    run_stage(tmp_path, "dpo", tiny_model, write_jsonl(tmp_path / "other.jsonl", pair_rows(20)), "other")
    for content in ((tmp_path / "other/reference.safetensors").read_bytes(), good[: len(good) // 2], b""):
        (tmp_path / "good/reference.safetensors").write_bytes(content)
        capsys.readouterr()
        run_stage(tmp_path, "dpo", tiny_model, pairs_file, "good")
        assert "reference: log-probs of 40 pairs" in capsys.readouterr().err
        assert (tmp_path / "good/reference.safetensors").read_bytes() == good


def test_with_lora_the_base_model_is_the_reference(tmp_path, tiny_model, pairs_file):
    run_stage(tmp_path, "dpo", tiny_model, pairs_file, "full", model={"dtype": "float32"}, run={"max_steps": 1})
    run_stage(
        tmp_path, "dpo", tiny_model, pairs_file, "lora", model={"dtype": "float32", "lora": {"rank": 4}}, run={"max_steps": 1}
    )
    full, lora = (load_file(tmp_path / name / "reference.safetensors") for name in ("full", "lora"))
    torch.testing.assert_close(full["chosen"], lora["chosen"])
    assert metrics_of(tmp_path / "lora")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_base_that_is_quantised_later_gets_its_own_reference(tmp_path, tiny_model, pairs_file, monkeypatch, capsys):
    """A run dies before its first checkpoint, and is repeated in the same folder with base_bits."""
    lora, quantised = ({"model": {"dtype": "float32", "lora": {"rank": 4, **bits}}} for bits in ({}, {"base_bits": 4}))
    sections = {"run": {"max_steps": 1}}
    stop_before(monkeypatch, 1)
    with pytest.raises(Stopped):
        run_stage(tmp_path, "dpo", tiny_model, pairs_file, **lora, **sections)
    file = tmp_path / "run/reference.safetensors"
    unquantised = load_file(file)["chosen"]
    capsys.readouterr()
    run_stage(tmp_path, "dpo", tiny_model, pairs_file, **quantised, **sections)
    assert "reference: log-probs of 40 pairs" in capsys.readouterr().err
    found = load_file(file)["chosen"]
    assert (found - unquantised).abs().max() > 1e-3
    assert metrics_of(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6), "the policy still is its reference"
    recipe = pair_recipe(tiny_model, pairs_file, tmp_path / "run", **lora, reference={"path": str(tiny_model)})
    file = write_recipe(tmp_path / "other.yaml", recipe)
    keys = [reference._key([], load(file, more, "dpo").recipe) for more in ((), ("model.lora.base_bits=4",))]
    assert keys[0] == keys[1], "another model as the reference is not quantised"


@pytest.mark.slow
def test_another_model_as_reference(tmp_path, tiny_model, pairs_file):
    """A trained policy measured against the model it started from: its first margin is what its training gained."""
    trained = run_stage(tmp_path, "dpo", tiny_model, pairs_file, "first", data={"val": str(pairs_file)})
    gained = metrics_of(tmp_path / "first")[-1]["val/margin"]
    sections = {"data": {"val": str(pairs_file)}, "reference": {"path": str(tiny_model)}}
    run_stage(tmp_path, "dpo", trained, pairs_file, "second", **sections)
    assert metrics_of(tmp_path / "second")[0]["val/margin"] == pytest.approx(gained, abs=1e-4)
    with pytest.raises(RunError, match=r"reference\.path"):
        run_stage(tmp_path, "dpo", trained, pairs_file, "second", data={"val": str(pairs_file)})


def test_a_reference_with_another_tokenizer_is_refused(tmp_path, plaudit, tiny_model, pairs_file):
    """Same size, same shapes, other tokens: nothing else would reveal it."""
    other = with_other_tokens(tiny_model, tmp_path / "other")
    recipe = pair_recipe(tiny_model, pairs_file, tmp_path / "run", reference={"path": str(other)})
    file = write_recipe(tmp_path / "r.yaml", recipe)
    message = f"{other}: its tokenizer differs from the policy's"
    with pytest.raises(RecipeError, match=re.escape(message)):
        train_dpo(file)
    assert not (tmp_path / "run").exists()
    code, out, _ = plaudit("doctor", file)
    assert (code, message in " ".join(out.split())) == (1, True), out


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "model"),
    [("dpo", LOW_MEMORY), ("dpo", {}), ("reward-model", LOW_MEMORY)],
    ids=["dpo lora", "dpo", "rm lora"],
)
def test_kill_9_and_resume_gives_the_same_result(tmp_path, tiny_model, pairs_file, stage, model):
    """Killed once in the first step and once in the middle."""
    steps = 12

    def recipe(name: str) -> Path:
        sections = {"model": model, "data": {"val": str(pairs_file)}}
        run = {"max_steps": steps, "save_every": 5, "validate_every": 7, "keep_last": 2}
        return write_recipe(tmp_path / f"{name}.yaml", pair_recipe(tiny_model, pairs_file, tmp_path / name, run=run, **sections))

    TRAIN[stage](recipe("reference"))
    killed, run = recipe("killed"), tmp_path / "killed"
    early = "reference.safetensors" if stage == "dpo" else "run.json"
    for moment in ("before line 1", "before line 9"):
        signalled(signal.SIGKILL, moment, stage, killed)
        assert (run / early).exists()
    TRAIN[stage](killed)
    last = f"checkpoints/step_{steps:06d}"
    for file in ("model/model.safetensors", f"{last}/trainer/00000.safetensors", f"{last}/state.json"):
        assert (run / file).read_bytes() == (tmp_path / "reference" / file).read_bytes(), file
    assert exact_metrics(run) == exact_metrics(tmp_path / "reference")


# The commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", TRAIN)
def test_doctor_on_pairs(tmp_path, plaudit, tiny_model, pairs_file, stage):
    tree = {"stage": stage, **pair_recipe(tiny_model, pairs_file, tmp_path / "run", data={"val": str(pairs_file)})}
    recipe = write_recipe(tmp_path / "r.yaml", tree)
    code, out, err = plaudit("doctor", recipe)
    assert code == 0, out + err
    assert f"for plaudit {stage}" in " ".join(out.split())
    assert "train: 40 pairs rendered" in out
    assert "the chosen answer is the longer one in" in out
    assert "steps of 6 pairs" in out
    assert "The first pair's chosen conversation as the" in out
    assert ("gets a new score head" in out) == (stage == "reward-model")
    assert ("prompts have the same tokens in training and sampling" in out) == (stage == "dpo")
    equal = write_jsonl(tmp_path / "equal.jsonl", [{"prompt": "?", "chosen": "3", "rejected": "3", "margin": 1}, *pair_rows(4)])
    code, out, _ = plaudit("doctor", recipe, f"data.train={equal}")
    assert code == 1
    assert "1 pairs have identical chosen and rejected answers: an error" in out
    assert ("the column `margin` is not used" in out) == (stage == "reward-model")


def test_doctor_warns_that_length_predicts_preference(tmp_path, plaudit, tiny_model):
    rows = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "?", "chosen": "3 " * (i + 5), "rejected": "3"} for i in range(10)])
    out = plaudit("doctor", write_recipe(tmp_path / "r.yaml", {"stage": "dpo", **pair_recipe(tiny_model, rows, tmp_path / "run")}))[
        1
    ]
    assert "the longer one in 100% of the pairs: the model may learn length instead of quality" in out


@pytest.mark.parametrize(
    ("stage", "setting", "message"),
    [
        ("dpo", "loss.bta=0.1", "loss.bta is not a setting. Did you mean loss.beta?"),
        ("dpo", "beta=0.1", "beta is not a setting. "),
        ("dpo", "train.train_batch_size=3", "Did you mean train.pairs_per_step?"),
        (
            "dpo",
            "loss={kind: ipo, label_smoothing: 0.1}",
            "label_smoothing has no effect: it applies to kind sigmoid, not ipo. Remove it",
        ),
        ("dpo", "loss.beta=0", "loss.beta should be greater than 0"),
        ("dpo", "loss.label_smoothing=0.5", "loss.label_smoothing should be less than 0.5"),
        ("dpo", "loss.kind=sigmod", "Did you mean sigmoid?"),
        ("dpo", "reference.path=./nowhere", "reference.path: ./nowhere does not exist."),
        ("dpo", "data.margin_column=by", "data.margin_column is not a setting of dpo recipes, only of reward-model recipes"),
        ("reward-model", "loss.center_rewards_coefficient=1", "Did you mean loss.centring_coefficient?"),
        ("reward-model", "data.train=nowhere.jsonl", "data.train: nowhere.jsonl does not exist."),
        ("reward-model", "data.margin_column=by", "column 'by' is missing"),
    ],
)
def test_a_wrong_recipe_gives_a_one_line_error(tmp_path, plaudit, tiny_model, pairs_file, stage, setting, message):
    recipe = write_recipe(tmp_path / "r.yaml", pair_recipe(tiny_model, pairs_file, tmp_path / "run"))
    code, _, err = plaudit(stage, recipe, setting)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_recipes_are_checked_against_the_command(tmp_path, plaudit, tiny_model, pairs_file):
    recipe = write_recipe(tmp_path / "r.yaml", {"stage": "reward-model", **pair_recipe(tiny_model, pairs_file, tmp_path / "run")})
    assert "is a recipe for `plaudit reward-model`, not `plaudit dpo`" in plaudit("dpo", recipe)[2]
    code, out, err = plaudit("reward-model", recipe, "run.max_steps=1")
    assert (code, f"reward model: {tmp_path / 'run/model'}" in out) == (0, True), err
    assert "LOAD REPORT" not in err


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_reward_model_is_refused_where_a_causal_model_is_needed(
    tmp_path, plaudit, tiny_models, rows_file, pairs_file, prompts_file, reward_file, kind
):
    """With qwen2's tied embeddings it would even load."""
    config = AutoConfig.from_pretrained(tiny_models[kind], num_labels=1)
    judge = tmp_path / "judge"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    AutoTokenizer.from_pretrained(tiny_models[kind]).save_pretrained(judge)
    recipes = {
        "sft": sft_recipe(judge, rows_file, tmp_path / "run"),
        "dpo": pair_recipe(judge, pairs_file, tmp_path / "run"),
        "rl": rl_recipe(judge, prompts_file, tmp_path / "run", reward_file),
    }
    for stage, recipe in recipes.items():
        code, _, err = plaudit(stage, write_recipe(tmp_path / "r.yaml", recipe))
        output = " ".join(err.split())
        assert code == 2
        assert f"model.path: {judge} is a reward model ({type_of(judge)}), which gives scores, but" in output
        assert f"`plaudit {stage}` trains a model that generates text" in output
        assert f"{{kind: scalar_model, model: {{path: {judge}}}}}" in output
    reference = pair_recipe(tiny_models[kind], pairs_file, tmp_path / "run", reference={"path": str(judge)})
    assert "reference.path: " in plaudit("dpo", write_recipe(tmp_path / "r.yaml", reference))[2]
    assert "MODEL: " in plaudit("sample", judge, prompts_file, "--out", tmp_path / "out.jsonl")[2]
    assert not (tmp_path / "run").exists()


def type_of(model: Path) -> str:
    [architecture] = json.loads((model / "config.json").read_text())["architectures"]
    return architecture


# Stages in sequence --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sft_then_a_reward_model_then_its_scores_then_dpo(tmp_path, tiny_model, pairs_file):
    """Each stage starts from the last one's output: the policy answers, the reward model ranks its answers, DPO trains on them."""
    from plaudit.loops.sample import SampleJob, sample
    from plaudit.prepare.pairs import make_pairs
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.engine import Sampling

    # SFT on both kinds of answers, so that the policy has something to choose between.
    both = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row[side]}]}
        for row in pair_rows()
        for side in ("chosen", "rejected")
    ]
    recipe = sft_recipe(
        tiny_model, write_jsonl(tmp_path / "sft.jsonl", [*both, *arithmetic_rows(10)]), tmp_path / "sft",
        train={"rows_per_step": 16, "tokens_per_micro_batch": 2048}, optim={"lr": 5e-3}, run={"max_steps": 60, "epochs": 50},
    )  # fmt: skip
    policy = train_sft(write_recipe(tmp_path / "sft.yaml", recipe))
    judge = run_stage(tmp_path, "reward-model", policy, pairs_file, "judge", run={"max_steps": 20})

    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(8))
    answers = tmp_path / "answers.jsonl"
    sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=1)
    sample(SampleJob(ModelSettings(path=str(policy)), [Source(prompts)], answers, 8, sampling, 256, "filter", None, None, "cpu"))
    rewards = write_recipe(tmp_path / "rewards.yaml", {"rewards": [{"kind": "scalar_model", "model": {"path": str(judge)}}]})
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    with Scorer(rewards) as scorer:
        scored = [row | {"reward": result["reward"]} for row, result in zip(rows, scorer.score(rows), strict=True)]
    made = make_pairs([write_jsonl(tmp_path / "scored.jsonl", scored)], tmp_path / "pairs", val_share=0.0)
    assert made.pairs >= 6
    train_file = tmp_path / "pairs/train.jsonl"
    for line in map(json.loads, train_file.read_text().splitlines()):
        assert line["margin"] > 0

    run_stage(tmp_path, "dpo", policy, train_file, "dpo", data={"val": str(train_file)}, run={"max_steps": 20})
    rows = metrics_of(tmp_path / "dpo")
    assert rows[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["val/accuracy"] == 1.0


# Pairs from scores ---------------------------------------------------------------------------------------------------


def scored_row(responses: list[str], rewards: list[float | None], **columns) -> dict:
    return {"prompt": [{"role": "user", "content": "?"}], "responses": responses, "reward": rewards, **columns}


def test_a_repeated_prompt_stays_in_one_split(tmp_path):
    from plaudit.prepare.pairs import make_pairs

    rows = [
        {**scored_row([f"good {i}", "bad"], [2.0, 1.0]), "prompt": [{"role": "user", "content": f"{i % 10}?"}]} for i in range(60)
    ]
    made = make_pairs([write_jsonl(tmp_path / "scored.jsonl", rows)], tmp_path, val_share=0.2)
    sides = [[json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "val")]
    assert (made.pairs, made.validation) == (60, 12) == (sum(map(len, sides)), len(sides[1]))
    train, val = ({pair["prompt"][0]["content"] for pair in side} for side in sides)
    assert not train & val


def test_pairs_are_the_best_and_the_worst(tmp_path, plaudit):
    rows = [
        scored_row(["a", "b", "c"], [1.0, 3.0, 2.0]),
        scored_row(["cut", "best", "", "unscored", "long", "worst"], [-9.0, 5.0, -9.0, None, -9.0, 1.0],
                   status=["truncated", *["finished"] * 5], tokens=[3, 3, 3, 3, 99, 3]),
        scored_row(["a", "b"], [1.0, 1.0]),
        scored_row(["a", "a"], [1.0, 2.0]),
        scored_row(["only"], [1.0]),
        scored_row(["a", "b"], [1.0, 1.5], tools=[{"type": "function"}]),
    ]  # fmt: skip
    file = write_jsonl(tmp_path / "scored.jsonl", rows)
    code, out, err = plaudit("prepare", "pairs", file, "--out", tmp_path / "pairs", "--max-response-tokens", 50, "--val-share", 0)
    assert code == 0, err
    assert "3 pairs to train on, 0 to validate on, of 6 prompts; 1 had too few responses; 2 had no clearly better response" in out
    made = [json.loads(line) for line in (tmp_path / "pairs/train.jsonl").read_text().splitlines()]
    assert sorted((row["chosen"], row["rejected"], row["margin"]) for row in made) == [
        ("b", "a", 0.5), ("b", "a", 2.0), ("best", "worst", 4.0),
    ]  # fmt: skip
    assert [row["tools"] for row in made if "tools" in row] == [[{"type": "function"}]]
    assert len(list(read_pairs(Source(tmp_path / "pairs/train.jsonl"), "margin"))) == 3


def test_pairs_from_samples_keep_their_tools(tmp_path, plaudit):
    from plaudit.report.samples import write_samples

    tools = [{"type": "function", "function": {"name": "add"}}]
    prompt = Prompt("sums:0", [{"role": "user", "content": "1 + 1?"}], tools=tools)
    texts = ("2", "3")
    samples = [Sample("sums:0", i, np.ones(1, np.int32), text, "finished", *[-np.ones(1)] * 2, 0) for i, text in enumerate(texts)]
    scores = (Score(1.0), Score(0.0))
    write_samples(tmp_path / "train_000001.parquet", [ScoredGroup(Group(prompt, np.ones(3, np.int32), tuple(samples)), scores, {})])
    code, _, err = plaudit("prepare", "pairs", tmp_path / "train_000001.parquet", "--out", tmp_path / "pairs", "--val-share", 0)
    assert code == 0, err
    [(_, pair)] = read_pairs(Source(tmp_path / "pairs/train.jsonl"))
    assert pair.chosen.tools == pair.rejected.tools == tools
    assert [pair.chosen.messages[-1]["content"], pair.rejected.messages[-1]["content"]] == ["2", "3"]


def test_a_share_of_the_pairs_is_held_out_for_validation(tmp_path, plaudit):
    rows = [{**scored_row(["a", f"b {i}"], [0.0, 1.0 + i]), "prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(100)]
    file = write_jsonl(tmp_path / "scored.jsonl", rows)
    for name in ("one", "two"):
        assert plaudit("prepare", "pairs", file, "--out", tmp_path / name)[0] == 0
    parts = [(tmp_path / "one" / part).read_text().splitlines() for part in ("train.jsonl", "val.jsonl")]
    assert [len(part) for part in parts] == [97, 3]
    assert len({*parts[0], *parts[1]}) == 100
    assert (tmp_path / "one/val.jsonl").read_bytes() == (tmp_path / "two/val.jsonl").read_bytes()


def test_a_row_without_an_answer_is_reported_with_its_columns(tmp_path, plaudit, tiny_model):
    """Other rows of the file have one."""
    rows = [*pair_rows(3), {"prompt": "?", "better": "3", "rejected": "4"}]
    recipe = pair_recipe(tiny_model, write_jsonl(tmp_path / "pairs.jsonl", rows), tmp_path / "run")
    code, _, err = plaudit("dpo", write_recipe(tmp_path / "r.yaml", recipe))
    output = " ".join(err.split())
    assert code == 2
    assert f"{tmp_path / 'pairs.jsonl'}: row 4: column 'chosen' is missing (found: prompt, better, rejected)" in output
    # Following the message's advice works.
    [entry] = re.findall(r"data.dataset_info points to: (\{.*\}), with data.train: mine", output)
    (tmp_path / "info.json").write_text(entry.replace("question", "prompt").replace("worse", "rejected"))
    write_jsonl(tmp_path / "pairs.jsonl", rows[3:])
    again = [f"data={{dataset_info: {tmp_path / 'info.json'}, train: mine}}", "run.max_steps=1"]
    code, _, err = plaudit("dpo", tmp_path / "r.yaml", *again)
    assert code == 0, err


def test_pairs_from_a_runs_samples(tmp_path, plaudit):
    """One pair per prompt and step: samples of different steps are not compared."""
    from plaudit.report.samples import write_samples
    from plaudit.types import Group, Prompt, Sample, Score, ScoredGroup

    def group(name: str, *answers: tuple[str, float | None]) -> ScoredGroup:
        one = np.zeros(1, dtype=np.float32)
        samples = [
            Sample(name, i, one, text, "truncated" if text == "cut" else "finished", one, one, 0)
            for i, (text, _) in enumerate(answers)
        ]
        prompt = Prompt(name, [{"role": "user", "content": f"{name}?"}])
        return ScoredGroup(Group(prompt, one, tuple(samples)), tuple(Score(value) for _, value in answers), {})

    first = [group("a", ("good", 2.0), ("cut", 9.0), ("bad", 1.0)), group("b", ("same", 1.0), ("as this", 1.0))]
    second = [group("a", ("better", 5.0), ("failed", None), ("best", 7.0))]
    files = [tmp_path / "train_000001.parquet", tmp_path / "train_000002.parquet"]
    for file, groups in zip(files, (first, second), strict=True):
        write_samples(file, groups)
    code, out, err = plaudit("prepare", "pairs", *files, "--out", tmp_path / "pairs", "--val-share", 0)
    assert code == 0, err
    assert "2 pairs to train on, 0 to validate on, of 3 prompts; 1 had no clearly better response" in out
    made = [json.loads(line) for line in (tmp_path / "pairs/train.jsonl").read_text().splitlines()]
    assert sorted((row["prompt"][0]["content"], row["chosen"], row["rejected"], row["margin"]) for row in made) == [
        ("a?", "best", "better", 2.0), ("a?", "good", "bad", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "responses": ["a", "b"]}, "column 'reward' is missing (found: prompt, responses). Score them first"),
        (scored_row(["a", "b"], [1.0]), "row 1: there should be a score for each of the 2 responses, not 1. Score them first"),
        (scored_row(["a", "b"], [1.0, 1.0]), "no pairs could be made"),
    ],
)
def test_rows_that_give_no_pairs_are_refused(tmp_path, plaudit, row, message):
    code, _, err = plaudit("prepare", "pairs", write_jsonl(tmp_path / "s.jsonl", [row]), "--out", tmp_path / "pairs")
    assert (code, message in err) == (2, True), err


# The documentation page ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_docs_recipes_match_the_repository_and_the_code_runs(tmp_path, tiny_model, monkeypatch):
    import re

    import yaml

    from plaudit.config import load
    from support.paths import REPOSITORY

    text = (REPOSITORY / "docs/preferences.md").read_text(encoding="utf-8")
    recipes = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if "stage:" in block]
    for block, name in zip(recipes, ("reward_model", "dpo"), strict=True):
        (tmp_path / "page.yaml").write_text(block)
        assert load(tmp_path / "page.yaml").recipe == load(REPOSITORY / f"recipes/preferences/{name}.yaml").recipe
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    recipe = {**yaml.safe_load(recipes[0]), "model": {"path": str(tiny_model)}, "optim": {"lr": 3e-4}}
    train_reward_model(write_recipe(tmp_path / "r.yaml", recipe))
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(code, {})  # it asserts that the confident answer scores higher
    [rewards] = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.S) if block.startswith("rewards:")]
    (tmp_path / "rewards.yaml").write_text(rewards)
    with Scorer(tmp_path / "rewards.yaml") as scorer:
        [scored] = scorer.score([{"prompt": "Friday plus 2 days?", "responses": ["It will be Sunday.", "Maybe Sunday?"]}])
    assert scored["reward"][0] > scored["reward"][1]
