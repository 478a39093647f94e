"""Every recipe in the repository is valid, and trains (for two steps, on a tiny model) or scores."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import load
from plaudit.explain import to_yaml
from plaudit.scoring import Scorer
from support.paths import REPOSITORY
from support.recipes import train_dpo, train_reward_model, train_rl, train_sft
from support.rows import prompt_rows, write_jsonl
from support.servers import stand_in_judge

RECIPES = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
TRAIN = {"sft": train_sft, "dpo": train_dpo, "reward-model": train_reward_model, "rl": train_rl}
TRAINING = [path for path in RECIPES if load(path).recipe.stage in TRAIN]
SCORING = [path for path in RECIPES if path not in TRAINING]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_recipe_is_valid_and_states_its_stage(path, tmp_path):
    loaded = load(path)
    assert "stage" in loaded.recipe.model_fields_set
    (tmp_path / "resolved.yaml").write_text(to_yaml(loaded))
    assert load(tmp_path / "resolved.yaml").recipe == loaded.recipe


def test_every_stage_has_a_recipe():
    stages = {load(path).recipe.stage for path in RECIPES}
    assert stages <= {*TRAIN, "score"}, "add the new stage to this test"
    assert {"sft", "dpo", "reward-model", "rl"} <= stages


@pytest.fixture(scope="module")
def classifier(tiny_model, tmp_path_factory) -> Path:
    """An untrained reward model."""
    import torch

    from plaudit.data.templates import load_template, load_tokenizer
    from plaudit.models.classifier import load_classifier
    from plaudit.recipe import ModelSettings

    folder = tmp_path_factory.mktemp("models") / "classifier"
    template = load_template(load_tokenizer(str(tiny_model)), None)
    load_classifier(ModelSettings(path=str(tiny_model)), template, torch.device("cpu"), seed=0).save(folder)
    return folder


@pytest.fixture(scope="module")
def thinking_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model as SFT on thoughts would leave it."""
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("models") / "thinking"))
    (folder / "longcot_config.json").write_text('{"longcot_delimiter": "</think>", "end_delimiter": null}')
    return folder


def answer_to(prompt: str) -> str:
    """What a judge of any of the recipes might answer."""
    if letters := re.findall(r"^\[([A-Z])\]$", prompt, re.M):
        return f"Ranking:\n{' = '.join(letters)}\nScores:\n{', '.join(f'{letter}: 7' for letter in letters)}"
    forms = {
        "Total Score": "Total Score: 7/10",
        "JSON object": '{"polite": 1, "clear": 0}',
        "Write one line: True": "True",
        "# Answer to grade": "7",
    }
    return next(answer for form, answer in forms.items() if form in prompt)


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with stand_in_judge(answer_to=answer_to) as url:
        yield f"{{placement: server, url: '{url}'}}"


GROUND_TRUTHS: dict[str, str | dict[str, str]] = {
    "ranking": {"ranking_score": '{"A": 3, "B": 1}', "ranking": "A > B"},
    "grade": "0.7",
    "function": {"rule": '{"Solution": 1, "Knowledge": [2]}'},
}
DATA_SOURCES = {"cascade": "bigmath_tinyv", "grade": "grade"}
EXTRA_INFO = {"criteria": "Ten points for the sum.", "rm_prompt_0": "", "rm_prompt_1": ""}


def prompts_for(recipe, folder: Path) -> Path:
    """Prompts with what the recipe's rewards need: a ground truth that they can parse, a data source, further columns."""
    first, rows = recipe.rewards[0], prompt_rows()
    truth = GROUND_TRUTHS.get(first.kind)
    truth = truth.get(getattr(first, "format", first.label)) if isinstance(truth, dict) else truth
    for row in rows:
        row |= {"data_source": DATA_SOURCES.get(first.kind, "sums"), "extra_info": row["extra_info"] | EXTRA_INFO}
        if truth is not None:
            row |= {"reward_model": {"ground_truth": truth}}
    return write_jsonl(folder / "prompts.jsonl", rows)


def shrink(recipe, data: Path, classifier: Path, judge: str) -> list[str]:
    """Overrides that shrink a recipe: few and short sequences, and stand-ins for missing files and models."""
    overrides = [
        f"data.{part}={data}" for part in ("train", "val") for files in [getattr(recipe.data, part)] if not all(map(_exists, files))
    ]
    if recipe.stage != "rl":
        return [*overrides, f"train.{'rows' if recipe.stage == 'sft' else 'pairs'}_per_step=4"]
    for i, reward in enumerate(recipe.rewards):
        for name, inner in (("", reward), ("judge.", getattr(reward, "judge", None)), ("rule.", getattr(reward, "rule", None))):
            place, model = f"rewards.{i}.{name}", getattr(inner, "model", None)
            if inner is not None and inner.kind == "math":
                overrides.append(f"{place}workers=1")
            if inner is None or model is None:
                continue
            overrides.append(f"{place}model.path={classifier}" if inner.kind == "scalar_model" else f"{place}model={judge}")
            if inner.view.extract != "none":
                overrides.append(f"{place}view.extract=none")  # a random model writes no code block, and no box
    overrides += ["rollout.n=2", "rollout.max_new_tokens=8", "train.prompts_per_step=2", "validation.max_prompts=2"]
    if recipe.train.prompts_per_update is not None:
        overrides.append("train.prompts_per_update=1")
    if recipe.validation.max_new_tokens is not None:
        overrides.append("validation.max_new_tokens=8")
    return [*overrides, f"data.max_prompt_tokens={min(recipe.data.max_prompt_tokens, 1024)}"]


def _exists(name: str) -> bool:
    return (REPOSITORY / name).exists()


@pytest.mark.parametrize("path", SCORING, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_recipe_scores(path, classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    recipe = tmp_path / path.name
    row = {
        "prompt": "2 apples and 2 apples: how many?",
        "responses": ["2 + 2 = 4\n#### 4", "#### 5"],
        "ground_truth": "4",
    }
    with stand_in_judge() as url:
        # A server that answers, and a model that is there.
        recipe.write_text(path.read_text().replace("http://127.0.0.1:8000", url).replace("runs/preference/model", str(classifier)))
        with Scorer(recipe) as scorer:
            [scored] = scorer.score([row])
    assert all(reward is not None for reward in scored["reward"])


@pytest.fixture
def small(
    tmp_path, tiny_model, thinking_model, rows_file, pairs_file, classifier, judge, monkeypatch
) -> Callable[[Path], list[str]]:
    """Overrides with which a recipe trains two steps on a tiny model, from the repository's root, where its paths begin."""
    monkeypatch.chdir(REPOSITORY)

    def overrides(path: Path) -> list[str]:
        recipe: Any = load(path).recipe
        data = {"sft": rows_file}.get(recipe.stage, pairs_file) if recipe.stage != "rl" else prompts_for(recipe, tmp_path)
        given = [
            *shrink(recipe, data, classifier, judge),
            f"model.path={thinking_model if recipe.stage == 'rl' else tiny_model}",
            f"run.dir={tmp_path / 'run'}",
            "run.max_steps=2",
            "run.trackers=[]",
            "run.device=cpu",
        ]
        if getattr(recipe, "critic", None) is not None:
            given.append("critic.pretrain_steps=1")  # so that the second step updates the policy too
        return [*given, f"model.tokenizer={tiny_model}"] if recipe.model.tokenizer else given

    return overrides


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: str(path.relative_to(REPOSITORY)))
@pytest.mark.grid(3)
def test_recipe_trains_two_steps(path, tmp_path, small):
    overrides = small(path)
    model = TRAIN[load(path).recipe.stage](path, *overrides)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    assert rows[-1]["lr"] > 0
    if any("placement: server" in override for override in overrides):
        assert rows[-1]["judge/calls"] > 0
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: str(path.relative_to(REPOSITORY)))
@pytest.mark.grid(2)
def test_doctor_has_no_complaint_about_a_recipe(path, small, plaudit):
    """With stand-ins for the files and models that are not here."""
    code, out, err = plaudit("doctor", path, *small(path))
    assert (code, "✗" in out) == (0, False), out + err


def test_the_first_recipe_improves_the_model(tmp_path, monkeypatch):
    """The README's two commands: the loss on held-out rows must fall sharply."""
    from plaudit.prepare.tiny_model import make_tiny_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    make_tiny_model(["recipes/first/train.jsonl"], "models/tiny")
    train_sft(REPOSITORY / "recipes/first/sft.yaml")
    rows = map(json.loads, (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines())
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert losses[0] > 5
    assert min(losses) < 0.6


@pytest.mark.slow
def test_the_first_rl_recipe_improves_the_model(plaudit, tmp_path, monkeypatch):
    """From random weights, in seconds: the doctor has no complaint, and the reward on held-out prompts rises."""
    from plaudit.prepare.tiny_model import make_tiny_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    make_tiny_model(["recipes/first/train.jsonl"], "models/tiny")
    code, out, _ = plaudit("doctor", "recipes/first/rl.yaml")
    assert (code, "!" in out.split("Memory on")[0]) == (0, False), out
    train_rl(REPOSITORY / "recipes/first/rl.yaml")
    rows = map(json.loads, (tmp_path / "runs/first_rl/metrics.jsonl").read_text().splitlines())
    rewards = [row["val/reward"] for row in rows if "val/reward" in row]
    assert rewards[0] < 0.3
    assert rewards[-1] > rewards[0] + 0.2


def test_the_first_reward_function_scores_parts_of_the_answer():
    row = {"prompt": "Friday plus 5 days?", "answer": "Wednesday"}
    responses = ["It will be Wednesday.", "It will be Sunday.", "will be", ""]
    with Scorer([{"kind": "function", "path": str(REPOSITORY / "recipes/first/reward.py")}]) as scorer:
        [scored] = scorer.score([{**row, "responses": responses}])
    assert scored["reward"] == pytest.approx([1.0, 32 / 39, 14 / 28, 0.0])


@pytest.mark.slow
def test_the_preference_recipes_improve_their_models(tmp_path, monkeypatch):
    """docs/preferences.md, top to bottom: the reward model and the policy improve on held-out pairs."""
    from plaudit.prepare.tiny_model import make_tiny_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    make_tiny_model(["recipes/first/train.jsonl"], "models/tiny")
    train_sft(REPOSITORY / "recipes/first/sft.yaml")
    for name, train in (("reward_model", train_reward_model), ("dpo", train_dpo)):
        train(REPOSITORY / f"recipes/preferences/{name}.yaml")
        rows = [json.loads(line) for line in (tmp_path / f"runs/first_{name}/metrics.jsonl").read_text().splitlines()]
        validated = [row for row in rows if "val/loss" in row]
        assert validated[0]["val/loss"] > 0.6
        assert validated[-1]["val/loss"] < 0.35
        assert validated[-1]["val/accuracy"] == 1.0
