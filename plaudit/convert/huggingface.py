"""Rules of transformers' TrainingArguments, and what LLaMA-Factory and TRL add to them."""

import math
from pathlib import Path
from typing import Any

from plaudit.convert.conversion import CARRIED, DEFAULT, Conversion
from plaudit.convert.quantised import convert_quantised
from plaudit.convert.values import is_unresolved
from plaudit.other_systems.entries import UNSET
from plaudit.other_systems.huggingface import SCHEDULES

ROWS = {"sft": "train.rows_per_step", "dpo": "train.pairs_per_step", "reward-model": "train.pairs_per_step"}
MANY = 10_000_000
"""Rows that no file has: such a limit is none."""
NEVER = 100_000
"""Steps that no run has: an interval that switches saving off."""
AGGREGATIONS = {
    "dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm",
        "cispo": "token-mean",
}  # fmt: skip
"""TRL's GRPO losses."""
DPO_LOSSES = ("sigmoid", "ipo", "hinge")


def convert_llamafactory(c: Conversion) -> None:
    if c.has("stage"):
        c.line(CARRIED, "stage", f"stage: {c.stage}")
    kind = c.value("finetuning_type")
    if kind == "lora":
        rank = c.value("lora_rank")
        c.set("model.lora.alpha", c.value("lora_alpha") or (2 * rank if isinstance(rank, int) else 16), "lora_alpha")
        c.set("model.lora.rank", rank, "lora_rank", "finetuning_type")
    else:
        c.without("model.lora", "all weights are trained")
        if kind != "full":
            c.needs(f"{kind} is not available: the recipe trains all weights; use model.lora for fewer", "finetuning_type")
        if kind == "full" and c.has("finetuning_type"):
            c.line(DEFAULT, "finetuning_type", "all weights are trained, as here without model.lora")
        c.no_meaning("all weights are trained", "lora_alpha")
    bits = {"quantization_bit": c.value("quantization_bit"), **_bits_of_switches(c)}
    convert_quantised(
        c, bits, lora=kind == "lora", dropout="lora_dropout", kind="quantization_type", nested=("double_quantization",)
    )
    c.set("data.dataset_info", str(Path(str(c.value("dataset_dir"))) / "dataset_info.json"), "dataset_dir")
    c.set("data.too_long", "cut_right", text="LLaMA-Factory cuts long rows, prompt and answer in proportion")
    _all_rows(c, "max_samples")
    if c.is_on("use_swanlab"):
        c.set("run.trackers", ["swanlab"], "use_swanlab")
        c.set("run.project", c.value("swanlab_project") or "llamafactory", "swanlab_project")
    c.no_meaning("SwanLab is off", "use_swanlab", "swanlab_project")
    _dtype(c, float32_by_default=True)
    _training_arguments(c)
    c.apply_table()


def convert_trl(c: Conversion) -> None:
    lora = c.is_on("use_peft") or c.has("peft_config", "lora_r")
    if lora and is_unresolved(c.value("peft_config")):
        c.needs("write the adapter's settings into model.lora", "peft_config")
    if not lora:
        c.without("model.lora", "all weights are trained: use_peft is off")
    c.no_meaning("model.lora is there, or all weights are trained", "use_peft", "peft_config")
    nested = ("use_bnb_nested_quant",)
    convert_quantised(c, _bits_of_switches(c), lora=lora, dropout="lora_dropout", kind="bnb_4bit_quant_type", nested=nested)
    in_script = "quantization_config.load_in_4bit" in c.spelled.get("load_in_4bit", {})
    if in_script and "model.lora.base_bits" in c.settings and not c.has("bnb_4bit_quant_type"):
        c.remark("BitsAndBytesConfig's 4 bits are FP4 unless it says nf4; those of model.lora.base_bits are NF4")
    _dtype(c, float32_by_default=False)
    if c.stage == "rl":
        _grpo(c)
    else:
        _pairs_or_rows(c)
    _training_arguments(c)
    c.apply_table()


def _bits_of_switches(c: Conversion) -> dict[str, int | None]:
    return {key: bits if c.is_on(key) else None for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8))}


# TrainingArguments -----------------------------------------------------------------------------------------------------


def _training_arguments(c: Conversion) -> None:
    schedule, keyword = str(c.value("lr_scheduler_type")), c.value("lr_scheduler_kwargs")
    if schedule in SCHEDULES:
        c.set("optim.schedule", SCHEDULES[schedule], "lr_scheduler_type")
    else:
        c.needs("choose optim.schedule: constant, linear, cosine or wsd", "lr_scheduler_type")
    ratio = keyword.get("min_lr_rate") if isinstance(keyword, dict) else None
    if ratio is not None:
        c.set("optim.min_lr_ratio", ratio, "lr_scheduler_kwargs")
    if keyword:
        c.needs("set optim.min_lr_ratio", "lr_scheduler_kwargs")
    c.no_meaning("it is empty", "lr_scheduler_kwargs")
    _warmup(c, schedule)
    c.set("optim.betas", [c.value("adam_beta1"), c.value("adam_beta2")], "adam_beta1", "adam_beta2")
    _save_and_validate(c)
    if c.stage in ROWS:
        _rows_per_step(c)
    drops = "drop" if c.stage == "rl" or c.is_on("dataloader_drop_last") else "keep"
    c.set("train.last_batch", drops, "dataloader_drop_last", text="prompts: always" if c.stage == "rl" else "")


def _warmup(c: Conversion, schedule: str) -> None:
    steps, ratio = c.value("warmup_steps"), c.value("warmup_ratio")
    if schedule == "constant":
        c.no_meaning("the schedule constant has no warm-up (constant_with_warmup has)", "warmup_steps", "warmup_ratio")
    elif isinstance(steps, float) and 0 < steps < 1:
        c.set("optim.warmup_ratio", steps, "warmup_steps", text="below 1 it is a share of all steps")
    elif isinstance(steps, int | float) and steps:
        c.set("optim.warmup_steps", steps, "warmup_steps")
    elif ratio:
        c.set("optim.warmup_ratio", ratio, "warmup_ratio")
    c.no_meaning("there is no warm-up, or the other key says how long it is", "warmup_steps", "warmup_ratio")


def _save_and_validate(c: Conversion) -> None:
    for strategy, steps, ours in (
        ("save_strategy", "save_steps", "run.save_every"),
        ("eval_strategy", "eval_steps", "run.validate_every"),
    ):
        chosen, every = str(c.value(strategy)), c.value(steps)
        if chosen == "steps" and isinstance(every, int) and every >= 1:
            c.set(ours, every, steps, strategy)
        elif chosen in ("steps", "epoch", "best"):
            c.needs(f"set {ours}, in steps", strategy, steps)
        c.no_meaning(f"it is off, as here without {ours}", strategy, steps)
    limit, keep, interval = c.value("save_total_limit"), "save_total_limit", c.value("save_steps")
    if str(c.value("save_strategy")) == "no" or (isinstance(interval, int) and interval >= NEVER):
        c.no_meaning("no checkpoint is saved before the last step", keep)
    elif isinstance(limit, str) or (isinstance(limit, int) and limit > 0):
        c.set("run.keep_last", limit, keep)
    else:
        c.set("run.keep_last", "all", keep)
        c.set("run.save_every_minutes", None, text="checkpoints by steps only")


def _rows_per_step(c: Conversion) -> None:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    sizes = [c.value(key) for key in keys]
    if not all(isinstance(size, int) for size in sizes):
        c.needs(f"set {ROWS[c.stage]}: rows per step, over all GPUs", *keys)
        return
    rows, processes = math.prod(sizes), c.source.processes
    formula = f"{sizes[0]} per GPU × {sizes[1]} accumulated × {processes or 1} GPUs"
    c.set(ROWS[c.stage], rows * (processes or 1), *keys, text=formula)
    if processes is None:
        c.remark(f"{ROWS[c.stage]} is {rows} for one GPU: give the original run's GPUs with --gpus N, or multiply it")


def _dtype(c: Conversion, *, float32_by_default: bool) -> None:
    if c.is_on("bf16"):
        c.set("model.dtype", "bfloat16", "bf16", text="with fp32 master weights")
    elif c.value("bf16") is False or (not c.has("bf16", "fp16", "pure_bf16", "dtype") and float32_by_default):
        c.set("model.dtype", "float32", "bf16")
    c.no_meaning("model.dtype is auto: bfloat16 on a GPU", "bf16")


def _all_rows(c: Conversion, key: str) -> None:
    value = c.value(key)
    if isinstance(value, int) and value < MANY:
        c.needs("make a file of the first rows", key)
    c.no_meaning("all rows are used", key)


# TRL -----------------------------------------------------------------------------------------------------------------


def _pairs_or_rows(c: Conversion) -> None:
    tokens = c.value("block_size") or c.value("max_length")
    text = (
        "with trl 0.19 RLMT's sft.py trained on 1024 tokens whatever this says" if c.stage == "sft" and c.has("block_size") else ""
    )
    c.set("data.max_tokens", UNSET if tokens is None else tokens, "block_size", "max_length", text=text)
    if tokens is None:
        c.remark("data.max_tokens: TRL has no limit (max_length None); the recipe's is 4096")
    mode = c.value("truncation_mode")
    if c.stage == "dpo" and c.has("block_size") and not c.has("truncation_mode"):
        mode = "keep_end"  # RLMT's dpo.py is of trl 0.19, whose default this was
    if c.stage == "reward-model":
        c.set("data.too_long", "filter", "truncation_mode", text="TRL leaves long pairs out")
    else:
        c.set(
            "data.too_long",
            "cut_left" if mode == "keep_end" else "cut_right",
            "truncation_mode",
            text=f"TRL cuts long rows ({mode})",
        )
    c.needs("the limit here is that of prompt and answer together, data.max_tokens", "max_prompt_length")
    if c.stage == "dpo":
        losses = c.value("loss_type")
        kind = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
        if kind in DPO_LOSSES:
            c.set("loss.kind", kind, "loss_type")
        c.needs(f"loss.kind is one of {', '.join(DPO_LOSSES)}", "loss_type")
        c.set("loss.beta", c.value("beta"), "beta")
    if c.stage == "sft":
        if not (c.is_on("assistant_only_loss") or c.is_on("completion_only_loss") or c.has("add_longcot_config")):
            c.remark("TRL's SFT trains on every token of a conversation; plaudit trains on assistant turns only (data.train_on)")
        c.no_meaning("the loss is on assistant turns only", "assistant_only_loss", "completion_only_loss")
        c.needs(
            "the SFT loss here is the mean negative log-likelihood",
            *(["loss_type"] if c.value("loss_type") not in (None, "nll") else []),
        )
        c.no_meaning("the SFT loss here is the mean negative log-likelihood", "loss_type")


def _grpo(c: Conversion) -> None:
    if c.whose == "RLOOConfig":
        c.set("algorithm.kind", "rloo")
    c.set("algorithm.kl_coefficient", c.value("beta"), "beta")
    epsilon, high = c.value("epsilon"), c.value("epsilon_high")
    c.set("algorithm.clip_ratio", [epsilon, epsilon if high is None else high], "epsilon", "epsilon_high")
    loss = str(c.value("loss_type"))
    if loss in AGGREGATIONS:
        c.set("algorithm.aggregation", AGGREGATIONS[loss], "loss_type")
    c.needs("choose algorithm.loss and algorithm.aggregation (docs/algorithms.md)", "loss_type")
    sequence = c.value("importance_sampling_level") == "sequence"
    chosen = "cispo" if loss == "cispo" else "gspo" if sequence else "clipped"
    c.set("algorithm.loss", chosen, "importance_sampling_level")
    scale = c.value("scale_rewards")
    if scale in ("batch",):
        c.needs(
            "there is no division by the batch's standard deviation: algorithm.divide_by_std is by the group's", "scale_rewards"
        )
    else:
        c.set("algorithm.divide_by_std", scale in (True, "group"), "scale_rewards")
    if c.value("multi_objective_aggregation") == "normalize_then_sum":
        c.needs("set algorithm.kind to gdpo, and normalise: group for every reward", "multi_objective_aggregation")
    c.no_meaning("rewards are added, then normalised, as here", "multi_objective_aggregation")
    c.set(
        "data.max_prompt_tokens",
        UNSET if c.value("max_prompt_length") is None else c.value("max_prompt_length"),
        "max_prompt_length",
    )
    if c.value("max_prompt_length"):
        c.set("data.too_long", "cut_left", text="TRL cuts long prompts on the left")
    _completions(c)
    _reward_functions(c)
    if c.has("num_generations_eval"):
        c.set("validation.temperature", c.value("temperature"), text="TRL evaluates as it trains")


def _completions(c: Conversion) -> None:
    """TRL counts completions: per device × accumulated × GPUs are one update; generation_batch_size are sampled together."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    device, accumulated, n = (c.value(key) for key in (*keys, "num_generations"))
    whole, steps = "generation_batch_size", "steps_per_generation"
    if not all(isinstance(size, int) and size > 0 for size in (device, accumulated, n)):
        c.needs("set train.prompts_per_step and train.prompts_per_update: prompts, over all GPUs", *keys, whole, steps)
        return
    processes = c.source.processes or 1
    update = device * accumulated * processes
    per_generation = c.value(whole) or device * processes * (c.value(steps) or accumulated)
    text = f"{device} per GPU × {accumulated} accumulated × {processes} GPUs, of {n} per prompt"
    if not isinstance(per_generation, int) or per_generation % n or update % n:
        c.needs(f"set train.prompts_per_step: {text} are no whole number of prompts", *keys, whole, steps)
        return
    c.set("train.prompts_per_step", per_generation // n, *keys, whole, steps, text=text)
    c.set("train.prompts_per_update", UNSET if update >= per_generation else update // n)
    if c.source.processes is None:
        c.remark("train.prompts_per_step is that of one GPU: give the original run's GPUs with --gpus N, or multiply it")


def _reward_functions(c: Conversion) -> None:
    functions, weights = c.value("reward_funcs"), c.value("reward_weights")
    listed = functions if isinstance(functions, list) else [] if functions is None else str(functions).strip("$()[]").split(",")
    for i, name in enumerate(listed):
        name, weight = str(name).strip(" '\""), weights[i] if isinstance(weights, list) and i < len(weights) else 1.0
        reward: dict[str, Any] = {"kind": "function", "name": name.rpartition(".")[2] or "reward", "path": "rewards.py",
            "scores": "trl",
                                  "function": name.rpartition(".")[2] or "reward"}  # fmt: skip
        if "/" in name:
            reward = {"kind": "scalar_model", "name": name.rpartition("/")[2], "model": {"path": name}}
        c.reward(reward if weight == 1.0 else reward | {"weight": weight})
    if not listed:
        c.reward({"kind": "function", "path": "rewards.py", "scores": "trl", "function": "reward"})
    c.reward_keys(range(len(c.rewards)), "reward_funcs", "reward_weights")
    c.remark(
        "rewards: move the reward functions into rewards.py, unchanged; scores: trl calls them as TRL does "
        "(docs/tutorials/from_trl.md)"
    )
