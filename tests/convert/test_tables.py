"""Every key of the other systems has an entry, and every entry names settings that exist."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from plaudit.config import settings as recipe_settings
from plaudit.convert.converted import convert
from plaudit.convert.values import flatten
from plaudit.other_systems import llamafactory, openrlhf, trl, verl
from plaudit.other_systems.entries import Table
from plaudit.recipe import STAGES

TABLES = [verl.TABLE, llamafactory.TABLE, trl.TABLE, openrlhf.TABLE]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_entries_name_settings_that_exist(table: Table):
    known = {".".join(map(str, place)) for recipe in STAGES.values() for place, _ in recipe_settings(recipe)}
    assert {setting for entry in table.keys.values() for setting in entry.to} <= known


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_aliases_are_of_keys_with_an_entry(table: Table):
    for alias in table.aliases:
        assert alias.endswith(".") or table.find(alias) is not None, alias


def test_a_key_that_no_version_has_is_unknown():
    assert all(table.find("actor_rollout_ref.actor.no_such_key") is None for table in TABLES)


# Packages' own lists ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Opens a package's wheel, without installing it."""
    folder = tmp_path_factory.mktemp("packages")

    def download(requirement: str) -> zipfile.ZipFile:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.11", "--only-binary=:all:"]
        try:
            done = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{requirement} cannot be downloaded within two minutes")
        wheel = next(folder.glob(f"{requirement.partition('=')[0]}-*.whl"), None)
        if wheel is None:
            pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        return zipfile.ZipFile(wheel)

    return download


def read(wheel: zipfile.ZipFile, ending: str) -> str:
    return wheel.read(next(name for name in wheel.namelist() if name.endswith(ending))).decode()


def fields(source: str) -> Iterator[str]:
    """Names of the fields of all dataclasses in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from (one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name))


def flags(source: str) -> Iterator[str]:
    """Names of the flags that an argument parser is given; those of actor and critic are made in a loop."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            written = ast.unparse(node.args[0])
            for prefix in ("actor", "critic") if "{prefix}" in written else ("",):
                yield written.removeprefix("f").strip("'\"").removeprefix("--").replace("{prefix}", prefix)


def missing(table: Table, keys: Iterator[str]) -> list[str]:
    return sorted({key for key in keys if not key.startswith("_") and table.find(key) is None})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["", "_megatron"])
def test_every_key_of_verl_has_an_entry(package, backend, tmp_path):
    content = read(package("verl==0.9.1"), f"trainer/config/_generated_ppo{backend}_trainer.yaml")
    keys = flatten(yaml.safe_load(content))
    assert len(keys) > 800
    assert missing(verl.TABLE, iter(keys)) == []
    (tmp_path / "verl.yaml").write_text(content)
    assert {line.key for line in convert(tmp_path / "verl.yaml").lines if line.key} == set(keys)


@pytest.mark.slow
def test_every_argument_of_llamafactory_has_an_entry(package):
    wheel = package("llamafactory==0.9.5")
    files = ("data_args", "finetuning_args", "model_args", "training_args", "generating_args")
    assert missing(llamafactory.TABLE, (name for file in files for name in fields(read(wheel, f"hparams/{file}.py")))) == []


@pytest.mark.slow
def test_every_argument_of_trl_has_an_entry(package):
    wheel = package("trl==1.16.0")
    files = ("base_config", "grpo_config", "rloo_config", "dpo_config", "sft_config", "reward_config", "model_config")
    assert missing(trl.TABLE, (name for file in files for name in fields(read(wheel, f"trainer/{file}.py")))) == []


@pytest.mark.slow
def test_every_flag_of_openrlhf_has_an_entry(package):
    wheel = package("openrlhf==0.11.2")
    programs = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")
    assert missing(openrlhf.TABLE, (name for program in programs for name in flags(read(wheel, f"cli/{program}.py")))) == []


@pytest.mark.parametrize("table", [llamafactory.TABLE, trl.TABLE], ids=lambda table: table.name)
def test_every_training_argument_of_transformers_has_an_entry(table):
    package = find_spec("transformers")  # its file is read; importing it takes seconds
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("training_args.py").read_text(encoding="utf-8")
    tree = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    assert missing(table, fields(ast.unparse(tree))) == []
