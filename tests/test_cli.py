"""The command line: help, exit codes, and one-line messages instead of tracebacks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command

from plaudit import __version__, cli
from plaudit.command_help import EXAMPLES
from plaudit.config import load
from plaudit.errors import DataError, Interrupted, PlauditError, RecipeError, RunError, TrainingStopped
from plaudit.models.logprobs import CHUNK_LOGITS
from plaudit.models.memory import MemoryPlan, plan_memory
from plaudit.models.trainable import load_policy
from plaudit.prepare.tiny_model import Kind
from plaudit.recipe import ModelSettings
from support.fault_server import FaultServer
from support.paths import REPOSITORY
from support.processes import Command
from support.recipes import rl_recipe, sft_recipe, write_recipe
from support.rows import arithmetic_rows, write_jsonl


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def plaudit(monkeypatch, capsys):
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["plaudit", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def recipe(tmp_path, tiny_model, rows_file) -> Path:
    return write_recipe(tmp_path / "r.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run", run={"max_steps": 2}))


def real_command(*arguments: object, flags: tuple[str, ...] = (), **environment: str) -> Result:
    command = [sys.executable, *flags, "-m", "plaudit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **environment})
    return Result(done.returncode, done.stdout, done.stderr)


# Help ----------------------------------------------------------------------------------------------------------------


HELP = [
    ((), ["Train language models with reward models.", "sft", "config", "doctor", "prepare", "--version"]),
    (
        ("sft",),
        ["Supervised fine-tuning on conversations", "Run the same command again to resume", "R.yaml", "section.name=value"],
    ),
    (
        ("dpo",),
        ["Direct preference optimisation", "Run the same command again to resume", "chosen and rejected", "section.name=value"],
    ),
    (
        ("reward-model",),
        ["Bradley–Terry reward model", "Run the same command again to resume", "scalar_model", "section.name=value"],
    ),
    (
        ("rl",),
        ["Reinforcement learning against rewards", "Run the same command again to resume", "R.yaml", "section.name=value"],
    ),
    (("sample",), ["Sample responses to prompts", "Run the same command again to resume", "--out", "--max-new-tokens", "--n"]),
    (("score",), ["Score saved responses", "Run the same command again to resume", "--details", "--out", "ground_truth"]),
    (("convert",), ["Convert settings of verl, LLaMA-Factory, TRL or OpenRLHF", "--from", "--out", "--gpus"]),
    (("merge",), ["Merge a LoRA adapter into its base model", "--out", "--dtype"]),
    (("recipes",), ["List the recipes that ship with plaudit", "current folder"]),
    (("ask",), ["Ask a model a question", "--temperature", "--rewards", "--ground-truth", "--system", "--seed"]),
    (("audit",), ["R.yaml", "--out", "--label", "--probes"]),
    (
        ("serve",),
        ["rewards over HTTP", "--host", "--port", "--token-env", "--max-in-flight", "--grace-s", "section.name=value"],
    ),
    (("view",), ["Look into runs in a browser", "--out", "--max-mb", "--port", "--token-env"]),
    (("demo",), ["from nothing to a trained policy", "--seed", "--out"]),
    (("config",), ["Print the resolved recipe", "where each value comes from", "--explain", "R.yaml"]),
    (("engine-command",), ["Print how to start a server for sampling", "R.yaml"]),
    (("doctor",), ["Check a recipe before any training", "--rows", "How many rows to render", "R.yaml"]),
    (("prepare",), ["Prepare data sets and small models", "tiny-model"]),
    (("prepare", "tiny-model"), ["random weights", "--out", "--kind", "llama|qwen2|qwen3|mistral", "--hidden-size", "--seed"]),
    (("prepare", "smollm2"), ["SmolLM2-135M-Instruct", "--out", "--gguf"]),
    (("prepare", "sorting"), ["letters to sort", "--out"]),
    (("prepare", "pairs"), ["best and worst response", "--out", "--min-responses", "--min-margin", "--val-share", "--seed"]),
    (("prepare", "conversations"), ["WildChat", "--out", "--all-turns", "--english", "--max-tokens", "--val", "--seed"]),
    (("prepare", "thoughts"), ["strong model", "--url", "--credential", "--without-thoughts", "--tries", "--english"]),
    (("prepare", "thoughts-sft"), ["conversations for plaudit sft", "--out", "--without-thoughts"]),
    (
        ("prepare", "zero-model"),
        ["base model", "stop.txt", "ends at </response>", "--out", "--without-thoughts", "--eos", "--tokenizer"],
    ),
    (
        ("prepare", "ranking-sft"),
        ["rank", "--out", "--format", "--shuffle-augment", "--max-characters", "--scores-heading", "--skip-bad-rows", "--seed"],
    ),
    (("prepare", "ranking-rl"), ["rank", "--out", "--format", "--shuffle-augment", "--max-characters", "--seed"]),
    (("prepare", "pointwise-sft"), ["pointwise judge", "--out", "--rule", "pointwise_score|grade", "--template", "--seed"]),
    (
        ("prepare", "pointwise-rl"),
        ["one prompt per candidate", "--out", "--rule", "pointwise_score|grade", "--template", "--data-source"],
    ),
    (("prepare", "translation-sft"), ["code block", "--out", "--response-column", "--template", "--skip-bad-rows", "--seed"]),
    (("prepare", "translation-rl"), ["translation", "--out", "--cross-lingual", "--target", "--test-set", "--seed"]),
    (("prepare", "math-rl"), ["ground truths", "--out", "--answer-in", "all|hashes|boxed", "--data-source", "--sample"]),
    (("prepare", "verifier-sft"), ["True or False", "--out", "--label-column", "--extract", "--balance", "--template", "--seed"]),
    (("prepare", "rubric-rl"), ["grade", "--out", "--rubric-column", "--highest", "--template", "--skip-bad-rows"]),
    (
        ("prepare", "arithmetic"),
        ["additions and subtractions", "--out", "--train", "--val", "--digits", "--operators", "--seed"],
    ),
]


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_prints_the_result_alone(plaudit, tmp_path, recipe, flag):
    code, out, err = plaudit("sft", recipe, flag)
    assert (code, err) == (0, "")
    assert out == f"trained model: {tmp_path / 'run/model'}\ncurves:        {tmp_path / 'run/curves.png'}\n"
    assert "this run is finished" in plaudit("sft", recipe).err, "and the next command is not quiet"
    code, out, err = plaudit("sft", flag, recipe, "run.max_steps=3")
    assert (code, out) == (2, "")
    assert "run.max_steps: was 2, is now 3" in err


@pytest.mark.parametrize("verb", ["sft", "dpo", "reward-model", "rl", "sample", "score"])
def test_long_commands_can_be_quiet(plaudit, verb):
    assert "--quiet" in plaudit(verb, "--help").out


@pytest.mark.parametrize(("verb", "explains"), HELP)
def test_help(plaudit, verb, explains):
    code, out, err = plaudit(*verb, "--help")
    assert code == 0
    assert not err
    for text in explains:
        assert text in out


@pytest.mark.parametrize(("verb", "explains"), HELP)
def test_short_help_option_and_examples(plaudit, verb, explains):
    code, out, _ = plaudit(*verb, "-h")
    assert code == 0
    assert verb in ((), ("prepare",)) or f"plaudit {' '.join(verb)}" in out.split("Examples:")[1]


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        (["train"], "plaudit train is not a command. To train, name the stage: plaudit sft, dpo, reward-model or rl, then R.yaml."),
        (["grpo", "R.yaml"], "algorithm of plaudit rl"),
        (["PPO"], "algorithm of plaudit rl"),
        (["benchmark"], "Did you mean plaudit eval?"),
        (["rm"], "Did you mean plaudit reward-model?"),
        (["chat"], "Did you mean plaudit ask?"),
        (["doktor"], "plaudit doktor is not a command. Did you mean plaudit doctor?"),
        (["prepare", "sortin"], "plaudit prepare sortin is not a command. Did you mean plaudit prepare sorting?"),
        (["xyzzy"], "plaudit xyzzy is not a command. plaudit --help lists all of them."),
    ],
)
def test_an_unknown_verb_points_to_the_right_one(plaudit, verb, hint):
    code, out, err = plaudit(*verb)
    assert (code, out) == (2, "")
    assert hint in err
    assert err.count("\n") == 1


def test_shell_completion_is_offered(plaudit):
    assert "--install-completion" in plaudit("--help").out


def test_examples_name_recipes_and_options_that_exist():
    commands = get_command(cli.app)
    for verb, lines in EXAMPLES.items():
        command = commands
        for name in verb.split():
            command = command.commands[name]
        options = {option for parameter in command.params for option in parameter.opts}
        for line in lines:
            assert {word for word in line.split() if word.startswith("-")} <= options
            assert all((REPOSITORY / word).exists() for word in line.split() if word.startswith("recipes/"))


def test_every_verb_has_help():
    verbs = {(command.name or command.callback.__name__.replace("_", "-"),) for command in cli.app.registered_commands}
    verbs |= {("prepare", command.name) for command in cli.prepare.registered_commands}
    assert verbs | {(), ("prepare",)} == {verb for verb, _ in HELP}


def test_version(plaudit):
    assert plaudit("--version") == (0, f"plaudit {__version__}\n", "")


def test_help_is_shown_without_a_verb(plaudit):
    code, out, err = plaudit()
    assert code == 2
    assert "Supervised fine-tuning" in out + err


# Mistakes ------------------------------------------------------------------------------------------------------------


def test_a_mistake_found_while_reading_rows_leaves_no_run_folder(tmp_path, plaudit, recipe, rows_file):
    code, _, err = plaudit("sft", recipe, f"run.dir={tmp_path}/runs/new", "data.max_tokens=2", "data.too_long=error")
    assert code == 2
    assert "more than data.max_tokens" in err
    assert not (tmp_path / "runs").exists()


def test_a_checkup_of_rules_needs_no_torch(tmp_path):
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    code, out, err = real_command("doctor", tmp_path / "r.yaml", flags=("-X", "importtime"))
    assert (code, "✓ reward   exact: starts" in out) == (0, True)
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines()}
    assert "plaudit.doctor.rewards" in imported
    assert not imported & {"torch", "transformers"}


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lrr=1"], "r.yaml (command line): optim.lrr is not a setting. Did you mean optim.lr?"),
        (["data.train={folder}/rows.jsonx"], "data.train: {folder}/rows.jsonx does not exist. Did you mean {folder}/rows.jsonl?"),
        (["model.path={folder}/modle"], "model.path: {folder}/modle does not exist. Did you mean {folder}/model?"),
        (["data.train={folder}/empty.jsonl"], "{folder}/empty.jsonl: the file is empty"),
    ],
)
def test_an_invalid_recipe_is_reported_before_torch_is_imported(tmp_path, recipe, tiny_model, rows_file, arguments, message):
    shutil.copy(rows_file, tmp_path / "rows.jsonl")
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "empty.jsonl").touch()
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    code, out, err = real_command("sft", recipe, *arguments, flags=("-X", "importtime"))
    lines = err.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    reported = [line for line in lines if not line.startswith("import time:")]
    assert code == 2
    assert not out
    assert len(reported) == 1
    assert reported[0].endswith(message.format(folder=tmp_path))
    assert "plaudit.config" in imported
    assert not imported & {"torch", "transformers", "peft", "matplotlib"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "{folder}/rr.yaml"], "{folder}/rr.yaml does not exist. Did you mean {folder}/r.yaml?"),
        (["sft", "{folder}"], "{folder} cannot be read: "),
        (["config", "{recipe}", "optim.lr=fast"], '{recipe} (command line): optim.lr should be a valid number, not "fast".'),
        (["doctor", "{recipe}", "optim.lrr=1"], "{recipe} (command line): optim.lrr is not a setting. Did you mean optim.lr?"),
        (
            ["sft", "{recipe}", "stage=sff"],
            '{recipe} (command line): stage should be one of sft, dpo, reward-model, rl, score, not "sff". Did you mean sft?',
        ),
        (["sft", "{recipe}", "data.train={folder}/none.jsonl"], "data.train: {folder}/none.jsonl does not exist."),
        (["doctor", "{recipe}", "data.val={folder}/x/y.jsonl"], "data.val: {folder}/x/y.jsonl does not exist. There is no folder"),
        (["sft", "{recipe}", "model.path={folder}/m"], "model.path: {folder}/m does not exist."),
        (["sft", "{recipe}", "model.path={folder}"], "model.path: {folder} is not a model in Hugging Face format: it has no"),
        (["sft", "{recipe}", "model.path={recipe}"], "model.path: {recipe} is not a model in Hugging Face format: it has no"),
        (
            ["sft", "{recipe}", "model.path=nobody/nothing"],
            "model.path: there is no folder nobody/nothing here, and the Hugging Face hub is switched off",
        ),
        (["sft", "{recipe}", "model.tokenizer=./t"], "model.tokenizer: ./t does not exist."),
        (["sft", "{recipe}", "model.chat_template=chatlm"], "model.chat_template: chatlm does not exist. Did you mean chatml?"),
        (["sft", "{recipe}", "model.chat_template={folder}/t.jinja"], "model.chat_template: {folder}/t.jinja does not exist."),
        (["sft", "{recipe}", "model.chat_template=llama3"], "model.chat_template: llama3 needs the tokens <|end_header_id|>, "),
        (["sft", "{recipe}", "data.max_tokens=5"], "{rows}: no row is left of 60 (60 are longer than data.max_tokens = 5)"),
        (["sft", "{recipe}", "data.train={folder}/text.jsonl"], "{folder}/text.jsonl: column 'messages' is missing (found: text)"),
        (["sft", "{recipe}", "model.lora.targets=[nope]"], "model.lora.targets: Target modules "),
        (["prepare", "tiny-model", "{folder}/none", "--out", "{folder}/m"], "{folder}/none does not exist."),
        (["prepare", "tiny-model", "{rows}", "--out", "{folder}"], "--out: {folder} is not empty (it has "),
        (["prepare", "tiny-model", "{rows}", "--out", "{recipe}/m"], "--out: {recipe}/m cannot be created: "),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(tmp_path, plaudit, recipe, rows_file, arguments, message):
    write_jsonl(tmp_path / "text.jsonl", [{"text": "only"}])
    names = {"folder": tmp_path, "recipe": recipe, "rows": rows_file}
    code, out, err = plaudit(*(argument.format(**names) for argument in arguments))
    assert code == 2
    assert not out
    *before, last = err.splitlines()
    assert last.startswith(message.format(**names))
    assert all(line.startswith("train: ") for line in before)
    assert "Traceback" not in err
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft"], "missing argument 'R.yaml'"),
        (["doctor", "r.yaml", "--rows", "-1"], "invalid value for '--rows'"),
        (
            ["prepare", "tiny-model", "r", "--out", "m", "--kind", "lama"],
            "'lama' is not one of 'llama', 'qwen2', 'qwen3', 'mistral'",
        ),
        (["prepare", "tiny-model", "r", "--out", "m", "--hidden-size", "12"], "12 is not a multiple of 8"),
        (["prepare", "tiny-model", "r", "--out", "m", "--layers", "0"], "invalid value for '--layers'"),
        (["prepare", "tiny-model", "r", "--out", "m", "--vocabulary", "100"], "greater than or equal to 259"),
        (["prepare", "tiny-model", "r"], "missing option '--out'"),
    ],
)
def test_wrong_usage_is_explained(tmp_path, monkeypatch, plaudit, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = plaudit(*arguments)
    assert code == 2
    assert message in err
    assert "--help" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read: it is not JSON"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "no tokenizer could be loaded from"),
        (lambda model: (model / "model.safetensors").unlink(), "incomplete weights: model.safetensors missing"),
        (lambda model: os.truncate(model / "model.safetensors", 9999), "no model could be loaded from"),
        (lambda model: (model / "chat_template.jinja").write_text("{% if"), "the chat template cannot render a user"),
    ],
)
def test_a_damaged_model_is_reported_in_one_line(tmp_path, plaudit, recipe, tiny_model, damage, message):
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    damage(model)
    code, _, err = plaudit("sft", recipe, f"model.path={model}")
    assert code == 2
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
    assert plaudit("doctor", recipe, f"model.path={model}").code == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlauditError("reason"), 2),
        (RecipeError("reason"), 2),
        (DataError("reason"), 2),
        (RunError("reason"), 2),
        (TrainingStopped("reason"), 2),
        (Interrupted("reason"), 130),
        (torch.OutOfMemoryError("reason. More words"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exit_codes(monkeypatch, plaudit, recipe, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr("plaudit.loops.sft.train", fail)
    got = plaudit("sft", recipe)
    assert (got.code, got.out) == (code, "")
    if isinstance(error, torch.OutOfMemoryError):
        assert got.err.startswith(
            "out of GPU memory (reason). Set model.gradient_checkpointing=true, set optim.placement=offload, or use model.lora"
        )
    else:
        assert got.err == "reason\n"


def test_a_demo_among_other_files_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "thesis.tex").touch()
    code, _, err = real_command("demo", "--out", tmp_path, flags=("-X", "importtime"))
    assert code == 2
    assert f"--out: {tmp_path} is not empty (it has thesis.tex)" in err
    assert "torch" not in {line.rpartition("|")[2].strip() for line in err.splitlines()}


def test_a_judge_that_rejects_the_key_is_reported_before_anything_is_loaded(tmp_path, tiny_model, plaudit, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "velvet-hammer")
    monkeypatch.setattr("plaudit.loops.train.train", None)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "What is 1 + 1?", "ground_truth": "2"}])
    with FaultServer(key="another") as server:
        judge = {"kind": "judge", "name": "helpful", "model": {"placement": "server", "url": server.url, "credential": "JUDGE_KEY"}}
        recipe = write_recipe(tmp_path / "rl.yaml", rl_recipe(tiny_model, rows, tmp_path / "run", judge))
        code, _, err = plaudit("rl", recipe)
    assert code == 2
    assert err.startswith(f"reward 'helpful': {server.url}/v1/models: HTTP 401")
    assert "The key in JUDGE_KEY is not accepted" in err
    assert not (tmp_path / "run").exists()


def test_ctrl_c_has_no_traceback(monkeypatch, plaudit, recipe):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("plaudit.loops.sft.train", stop)
    code, out, err = plaudit("sft", recipe)
    assert code == 130
    assert "Traceback" not in out + err


def test_a_bug_keeps_its_traceback(monkeypatch, plaudit, recipe):
    def fail(*_):
        raise KeyError("a bug")

    monkeypatch.setattr("plaudit.loops.sft.train", fail)
    with pytest.raises(KeyError):
        plaudit("sft", recipe)


# Prepare -------------------------------------------------------------------------------------------------------------


def test_tiny_models_are_made_from_rows_for_rl_too(plaudit, tmp_path):
    rows = [{"prompt": "Shout: xyzzyq", "ground_truth": "XYZZYQ"}, {"prompt": "Shout: xyzzyq", "ground_truth": 7}]
    write_jsonl(tmp_path / "rl.jsonl", rows)
    code, out, err = plaudit("prepare", "tiny-model", tmp_path / "rl.jsonl", "--out", tmp_path / "m", "--hidden-size", 16)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'm'}: llama with ")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert {"xyzzyq", "XYZZYQ"} <= {token.strip("Ġ") for token in tokenizer.get_vocab()}  # prompts and ground truths


def test_rows_that_no_stage_reads_are_refused_by_tiny_model(plaudit, tmp_path):
    write_jsonl(tmp_path / "odd.jsonl", [{"query": "hi", "reply": "ho"}])
    code, _, err = plaudit("prepare", "tiny-model", tmp_path / "odd.jsonl", "--out", tmp_path / "m")
    assert (code, "column 'messages' is missing (found: query, reply)" in err) == (2, True), err


# Config --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explain", [[], ["--explain"]])
def test_config_prints_a_recipe_that_reads_back(tmp_path, plaudit, recipe, explain):
    overrides = ["optim.lr=1e-4", "model.lora.rank=4", "data.val=[a b.jsonl, 'c: d']"]
    code, out, err = plaudit("config", recipe, *overrides, *explain)
    assert (code, err) == (0, "")
    (tmp_path / "again.yaml").write_text(out)
    assert load(tmp_path / "again.yaml").recipe == load(recipe, overrides).recipe
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in out.splitlines()}
    where = {"lr: 0.0001": "command line", "warmup_steps: 2": f"{recipe}:1", "eps: 1e-08": "default", "rank: 4": "command line"}
    for setting, origin in where.items():
        assert lines[setting].endswith(f"[{origin}]" if explain else origin)
        assert not explain or len(lines[setting]) > len(origin) + 5


# Doctor --------------------------------------------------------------------------------------------------------------

CHECKS = ["files", "template", "rows", "steps", "weights", "memory"]


def findings(out: str) -> list[tuple[str, str, str]]:
    """(mark, check, text) of each line."""
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line[2:3] in ("✓", "!", "✗") and line.startswith("  ")]
    return [(mark, check, text) for mark, check, text in lines]


def test_doctor_on_a_healthy_recipe(plaudit, recipe, rows_file, tiny_model):
    code, out, err = plaudit("doctor", recipe, f"data.val={rows_file}")
    assert (code, err) == (0, "")
    found = findings(out)
    assert {mark for mark, *_ in found} == {"✓"}
    assert list(dict.fromkeys(check for _, check, _ in found)) == [*CHECKS, "disk"]
    texts = [f"{check}: {text}" for _, check, text in found]
    assert f"files: train: {rows_file} has 60 rows with messages" in texts
    assert f"files: val: {rows_file} has 60 rows with messages" in texts
    assert "template: the tokenizer's own; turns end with '<|im_end|>' (token 2)" in texts
    assert "steps: at most 2 steps of 6 rows" in texts
    assert f"weights: {tiny_model}: 21 tensors, all complete" in texts
    assert any(text.startswith("memory: about 71 MB (weights 1 MB, optimiser 1 MB, passes 69 MB)") for text in texts)

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in arithmetic_rows()]
    longest = max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered)
    for part in ("train", "val"):
        lengths = next(text for text in texts if text.startswith(f"rows: {part}: 60 rows rendered"))
        assert f"longest {longest};" in lengths
    assert rendered[0] in out.replace("⟦", "").replace("⟧", "")
    answer = arithmetic_rows()[0]["messages"][-1]["content"]
    assert f"⟦{answer}<|im_end|>" in out  # a colour would not be seen in a file


def test_doctor_warns_of_steps_that_the_data_does_not_have(plaudit, recipe):
    code, out, _ = plaudit("doctor", recipe, "run.max_steps=40")
    [text] = [text for mark, check, text in findings(out) if (mark, check) == ("!", "steps")]
    assert code == 0
    assert text == "the data ends after 10 steps (run.epochs = 1), before run.max_steps = 40: raise run.epochs to train that long"


def test_doctor_counts_the_steps_without_an_epochs_last_short_batch(plaudit, recipe):
    settings = ["run.max_steps=null", "run.epochs=2", "train.rows_per_step=8", "train.last_batch=drop"]
    _, out, _ = plaudit("doctor", recipe, *settings)
    [text] = [text for _, check, text in findings(out) if check == "steps"]
    assert text == "at most 14 steps of 8 rows; each epoch leaves 4 of 60 rows out (train.last_batch: drop)"
    code, out, _ = plaudit("doctor", recipe, *settings, "train.rows_per_step=61")
    [(mark, text)] = [(mark, text) for mark, check, text in findings(out) if check == "steps"]
    assert (code, mark) == (1, "✗")
    assert "take fewer rows per step" in text


def test_doctor_counts_the_space_of_checkpoints(plaudit, recipe, rows_file, monkeypatch):
    """fp32: a checkpoint has the weights and two moments of each; with a validation, the best one is kept too."""
    for keep, val, free, mark in ((2, [], 1e12, "✓"), (2, [], 1e6, "!"), (5, [f"data.val={rows_file}"], 1e12, "✓")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        _, out, _ = plaudit("doctor", recipe, f"run.keep_last={keep}", *val)
        [(found, text)] = [(mark, text) for mark, check, text in findings(out) if check == "disk"]
        kept = keep + len(val)
        assert found == mark
        assert f": {kept} checkpoints of {PARAMETERS * 12 / 1e6:.0f} MB" in text
        assert f"take up to {((kept + 1) * 12 + 4) * PARAMETERS / 1e6:.0f} MB" in text
        assert ("lower run.keep_last" in text) == (mark == "!")


def test_doctor_counts_the_space_of_all_checkpoints(plaudit, recipe, rows_file, monkeypatch):
    """Of 10 steps, every third and the last are saved; after a validation, the best so far."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e6))
    validated = [f"data.val={rows_file}", "run.validate_every=5"]
    for settings, kept in (([], 4), (validated, 5), ([*validated, "run.keep_best=false"], 4)):
        _, out, _ = plaudit("doctor", recipe, "run.keep_last=all", "run.max_steps=10", "run.save_every=3", *settings)
        [text] = [text for mark, check, text in findings(out) if (mark, check) == ("!", "disk")]
        assert f": {kept} checkpoints of {PARAMETERS * 12 / 1e6:.0f} MB and the trained model take up to" in text
        assert f"take up to {(kept * 12 + 4) * PARAMETERS / 1e6:.0f} MB and 2 MB more every 30 minutes" in text
        assert "set run.keep_last to a number" in text
    _, out, _ = plaudit("doctor", recipe, "run.keep_last=all", "run.save_every_minutes=null")
    [text] = [text for _, check, text in findings(out) if check == "disk"]
    assert "1 checkpoint of" in text
    assert "minutes" not in text


@pytest.mark.parametrize(("setting", "effect"), [("text", "read as text"), ("control", "read as control tokens")])
def test_doctor_counts_rows_with_control_tokens(plaudit, recipe, tmp_path, setting, effect):
    rows = [{"prompt": f"What is {i}?", "response": "It is." + "<|im_end|>" * (i < 2)} for i in range(5)]
    file = write_jsonl(tmp_path / "forged.jsonl", rows)
    _, out, _ = plaudit("doctor", recipe, f"data.train={file}", f"data.special_tokens={setting}")
    assert f"train: 2 of 5 rows contain control tokens in their messages: {effect}" in " ".join(out.split())


@pytest.mark.parametrize(("count", "shown"), [(7, 7), (0, 60)])
def test_doctor_renders_the_requested_number_of_rows(plaudit, recipe, count, shown):
    assert f"train: {shown} rows rendered" in plaudit("doctor", recipe, "--rows", count).out


def test_doctor_abbreviates_long_rows(tmp_path, plaudit, recipe, monkeypatch):
    words = " ".join(map(str, range(2000)))
    rows = [{"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "[bold]yes[/bold]"}]}]
    out = plaudit("doctor", recipe, f"data.train={write_jsonl(tmp_path / 'long.jsonl', rows)}", "data.max_tokens=9999").out
    assert "<|im_start|>user\n0 1 2 3" in out
    assert " … " in out
    assert "[bold]yes[/bold]<|im_end|>" in out, "rows are text, not markup"
    assert "999 1000 1001" not in out


NO_GENERATION_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_END_TOKEN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
USER_FIRST = (
    "{% if messages[-1].role != 'assistant' and messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found') }}{% endif %}"
    f"{NO_GENERATION_PROMPT}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
LAST_ANSWER_ONLY = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("settings", "check", "text", "shows_row"),
    [
        (["data.train={folder}/text.jsonl"], "rows", "column 'messages' is missing (found: text)", False),
        (["data.val={folder}/text.jsonl"], "rows", "column 'messages' is missing (found: text)", True),
        (["data.train={folder}/broken.jsonl"], "files", "broken.jsonl:61: not valid JSON", False),
        (["data.max_tokens=40", "data.too_long=error"], "rows", "are longer than data.max_tokens = 40: an error", True),
        (["data.max_tokens=9"], "rows", "train: 60 of 60 (100.0%) are longer than data.max_tokens = 9: filtered out", True),
        (["model.chat_template={folder}/no_prompt.jinja"], "template", "the chat template has no generation prompt", False),
        (["model.chat_template={folder}/last.jinja"], "rows", "it rewrites message 2", False),
        (["model.path={folder}/base"], "template", "the tokenizer has no chat template (a base model?)", False),
        (["model.path={folder}/empty"], "weights", "cannot read the weights (safetensors only", True),
        (["model.lora.targets=[nope]"], "memory", "has no linear layer of that name", True),
        (["model.lora.targets='*'"], "memory", "is not a pattern", True),
        (["run.device=cuda"], "memory", "run.device is cuda, but torch sees no GPU here", True),
    ],
)
def test_doctor_on_an_unhealthy_recipe(tmp_path, plaudit, recipe, rows_file, tiny_model, settings, check, text, shows_row):
    if "run.device=cuda" in settings and torch.cuda.is_available():
        pytest.skip("a GPU is available")
    write_jsonl(tmp_path / "text.jsonl", [{"text": "only"}])
    (tmp_path / "broken.jsonl").write_bytes(rows_file.read_bytes() + b"{oops\n")
    (tmp_path / "no_prompt.jinja").write_text(NO_GENERATION_PROMPT)
    (tmp_path / "last.jinja").write_text(LAST_ANSWER_ONLY)
    (shutil.copytree(tiny_model, tmp_path / "base") / "chat_template.jinja").unlink()
    (shutil.copytree(tiny_model, tmp_path / "empty") / "model.safetensors").unlink()
    code, out, err = plaudit("doctor", recipe, *(setting.format(folder=tmp_path) for setting in settings))
    assert (code, err) == (1, "")
    found = findings(out)
    assert any(mark == "✗" and name == check and text in reported for mark, name, reported in found), out
    assert [name for name in dict.fromkeys(name for _, name, _ in found) if name != "disk"] == CHECKS, "the other checks still run"
    assert ("The first row as the model sees it" in out) == shows_row
    assert "Traceback" not in out
    if "is not a pattern" not in text:  # that one is left to peft
        assert plaudit("sft", recipe, *(setting.format(folder=tmp_path) for setting in settings)).code == 2


@pytest.mark.parametrize(
    ("template", "settings", "warning"),
    [
        (NO_END_TOKEN, [], "turns end without a special token, so the model will not learn to stop"),
        (LAST_ANSWER_ONLY, ["data.train_on=last"], None),
        (USER_FIRST, ["data.train={folder}/no_user.jsonl"], None),
        (None, ["data.max_tokens=40"], "are longer than data.max_tokens = 40: filtered out"),
        (None, ["data.max_tokens=40", "data.too_long=cut_left"], "are longer than data.max_tokens = 40: cut on the left"),
        (None, ["train.rows_per_step=100"], "exceeds the 60 rows in the data: there is one step, of all of them"),
        (
            None,
            ["train.rows_per_step=100", "run.epochs=3"],
            "60 rows in the data: a step has rows of several epochs",
        ),
    ],
)
def test_doctor_only_warns_about_unusual_settings(tmp_path, plaudit, recipe, template, settings, warning):
    no_user = [{"role": "system", "content": "Speak."}, {"role": "assistant", "content": "Now."}]
    write_jsonl(tmp_path / "no_user.jsonl", [*arithmetic_rows(6), {"messages": no_user}])
    settings = [setting.format(folder=tmp_path) for setting in settings]
    if template:
        (tmp_path / "t.jinja").write_text(template)
        settings.append(f"model.chat_template={tmp_path / 't.jinja'}")
    code, out, err = plaudit("doctor", recipe, *settings)
    assert (code, err) == (0, "")
    found = findings(out)
    assert [text for mark, _, text in found if mark == "✗"] == []
    warnings = [text for mark, _, text in found if mark == "!"]
    assert len(warnings) == (warning is not None)
    assert not warning or warning in warnings[0]
    assert plaudit("sft", recipe, *settings).code == 0


# Memory --------------------------------------------------------------------------------------------------------------

# The tiny llama: width 64, 2 layers, 4 heads of 16 and 2 for keys and values, MLP 160, 320 tokens.
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64
PARAMETERS = 2 * 320 * 64 + 2 * LAYER + 64
ADAPTERS = 2 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 160))  # rank 4 on every linear layer
MERGED = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160)  # a second copy of these


@pytest.mark.parametrize(("targets", "merged"), [(["q_proj"], 2 * (64 * 64 + 2 * 64 * 32)), (["q_proj", "embed_tokens"], 0)])
def test_adapters_of_other_modules_are_planned_as_peft_computes_them(tiny_model, targets, merged):
    """Queries, keys and values are one product. With an adapter of the embeddings, nothing is merged."""
    model = ModelSettings.model_validate({"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4, "targets": targets}})
    assert plan_memory(model, torch.device("cpu"), micro_batch=1000).merged == 4 * merged


@pytest.mark.parametrize(
    ("settings", "device", "weights", "training"),
    [
        ({"dtype": "float32"}, "cpu", 4 * PARAMETERS, 12 * PARAMETERS),
        ({"dtype": "bfloat16"}, "cpu", 2 * PARAMETERS, 16 * PARAMETERS),
        ({}, "cpu", 4 * PARAMETERS, 12 * PARAMETERS),
        ({}, "cuda", 2 * PARAMETERS, 16 * PARAMETERS),
        ({"dtype": "float32", "lora": {"rank": 4}}, "cpu", 4 * (PARAMETERS + MERGED) + 4 * ADAPTERS, 12 * ADAPTERS),
        ({"dtype": "bfloat16", "lora": {"rank": 4}}, "cpu", 2 * (PARAMETERS + MERGED) + 4 * ADAPTERS, 12 * ADAPTERS),
    ],
)
def test_memory_plan_matches_a_manual_count(tiny_model, settings, device, weights, training):
    def plan_for(tokens: int, *, one: bool = False, **more) -> MemoryPlan:
        model = ModelSettings.model_validate({"path": str(tiny_model), **settings, **more})
        return plan_memory(model, torch.device(device), micro_batch=tokens, one_micro_batch=one)

    plan = plan_for(1000)
    assert (plan.parameters, plan.trainable) == (PARAMETERS, ADAPTERS if "lora" in settings else PARAMETERS)
    assert (plan.weights, plan.gradients + plan.state) == (weights, training)
    assert plan.logits == 8 * CHUNK_LOGITS[device] + (0 if "lora" in settings else 4 * 320 * 64)
    assert plan.total == weights + training + plan.activations + plan.logits
    assert plan_for(1000, one=True).total == plan.total - min(plan.gradients, plan.activations + plan.logits)
    assert plan_for(3000).activations == 3 * plan.activations
    # One of the two layers, and the inputs of both, in fp32.
    assert plan_for(1000, gradient_checkpointing=True).activations == plan.activations / 2 + 1000 * 4 * 2 * 64


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"], ["self_attn.q_proj"], r".*\.1\..*(gate|up)_proj"])
def test_memory_plan_counts_trainable_parameters(tiny_models, kind, targets):
    from plaudit.data.templates import load_template, load_tokenizer

    recipe = ModelSettings.model_validate({"path": str(tiny_models[kind]), "lora": targets and {"rank": 4, "targets": targets}})
    cpu = torch.device("cpu")
    policy = load_policy(recipe, load_template(load_tokenizer(recipe.path), None), cpu)
    plan = plan_memory(recipe, cpu, micro_batch=1000)
    trained = sum(p.numel() for _, p in policy.trainable())
    assert plan.trainable == trained
    assert plan.parameters == sum(p.numel() for p in policy.model.parameters()) - (trained if targets else 0)


# Prepare -------------------------------------------------------------------------------------------------------------


def test_prepare_makes_a_model_that_transformers_can_load(tmp_path, plaudit, rows_file):
    arguments = ["--kind", "qwen3", "--hidden-size", "32", "--layers", "1", "--vocabulary", "300"]
    code, out, _ = plaudit("prepare", "tiny-model", rows_file, "--out", tmp_path / "new/model", *arguments)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new/model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new/model")
    assert code == 0
    assert out == f"{tmp_path / 'new/model'}: qwen3 with {sum(p.numel() for p in model.parameters()):,} parameters\n"
    assert (model.config.model_type, model.config.hidden_size, model.config.num_hidden_layers) == ("qwen3", 32, 1)
    assert len(tokenizer) <= 300
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


def test_prepare_makes_a_tiny_model_of_pairs(tmp_path, plaudit):
    pairs = [{"prompt": "What is 2 + 2?", "chosen": "Four, surely.", "rejected": "Nobody knows."}] * 9
    rows = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    arguments = ["--hidden-size", "32", "--layers", "1", "--vocabulary", "300"]
    assert plaudit("prepare", "tiny-model", rows, "--out", tmp_path / "model", *arguments).code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer.encode("Nobody")) < len("Nobody")  # its text was in the training rows


def test_prepare_does_not_overwrite_files(tmp_path, plaudit, rows_file):
    (tmp_path / "config.json").write_text("mine")
    assert plaudit("prepare", "tiny-model", rows_file, "--out", tmp_path).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_file_is_no_folder_to_write_a_model_to(plaudit, rows_file):
    code, _, err = plaudit("prepare", "tiny-model", rows_file, "--out", rows_file)
    assert (code, err) == (2, f"--out: {rows_file} is a file; name a new folder\n")


def test_help_lists_every_kind_of_tiny_model(plaudit):
    """The command repeats the list to avoid a heavy import."""
    assert "|".join(get_args(Kind)) in plaudit("prepare", "tiny-model", "--help").out


# The real command ----------------------------------------------------------------------------------------------------


def test_no_secret_is_written_or_shown(tmp_path, recipe):
    """Neither plaudit nor a tracker leaks one, in any file of the run (text or binary) or in the output."""
    names = ["WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MY_SERVICE_SECRET"]
    secrets = {name: f"{number}" + "made0up1value2" * 3 for number, name in enumerate(names)}
    elsewhere = {name: str(tmp_path / "wandb") for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    command = Command("sft", recipe, "run.trackers=[wandb, tensorboard]", WANDB_MODE="offline", **secrets, **elsewhere)
    assert command.wait() == 0, command.output
    assert f"trained model: {tmp_path / 'run/model'}" in command.output.splitlines()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"optim.lr" in path.read_bytes() for path in files if path.suffix == ".wandb"), "otherwise this test checks nothing"
    for name, secret in secrets.items():
        assert secret not in command.output, name
        for path in files:
            assert secret.encode() not in path.read_bytes(), (name, path)


def test_the_command_is_installed(tmp_path):
    """`plaudit` next to this Python, and `python -m plaudit`, from any folder."""
    script = Path(sys.executable).with_name("plaudit")
    for command in ([str(script)], [sys.executable, "-m", "plaudit"]):
        done = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert (done.returncode, done.stdout) == (0, f"plaudit {__version__}\n"), done.stderr


def test_overrides_with_dashes_are_rejected(recipe, plaudit):
    code, _, err = plaudit("sft", recipe, "--optim.lr", "1e-5")
    assert code == 2
    assert err.splitlines()[-1] == "'--optim.lr' is not an override: write it as section.name=value, without dashes and with ="


def test_doctor_reports_when_it_checked_only_some_rows(recipe, plaudit):
    code, out, _ = plaudit("doctor", recipe, "--rows", "10")
    assert code == 0
    assert "train: checked only the first 10 rows; --rows 0 checks all of them" in out
    assert "only the first" not in plaudit("doctor", recipe).out
