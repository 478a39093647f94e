"""A recipe and the files it names, checked before anything heavy is imported."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from plaudit.config import LoadedRecipe, flatten, load
from plaudit.data.conversations import Source, read_conversations, read_prompts, resolve_sources
from plaudit.data.pairs import read_pairs
from plaudit.errors import PlauditError, RecipeError, did_you_mean, nearest_path
from plaudit.hub import looks_local, model_folder
from plaudit.lora_folder import is_lora_folder, read_lora_folder, with_weights
from plaudit.model_files import require_config
from plaudit.models.quantisable import find_obstacle, refusal, undivided
from plaudit.output_folder import require_run_folder
from plaudit.recipe import (
    DPORecipe,
    ModelSettings,
    PairDataSettings,
    PreferenceRecipe,
    Recipe,
    RewardedRecipe,
    RewardModelDataSettings,
    RewardSettings,
    RLRecipe,
    ScoreRecipe,
    SFTDataSettings,
    SFTRecipe,
    quantised_bases,
)
from plaudit.recipe.reward_models import RewardModel
from plaudit.recipe.rewards import OF_MODEL, nested_rewards
from plaudit.response_files import read_longcot_config
from plaudit.servers.sglang_command import SGLANG
from plaudit.servers.vllm_command import VLLM
from plaudit.shipped import opening_comment

QUICK_BYTES, QUICK_ROWS = 1 << 26, 10_000
"""Files and rows that are read in about a second."""


def load_checked(path: Path, overrides: Sequence[str] | None, stage: str | None) -> tuple[LoadedRecipe, dict[str, list[Source]]]:
    """The recipe, and the data files of `data.train` and `data.val`. All files and folders it names exist, and if it is for a
    `stage`, their rows can be read."""
    loaded, sources = check_files(load(path, overrides or (), stage))
    if stage is not None:
        require_rows(loaded.recipe, sources)
    return loaded, sources


def check_files(loaded: LoadedRecipe) -> tuple[LoadedRecipe, dict[str, list[Source]]]:
    """The same for a recipe that is loaded already. All that is missing is reported at once, with the commands that make it."""
    recipe, sources, problems = loaded.recipe, dict[str, list[Source]](), list[PlauditError]()

    def find_sources(recipe: Recipe) -> None:
        sources.update(_sources(recipe))

    for check in (
        require_reward_files, find_sources, _require_policy, _require_quantisable, _require_reference, _require_engine,
        _require_run_folder,
    ):  # fmt: skip
        try:
            check(recipe)
        except PlauditError as error:
            problems.append(error)
    if not problems:
        return loaded, sources
    commands = [f"  {command}" for command in _commands_for_missing_files(loaded)]
    how = [f"The comment at the top of {loaded.path} says how to make what is missing:"] if commands else []
    raise type(problems[0])("\n".join([*map(str, problems), *how, *commands]))


def _sources(recipe: Recipe) -> dict[str, list[Source]]:
    if isinstance(recipe, ScoreRecipe):
        return {}
    data = recipe.data
    dataset_info = data.dataset_info if isinstance(data, SFTDataSettings | PairDataSettings) else None
    ranked = isinstance(data, PairDataSettings)
    return {
        split: resolve_sources(names, dataset_info, f"data.{split}", ranked=ranked)
        for split, names in (("train", data.train), ("val", data.val))
    }


def _require_policy(recipe: Recipe) -> None:
    if isinstance(recipe, ScoreRecipe):
        return
    require_model(recipe.model, "model.")
    _require_complete_base(recipe.model)
    if recipe.stage != "reward-model":
        require_causal_model(recipe.model.path, "model.path", f"`plaudit {recipe.stage}` trains a model that generates text")


def _require_quantisable(recipe: Recipe) -> None:
    """lora.base_bits, of the policy and the critic."""
    if isinstance(recipe, ScoreRecipe):
        return
    for section, model in quantised_bases(recipe).items():
        if recipe.cluster.sharding == "full":
            raise RecipeError(undivided(section))
        try:
            config = require_config(model_folder(with_weights(model.path), weights=False))
        except PlauditError:
            continue  # reported by another check
        own_code = model.trust_remote_code and any(name.startswith("AutoModel") for name in config.get("auto_map") or {})
        if obstacle := find_obstacle(config, own_code=own_code):
            raise RecipeError(refusal(model.path, section, obstacle))


def _require_reference(recipe: Recipe) -> None:
    if isinstance(recipe, DPORecipe | RLRecipe) and recipe.reference.path is not None:
        require_model_folder(recipe.reference.path, "reference.path")
        require_causal_model(recipe.reference.path, "reference.path", "the reference computes log-probs of responses")


def _require_engine(recipe: Recipe) -> None:
    for file in recipe.rollout.files if isinstance(recipe, RLRecipe) else ():
        if not file.is_file():
            raise PlauditError(f"rollout.engine: {file} is not a file.{nearest_path(file)}")


def _require_run_folder(recipe: Recipe) -> None:
    if not isinstance(recipe, ScoreRecipe):
        require_run_folder(Path(recipe.run.dir))


def _commands_for_missing_files(loaded: LoadedRecipe) -> list[str]:
    """The commands in the comment at the top of a recipe whose output it names, but does not find."""
    named = [value for values in flatten(loaded.recipe).values() for value in (values if isinstance(values, list) else [values])]
    missing = [Path(value) for value in named if isinstance(value, str) and not os.path.exists(value)]
    lines = opening_comment(loaded.path) if loaded.path.is_file() else []  # from Python, there is no file
    commands = {line: out for line in lines if line.startswith("plaudit ") and (out := _output_of(line)) is not None}
    return [command for command, out in commands.items() if any(path.is_relative_to(out) for path in missing)]


def _output_of(command: str) -> str | None:
    """The folder that a command writes: `--out`, or the run folder of the recipe that it trains."""
    words = command.split()
    if "--out" in words[:-1]:
        return words[words.index("--out") + 1]
    try:
        recipe = load(words[2], words[3:]).recipe if words[2:] and words[2].endswith(".yaml") else None
    except PlauditError:
        return None
    return None if recipe is None or isinstance(recipe, ScoreRecipe) else str(recipe.run.dir)


def require_rows(recipe: Recipe, sources: dict[str, list[Source]]) -> None:
    """Read the rows of small files: a mistake in them is reported at once, before torch is imported and a run folder is made."""
    for source in [source for part in sources.values() for source in part]:
        if source.hub is None and source.path.is_file() and source.path.stat().st_size > QUICK_BYTES:
            continue
        if isinstance(recipe, SFTRecipe):
            rows: Iterator[Any] = read_conversations(source)
        elif isinstance(recipe, PreferenceRecipe):
            margins = recipe.data.margin_column if isinstance(recipe.data, RewardModelDataSettings) else None
            rows = read_pairs(source, margins)
        else:
            rows = read_prompts(source)
        for _ in islice(rows, QUICK_ROWS):
            pass


def load_rewards(path: Path, overrides: Sequence[str] | None = None) -> tuple[RewardSettings, ...]:
    """The rewards of a score or RL recipe."""
    recipe = load(path, overrides or ()).recipe
    if not isinstance(recipe, RewardedRecipe):
        raise PlauditError(f"{path} is a recipe for `plaudit {recipe.stage}`, which has no rewards")
    require_reward_files(recipe)
    return recipe.rewards


def require_reward_files(recipe: Recipe) -> None:
    """The files that rewards depend on exist and can be read, and their servers can be launched."""
    for reward in recipe.rewards if isinstance(recipe, RewardedRecipe) else ():
        for file in reward.files:
            if not file.is_file():
                raise PlauditError(f"reward '{reward.label}': {file} is not a file.{_why_missing(file, reward)}")
        for one in (reward, *reward.inner):
            if (longcot := one.view.longcot_file) is not None:
                read_longcot_config(longcot)
    if isinstance(recipe, RewardedRecipe):
        _require_server_programs(recipe.rewards)


def _why_missing(file: Path, reward: RewardSettings) -> str:
    if any(one.view.longcot_config == OF_MODEL and one.view.longcot_file == file for one in (reward, *reward.inner)):
        return (
            " `plaudit sft` on texts with thoughts writes it. If the policy does not think, remove view.longcot_config; if it "
            'does, write the file: {"longcot_delimiter": "</think>"}'
        )
    return nearest_path(file)


def _require_server_programs(rewards: Sequence[RewardSettings]) -> None:
    """placement: launch. vLLM, or SGLang, is where it will be started from."""
    programs: dict[tuple[str | None, str], str] = {}
    for name, reward in [named for one in rewards for named in nested_rewards(one, one.label)]:
        model = getattr(reward, "model", None)
        if isinstance(model, RewardModel) and model.placement == "launch":
            programs.setdefault((model.program, model.dialect), name)
    for (program, dialect), name in programs.items():
        command = {"vllm": VLLM, "sglang": SGLANG}[dialect]
        if problem := command.find_problem(program):
            raise PlauditError(f"reward '{name}': placement: launch starts a {command.title} server. {problem}")


def require_servers(recipe: Recipe) -> None:
    """placement: server. Each answers, has the model and accepts the key: reported before torch is imported and a run folder is
    made."""
    models: dict[RewardModel, tuple[str, Any]] = {}
    for name, reward in [named for one in getattr(recipe, "rewards", ()) for named in nested_rewards(one, one.label)]:
        model = getattr(reward, "model", None)
        if isinstance(model, RewardModel) and model.placement == "server":
            models.setdefault(model, (name, reward.limits))
    if not models:
        return

    from plaudit.reward_models.server_client import ServerClient

    for model, (name, limits) in models.items():
        try:
            asyncio.run(ServerClient(model, limits).require_server())
        except RecipeError as error:
            raise RecipeError(f"reward '{name}': {error}") from None


def require_model(settings: ModelSettings, prefix: str, *, served: bool = False) -> None:
    """What the model settings name exists: on this disk, or (`org/name`) on the hub. `served`: the model is on a server, and the
    folder may have its tokenizer alone."""
    templates = [file.stem for file in (Path(__file__).parent / "data/named_templates").glob("*.jinja")]
    for setting, names in (("path", []), ("tokenizer", []), ("chat_template", templates)):
        _require_path(getattr(settings, setting), "MODEL" if prefix + setting == "path" else f"{prefix}{setting}", names)
    if not served:
        _require_config(settings.path, f"{prefix}path" if prefix else "MODEL")


def require_model_folder(path: str, setting: str) -> None:
    """As require_model, for a setting that is only a path."""
    _require_path(path, setting, [])
    _require_config(path, setting)


def require_causal_model(path: str, setting: str, reason: str) -> None:
    """Refuse a reward model, which would fail late with an error about weights, or (with tied embeddings) not at all."""
    lora = read_lora_folder(path)
    try:
        config = require_config(model_folder(path if lora is None else lora.base, weights=False))
    except PlauditError:
        return  # damaged: reported when it is loaded
    kind = next(iter(config.get("architectures") or ()), "")
    if kind.endswith("ForSequenceClassification") or (lora is not None and lora.scores):
        what = kind if lora is None else "a LoRA adapter with a score head"
        raise PlauditError(
            f"{setting}: {path} is a reward model ({what}), which gives scores, but {reason}. Name a causal model, such as the one "
            f"it was trained from. To use it as a reward: {{kind: scalar_model, model: {{path: {path}}}}}."
        )


def _require_complete_base(settings: ModelSettings) -> None:
    """An adapter of an adapter could be loaded by nobody: peft and vLLM expect a complete base."""
    if settings.lora is not None and not settings.lora.merge_on_save and is_lora_folder(settings.path):
        raise PlauditError(
            f"model.lora.merge_on_save is false, but model.path is itself a LoRA adapter ({settings.path}): the new adapter would "
            f"have no complete model as its base. Merge it first (plaudit merge {settings.path} --out FOLDER) and set "
            "model.path=FOLDER, or leave merge_on_save true."
        )


def _require_path(path: str | None, setting: str, names: Sequence[str]) -> None:
    if path is None or path in names or os.path.exists(path):
        return
    if looks_local(path):
        hint = did_you_mean(path, names) or nearest_path(Path(path))
        raise PlauditError(f"{setting}: {path} does not exist.{hint}")
    try:
        model_folder(path, weights=False)
    except PlauditError as error:
        raise PlauditError(f"{setting}: {error}") from None


def _require_config(path: str, setting: str) -> None:
    model = Path(path)
    try:
        lora = read_lora_folder(model)
    except PlauditError as error:
        raise PlauditError(f"{setting}: {error}") from None
    if lora is None and model.exists() and not (model / "config.json").is_file():
        inside = model / "model"
        near = f". Did you mean {inside}?" if (inside / "config.json").is_file() or is_lora_folder(inside) else ""
        raise PlauditError(f"{setting}: {model} is not a model in Hugging Face format: it has no config.json{near}")
