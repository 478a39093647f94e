"""Recipes: parsing, validation and error messages."""

import fnmatch
import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from plaudit import plugins
from plaudit.config import LoadedRecipe, flatten, load
from plaudit.config import settings as recipe_settings
from plaudit.errors import PlauditError, RecipeError, nearest_path
from plaudit.explain import explain, to_yaml
from plaudit.recipe import STAGES, OptimSettings, RewardSettings, Section, SFTRecipe
from plaudit.recipe.rewards import OneReward
from plaudit.redaction import redact
from plaudit.train.schedule import lr_at
from support.paths import REPOSITORY

MINIMAL = """\
model: {path: m}
data: {train: rows.jsonl}
run: {dir: runs/a}
"""
RL = f"{MINIMAL}rewards: [{{kind: length, at_most: 5}}]\n"
SECRET = "sk-abcdef1234567890abcd"


@pytest.fixture
def read(tmp_path):
    """Loads a recipe from this text with these overrides."""

    def read(text: str = MINIMAL, *overrides: str, stage: str | None = None) -> LoadedRecipe:
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return load(path, overrides, stage)

    return read


@pytest.fixture
def error_for(read, tmp_path):
    """Returns the one-line error of an invalid recipe, without the file's folder."""

    def error_for(text: str = MINIMAL, *overrides: str, stage: str | None = None) -> str:
        with pytest.raises(RecipeError) as caught:
            read(text, *overrides, stage=stage)
        message = str(caught.value).replace(f"{tmp_path}/", "")
        assert message
        assert "\n" not in message
        return message

    return error_for


def value_of(loaded: LoadedRecipe, name: str):
    value = loaded.recipe
    for part in name.split("."):
        value = getattr(value, part)
    return value


# YAML ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.lr", "1e-5", 1e-5),
        ("optim.lr", "1E3", 1000.0),
        ("optim.lr", ".5", 0.5),
        ("optim.lr", "5.", 5.0),
        ("optim.lr", "+1.5e+2", 150.0),
        ("optim.lr", "2", 2.0),
        ("seed", "0o17", 15),
        ("seed", "0x1F", 31),
        ("seed", "017", 17),
        ("train.rows_per_step", "1e3", 1000),
        ("run.keep_best", "true", True),
        ("run.keep_best", "False", False),
        ("run.keep_best", "TRUE", True),
        ("optim.max_grad_norm", "null", None),
        ("optim.max_grad_norm", "~", None),
        ("optim.max_grad_norm", "", None),
        ("optim.max_grad_norm", "# nothing here", None),
        ("run.project", "yes", "yes"),
        ("run.project", "no", "no"),
        ("run.project", "on", "on"),
        ("run.project", "Off", "Off"),
        ("run.project", "12:30:45", "12:30:45"),
        ("run.project", "2024-01-31", "2024-01-31"),
        ("run.project", "0b101", "0b101"),
        ("run.project", "1_000", "1_000"),
        ("run.project", "1.2.3", "1.2.3"),
        ("run.project", "=", "="),
        ("run.project", "'1e-5'", "1e-5"),
        ("run.project", '"17"', "17"),
        ("run.project", "'null'", "null"),
        ("run.project", "!!str 17", "17"),
        ("run.project", "ünïcödé", "ünïcödé"),
        ("data.train", "a.jsonl", ("a.jsonl",)),
        ("data.train", "[a.jsonl, b.jsonl]", ("a.jsonl", "b.jsonl")),
    ],
)
def test_values_are_read_as_yaml_1_2(read, name, text, value):
    section, _, setting = name.rpartition(".")
    lines = {"model": "path: m", "data": "train: rows.jsonl", "run": "dir: runs/a"}
    if section in lines and setting not in lines[section]:
        lines[section] += f"\n  {setting}: {text}"
    else:
        lines[section or setting] = f"{setting}: {text}"
    document = "".join(f"{key}:\n  {inner}\n" for key, inner in lines.items() if key != "seed")
    document += f"seed: {text}\n" if name == "seed" else ""
    got = value_of(read(document), name)
    assert got == value
    assert type(got) is type(value)
    # The command line follows the same rules.
    assert value_of(read(MINIMAL, f"{name}={text}"), name) == value


def test_yaml_anchors_work(read):
    recipe = read("model: {path: &here m, tokenizer: *here}\ndata: {train: x}\nrun: {dir: d}").recipe
    assert recipe.model.tokenizer == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml is not a recipe"),
        ("# only a comment\n", "r.yaml is not a recipe"),
        ("- model\n", "r.yaml is not a recipe"),
        ("just words", "r.yaml is not a recipe"),
        ("seed: 1\nmodel: {path: m\nrun: x", "r.yaml:3: not valid YAML: "),
        ("seed: 1\n\tmodel: m", "r.yaml:2: not valid YAML: "),
        ("seed: 1\n---\nseed: 2", "r.yaml:2: not valid YAML: found another document"),
        ("seed: \x00", "r.yaml: not valid YAML: "),
        ("seed: *unknown", "r.yaml:1: not valid YAML: "),
        (f"{MINIMAL}optim:\n  lr: 1\n  lr: 2\n", "r.yaml:6: optim.lr is given twice"),
        ("model: {path: m}\nmodel: {path: m}\n", "r.yaml:2: model is given twice"),
        ("seed: 1\n[a, b]: 2\n", "r.yaml:2: the name of a setting should be a word"),
        ("seed: !!int abc", 'r.yaml:1: seed: "abc" is not of YAML\'s type int'),
        ("\nseed: !!python/name:os.system x", "r.yaml:2: seed: the YAML tag "),
        ("\nmodel: !!set {path}", "r.yaml:2: model: the YAML tag set has no meaning"),
        ("model: &m {path: *m}", "r.yaml:1: model.path is nested too deeply"),
        (f"seed: {'[' * 5000}", "r.yaml is not a recipe: it is nested too deeply"),
    ],
)
def test_text_that_is_not_a_recipe_is_rejected(error_for, text, message):
    assert error_for(text).startswith(message)


@pytest.mark.parametrize(
    ("name", "suggested"), [("trian.jsonl", True), ("train.json", True), ("rows.jsonl", False), ("test.jsonl", False)]
)
def test_only_similar_files_are_suggested(tmp_path, name, suggested):
    (tmp_path / "train.jsonl").touch()
    assert ("Did you mean" in nearest_path(tmp_path / name)) == suggested


def test_a_missing_file_suggests_the_nearest_name(tmp_path):
    (tmp_path / "sft.yaml").write_text(MINIMAL)
    (tmp_path / "unrelated").write_text("")
    with pytest.raises(RecipeError, match=r"stf\.yaml does not exist\. Did you mean .*/sft\.yaml\?$"):
        load(tmp_path / "stf.yaml")
    with pytest.raises(RecipeError, match=r"quite-different does not exist.$"):
        load(tmp_path / "quite-different")
    with pytest.raises(RecipeError, match=r"There is no folder .*nowhere either"):
        load(tmp_path / "nowhere" / "sft.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path)
    assert nearest_path(tmp_path / "sft.yml") == f" Did you mean {tmp_path / 'sft.yaml'}?"


# Wrong settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("run.lr=1", "optim.lr"),
        ("optm.lr=1", "optim"),
        ("model.lora.ranks=4", "model.lora.rank"),
        ("model.lora.merge=false", "model.lora.merge_on_save"),
        ("lora.rank=4", "model.lora"),
        ("optim.rank=4", "model.lora.rank"),
        ("run.warmup_steps=4", "optim.warmup_steps"),
        ("warmup_step=4", "optim.warmup_steps"),
        ("train.row_per_step=4", "train.rows_per_step"),
        ("sed=1", "seed"),
    ],
)
def test_unknown_settings_are_refused_with_a_suggestion(error_for, override, suggestion):
    message = error_for(MINIMAL, override)
    assert "is not a setting." in message
    assert message.endswith(f" Did you mean {suggestion}?")


def test_unknown_settings_are_located(error_for):
    assert error_for(f"{MINIMAL}optim:\n  lrr: 1\n") == "r.yaml:5: optim.lrr is not a setting. Did you mean optim.lr?"
    assert error_for(MINIMAL, "zzzzzz=1") == "r.yaml (command line): zzzzzz is not a setting."
    # A name with dots is for the command line; suggesting the same name would not help.
    assert error_for(f"{MINIMAL}optim.lr: 1").endswith("sections are nested: optim: {lr: …}.")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=fast", 'optim.lr should be a valid number, not "fast".'),
        ("optim.lr=true", "optim.lr: should not be true"),
        ("optim.lr=[1]", "optim.lr should be a valid number, not [1]."),
        ("optim.lr={a: 1}", "optim.lr should be a valid number, not a section."),
        ("optim.lr=null", "optim.lr should be a valid number, not null."),
        ("optim.lr=", "optim.lr should be a valid number, not null."),
        ("optim.lr=0", "optim.lr should be greater than 0, not 0."),
        ("optim.lr=.inf", "optim.lr should be a finite number, not Infinity."),
        ("optim.lr=.nan", "optim.lr should be a finite number, not NaN."),
        ("optim.lr=1e999", "optim.lr should be a finite number, not Infinity."),
        ("optim.betas=0.9", "optim.betas should be a list, not 0.9."),
        ("optim.betas=[0.9]", "optim.betas has too few values (Decay rates of"),
        ("optim.betas=[0.9, 0.9, 0.9]", "optim.betas should be 2 values, not [0.9, 0.9, 0.9]."),
        ("optim.betas=[0.9, x]", 'optim.betas.1 should be a valid number, not "x".'),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1 should be less than 1, not 1.0."),
        ("optim.betas=[true, 0.9]", "optim.betas: should not be true"),
        ("optim=3", "optim should be a section, not 3."),
        ("optim=[lr]", 'optim should be a section, not ["lr"].'),
        ("optim=null", "optim should be a section, not null."),
        ("model.lora=yes", 'model.lora should be a section, not "yes".'),
        ("model.lora.targets=7", "model.lora.targets should be a valid string, not 7."),
        ("seed=1.5", "seed should be a valid integer, not 1.5."),
        ("seed=-1", "seed should be greater than or equal to 0, not -1."),
        ("model.gradient_checkpointing=1.5", "gradient_checkpointing: should be true, false, auto or a number of layers, not 1.5"),
        ("train.keep_logits=atuo", 'train.keep_logits: should be true, false or auto, not "atuo"'),
        ("model.gradient_checkpointing=0", "gradient_checkpointing: should be true, false, auto or a number of layers, not 0"),
        ("run.keep_best=maybe", 'run.keep_best should be true or false, not "maybe".'),
        ("run.project=12", "run.project should be a valid string, not 12."),
        ("run.dir=true", "run.dir: should not be true"),
        ("data.train=7", "data.train should be a list, not 7."),
        ("data.train=[a, 7]", "data.train.1 should be a valid string, not 7."),
        ("run.trackers=[wandbb]", "Did you mean wandb?"),
        (
            "optim.schedule=cosin",
            "should be 'constant', 'linear', 'cosine' or 'wsd', not \"cosin\". Did you mean cosine?",
        ),
        ("optim.schedule=zzz", "should be 'constant', 'linear', 'cosine' or 'wsd', not \"zzz\"."),
        ("optim={warmup_steps: 3, warmup_ratio: 0.1}", "optim: set warmup_steps or warmup_ratio, not both"),
        ("optim={schedule: constant, min_lr_ratio: 0.1}", "optim: min_lr_ratio has no effect: schedule constant"),
        (
            "optim={schedule: constant, min_lr_ratio: 0.0}",
            "min_lr_ratio has no effect: schedule constant does not decay. Remove it",
        ),  # even though it is the default
        (
            "optim={schedule: cosine, decay_ratio: 0.1}",
            "optim: decay_ratio has no effect: it applies to schedule wsd, not cosine. Remove it",
        ),
        ("data.train=[]", "data.train: is empty; name at least one file"),
        ("data.train=null", "data.train should be a list, not null."),
        ("data.val=true", "data.val: should not be true"),
        ("model.lora.targets=[q_proj, lm_head]", "model.lora.targets: lm_head cannot be adapted"),
    ],
)
def test_wrong_values_are_refused(error_for, override, message):
    error = error_for(MINIMAL, override)
    assert error.startswith("r.yaml (command line): ")
    assert message in error


def test_mistakes_are_located_and_each_gets_a_line(error_for, read):
    assert error_for(f"{MINIMAL}optim:\n  eps: 1e-6\n  lr: fast\n").startswith("r.yaml:6: optim.lr should be")
    both = f"{MINIMAL}optim:\n  warmup_steps: 3\n  warmup_ratio: 0.1\n"
    assert error_for(both) == "r.yaml:5: optim: set warmup_steps or warmup_ratio, not both"
    with pytest.raises(RecipeError) as caught:
        read(MINIMAL, "optim.lr=fast", "sed=1", "optim.betas=[0]")
    assert len(str(caught.value).splitlines()) == 3


def test_every_boolean_that_should_be_a_number_gets_a_line(read, tmp_path):
    with pytest.raises(RecipeError) as caught:
        read(f"{MINIMAL}optim:\n  lr: true\n  eps: false\n", "seed=x", "model.lora.rank=true")
    assert str(caught.value).replace(f"{tmp_path}/", "").splitlines() == [
        'r.yaml (command line): seed should be a valid integer, not "x".',
        "r.yaml (command line): model.lora.rank: should not be true",
        "r.yaml:5: optim.lr: should not be true",
        "r.yaml:6: optim.eps: should not be false",
    ]


class Length(Section):
    kind: Literal["length"]
    weight: float = 1.0
    limit: int


class Judge(Section):
    kind: Literal["judge"]
    model: str = ""


class WithRewards(SFTRecipe):
    rewards: list[Annotated[Length | Judge, Field(discriminator="kind")]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{kind: length, limit: 1, weight: true}", "r.yaml:5: rewards.0.weight: should not be true"),
        ("{kind: length, limit: x}", 'r.yaml:5: rewards.0.limit should be a valid integer, not "x".'),
        ("{kind: length}", "r.yaml:5: rewards.0.limit is missing"),
        ("{kind: judge, limit: 1}", "r.yaml:5: rewards.0.limit is not a setting."),
        ("{kind: juge}", "r.yaml:5: rewards.0.kind should be one of 'length', 'judge', not \"juge\". Did you mean judge?"),
        ("{limit: 1}", "r.yaml:5: rewards.0.kind is missing"),
        ("length", 'r.yaml:5: rewards.0 should be a section, not "length".'),
    ],
)
def test_a_list_of_sections_distinguished_by_kind(read, error_for, monkeypatch, entry, message):
    monkeypatch.setitem(STAGES, "sft", WithRewards)
    good = read(f"{MINIMAL}rewards:\n- {{kind: judge, model: m}}\n- {{kind: length, limit: 3}}\n").recipe
    assert isinstance(good, WithRewards)
    assert good.rewards == [Judge(kind="judge", model="m"), Length(kind="length", limit=3)]
    assert error_for(f"{MINIMAL}rewards:\n- {entry}\n").startswith(message)


def test_missing_settings_are_described(error_for):
    assert error_for("model: {path: m}\ndata: {train: x}\n") == (
        "r.yaml: run is missing (Run folder, length, validation and checkpoints.)"
    )
    assert error_for("data: {train: x}\nrun: {dir: d}\nmodel: {dtype: auto}").startswith(
        "r.yaml:3: model.path is missing (A folder in Hugging Face format"
    )


def test_stage(read, error_for):
    assert read(MINIMAL, stage="sft").recipe.stage == "sft"
    assert read(f"stage: sft\n{MINIMAL}").recipe.stage == "sft"
    assert (
        error_for(f"{MINIMAL}stage: sftt")
        == 'r.yaml:4: stage should be one of sft, dpo, reward-model, rl, score, not "sftt". Did you mean sft?'
    )
    assert (
        error_for(f"{MINIMAL}stage: [sft]")
        == 'r.yaml:4: stage should be one of sft, dpo, reward-model, rl, score, not ["sft"]. Did you mean sft?'
    )
    assert "stage should be 'sft', not null" in error_for(f"{MINIMAL}stage: null")


def test_a_recipe_for_another_verb_is_rejected(read, monkeypatch):
    monkeypatch.setitem(STAGES, "other", SFTRecipe)
    with pytest.raises(RecipeError, match="is a recipe for `plaudit sft`, not `plaudit other`"):
        read(f"stage: sft\n{MINIMAL}", stage="other")


# Overrides -----------------------------------------------------------------------------------------------------------


def test_overrides_reach_every_kind_of_setting(read):
    text = f"{MINIMAL}optim: {{lr: 1, betas: [0.5, 0.6]}}\n"
    recipe = read(
        text,
        "model.lora.rank=8",
        "optim.betas.1=0.7",
        "data.train=[a.jsonl, b.jsonl]",
        "data.train.0=c.jsonl",
        "optim.max_grad_norm=null",
        "run.trackers=[wandb]",
        " run.project = a=b",
        "run.dir=runs/[1",  # not valid YAML, but a valid folder name
        "model.tokenizer=",
    ).recipe
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (8, 32.0)
    assert recipe.optim.betas == (0.5, 0.7)
    assert recipe.data.train == ("c.jsonl", "b.jsonl")
    assert recipe.optim.max_grad_norm is None
    assert recipe.run.trackers == ("wandb",)
    assert (recipe.run.project, recipe.run.dir) == ("a=b", "runs/[1")
    assert recipe.model.tokenizer is None
    assert recipe.optim.lr == 1.0


def test_null_resets_settings_that_are_not_nullable(read, error_for):
    text = "model: {path: m}\ndata: {train: a}\nrun: {dir: d}\noptim: {schedule: wsd, decay_ratio: 0.2, min_lr_ratio: 0.1}\n"
    loaded = read(text, "optim.schedule=constant", "optim.decay_ratio=null", "optim.min_lr_ratio=")
    assert (loaded.recipe.optim.schedule, loaded.recipe.optim.decay_ratio) == ("constant", 0.1)
    assert "optim.lr should be a valid number, not null" in error_for(text.replace("schedule: wsd,", "schedule: wsd, lr: null,"))
    assert "model.path should be a valid string, not null" in error_for(text, "model.path=null")


@pytest.mark.parametrize("override", ["data.val=null", "data.val=", "data.val=[]"])
def test_optional_files_can_be_reset(read, override):
    text = "model: {path: m}\ndata: {train: a, val: b}\nrun: {dir: d}\n"
    assert read(text).recipe.data.val == ("b",)
    assert read(text, override).recipe.data.val == ()


def test_command_line_beats_file_beats_default(read):
    text = f"{MINIMAL}optim: {{lr: 0.5, eps: 0.5}}\n"
    assert read(text).recipe.optim.lr == 0.5
    optim = read(text, "optim.lr=0.25", "optim.lr=0.125").recipe.optim
    assert (optim.lr, optim.eps, optim.weight_decay) == (0.125, 0.5, 0.0)
    assert read(text, "optim={lr: 2}").recipe.optim.eps == 1e-8
    assert read(f"{MINIMAL}optim: {{lr: 0.5}}\n", "optim=null", "optim.lr=2").recipe.optim.lr == 2.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "'optim.lr' is not an override: write it as section.name=value"),
        ("=3", "is not an override"),
        (" =3", "is not an override"),
        ("data.train.2=x", "data.train.2: there is no entry 2: data.train has 2 entries, data.train.0 to data.train.1"),
        ("--optim.lr=1", "'--optim.lr=1' is not an override: write optim.lr=1, without dashes"),
        ("optum.lr=1", "r.yaml (command line): optum is not a setting. Did you mean optim?"),
        ("rolout.n.m=1", "r.yaml (command line): rolout is not a setting."),
        ("data.train.last=x", "there is no entry last"),
        ("data.train.0.name=x", "data.train.0.name: there is no entry name"),
        ("data.train.²=x", "there is no entry ²"),
        ("optim.0=x", "optim.0 is not a setting"),
        ("optim..lr=1", "optim. is not a setting"),
        ("optim={lr: 1, lr: 2}", "command line: optim.lr is given twice"),
        ("optim.lr=!!int x", 'command line: optim.lr: "x" is not of YAML\'s type int'),
        (f"optim.lr={'[' * 5000}", "command line: optim.lr is nested too deeply"),
    ],
)
def test_unusable_overrides_are_reported(error_for, override, message):
    assert message in error_for("model: {path: m}\ndata: {train: [a, b]}\nrun: {dir: d}\n", override)


# Output --------------------------------------------------------------------------------------------------------------


def test_to_yaml_shows_where_values_come_from(read, tmp_path):
    text = f"{MINIMAL}optim:\n  lr: 1e-4\n  betas: [0.5, 0.6]\n"
    shown = to_yaml(read(text, "optim.eps=1e-6", "optim.betas.0=0.7", "model.lora.rank=4"))
    comments = {line.split("#")[0].strip(): line.partition("# ")[2] for line in shown.splitlines()}
    assert comments["lr: 0.0001"] == f"{tmp_path}/r.yaml:5"
    assert comments["eps: 1e-06"] == comments["rank: 4"] == "command line"
    assert comments["betas: [0.7, 0.6]"] == f"{tmp_path}/r.yaml:6 and command line"
    assert comments["weight_decay: 0.0"] == comments["alpha: 32.0"] == comments["warmup_steps: null"] == "default"
    assert comments["path: m"] == f"{tmp_path}/r.yaml:1"


def test_explain_describes_settings(read):
    lines = [" ".join(line.split()) for line in explain(read()).splitlines()]
    assert lines[lines.index("lr: 1e-05 # number > 0 [default]") + 1] == "# Peak learning rate of AdamW."
    assert "optim: # Optimiser and learning-rate schedule." in lines
    assert "dtype: auto # auto | float32 | bfloat16 [default]" in lines


def test_explain_lists_the_settings_of_unset_sections(read):
    lines = [" ".join(line.split()) for line in explain(read(RL)).splitlines()]
    for setting in (
        "# rank: 16 # integer > 0 [default]",
        "# loss_coefficient: 0.5 # number ≥ 0 [default]",
        "# estimator: k1 # k1 | abs | k2 | k3 [default]",
        "# high: 2.0 # number > 1 [default]",
        "# max_rounds: 5 # integer > 0 [default]",
        "# placement: resident # resident | offload [default]",
    ):
        assert setting in lines, setting
    assert "gradient_checkpointing: false # true | false | integer > 0 | auto [default]" in lines


def test_explain_prints_only_the_named_settings(read):
    loaded = read(RL)
    critic = explain(loaded, ["critic"])
    assert critic.startswith("critic: null")
    assert "pretrain_steps: 0" in critic
    assert "rollout" not in critic.replace("rollout.", "")
    one = explain(loaded, ["optim.lr"])
    assert [line.split("#")[0].strip() for line in one.splitlines()] == ["optim:", "lr: 1e-06", ""]
    assert "# max_tokens: … " in explain(loaded, ["rewards.overlong"]), "a kind that the recipe does not use"
    with pytest.raises(RecipeError, match=r"--explain: critc is not a setting of rl recipes\. Did you mean critic\?"):
        explain(loaded, ["critc"])
    with pytest.raises(RecipeError, match=r"of rl recipes, only of sft recipes\. Did you mean train\.prompts_per_step\?$"):
        explain(loaded, ["train.rows_per_step"])
    with pytest.raises(
        RecipeError, match=r"rewards\.judge\.model is not a setting of sft recipes, only of rl and score recipes\.$"
    ):
        explain(read(f"stage: sft\n{MINIMAL}"), ["rewards.judge.model"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rewards.jugde", "Did you mean rewards.judge?"),
        ("rewads.judge", "Did you mean rewards.judge?"),
        ("rewards.jugde.modle.pth", "Did you mean rewards.judge.model.path?"),
        ("rewards.0.wieght", "Did you mean rewards.0.weight?"),
        ("rewards.7", "Its rewards are rewards.0 (length)."),
        ("optm.lrr", "Did you mean optim.lr?"),
        ("lr", "Did you mean optim.lr?"),
        ("critc.lr", "Did you mean critic.optim.lr?"),
        ("judge", "Did you mean rewards.judge?"),
        ("max_response_length", "Did you mean rollout.max_new_tokens?"),
        ("something.else", "Its sections are stage, seed, model, "),
    ],
)
def test_explain_suggests_what_a_misspelt_name_may_have_meant(read, name, hint):
    with pytest.raises(RecipeError, match=re.escape(f"--explain: {name} is not a setting of rl recipes. {hint}")):
        explain(read(RL), [name])


def explained(loaded: LoadedRecipe, *names: str) -> list[str]:
    """The lines of the explanation, without their alignment."""
    return [" ".join(line.split()) for line in explain(loaded, names).splitlines()]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("critic", "critic: null # section | null [default]"),
        ("rewards.judge", "# model: … # section [required]"),
        ("rewards.judge", "# gate: null # section | null [default]"),
        ("rewards.judge", "# fields: [] # list of sections [default]"),
        ("rewards.rubric_judge", "# criteria: … # list of sections [required]"),
        ("rewards.cascade", "# judge: … # a reward of any kind [required]"),
        ("rewards.cascade", "# rule: null # a reward of any kind | null [default]"),
    ],
)
def test_explain_says_null_only_where_it_is_allowed(read, name, line):
    assert line in explained(read(RL), name)


@pytest.mark.parametrize("kind", plugins.kinds("rewards"))
def test_explain_describes_the_values_of_every_setting_of_a_reward(read, kind):
    settings_with_values = [line for line in explained(read(RL), f"rewards.{kind}") if re.match(r"# (- )?\w+: \S+.* # ", line)]
    assert settings_with_values
    for line in settings_with_values:
        allowed = line.rpartition(" # ")[2].partition(" [")[0]
        assert allowed, line
        assert not allowed.startswith("|"), line


def test_explain_lists_the_settings_of_required_sections(read):
    lines = explained(read(RL), "rewards.judge")
    model, sampling = lines.index("# model: … # section [required]"), lines.index("# sampling: # How its answers are sampled.")
    assert "# path: null # text | null [default]" in lines[model:sampling]
    assert "# - name: … # text [required]" in explained(read(RL), "rewards.rubric_judge.criteria")
    judge = ["# judge: … # a reward of any kind [required]", "# The judge: a reward of any kind."]
    assert explained(read(RL), "rewards.cascade.judge")[1:] == judge, "its kind decides which settings it has"


def test_an_explained_list_of_sections_reads_back_without_its_comment_signs(read):
    """`# criteria: …` and the settings of an entry, uncommented."""
    lines = explain(read(RL), ["rewards.rubric_judge.criteria"]).splitlines()[1:]
    bare = [line.replace("# ", "", 1).replace("…", "x" if "name" in line else "") for line in lines if "#     " not in line]
    assert yaml.safe_load("\n".join(bare)) == {"criteria": [{"name": "x", "description": "", "weight": 1.0}]}


def test_explain_prints_single_settings_of_a_kind_of_reward(read):
    loaded = read(RL)
    model = explained(loaded, "rewards.judge.model")
    assert model[0].startswith("rewards: #")
    assert model[1] == "# model: … # section [required]"
    assert "# dialect: vllm # vllm | sglang | openai [default]" in model
    assert not [line for line in model if line.startswith(("# limits:", "# kind:", "at_most:"))]
    limits, retries = explained(loaded, "rewards.judge.limits.retries")[1:3]
    assert limits.startswith("# limits: #")
    assert retries == "# retries: 4 # integer ≥ 0 [default]"
    both = explained(loaded, "rewards.judge.limits.retries", "rewards.judge.limits.pause_s", "rewards.overlong.max_tokens")
    assert [line.split(":")[0] for line in both if re.match(r"(# )?\w+: .*#", line)] == [
        "rewards", "# limits", "# pause_s", "# retries", "# max_tokens",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"rewards\.judge\.modl is not .* Did you mean rewards\.judge\.model\?"):
        explain(loaded, ["rewards.judge.modl"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("algorithm.clip=0.1", "algorithm.clip_ratio"),
        ("algorithm.kl_kind=k1", "algorithm.kl_estimator"),
        ("algorithm.kl_reward.kind=k1", "algorithm.kl_reward.estimator"),
        ("algorithm.reference_placement=offload", "reference.placement"),
        ("critic.clip=0.1", "critic.clip_value"),
        ("critic.coefficient=0.1", "critic.loss_coefficient"),
        ("critic.warmup_steps=2", "critic.pretrain_steps"),
        ("critic.optim.offload=true", "critic.optim.placement"),
        ("optim.offload=true", "optim.placement"),
        ("run.repeatable=true", "run.deterministic"),
    ],
)
def test_old_names_suggest_the_new_ones(error_for, old, new):
    assert f"is not a setting. Did you mean {new}?" in error_for(RL, old)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rollout={n: 2}", "rollout is not a setting of sft recipes, only of rl recipes."),
        ("rewards=[{kind: length}]", "rewards is not a setting of sft recipes, only of rl and score recipes."),
        ("train.share_prompts=true", "share_prompts is not a setting of sft recipes, only of dpo, reward-model and rl recipes."),
        ("train.pairs_per_step=2", "only of dpo and reward-model recipes. Did you mean train.rows_per_step?"),
        ("run.keep_tokens=true", "run.keep_tokens is not a setting of sft recipes, only of rl recipes."),
        ("optim.rows_per_step=2", "optim.rows_per_step is not a setting. Did you mean train.rows_per_step?"),
    ],
)
def test_settings_of_other_stages_are_recognised(error_for, given, message):
    assert error_for(f"stage: sft\n{MINIMAL}", given).endswith(message)


def test_a_stage_that_was_not_named_is_stated(error_for):
    sections = f"{MINIMAL}reference: {{path: m}}\nloss: {{beta: 0.1}}\nrollout: {{n: 2}}\n"
    message = "r.yaml:6: rollout is not a setting of dpo recipes, only of rl recipes."
    assert error_for(sections) == f"{message} The recipe names no stage and was taken for dpo; if it is another, add `stage: …`."
    assert error_for(f"{sections}stage: dpo\n") == message


def test_the_engine_is_native_or_a_class_in_a_file(read, error_for):
    assert read(RL, "rollout.engine=engines/mine.py:Mine").recipe.rollout.engine == "engines/mine.py:Mine"
    for wrong in ("vlm", "mine.py", ".py:Mine", ":Mine", "mine:Mine"):
        assert "rollout.engine: should be native, vllm, sglang, or your own engine as file.py:Class" in error_for(
            RL, f"rollout.engine={wrong}"
        )


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (["url=http://a:1", "tensor_parallel=2"], "tensor_parallel has no effect: url names servers that run already"),
        (["url=http://a:1", "program=vllm"], "program has no effect"),
        (["url=http://a:1?x=1"], "should have no user, password or query"),
        (["url=http://a:1", "weights=files"], "weights: files with url needs weights_folder"),
        (["credential=KEY"], "credential has no effect: a server that plaudit starts gets a key of its own"),
        (["gpus=[1]", "sleep=true"], "sleep has no effect: servers with gpus of their own keep their memory"),
        (["gpus=[1,1]"], "gpus names a GPU twice"),
        (["gpus=[1,2,3]", "tensor_parallel=2"], "3 gpus cannot be divided among servers that need 2 each (tensor_parallel)"),
    ],
)
def test_contradictory_settings_of_an_engines_server(error_for, server, message):
    assert message in error_for(RL, "rollout.engine=vllm", *(f"rollout.server.{setting}" for setting in server))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["metrics=[pass@5]"], "metrics: pass@5 needs 5 samples per prompt, and validation.n is 4: raise it"),
        (["metrics=best-of@2"], "'best-of@2' is not one of pass@k, majority@k and best_of@k, with a number for k"),
        (["metrics=[pass@k]"], "'pass@k' is not one of"),
        (["metrics=[pass@2]", "temperature=0"], "pass@2 of greedy samples, which are all the same: set validation.temperature"),
        (["metrics=[majority@2]"], "majority@2 counts equal answers, and no reward reads"),
        (["metrics=[pass@2]", "gold=exakt"], "validation.gold: no reward is called 'exakt' (found: "),
        (["gold=exact"], "gold has no effect: validation.metrics is empty"),
    ],
)
def test_wrong_metrics_of_a_validation(error_for, settings, message):
    assert message in error_for(RL, "validation.n=4", "validation.temperature=1", *(f"validation.{one}" for one in settings))


def test_settings_are_at_most_four_levels_deep():
    """a.b.c.d; list indices do not count."""
    places = {place for recipe in STAGES.values() for place, _ in recipe_settings(recipe)}
    for kind in plugins.kinds("rewards"):
        places |= {place for place, _ in recipe_settings(plugins.kind("rewards", kind), ("rewards",))}
    assert not {".".join(map(str, place)) for place in places if len(place) > 4}


def assert_reads_back(loaded: LoadedRecipe, folder) -> None:
    for text in (to_yaml(loaded), explain(loaded)):
        path = folder / "back.yaml"
        path.write_text(text, encoding="utf-8")
        assert load(path).recipe == loaded.recipe


@pytest.mark.parametrize(
    "text",
    ["", " ", "1e-5", "0o17", "0x1F", ".5", "yes", "null", "~", "true", "12:30:45", "a: b", "a #b", "# a", "- a", "'",
     '"', "a\nb", "a\n", "\n", "\r\n", "a\tb", "...", "---", "a\n...", "é", "😀", "\x00", "\x85", "\u2028", "\ufeff",
     "{a}", "[a]", "*a", "&a", "!a", "%a", "@a", "`a", "x" * 300, "a, b " * 60, "\\"],
)  # fmt: skip
def test_any_string_reads_back(text, read, tmp_path):
    recipe = SFTRecipe.model_validate({"model": {"path": text}, "data": {"train": [text, text]}, "run": {"dir": text}})
    assert_reads_back(LoadedRecipe(recipe, tmp_path / "r.yaml", {}), tmp_path)


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
below_one = st.floats(0, 1, exclude_max=True)
recipes = st.builds(
    lambda texts, numbers, betas, seed, lora, trackers: {
        "seed": seed,
        "model": {"path": texts[0], "chat_template": texts[1], "lora": lora},
        "data": {"train": texts, "val": texts[2:]},
        "optim": {"lr": numbers[0], "eps": numbers[1], "betas": betas, "max_grad_norm": numbers[2]},
        "run": {"dir": texts[2], "trackers": trackers},
    },
    st.lists(st.text(), min_size=3, max_size=4),
    st.lists(positive, min_size=3, max_size=3),
    st.tuples(below_one, below_one),
    st.integers(min_value=0),
    st.none() | st.fixed_dictionaries({"rank": st.integers(1), "targets": st.text() | st.lists(st.text(max_size=5))}),
    st.lists(st.sampled_from(["wandb", "mlflow"])),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=recipes)
def test_every_recipe_reads_back(tree, tmp_path):
    try:
        recipe = SFTRecipe.model_validate(tree)
    except ValidationError:
        return  # lm_head among the targets
    assert_reads_back(LoadedRecipe(recipe, tmp_path / "r.yaml", {}), tmp_path)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "optim.lr": positive,
            "optim.betas": st.lists(below_one, min_size=2, max_size=2),
            "optim.max_grad_norm": st.none() | positive,
            "seed": st.integers(0, 2**63),
            "model.lora.rank": st.integers(1, 999),
            "run.keep_best": st.booleans(),
            "run.project": st.text("abc xyz-_/.:#'\"{}[],\\\n0123456789"),
        },
    )
)
def test_override_values_reach_the_recipe_unchanged(values, read, tmp_path):
    loaded = read(MINIMAL, *(f"{name}={json.dumps(value)}" for name, value in values.items()))
    for name, value in values.items():
        assert value_of(loaded, name) == (tuple(value) if isinstance(value, list) else value)
    assert_reads_back(loaded, tmp_path)


def test_flatten_names_every_setting(read):
    flat = flatten(read(MINIMAL, "optim.lr=0.5").recipe)
    assert (flat["optim.lr"], flat["model.lora"], flat["data.train"]) == (0.5, None, ["rows.jsonl"])
    assert "optim" not in flat


# Recipe classes ------------------------------------------------------------------------------------------------------


def test_a_recipe_is_frozen(read):
    recipe = read().recipe
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("stage", STAGES)
def test_every_setting_has_a_description(stage):
    undescribed = [place for place, info in recipe_settings(STAGES[stage]) if not (info.description or "").strip()]
    assert not undescribed


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_resume_patterns_match_existing_settings(stage):
    """A pattern that matches no setting is misspelt."""
    places = {".".join(map(str, place)) for place, _ in recipe_settings(STAGES[stage])}
    if stage == "rl":
        kinds: list[type[RewardSettings]] = [plugins.kind("rewards", name) for name in plugins.kinds("rewards")]
        rewards = (RewardSettings, OneReward | None)
        inside = {name for kind in kinds for name, info in kind.model_fields.items() if info.annotation in rewards}
        assert inside == {"scorer", "rule", "judge"}
        for start in (("rewards", 0), *(("rewards", 0, name) for name in inside)):
            places |= {".".join(map(str, place)) for kind in kinds for place, _ in recipe_settings(kind, start)}
    patterns = STAGES[stage].RESUME_MAY_CHANGE + STAGES[stage].RESUME_CHANGES_ROUNDING
    assert not [pattern for pattern in patterns if not fnmatch.filter(places, pattern)]


@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("decay", [0.2, 0.5, 1.0])
def test_wsd_does_not_jump_if_warmup_and_decay_overlap(warmup, decay):
    optim = OptimSettings(lr=1.0, schedule="wsd", warmup_ratio=warmup, decay_ratio=decay)
    rates = [lr_at(step, 10, optim) for step in range(10)]
    assert max(rates) == 1.0
    largest_change = max(abs(b - a) for a, b in pairwise(rates))
    spans = [span for span in (warmup, min(decay, 1 - warmup)) if span]
    assert largest_change <= 1 / (10 * min(spans)) + 1e-9


# Secrets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        f"run.wandb_api_key={SECRET}",
        f"api-key={SECRET}",
        f"aws.secret_access_key={SECRET}",
        f"openai.secret_key={SECRET}",
        f"run.token={SECRET}",
        "run.hf_token=a",
        "judge.auth-token=a",
        "judge.bearer_token=a",
        f"model.password={SECRET}",
        f"run.project={SECRET}",
        f"data.train=[a, {SECRET}]",
    ],
)
def test_secrets_are_refused_and_not_shown(error_for, override):
    message = error_for(MINIMAL, override)
    name = override.partition("=")[0]
    assert f"{name}" in message
    assert "keys and passwords do not belong in a recipe. Put it into the environment" in message
    assert SECRET not in message


def test_the_name_of_an_environment_variable_is_not_a_secret(tmp_path):
    model = {"placement": "server", "url": "http://judge:1", "credential": "JUDGE_API_KEY"}
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps({"stage": "score", "rewards": [{"kind": "judge", "model": model}]}))
    load(file)
    with pytest.raises(RecipeError, match="keys and passwords do not belong in a recipe"):
        load(file, ["rewards.0.model.credential=hunter2-key"])


@pytest.mark.parametrize("name", ["stop_token", "end_token", "max_tokens", "key"])
def test_not_every_token_is_a_secret(error_for, name):
    assert f"run.{name} is not a setting." in error_for(MINIMAL, f"run.{name}='<|im_end|>'")


def test_secrets_are_located(error_for):
    assert error_for(f"{MINIMAL}wandb:\n  api_key: {SECRET}\n").startswith("r.yaml:5: wandb.api_key: keys and passwords")


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (MINIMAL, [SECRET]),
        (MINIMAL, [f"{SECRET}=1"]),
        (MINIMAL, [f"optim.lr=x{'y' * 65} {SECRET}"]),
        (MINIMAL, [f"optim.lr=https://{SECRET}:{SECRET}@host"]),
        (MINIMAL, [f"optim.schedule=x {SECRET}"]),
        (MINIMAL, [f"stage=x {SECRET}"]),
        (MINIMAL, [f"optim.lr=!!int {SECRET}"]),
        (MINIMAL, [f"data.train.{SECRET}=1"]),
        (f"{MINIMAL}? {SECRET}\n? {SECRET}\n", []),
        (f"{MINIMAL}seed: *{SECRET}\n", []),
        (f"{MINIMAL}optim: {SECRET}x\n", []),
    ],
)
def test_no_message_shows_a_secret(error_for, text, overrides):
    message = error_for(text, *overrides)
    assert "abcdef" not in message


def test_secrets_from_the_environment_are_not_shown(error_for, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "correct horse")
    monkeypatch.setenv("OTHER_TOKEN", "correct horse battery")
    assert redact("it is correct horse battery.") == "it is $OTHER_TOKEN."
    assert "run.project: keys and passwords do not belong in a recipe" in error_for(MINIMAL, "run.project=my correct horse")
    assert "$WANDB_API_KEY" in error_for(MINIMAL, "correct horse")
    assert str(PlauditError("no correct horse here")) == "no $WANDB_API_KEY here"
    monkeypatch.setenv("AZURE_OPENAI_KEY", "staple gun")
    assert redact("it is staple gun.") == "it is $AZURE_OPENAI_KEY."


@pytest.mark.parametrize(
    "text", [SECRET, "hf_" + "aB3" * 11, "ghp_" + "a1B2" * 9, "sk-proj-aB_3" + "x" * 30, "xoxb-1234567890-abcdefghij"]
)
def test_strings_shaped_like_keys_are_redacted(text):
    assert redact(f"got {text!r}.") == "got '[secret]'."
    assert redact("git clone https://me:hunter2@host/x") == "git clone https://[secret]@host/x"


@pytest.mark.parametrize(
    "text", ["hf-internal-testing/tiny-random-LlamaForCausalLM", "runs/sk-learn-with-a-long-name", "Qwen/Qwen3-0.6B"]
)
def test_names_of_models_and_runs_are_not_secrets(read, text):
    assert redact(text) == text
    assert read(MINIMAL, f"model.path={text}").recipe.model.path == text


# Speed ---------------------------------------------------------------------------------------------------------------


def test_an_invalid_recipe_is_reported_without_heavy_imports(tmp_path):
    (tmp_path / "r.yaml").write_text(f"{MINIMAL}optim: {{lrr: 1}}\n")
    script = """
import sys
from plaudit.config import load
try:
    load(sys.argv[1])
except ValueError as error:
    print(error)
print([name for name in ("torch", "transformers", "pyarrow", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "r.yaml")]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].endswith("optim.lrr is not a setting. Did you mean optim.lr?")
    assert lines[1] == "[]"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("optim.learning_rate=1e-5", "optim.lr"),
        ("cutoff_len=12000", "data.max_tokens"),
        ("num_train_epochs=3", "run.epochs"),
        ("model.lora.r=8", "model.lora.rank"),
        ("batch_size=8", "train.rows_per_step"),
        ("model.name=m", "model.path"),
    ],
)
def test_names_from_other_trainers_suggest_ours(error_for, given, ours):
    assert error_for(MINIMAL, given).endswith(f"is not a setting. Did you mean {ours}?")


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "train.gradient_accumulation_steps"])
def test_a_batch_that_is_counted_differently_elsewhere_is_explained(error_for, name):
    message = error_for(MINIMAL, f"{name}=4")
    assert "Did you mean train.rows_per_step? It is the whole batch of an update" in message


@pytest.mark.parametrize(
    ("override", "form"),
    [
        ("model=runs/x", "model: {path: runs/x}"),
        ("data=train.jsonl", "data: {train: train.jsonl}"),
        ("train=[4]", "train: {rows_per_step: …}"),
    ],
)
def test_a_value_in_place_of_a_section_shows_the_form_to_write(error_for, override, form):
    assert error_for(MINIMAL, override).endswith(f" Write {form}.")


@pytest.mark.parametrize(
    ("rewards", "form"),
    [
        ("three.py", "[{kind: function, path: three.py}]"),
        ("math", "[{kind: math}]"),
        ("[math]", "[{kind: math}]"),
        ("{kind: math, weight: 2}", "[{kind: math, …}]"),
    ],
)
def test_rewards_that_are_no_list_of_sections_show_the_form_to_write(error_for, rewards, form):
    assert error_for(f"stage: score\nrewards: {rewards}\n").endswith(f" Write rewards: {form}.")


@pytest.mark.parametrize(
    ("name", "what"),
    [("train.jsonl", "is a data file, not a recipe"), ("reward.py", "is a Python file, not a recipe")],
)
def test_another_kind_of_file_in_place_of_a_recipe_is_named(tmp_path, name, what):
    (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(RecipeError, match=what):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("train.packing=true", "Sequences are always packed without padding: remove it."),
        ("model.quantization=4", "Did you mean model.lora.base_bits?"),
        ("run.use_vllm=true", "plaudit samples with its own engine"),
        (
            "actor_rollout_ref.actor.optim.learning_rate=1e-6",
            "It is a section of verl's. actor_rollout_ref.actor.optim.learning_rate: Did you mean optim.lr?",
        ),
        ("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node: Did you mean cluster.gpus?"),
        ("ckpt.save_steps=5", "It is a section of OpenRLHF's. ckpt.save_steps: Did you mean run.save_every?"),
    ],
)
def test_settings_without_counterpart_say_what_to_do(error_for, given, hint):
    assert hint in error_for(MINIMAL, given)


def test_every_name_from_other_trainers_maps_to_a_setting():
    from plaudit.other_systems.other_words import OTHER_WORDS

    known = {".".join(map(str, place)) for recipe in STAGES.values() for place, _ in recipe_settings(recipe)}
    assert {setting for settings in OTHER_WORDS.values() for setting in settings.split(" or ")} <= known


def test_an_option_with_dashes_explains_the_override_syntax(error_for):
    assert error_for(MINIMAL, "--optim.lr").endswith("write it as section.name=value, without dashes and with =")


def test_a_single_tracker_needs_no_list(read):
    assert read(MINIMAL, "run.trackers=tensorboard").recipe.run.trackers == ("tensorboard",)
