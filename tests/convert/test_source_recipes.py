"""The recipes of the sources have the settings of their launch scripts, as `plaudit convert` reads them, but for one table."""

import re
import shlex
from fnmatch import fnmatchcase
from typing import Any

import pytest

from plaudit.config import flatten, load
from plaudit.convert.converted import convert
from plaudit.data.conversations import Source
from plaudit.doctor.rows import check_steps, row_order
from plaudit.shipped import opening_comment
from support.paths import REPOSITORY

RECIPES = REPOSITORY / "recipes"
FOLDERS = ("grrm", "rlmt", "rubric", "several_rms", "tinyv")
SHIPPED = sorted(f"{path.parent.name}/{path.stem}" for name in FOLDERS for path in (RECIPES / name).glob("*.yaml"))
OWN = ("grrm/mini_rl", "grrm/mini_sft", "rlmt/sft_qwen_lora")
"""Not of a source."""
SIBLINGS = {
    "grrm/policy_grpo_cla": ("grrm/policy_grpo", {"data.train"}),
    "rlmt/grpo_llamabase_zero_nothink": ("rlmt/grpo_llamabase_zero_think", {"model.path"}),
    "rlmt/grpo_qweninstruct_warm-start_think": ("rlmt/grpo_llamainstruct_warm-start_think", {"model.path"}),
    "rlmt/ppo_llamabase_warm-start_think": (
        "rlmt/ppo_llamabase_warm-start_nothink",
        {"model.path", "rewards.0.view.longcot_config"},
    ),
}
"""Without a launch script here. Each has the settings of another recipe, but for these, and its own folder."""
COMMANDS = {
    "grrm_rm_sft": "grrm/sft",
    "rlmt_dpo": "rlmt/dpo_llama_think",
    "rlmt_sft_llama": "rlmt/sft_llama_think",
    "rlmt_sft_qwen": "rlmt/sft_qwen_think",
    "tinyv_grpo_recorded_run": "tinyv/grpo_addon",
}
"""Recipes that are not called as their launch script."""
COMMANDS |= {name.replace("/", "_"): name for name in SHIPPED if name not in (*OWN, *SIBLINGS, *COMMANDS.values())}
COMMANDS["tinyv_grpo_addon"] = "tinyv/grpo_addon"

FILES = "a path: of the source's machine there, of this repository's data, models and runs here"
ALLOWED = [
    ("*", "data.train", FILES),
    ("*", "data.val", FILES),
    ("*", "model.path", FILES),
    ("*", "run.dir", FILES),
    ("*", "rewards.*.model.path", FILES),
    ("several_rms/*", "rewards.?.path", "a path: the files of this folder, in place of the source's"),
    ("grrm/*", "data.dataset_info", "the file itself is named, instead of its entry in dataset_info.json"),
    ("tinyv/verifier_sft", "data.dataset_info", "the data set on the hub is named, instead of its entry in dataset_info.json"),
    ("*", "cluster.*", "a recipe computes the same on any number of GPUs: they are given when it is started"),
    ("rubric/ppo_*", "rewards.0.judge.template", "the words of the prompt are plaudit's; a script does not contain them"),
    ("rubric/ppo_*", "rewards.0.judge.model.arguments", "of the judge's server, which the script starts by itself"),
    ("tinyv/grpo_*", "rewards.0.judge.model.arguments", "of the judge's server, which the script starts by itself"),
    ("rubric/outcome_baseline", "rewards.*", "gsm8k's rule, for rows of another source than these, is left out"),
    ("several_rms/*", "rewards.?.gate*", "every reward model counts, as combine says; there only where the rule gives 1"),
    ("several_rms/multi_node_bge", "rewards.2.*", "the similarity by the source's service, which convert leaves to the reader"),
    ("rlmt/ppo_*", "rewards.0.view.longcot_config", "SFT without thoughts writes no such file, though the source names one"),
    ("rlmt/ppo_*", "train.tokens_per_micro_batch", "16 padded sequences at once do not fit; the gradient does not depend on it"),
    ("grrm/*", "train.tokens_per_micro_batch", "as many as a GPU has memory for; the gradient does not depend on it"),
    ("several_rms/*", "train.tokens_per_micro_batch", "as many as a GPU has memory for; the gradient does not depend on it"),
    ("rlmt/sft_*", "model.tokenizer", FILES),
    ("rlmt/sft_*", "model.liger", "plaudit's own fused layers save as much memory, and are faster"),
    ("rlmt/sft_*", "data.train_on", "rows have one answer; templates of thinking models hide earlier thoughts"),
    ("rlmt/sft_*", "train.tokens_per_micro_batch", "at least one row; the gradient does not depend on it"),
]
"""Recipe, setting, reason."""


def settings_of(name: str) -> dict[str, Any]:
    return flatten(load(RECIPES / f"{name}.yaml").recipe)


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> set[str]:
    return {name for name in {*theirs, *ours} if theirs.get(name, ...) != ours.get(name, ...)}


def explains(row: tuple[str, str, str], recipe: str, setting: str) -> bool:
    return fnmatchcase(recipe, row[0]) and fnmatchcase(setting, row[1])


@pytest.fixture(scope="module")
def differences(reference_commands, tmp_path_factory) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Of each launch script and its recipe: settings that differ, with their values in both."""
    found, file = {}, tmp_path_factory.mktemp("converted") / "recipe.yaml"
    for command, recipe in COMMANDS.items():
        # (run_outcome.sh relies on the defaults of its fork, and no key identifies that fork.)
        defaults = "rrm" if command.startswith("rubric") else "auto"
        file.write_text(convert(reference_commands / f"{command}.txt", gpus=8, defaults=defaults).recipe)
        theirs, ours = flatten(load(file).recipe), settings_of(recipe)
        found[command] = {name: (theirs.get(name), ours.get(name)) for name in differing(theirs, ours)}
    return found


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_recipe_has_the_settings_of_its_launch_script(command, differences):
    recipe = COMMANDS[command]
    unexplained = {
        setting: values
        for setting, values in differences[command].items()
        if not any(explains(row, recipe, setting) for row in ALLOWED)
    }
    assert unexplained == {}


def test_every_allowed_difference_occurs(differences):
    occurring = [(COMMANDS[command], setting) for command, found in differences.items() for setting in found]
    assert [row for row in ALLOWED if not any(explains(row, *one) for one in occurring)] == []


@pytest.mark.parametrize("recipe", SIBLINGS)
def test_a_recipe_without_a_script_has_the_settings_of_its_sibling(recipe):
    sibling, allowed = SIBLINGS[recipe]
    assert differing(settings_of(sibling), settings_of(recipe)) == {*allowed, "run.dir"}


def test_every_launch_script_has_a_recipe_and_every_recipe_a_source(reference_commands):
    scripts = {file.stem for file in reference_commands.glob("*.txt")}
    assert scripts == {*COMMANDS, "judge_server_rubric", "judge_server_tinyv"}
    for name in set(SHIPPED) - set(OWN):
        comment = opening_comment(RECIPES / f"{name}.yaml")
        assert any(line.startswith("Source: ") for line in comment), name
        assert any(line.startswith("Differs: ") for line in comment), name


@pytest.mark.parametrize("source", ["rubric", "tinyv"])
def test_the_judge_is_started_as_by_the_source_apart_from_tensor_parallelism(reference_commands, tmp_path, source):
    (tmp_path / "judge.yaml").write_text(convert(reference_commands / f"judge_server_{source}.txt").recipe)
    judge: Any = load(tmp_path / "judge.yaml").recipe
    [theirs] = judge.rewards
    words = list(theirs.model.arguments)
    place = words.index("--tensor-parallel-size")
    del words[place : place + 2]  # by default a recipe runs on one GPU
    for path in sorted((RECIPES / source).glob("*.yaml")):
        recipe: Any = load(path).recipe
        for reward in getattr(recipe, "rewards", ()):
            if reward.kind == "cascade":
                model = reward.judge.model
                assert (model.placement, " ".join(model.arguments).split()) == ("launch", words)
                assert source != "tinyv" or model.path == theirs.model.path


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_of_a_folder_lists_its_recipes_and_its_commands_are_valid(folder):
    page = (RECIPES / folder / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+)\.yaml\)", page))
    assert {f"{folder}/{name}" for name in linked} == {name for name in SHIPPED if name.startswith(f"{folder}/")}
    commands = [shlex.split(line) for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    for _, stage, recipe, *overrides in commands:
        assert load(REPOSITORY / recipe, overrides, stage).recipe.stage == stage
    together = " ".join(word for command in commands for word in command)
    assert " cluster.gpus=8" in together
    assert " cluster.nodes=2" in together


STEPS = {
    "grpo_llamabase_warm-start_think": 234, "grpo_llamabase_warm-start_nothink": 234, "grpo_llamabase_zero_think": 468,
    "grpo_llamabase_zero_nothink": 468, "grpo_llamainstruct_warm-start_think": 116, "grpo_llamainstruct_warm-start_nothink": 234,
    "grpo_qwenbase_warm-start_think": 234, "grpo_qwenbase_warm-start_nothink": 116, "grpo_qwenbase_zero_think": 234,
    "grpo_qwenbase_zero_nothink": 234, "grpo_qweninstruct_warm-start_think": 116, "grpo_qweninstruct_warm-start_nothink": 234,
    "ppo_llamabase_warm-start_think": 234, "ppo_llamabase_warm-start_nothink": 234,
}  # fmt: skip
"""Of RLMT's runs on WildChat-IF: floor(7544 / prompts_per_step) × epochs."""


def test_rlmt_trains_as_many_steps_as_the_source(real_data):
    files = [Source(real_data / "wildchat_if_train.parquet")]
    for name, steps in STEPS.items():
        path = RECIPES / f"rlmt/{name}.yaml"
        recipe: Any = load(path).recipe
        [(_, text)] = check_steps(recipe, row_order(recipe, files))
        assert text.startswith(f"at most {steps} steps of {recipe.train.prompts_per_step} prompts"), name
        assert re.search(rf"; {steps} steps\.", " ".join(opening_comment(path))), name
