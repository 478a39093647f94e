"""Files of other systems become recipes that load, and no key is dropped without a line."""

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import flatten, load
from plaudit.convert.conversion import CARRIED, DEFAULT, NEEDS_YOU, NO_MEANING
from plaudit.convert.converted import Converted, convert
from plaudit.errors import PlauditError
from plaudit.other_systems import llamafactory, openrlhf, trl, verl
from support.paths import REPOSITORY


@pytest.fixture
def converted(tmp_path):
    """Converts a text, and checks that the recipe loads."""

    def convert_text(text: str, name: str = "run.sh", **options: Any) -> tuple[Converted, dict[str, Any]]:
        path = tmp_path / name
        path.write_text(text)
        result = convert(path, **options)
        return result, loaded(result, tmp_path)

    return convert_text


def loaded(result: Converted, folder: Path) -> dict[str, Any]:
    (folder / "converted.yaml").write_text(result.recipe)
    return flatten(load(folder / "converted.yaml").recipe)


def keys_under(result: Converted, heading: str) -> set[str]:
    return {line.key for line in result.under(heading)}


def needs(result: Converted) -> str:
    return "\n".join(f"{line.key}: {line.text}" for line in result.under(NEEDS_YOU))


# The launch scripts of the four sources --------------------------------------------------------------------------------

GROUPS = {
    "grrm": 4,
    "judge": 2,
    "rlmt_grpo_llama": 5,
    "rlmt_grpo_qwen": 5,
    "rlmt_[ps]": 3,
    "rlmt_dpo": 1,
    "rubric": 6,
    "several": 4,
    "tinyv": 7,
}
"""Patterns of their names, and how many there are."""


@pytest.mark.parametrize(("group", "count"), GROUPS.items())
def test_every_key_of_the_launch_scripts_has_a_line(reference_commands, tmp_path, group, count):
    files = list(reference_commands.glob(f"{group}*.txt"))
    assert len(files) >= count
    for file in files:
        result = convert(file)
        given = {line.partition("=")[0].lstrip("+") for line in file.read_text().splitlines() if line.strip() and line[0] != "#"}
        assert given == {line.key for line in result.lines if line.key}, file.name
        assert "unknown key" not in needs(result), file.name
        assert loaded(result, tmp_path), file.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "grrm_rlvr",
            {
                "algorithm.kind": "grpo", "algorithm.divide_by_std": False, "algorithm.loss": "gspo",
                    "algorithm.clip_ratio": [0.0003, 0.0004],
                "algorithm.aggregation": "seq-mean-token-mean", "algorithm.kl_coefficient": 0.0, "algorithm.kl_reward": None,
                    "rollout.n": 8,
                "rollout.max_new_tokens": 4096, "data.max_prompt_tokens": 1600, "data.too_long": "filter", "optim.lr": 1e-5,
                "optim.schedule": "cosine", "optim.min_lr_ratio": 0.2, "optim.weight_decay": 0.01, "train.prompts_per_step": 512,
                "train.prompts_per_update": 128, "train.tokens_per_micro_batch": 16384, "validation.temperature": 1.0,
                    "validation.top_p": 0.7,
                "run.epochs": 1.0, "run.save_every": 200, "run.validate_every": 20, "run.validate_first": True,
                    "rewards.0.kind": "ranking",
            },
        ),
        (
            "rubric_ppo_with_kl",
            {
                "algorithm.kind": "ppo", "algorithm.clip_ratio": [0.2, 0.2], "algorithm.dual_clip": 3.0,
                    "algorithm.entropy_coefficient": 0.0,
                "algorithm.kl_coefficient": 0.001, "algorithm.kl_estimator": "k3", "algorithm.kl_reward.coefficient": 0.001,
                "algorithm.kl_reward.estimator": "k1", "critic.optim.lr": 9e-6, "critic.optim.weight_decay": 0.01,
                    "critic.clip_value": 0.5,
                "run.validate_first": False, "rewards.0.mode": "only", "rewards.0.judge.parser": "total_score",
                    "rewards.1.when": "otherwise",
                "optim.lr": 5e-7, "train.prompts_per_update": 64, "rollout.n": 8, "train.tokens_per_micro_batch": 15360,
            },
        ),
        (
            "tinyv_grpo_addon_no_kl",  # TinyV's own defaults: an entropy bonus, no dual clip
            {
                "algorithm.entropy_coefficient": 0.001, "algorithm.dual_clip": None, "algorithm.kl_coefficient": 0.0,
                    "algorithm.kl_reward": None,
                "rewards.0.mode": "addon", "rewards.0.judge.parser": "true_false", "rewards.0.rule.kind": "math",
                    "rewards.0.judge.view.extract": "answer",
                    "run.validate_first": True,
            },
        ),
        (
            "several_rms_multi_node_add_mul",
            {
                "algorithm.kind": "reinforce++", "algorithm.kl_coefficient": 1e-4, "rewards.1.kind": "plugin",
                    "rewards.1.weight": 0.3, "rewards.1.prompt_column": "rm_prompt_0", "rewards.2.prompt_column": "rm_prompt_1",
                "rewards.2.combine": "multiply", "rewards.2.gate.reward": "rule", "reference.placement": "offload",
                "optim.placement": "offload", "rollout.temperature": 0.8,
            },
        ),
        (
            "rlmt_grpo_llamainstruct_warm-start_think",
            {
                "data.too_long": "cut_left", "rollout.temperature": 0.8, "rollout.top_p": 0.95, "train.prompts_per_step": 128,
                "train.prompts_per_update": 64, "train.tokens_per_micro_batch": 5120, "rewards.0.kind": "scalar_model",
                "rewards.0.view.longcot_config": "model", "rewards.0.view.strict": True,
                    "optim.lr": 3e-7,
                "run.dir": "checkpoints/verl/grpo__llamainstruct__warm-start__think",
            },
        ),
        (
            "grrm_policy_grpo",
            {
                "rewards.0.kind": "group_judge", "rewards.0.scale": 0.01, "rewards.0.malformed": -0.04,
                    "rewards.0.view.extract": "codeblock",
                "rewards.0.model.max_prompt_tokens": 2048, "rewards.0.sampling.max_new_tokens": 8192, "rewards.1.kind": "overlong",
                "rewards.1.penalty": 0.04, "rewards.1.capped": True, "rewards.1.gate.reward": "group_judge",
                    "rewards.1.gate.above": -0.04, "algorithm.positive_sft_coefficient": 0.1,
                    "train.shuffle": True,
            },
        ),
        (
            "rlmt_dpo",
            {
                "stage": "dpo", "data.max_tokens": 4096, "loss.beta": 0.1, "loss.kind": "sigmoid", "optim.lr": 3e-7,
                    "optim.schedule": "cosine",
                "optim.warmup_ratio": 0.05, "optim.weight_decay": 1e-4, "optim.betas": [0.9, 0.95], "run.epochs": 2.0,
                    "run.save_every": None,
                "train.pairs_per_step": 128, "data.too_long": "cut_left",
            },
        ),
        (
            "grrm_rm_sft",
            {
                "stage": "sft", "model.chat_template": "chatml", "model.lora": None, "model.gradient_checkpointing": True,
                    "data.max_tokens": 12000,
                "data.dataset_info": "data/dataset_info.json", "data.too_long": "cut_right", "optim.lr": 6e-6,
                    "optim.weight_decay": 0.0,
                "train.rows_per_step": 32, "seed": 42,
            },
        ),
    ],
)  # fmt: skip
def test_the_recipe_computes_what_the_source_would(reference_commands, tmp_path, name, expected):
    recipe = loaded(convert(reference_commands / f"{name}.txt", gpus=8), tmp_path)
    assert {setting: recipe.get(setting) for setting in expected} == expected


# verl ------------------------------------------------------------------------------------------------------------------

VERL = "python3 -m verl.trainer.main_ppo data.train_files=t.parquet actor_rollout_ref.model.path=m "


def test_defaults_of_verl_that_differ_from_ours_are_written_out(converted):
    result, recipe = converted(VERL)
    expected = {
        "algorithm.kind": "ppo", "train.prompts_per_step": 1024, "train.prompts_per_update": 256, "train.shuffle": False,
            "rollout.n": 1,
        "rollout.max_new_tokens": 512, "data.max_prompt_tokens": 512, "data.too_long": "error", "optim.weight_decay": 0.01,
            "run.epochs": 30.0,
        "model.gradient_checkpointing": True, "critic.optim.weight_decay": 0.01, "critic.optim.lr": 1e-5,
            "algorithm.dual_clip": 3.0, "train.last_batch": "drop",
    }  # fmt: skip
    assert {setting: recipe[setting] for setting in expected} == expected
    assert "weight_decay: 0.01" in result.recipe
    assert "verl's default" in result.recipe


def test_false_of_hydra_and_quotes_are_read(converted):
    lists = "'data.val_files=[\"a.parquet\",b.parquet]' +trainer.logger=['console','wandb'] "
    _, recipe = converted(
        VERL + lists + "actor_rollout_ref.actor.use_kl_loss=FALSE algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
    )
    assert recipe["algorithm.kl_coefficient"] == 0.0
    assert recipe["data.val"] == ["a.parquet", "b.parquet"]
    assert recipe["run.trackers"] == ["wandb"]


@pytest.mark.parametrize(
    ("flags", "kept", "minutes"),
    [
        ("trainer.save_freq=10", "all", None),
        ("trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=null", "all", None),
        ("trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=3", 3, 30.0),
        ("trainer.save_freq=10 trainer.remove_previous_ckpt_in_save=True", 1, 30.0),
        ("trainer.save_freq=10 trainer.remove_previous_ckpt_in_save=False", "all", None),
        ("trainer.max_actor_ckpt_to_keep=null", 2, 30.0),  # nothing is saved before the last step
    ],
)
def test_the_checkpoints_that_verl_keeps(converted, flags, kept, minutes):
    result, recipe = converted(VERL + flags)
    assert (recipe["run.keep_last"], recipe["run.save_every_minutes"]) == (kept, minutes)
    assert not {"trainer.max_actor_ckpt_to_keep", "trainer.remove_previous_ckpt_in_save"} & keys_under(result, NEEDS_YOU)


def test_micro_batches_are_ignored_where_verl_ignores_them(converted):
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000 "
    result, recipe = converted(VERL + micro + tokens + "actor_rollout_ref.actor.use_dynamic_bsz=True")
    assert recipe["train.tokens_per_micro_batch"] == 20000
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in keys_under(result, NO_MEANING)
    result, recipe = converted(VERL + micro + tokens)
    assert recipe["train.tokens_per_micro_batch"] == 4 * 1024
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in keys_under(result, NO_MEANING)


def test_a_clip_ratio_that_verl_does_not_read_is_reported(converted):
    result, recipe = converted(VERL + "actor_rollout_ref.actor.clip_ratio=0.1")
    assert recipe["algorithm.clip_ratio"] == [0.2, 0.2]
    assert "actor_rollout_ref.actor.clip_ratio" in keys_under(result, NEEDS_YOU)


def test_every_spelling_of_a_key_is_found(converted):
    earlier, _ = converted(VERL + "custom_reward_function.path=r.py algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2")
    later, recipe = converted(
        VERL + "reward.custom_reward_function.path=r.py algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2"
    )
    assert earlier.tree["rewards"] == later.tree["rewards"] == [{"kind": "function", "path": "r.py"}]
    assert "custom_reward_function.path" in keys_under(earlier, CARRIED)
    assert recipe["rewards.0.path"] == "r.py"


def test_a_configuration_next_to_the_script_is_read(converted, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/grpo.yaml").write_text(
        "data: {train_files: t.parquet, max_prompt_length: 77, max_response_length: '${data.max_prompt_length}'}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\nalgorithm: {adv_estimator: grpo}\n"
    )
    _, recipe = converted(
        "python -m verl.trainer.main_ppo --config-path ./configs --config-name grpo actor_rollout_ref.rollout.n=6"
    )
    assert (recipe["data.max_prompt_tokens"], recipe["rollout.max_new_tokens"], recipe["rollout.n"]) == (77, 77, 6)


def test_the_judge_is_the_server_that_the_script_starts(converted):
    script = (
        "vllm serve org/judge --tensor-parallel-size 4 --port 8000 --host 0.0.0.0 &\n" + VERL + "reward_model.tinyv_setup=addon"
    )
    _, recipe = converted(script)
    assert recipe["rewards.0.judge.model.path"] == "org/judge"
    assert recipe["rewards.0.judge.model.placement"] == "launch"
    assert recipe["rewards.0.judge.model.arguments"] == ["--tensor-parallel-size", "4"]


def test_a_server_that_no_reward_uses_is_listed(converted):
    result, _ = converted(
        "python -m vllm.entrypoints.openai.api_server --model org/judge &\n" + VERL + "custom_reward_function.path=r.py"
    )
    assert "also starts a vLLM server (org/judge)" in needs(result)


# Values and files that need a person -----------------------------------------------------------------------------------


def test_variables_that_are_never_set_stay_and_are_listed(converted):
    result, recipe = converted(
        "python -m verl.trainer.main_ppo data.train_files=$DATA/x.parquet actor_rollout_ref.model.path=${MODEL_PATH} "
        "trainer.n_gpus_per_node=${GPUS} actor_rollout_ref.actor.use_kl_loss=$KL"
    )
    assert recipe["data.train"] == ["${DATA}/x.parquet"]
    assert recipe["model.path"] == "${MODEL_PATH}"
    assert {"trainer.n_gpus_per_node", "actor_rollout_ref.actor.use_kl_loss"} <= keys_under(result, NEEDS_YOU)
    assert "${MODEL_PATH} is not in the file" in needs(result)


def test_a_script_is_never_run(converted, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    result, _ = converted(VERL + f"trainer.default_local_dir=$(rm -rf {victim})\nrm -rf {victim}\n")
    assert victim.is_dir()
    assert f"$(rm -rf {victim}) was not run" in needs(result)


def test_an_unknown_key_needs_you(converted):
    result, _ = converted(VERL + "data.no_such_key=5")
    assert "data.no_such_key: unknown key" in needs(result)


def test_a_value_that_a_recipe_refuses_needs_you(converted):
    result, recipe = converted(VERL + "data.train_batch_size=-3 actor_rollout_ref.rollout.temperature=hot")
    assert {"data.train_batch_size", "actor_rollout_ref.rollout.temperature"} <= keys_under(result, NEEDS_YOU)
    assert recipe["rollout.temperature"] == 1.0


def test_a_combination_that_a_recipe_refuses_needs_you(converted):
    result, recipe = converted(VERL + "algorithm.adv_estimator=grpo")  # verl's n is 1
    assert recipe["rollout.n"] == 8
    assert "rollout.n was refused: rollout.n is 1, but grpo compares the samples of a group" in needs(result)


def test_an_open_number_of_a_reward_needs_you(converted):
    result, recipe = converted(VERL + "reward_model.tinyv_setup=mixed reward_model.tinyv_weight=$WEIGHT")
    assert recipe["rewards.0.judge_weight"] == 1.0
    assert "rewards.0.judge_weight was refused" in needs(result)


def test_a_reward_that_lacks_something_is_left_out(converted):
    overlong = "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=0 custom_reward_function.path=r.py"
    result, recipe = converted(VERL + overlong)
    assert recipe["rewards.0.path"] == "r.py"
    assert "rewards.1.kind" not in recipe
    assert "rewards.1 (overlong) was left out: its buffer_tokens is missing" in needs(result)


def test_values_cannot_add_lines_to_the_recipe_or_move_the_cursor(converted):
    values = (
        "data.no_such_key=a\nrun: {dir: elsewhere}",
        "trainer.project_name=p\n\x1b[2Jq",
        "trainer.default_local_dir=runs/a\nb",
    )
    text = VERL + " ".join(map(shlex.quote, values))
    result, recipe = converted(text)
    assert recipe["run.dir"] == "runs/a\nb"
    assert recipe["run.project"] == "p\n\x1b[2Jq"
    assert "\x1b" not in result.recipe + result.report


def test_references_to_references_are_followed_within_bounds(converted):
    lines = [f"trainer.k{i}=" + f"${{trainer.k{i + 1}}}" * 50 for i in range(12)]
    known = ["data.train_files=t", "actor_rollout_ref.model.path=m", "trainer.k12=" + "x" * 5000]
    result, _ = converted("\n".join([*known, *lines]), "run.txt")
    assert len(result.recipe) < 200_000


def test_keys_and_passwords_are_neither_written_nor_shown(converted):
    secret = "sk-abcdefgh12345678ijklmnop"
    result, _ = converted(f"python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p --use_wandb {secret}")
    assert secret not in result.recipe + result.report
    assert "use_wandb=[secret]" in result.report


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("run.sh", "", "has no settings"),
        ("run.sh", "echo hello\nls -la\n", "has no settings"),
        ("run.sh", 'python -m verl.trainer.main_ppo "open', "is not a script that can be read: line 1"),
        ("run.sh", "\0\1", "is binary"),
        ("run.yaml", "- just\n- a list\n", "of no system that plaudit convert knows"),
        ("run.yaml", "a: [", "is not valid YAML"),
        ("run.yaml", "5", "should be settings by name"),
        ("run.py", "def f(:", "is not a Python script"),
        ("run.py", "print('no config')", "has no settings"),
        ("run.txt", "colour=blue\nsize=3\n", "of no system that plaudit convert knows"),
        ("run.sh", "llamafactory-cli train missing.yaml", "missing.yaml is not next to this file"),
        ("run.yaml", "stage: kto\nmodel_name_or_path: m\n", "stage kto has no counterpart"),
        ("run.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x model.partial_pretrain=m", "verl's SFT trainer"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(PlauditError, match=problem):
        convert(tmp_path / name)


def test_a_file_that_is_missing_is_reported(tmp_path):
    with pytest.raises(PlauditError, match="does not exist"):
        convert(tmp_path / "missing.sh")


VALUES = [
    "1",
    "0",
    "-1",
    "true",
    "null",
    "",
    "abc",
    "1e-5",
    "[1,2]",
    "{}",
    "${X}",
    "$(date)",
    "nan",
    "1e999",
    "[[1],2]",
    "grpo",
    "x/y.py",
]
COMMANDS = {
    "verl": (verl.TABLE, "python -m verl.trainer.main_ppo", "{}={}"),
    "trl": (trl.TABLE, "trl grpo", "--{} {}"),
    "llamafactory": (llamafactory.TABLE, "llamafactory-cli train", "{}={}"),
    "openrlhf": (openrlhf.TABLE, "python -m openrlhf.cli.train_ppo_ray", "--{} {}"),
}


@pytest.mark.parametrize("system", COMMANDS)
def test_any_values_lead_to_a_recipe_that_loads_and_a_line_for_every_key(converted, system):
    draw, (table, command, form) = random.Random(system), COMMANDS[system]
    names = [key for key in [*table.keys, *table.aliases] if re.fullmatch(r"[\w.]*\w", key) and key != "stage"]
    for _ in range(8):
        keys = draw.sample(names, 30)
        values = [draw.choice(VALUES) for _ in keys]
        written = [value if "$" in value else shlex.quote(value) for value in values]
        result, _ = converted(f"{command} {' '.join(form.format(*pair) for pair in zip(keys, written, strict=True))}")
        assert set(keys) <= {line.key for line in result.lines}


# LLaMA-Factory, TRL, OpenRLHF ------------------------------------------------------------------------------------------


def test_llamafactory_trains_a_lora_by_default(converted):
    result, recipe = converted(
        "stage: dpo\nmodel_name_or_path: m\ndataset: a,b\ntemplate: mistral\npref_beta: 0.2\n", "dpo.yaml", gpus=2
    )
    assert (recipe["model.lora.rank"], recipe["model.lora.alpha"]) == (8, 16)
    assert recipe["data.train"] == ["a", "b"]
    assert (recipe["loss.beta"], recipe["train.pairs_per_step"], recipe["optim.lr"], recipe["optim.schedule"]) == (
        0.2,
        16,
        5e-5,
        "linear",
    )
    assert recipe["model.dtype"] == "float32"
    assert "template" in keys_under(result, NEEDS_YOU)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --use_peft true --load_in_4bit true --bnb_4bit_quant_type nf4", 4),
        ("trl dpo --model_name_or_path m --dataset_name d --use_peft true --load_in_8bit true --lora_dropout 0.1", 8),
        ("llamafactory-cli train stage=sft model_name_or_path=m dataset=d quantization_bit=4 lora_dropout=0.05", 4),
        ("llamafactory-cli train stage=sft model_name_or_path=m dataset=d quantization_bit=8 quantization_method=bnb", 8),
        ("llamafactory-cli train stage=sft model_name_or_path=m dataset=d quantization_bit=4 quantization_method=bitsandbytes", 4),
        ("deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d --lora_rank 8 --load_in_4bit --lora_dropout 0.1", 4),
    ],
)
def test_qlora_is_a_base_in_few_bits(converted, text, bits):
    result, recipe = converted(text)
    assert (recipe["model.lora.base_bits"], recipe["model.lora.dropout"]) == (bits, 0.0)
    assert not {key for key in keys_under(result, NEEDS_YOU) if "quant" in key or "load_in" in key}
    dropped = [line.text for line in result.under(NO_MEANING) if "model.lora.dropout is 0 instead of 0." in line.text]
    assert len(dropped) == ("dropout" in text or "trl" in text), "TRL's default is 0.05"
    assert not [line for line in result.report.splitlines() if line.strip().startswith("=")], "a default has no key"


def test_kinds_of_quantisation_that_differ_are_named(converted):
    trl = "trl sft --model_name_or_path m --dataset_name d --use_peft true --load_in_4bit true"
    result, recipe = converted(f"{trl} --bnb_4bit_quant_type fp4 --use_bnb_nested_quant true --bnb_4bit_quant_storage uint8")
    assert recipe["model.lora.base_bits"] == 4
    assert "bnb_4bit_quant_type: the 4 bits of model.lora.base_bits are NF4" in needs(result)
    reasons = {line.key: line.text for line in result.under(NO_MEANING)}
    assert "instead of 0.016" in reasons["use_bnb_nested_quant"]
    assert "the only setting" in reasons["bnb_4bit_quant_storage"]
    result, _ = converted(
        "stage: sft\nmodel_name_or_path: m\ndataset: d\nquantization_bit: 3\nquantization_method: hqq\n", "a.yaml"
    )
    assert {"quantization_bit", "quantization_method"} <= keys_under(result, NEEDS_YOU)


@pytest.mark.parametrize(
    "text",
    [
        "trl sft --model_name_or_path m --dataset_name d --load_in_4bit true --bnb_4bit_quant_type nf4",
        "llamafactory-cli train stage=sft model_name_or_path=m dataset=d finetuning_type=full quantization_bit=4",
        "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d --load_in_4bit",
    ],
)
def test_a_quantised_base_without_lora_needs_you(converted, text):
    result, recipe = converted(text)
    assert not any(setting.startswith("model.lora.") for setting in recipe)
    assert "weights are trained in float32 or bfloat16" in needs(result)


def test_a_script_with_bitsandbytes(converted):
    script = """
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("m", quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, {kind}bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16))
trainer = SFTTrainer(model="m", train_dataset="d", peft_config=LoraConfig(r=4, lora_dropout=0.1), args=SFTConfig(output_dir="o"))
"""
    for kind, is_named in (("", True), ("bnb_4bit_quant_type='nf4', ", False)):
        result, recipe = converted(script.replace("{kind}", kind), "train.py")
        assert (recipe["model.lora.base_bits"], recipe["model.lora.dropout"]) == (4, 0.0)
        assert ("FP4 unless it says nf4" in needs(result)) == is_named
        assert "quantization_config.bnb_4bit_compute_dtype" in keys_under(result, NO_MEANING)
        assert "unknown key" not in needs(result)


def test_the_last_batch_of_transformers(converted):
    for flags, expected in (("", "keep"), ("--dataloader_drop_last false", "keep"), ("--dataloader_drop_last true", "drop")):
        result, recipe = converted(f"trl sft --model_name_or_path m --dataset_name d {flags}")
        assert recipe["train.last_batch"] == expected
        assert "dataloader_drop_last" not in keys_under(result, NEEDS_YOU)


@pytest.mark.parametrize(
    ("flags", "kept", "minutes"),
    [
        ("", "all", None),
        ("--save_total_limit 1", 1, 30.0),
        ("--save_strategy no --save_total_limit 1", 2, 30.0),
        ("--save_steps 500000", 2, 30.0),
    ],
)
def test_the_checkpoints_that_trl_keeps(converted, flags, kept, minutes):
    _, recipe = converted(f"trl sft --model_name_or_path m --dataset_name d {flags}")
    assert (recipe["run.keep_last"], recipe["run.save_every_minutes"]) == (kept, minutes)


def test_a_trl_script_is_read_from_its_syntax(converted):
    script = """
from trl import GRPOConfig, GRPOTrainer
MODEL = "models/small"
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=[length, "org/rm"], peft_config=LoraConfig(r=4, lora_alpha=8),
    train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    args=GRPOConfig(output_dir="runs/a", per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=8,
                    loss_type="dr_grpo", scale_rewards=False, max_steps=steps(), epsilon_high=0.28, steps_per_generation=8),
)
"""
    result, recipe = converted(script, "train.py", gpus=1)
    expected = {
        "model.path": "models/small", "model.lora.rank": 4, "model.lora.alpha": 8, "data.train": ["train.jsonl"], "rollout.n": 8,
        "train.prompts_per_step": 16, "train.prompts_per_update": 8, "algorithm.aggregation": "seq-mean-token-sum-norm",
        "algorithm.divide_by_std": False, "algorithm.clip_ratio": [0.2, 0.28], "algorithm.dual_clip": None, "optim.lr": 1e-6,
        "rewards.0.function": "length", "rewards.1.kind": "scalar_model", "run.max_steps": None,
        "train.last_batch": "drop",
    }  # fmt: skip
    assert {setting: recipe[setting] for setting in expected} == expected
    assert "max_steps" in keys_under(result, NEEDS_YOU)


@pytest.mark.parametrize(
    ("command", "stage", "setting", "value"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --learning_rate 3e-5 --packing", "sft", "optim.lr", 3e-5),
        (
            "trl reward --model_name_or_path m --dataset_name d --center_rewards_coefficient 0.01",
            "reward-model",
            "loss.centring_coefficient",
            0.01,
        ),
        (
            "accelerate launch --num_processes 4 dpo.py --model_name_or_path m --dataset_name d --beta 0.3",
            "dpo",
            "train.pairs_per_step",
            32,
        ),
        ("deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d --beta 0.3", "dpo", "loss.beta", 0.3),
    ],
)
def test_commands_of_other_stages(converted, command, stage, setting, value):
    _, recipe = converted(command)
    assert (recipe["stage"], recipe[setting]) == (stage, value)


EARLIER_FLAGS = """--pretrain m --prompt_data p --reward_pretrain rm --init_kl_coef 0.02 --train_batch_size 64
    --rollout_batch_size 32 --n_samples_per_prompt 4"""
LATER_FLAGS = """--actor.model_name_or_path m --data.prompt_dataset p --reward.model_name_or_path rm --algo.kl.init_coef 0.02
    --train.batch_size 64 --rollout.batch_size 32 --rollout.n_samples_per_prompt 4"""


@pytest.mark.parametrize("flags", [EARLIER_FLAGS, LATER_FLAGS], ids=["earlier", "later"])
def test_openrlhf_counts_samples_and_puts_kl_into_the_reward(converted, flags):
    _, recipe = converted(f"ray job submit -- python3 -m openrlhf.cli.train_ppo_ray {' '.join(flags.split())}")
    expected = {
        "algorithm.kind": "ppo", "train.prompts_per_step": 32, "train.prompts_per_update": 16,
            "algorithm.kl_reward.coefficient": 0.02,
        "algorithm.kl_coefficient": 0.0, "optim.betas": [0.9, 0.95], "optim.schedule": "cosine", "optim.min_lr_ratio": 0.1,
        "critic.optim.lr": 9e-6, "rewards.0.kind": "scalar_model", "rewards.0.bounds": [-10, 10], "algorithm.dual_clip": None,
    }  # fmt: skip
    assert {setting: recipe[setting] for setting in expected} == expected


def test_what_is_a_default_here_is_left_out_of_the_recipe(converted):
    result, _ = converted(VERL + "actor_rollout_ref.actor.optim.lr=1e-6")
    assert "actor_rollout_ref.actor.optim.lr" in keys_under(result, DEFAULT)
    assert "lr: " not in result.recipe.partition("optim:\n")[2]


# The command -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_recipe_and_prints_the_report(tmp_path, capsys, monkeypatch):
    from plaudit.cli import main

    (tmp_path / "run.sh").write_text(VERL)
    out = tmp_path / "new/recipe.yaml"
    monkeypatch.setattr("sys.argv", ["plaudit", "convert", str(tmp_path / "run.sh"), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "carried over (" in printed
    assert "needs you (" in printed
    assert load(out).recipe.stage == "rl"
    with pytest.raises(SystemExit):
        main()
    assert "exists already" in capsys.readouterr().err


def test_the_example_of_the_documentation(converted):
    page = (REPOSITORY / "docs/convert.md").read_text(encoding="utf-8")
    script, recipe = (re.search(rf"^```{start}\n(.*?)^```$", page, re.M | re.S) for start in ('sh title="run_grpo.sh"', "yaml"))
    assert script is not None
    assert recipe is not None
    result, _ = converted(script[1], "run_grpo.sh")
    assert result.recipe == recipe[1]
