"""The Python API: recipes as function calls (docs/python_api.md).

A call is a recipe: a file with overrides as keyword sections, or everything from Python. Rows and functions that it brings along
are written into the run folder, so that a run can be resumed, and repeated from the command line with its `recipe.yaml`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from plaudit.config import Draft, check_section, read_draft
from plaudit.data.conversations import Source, resolve_sources
from plaudit.data.in_memory import rows_file
from plaudit.errors import DataError
from plaudit.files import fingerprint, text_digest, weights_fingerprint
from plaudit.input_files import InputFile, place_inputs, written
from plaudit.inputs import check_files, require_causal_model, require_model, require_rows
from plaudit.lora_folder import CONFIG as LORA_CONFIG
from plaudit.recipe import ModelSettings, SampleSettings
from plaudit.rewards.functions.callables import reward_entries
from plaudit.run_folder import RunFolder, refuse_while_training

if TYPE_CHECKING:
    import pyarrow as pa

StrPath = str | os.PathLike[str]
Settings = Mapping[str, Any]
"""A section of a recipe."""
Rows = Any
"""A list of dicts, a pyarrow table, a Hugging Face data set, a pandas or polars data frame; or a path, or a list of paths."""
RewardFunction = Callable[..., Any]
"""In verl's signature, in TRL's, or over groups (docs/python_api.md)."""


class _Sections(TypedDict, total=False):
    model: StrPath | Settings
    """A model folder or a name on the hub; or the section `model`."""
    data: Rows | Settings
    """Rows to train on; or the section `data`, whose `train` and `val` may be rows."""
    train: Settings
    optim: Settings
    cluster: Settings
    """{"gpus": 8}: one process per GPU."""
    run: StrPath | Settings
    """The run folder, or the section `run`. Default: a folder in `runs/` named after what the call depends on."""
    seed: int


class _DPOSections(_Sections, total=False):
    reference: Settings
    loss: Settings


class _RewardModelSections(_Sections, total=False):
    loss: Settings


class _RLSections(_Sections, total=False):
    rewards: RewardFunction | Settings | Sequence[RewardFunction | Settings]
    """Functions, and entries as under `rewards:` in a recipe; one alone needs no list. A function with settings:
    {"function": f, "weight": 0.5}."""
    rollout: Settings
    validation: Settings
    algorithm: Settings
    critic: Settings | None
    reference: Settings
    audit: Settings


def sft(recipe: StrPath | None = None, /, **sections: Unpack[_Sections]) -> RunFolder:
    """Supervised fine-tuning: `plaudit sft`. Sections: model, data, train, optim, cluster, run, seed."""
    return _train("sft", recipe, sections)


def dpo(recipe: StrPath | None = None, /, **sections: Unpack[_DPOSections]) -> RunFolder:
    """Direct preference optimisation: `plaudit dpo`. Sections: model, data, reference, loss, train, optim, cluster,
    run, seed."""
    return _train("dpo", recipe, sections)


def reward_model(recipe: StrPath | None = None, /, **sections: Unpack[_RewardModelSections]) -> RunFolder:
    """Train a Bradley–Terry reward model: `plaudit reward-model`. Sections: model, data, loss, train, optim, cluster, run,
    seed."""
    return _train("reward-model", recipe, sections)


def rl(recipe: StrPath | None = None, /, **sections: Unpack[_RLSections]) -> RunFolder:
    """Reinforcement learning: `plaudit rl`. Sections: model, data, rewards, rollout, validation, algorithm, critic, reference,
    audit, train, optim, cluster, run, seed."""
    return _train("rl", recipe, sections)


def load_run(folder: StrPath) -> RunFolder:
    """A run that was trained before, or is being trained."""
    return RunFolder(Path(folder))


# Training ------------------------------------------------------------------------------------------------------------


def _train(stage: str, recipe: StrPath | None, sections: Mapping[str, Any]) -> RunFolder:
    call = f"plaudit.{stage.replace('-', '_')}()"
    draft = Draft(Path(call), {}, {}, call) if recipe is None else read_draft(Path(recipe), call)
    draft.update(_expand(sections))
    folder = _run_folder(draft, stage)
    draft.tree, files = place_inputs(draft.tree, folder / "inputs")
    loaded = draft.check(stage)
    refuse_while_training(folder)
    with written(files, folder):
        checked = check_files(loaded)
        require_rows(loaded.recipe, checked[1])

        from plaudit.loops.train import train

        train(*checked)
    return RunFolder(folder)


def _expand(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments as sections of a recipe, with files in place of rows and functions."""
    tree = dict(sections)
    for name, setting in (("model", "path"), ("run", "dir")):
        if isinstance(tree.get(name), str | os.PathLike):
            tree[name] = {setting: tree[name]}
    if tree.get("data") is not None:
        data = tree["data"] if isinstance(tree["data"], Mapping) else {"train": tree["data"]}
        tree["data"] = {
            name: rows_file(value, name, f"data.{name}") if name in ("train", "val") and not _is_path(value) else value
            for name, value in data.items()
        }
    if tree.get("rewards") is not None:
        tree["rewards"] = reward_entries(tree["rewards"])
    return tree


def _is_path(rows: Rows) -> bool:
    """Whether rows are given as a path, or as several."""
    several = isinstance(rows, list | tuple) and bool(rows) and all(isinstance(one, str | os.PathLike) for one in rows)
    return rows is None or isinstance(rows, str | os.PathLike) or several


def _run_folder(draft: Draft, stage: str) -> Path:
    """`run.dir`; by default named after all that the call depends on, so that the same call resumes and another one starts anew."""
    run = draft.tree.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir") is None:
        # Not on the number of processes: a run may be resumed with another one.
        contents = _contents({name: section for name, section in draft.tree.items() if name != "cluster"})
        draft.update({"run": {"dir": f"runs/{stage}-{text_digest(json.dumps(contents, sort_keys=True))[:8]}"}})
    return Path(str(run.get("dir")) if isinstance(run, dict) else "runs")


def _contents(value: Any) -> Any:
    """A recipe's values with digests of the files, models and functions that they name."""
    match value:
        case dict():
            return {name: _contents(one) for name, one in value.items()}
        case list():
            return [_contents(one) for one in value]
        case InputFile():
            return value.digest
        case str() if os.path.isfile(value):  # unlike Path's, False for text that cannot be a path
            return [value, fingerprint(Path(value))]
        case str() if any(os.path.isfile(os.path.join(value, name)) for name in ("config.json", LORA_CONFIG)):
            return [value, weights_fingerprint(Path(value))]
        case str() if os.path.isfile(os.path.join(value, "state.json")):  # rows that save_to_disk wrote
            return [value, fingerprint(Path(value))]
        case bool() | int() | float() | str() | None:
            return value
    return repr(value)


# Sampling ------------------------------------------------------------------------------------------------------------


def sample(
    model: StrPath | Settings,
    prompts: "Rows | Sequence[str]",
    *,
    n: int = 1,
    max_new_tokens: int = 1024,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    stop: str | Sequence[str] | None = None,
    seed: int = 0,
    max_prompt_tokens: int = 4096,
    too_long: Literal["filter", "error", "cut_left"] = "filter",
    special_tokens: Literal["text", "control"] = "text",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> "pa.Table":
    """Sample n responses to each prompt: a row per prompt, in order, with `responses` (a list) and the prompt's columns.

    `prompts`: a list of questions, rows with a column `prompt`, or a path (`pathlib.Path`, or one text). For large files that are
    to be resumed, use `plaudit sample`.
    """
    given = {
        "n": n, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "stop": stop, "seed": seed, "max_prompt_tokens": max_prompt_tokens, "too_long": too_long, "special_tokens": special_tokens,
        "device": device,
    }  # fmt: skip
    call = "plaudit.sample()"
    arguments = check_section(SampleSettings, given, call)
    settings = check_section(ModelSettings, model if isinstance(model, Mapping) else {"path": model}, call)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = _prompt_sources(prompts, folder)
        require_model(settings, "")
        require_causal_model(settings.path, "model", f"{call} needs a model that generates text")

        from plaudit.loops.sample import sample_table

        return sample_table(settings, sources, arguments)


def _prompt_sources(prompts: Any, folder: Path) -> list[Source]:
    try:
        return resolve_sources(_prompt_files(prompts, folder), None, "prompts")
    except DataError as error:
        if isinstance(prompts, str) and not os.path.exists(prompts):
            raise DataError(f'{error}\nTo ask one question, pass a list: ["…"].') from None
        raise


def _prompt_files(prompts: Any, folder: Path) -> list[str]:
    """Paths as they are; questions and rows as a file in `folder`."""
    if isinstance(prompts, str | os.PathLike):
        return [os.fspath(prompts)]
    if isinstance(prompts, Sequence) and all(isinstance(one, str) for one in prompts):
        prompts = [{"prompt": question} for question in prompts]
    elif _is_path(prompts):
        return [os.fspath(path) for path in prompts]
    file = rows_file(prompts, "prompts", "prompts")
    file = replace(file, name=f"prompts{Path(file.name).suffix}")  # the name is part of a prompt's id, which seeds its samples
    file.write(folder)
    return [str(folder / file.name)]
