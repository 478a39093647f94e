"""A recipe with the files it names: all of it checked before anything heavy is imported."""

import json
from collections.abc import Sequence
from pathlib import Path

from plaudit.config import LoadedRecipe, load
from plaudit.data.conversations import Source, resolve_sources
from plaudit.errors import PlauditError, did_you_mean, nearest_path
from plaudit.recipe import (
    DPORecipe,
    ModelSettings,
    PairDataSettings,
    Recipe,
    RewardedRecipe,
    RewardSettings,
    ScoreRecipe,
    SFTDataSettings,
)


def load_checked(path: Path, overrides: Sequence[str] | None, stage: str | None) -> tuple[LoadedRecipe, dict[str, list[Source]]]:
    """The recipe, and the files its data settings name: all of it checked before anything heavy is imported."""
    loaded = load(path, overrides or (), stage)
    require_reward_files(loaded.recipe)
    if isinstance(loaded.recipe, ScoreRecipe):
        return loaded, {}
    data = loaded.recipe.data
    parts = {"train": data.train, "val": data.val}
    named = data.dataset_info if isinstance(data, SFTDataSettings | PairDataSettings) else None
    ranked = isinstance(data, PairDataSettings)
    sources = {part: resolve_sources(names, named, f"data.{part}", ranked=ranked) for part, names in parts.items()}
    require_model(loaded.recipe.model, "model.")
    if loaded.recipe.stage != "reward-model":
        require_one_that_writes(loaded.recipe.model.path, "model.path", f"`plaudit {loaded.recipe.stage}` trains one that writes")
    if isinstance(loaded.recipe, DPORecipe) and loaded.recipe.loss.reference is not None:
        require_model_folder(loaded.recipe.loss.reference, "loss.reference")
        require_one_that_writes(loaded.recipe.loss.reference, "loss.reference", "the reference says how likely an answer is")
    return loaded, sources


def load_rewards(path: Path, overrides: Sequence[str] | None = None) -> tuple[RewardSettings, ...]:
    """The rewards of a recipe that has nothing else, or of one for RL."""
    recipe = load(path, overrides or ()).recipe
    if not isinstance(recipe, RewardedRecipe):
        raise PlauditError(f"{path} is a recipe for `plaudit {recipe.stage}`: it has no rewards")
    require_reward_files(recipe)
    return recipe.rewards


def require_reward_files(recipe: Recipe) -> None:
    """Files that rewards need are there, and can be read."""
    for reward in recipe.rewards if isinstance(recipe, RewardedRecipe) else ():
        for file in reward.files:
            if not file.is_file():
                raise PlauditError(f"reward '{reward.label}': {file} is not a file.{nearest_path(file)}")
        for one in (reward, *reward.inner):
            if one.view.longcot_config is not None:
                from plaudit.rewards.view import read_longcot_config

                read_longcot_config(one.view.longcot_config)


def require_model(settings: ModelSettings, prefix: str) -> None:
    """A model setting that must be a folder here, and is not. (`org/name` may be on the hub; transformers will tell.)"""
    templates = [file.stem for file in (Path(__file__).parent / "data/named_templates").glob("*.jinja")]
    for setting, names in (("path", []), ("tokenizer", []), ("chat_template", templates)):
        _require_there(getattr(settings, setting), f"{prefix}{setting}", names)
    _require_config(settings.path, f"{prefix}path" if prefix else "MODEL")


def require_model_folder(path: str, setting: str) -> None:
    """The same of a setting that is only a path."""
    _require_there(path, setting, [])
    _require_config(path, setting)


def require_one_that_writes(path: str, setting: str, wanted: str) -> None:
    """A reward model's folder in its place would fail with a word about weights, or not at all: tied embeddings make a head."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        kind = next(iter(config.get("architectures") or ()), "")
    except (OSError, ValueError, AttributeError):
        return  # on the hub, or damaged: whoever loads it will tell
    if kind.endswith("ForSequenceClassification"):
        raise PlauditError(
            f"{setting}: {path} is a reward model ({kind}): it gives a score and does not write, and {wanted}. Name a causal "
            f"model, such as the one it was begun from. As a reward it is {{kind: scalar_model, model: {{path: {path}}}}}."
        )


def _require_there(given: str | None, setting: str, names: Sequence[str]) -> None:
    if given is None or given in names or Path(given).exists():
        return
    looks_local = given.startswith((".", "/", "~")) or given.count("/") != 1 or Path(given).parent.is_dir()
    if looks_local:
        raise PlauditError(f"{setting}: {given} does not exist.{did_you_mean(given, names) or nearest_path(Path(given))}")


def _require_config(path: str, setting: str) -> None:
    model = Path(path)
    if model.exists() and not (model / "config.json").is_file():
        near = f". Did you mean {model / 'model'}?" if (model / "model/config.json").is_file() else ""
        raise PlauditError(f"{setting}: {model} is not a model in Hugging Face format: there is no config.json in it{near}")
