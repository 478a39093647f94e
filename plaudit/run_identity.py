"""What makes two starts the same run: the recipe and the content of its inputs. run.json in the run folder records it."""

import fnmatch
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from plaudit import __version__
from plaudit.config import flatten, settings_of
from plaudit.data.conversations import Source
from plaudit.data.templates import ChatTemplate
from plaudit.errors import DataError
from plaudit.files import fingerprint, text_digest, weights_fingerprint
from plaudit.hub import model_folder
from plaudit.input_files import is_function_file
from plaudit.recipe import TrainingRecipe

MICRO_BATCH = "tokens_per_micro_batch"
"""In run.json: the number that was used, whatever the recipe says."""
SETTING = f"train.{MICRO_BATCH}"
RESOLVED = "resolved"
"""In run.json: what `auto` stands for, by setting."""


@dataclass(frozen=True)
class Differences:
    """Between a run as it is started now and as run.json records it; each a line that names the setting or file."""

    rounding: list[str]
    """Settings that change results in the last bits at most."""
    code: list[str]
    """Rewards and engines whose code has changed: allowed, because fixing one is how a stopped run continues."""
    forbidden: list[str]
    """All others: this is another run."""


def describe_run(
    recipe: TrainingRecipe, files: Sequence[Path | Source], template: ChatTemplate | None, inputs: dict[str, str]
) -> dict[str, Any]:
    """The content of a new run.json. `inputs`: further digests, by a name that a person understands."""
    digests = {str(file): _fingerprint(file) for file in files} | _model_digests(recipe, template) | inputs
    return {"recipe": flatten(recipe), "inputs": digests, "versions": _versions(), "git": _git_state(), "trackers": {}}


def recorded_micro_batch(description: dict[str, Any]) -> int | None:
    """What a run was last trained with; of a run that is older than this entry, what its recipe says."""
    tokens = description.get(MICRO_BATCH, description["recipe"].get(SETTING))
    return tokens if isinstance(tokens, int) else None


def describe_auto(recipe: TrainingRecipe, resolved: TrainingRecipe, micro_batch: int | None) -> dict[str, Any]:
    """Entries of run.json: what `auto` stands for."""
    values = flatten(resolved)
    decided = {name: values[name] for name, value in flatten(recipe).items() if value == "auto" and values[name] != "auto"}
    return {MICRO_BATCH: micro_batch, RESOLVED: decided}


def with_recorded(recipe: TrainingRecipe, description: dict[str, Any]) -> TrainingRecipe:
    """The recipe with what the run has recorded of `auto`."""
    settings = {SETTING: recorded_micro_batch(description), **description.get(RESOLVED, {})}
    for name, value in settings.items():
        section, _, setting = name.partition(".")
        part = getattr(recipe, section, None)
        if value is not None and part is not None and getattr(part, setting, None) == "auto":
            recipe = recipe.model_copy(update={section: part.model_copy(update={setting: value})})
    return recipe


def compare(then: dict[str, Any], now: dict[str, Any], recipe: TrainingRecipe, code: set[str]) -> Differences:
    """How the run described by `then` differs from `now`, started with `recipe`."""
    old, new = {**_defaults_since(then["recipe"], recipe), **then["recipe"]}, dict(now["recipe"])
    for settings in (old, new):
        if settings.get(SETTING) == "auto":  # which keeps its number
            settings[SETTING] = recorded_micro_batch(then) or "auto"
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    # Functions from Python: each version is a file of its own.
    functions = [name for name in differ if is_function_file(old.get(name)) and is_function_file(new.get(name))]
    lines = {name: f"  {name}: was {_shown(name, old)}, is now {_shown(name, new)}" for name in differ}
    allowed = recipe.RESUME_MAY_CHANGE + recipe.RESUME_CHANGES_ROUNDING
    forbidden = [lines[name] for name in differ if not _matches(name, allowed) and name not in functions]
    before, after = then["inputs"], now["inputs"]
    forbidden += [
        f"  {path}: {'its content has changed' if path in before.keys() & after.keys() else 'is not part of both runs'}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and path not in code and not is_function_file(path)
    ]
    return Differences(
        rounding=[lines[name] for name in differ if _matches(name, recipe.RESUME_CHANGES_ROUNDING)],
        code=[path for path in sorted(code & before.keys()) if before[path] != after[path]]
        + [
            f"the function of reward '{new.get(name.removesuffix('path') + 'name')}'"
            for name in functions
            if Path(old[name]).name != Path(new[name]).name  # else it is the same file, from another folder
        ],
        forbidden=forbidden,
    )


@dataclass(frozen=True)
class Computing:
    """How a run is computed: as the machine and the launcher have it, not as the recipe says. May change when it is resumed."""

    threads: int | None
    """Of each process, on a CPU."""
    processes: int
    sharding: str
    """What the processes divide among themselves."""

    @classmethod
    def recorded(cls, description: dict[str, Any]) -> "Computing | None":
        """As run.json says; None before the first checkpoint, or if the run is older than these entries."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: description[name] for name in names}) if all(name in description for name in names) else None

    def changed(self, before: "Computing") -> str | None:
        """'with 2 processes and had 1, …', if results depend on the difference."""
        differ = "so its result is not that of an uninterrupted run to the last bit"
        if (self.processes, self.sharding) != (before.processes, before.sharding):
            return f"with {self._processes} and had {before._processes}, {differ}"
        if self.threads != before.threads and None not in (self.threads, before.threads):
            return f"with {self.threads} threads and had {before.threads}, {differ}; OMP_NUM_THREADS={before.threads} keeps it"
        return None

    @property
    def _processes(self) -> str:
        return "1 process" if self.processes == 1 else f"{self.processes} processes (sharding: {self.sharding})"


def advice(differences: Differences, folder: Path) -> list[str]:
    """What to do about a run that is another one."""
    changed = [line.strip() for line in differences.forbidden]
    lines = ["Choose another run.dir, or undo the difference to resume that run."]
    if any(line.startswith(("validation.", "data.val:")) for line in changed):
        lines.append(
            "A run keeps its validation set and how it is sampled, because its curve and its best checkpoint compare results "
            "of all steps. How often it validates (run.validate_every) may change."
        )
    if any(line.startswith(("run.max_steps:", "run.epochs:")) for line in changed):
        lines.append(
            "A run keeps its length, which its learning rates depend on. To train longer, start another run from its model: "
            f"model.path={folder / 'model'} run.dir=…"
        )
    return lines


def _defaults_since(before: dict[str, Any], recipe: TrainingRecipe) -> dict[str, Any]:
    """Settings newer than the run had their defaults in it; those of a section that it did not have (LoRA) had none."""
    fields = settings_of(recipe.model_dump(), type(recipe))
    defaults = {".".join(map(str, place)): field for place, field in fields.items() if not field.is_required()}
    return {
        name: json.loads(json.dumps(defaults[name].default))
        for name in flatten(recipe).keys() & defaults.keys()
        if name.rpartition(".")[0] not in before
    }


def _model_digests(recipe: TrainingRecipe, template: ChatTemplate | None) -> dict[str, str]:
    if template is None:
        return {}
    return {
        "the model": weights_fingerprint(model_folder(recipe.model.path)),
        "the tokenizer": text_digest(template.tokenizer.backend_tokenizer.to_str()),  # pyright: ignore
        "the chat template": text_digest(template.text),
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split(".")
    return any(
        len(parts) == pattern.count(".") + 1 and all(map(fnmatch.fnmatchcase, parts, pattern.split("."))) for pattern in patterns
    )


def _shown(name: str, recipe: dict[str, Any]) -> str:
    return json.dumps(recipe[name], ensure_ascii=False) if name in recipe else "not set"


def _fingerprint(file: Path | Source) -> str:
    try:
        return file.fingerprint() if isinstance(file, Source) else fingerprint(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from None


@cache
def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    names = ("torch", "transformers", "peft", "safetensors", "numpy", "pyarrow")
    return {"plaudit": __version__, "python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory, and which files differ from it: names only, never content."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode or not os.access(".", os.R_OK):
        return None
    return {"commit": commit.stdout.strip(), "changed": [line[3:] for line in changed.stdout.splitlines()]}
