"""Rules of OpenRLHF: settings that several of its flags decide together."""

from typing import Any

from plaudit.convert.conversion import Conversion
from plaudit.convert.huggingface import ROWS
from plaudit.convert.quantised import convert_quantised
from plaudit.other_systems.entries import UNSET
from plaudit.other_systems.openrlhf import ESTIMATORS, MICRO

MANY = 1_000_000
"""Rows that are all rows: OpenRLHF's default."""


def convert_openrlhf(c: Conversion) -> None:
    lora = isinstance(c.value("ds.lora.rank"), int) and c.value("ds.lora.rank") > 0
    if not lora:
        c.without("model.lora", "all weights are trained: the rank is 0")
    bits = {"ds.load_in_4bit": 4 if c.is_on("ds.load_in_4bit") else None}
    convert_quantised(c, bits, lora=lora, dropout="ds.lora.dropout")
    _trackers(c)
    limit = c.value("data.max_samples")
    if isinstance(limit, int | float) and limit < MANY:
        c.needs("make a file of the first rows", "data.max_samples")
    c.no_meaning("all rows are used", "data.max_samples")
    if c.stage == "rl":
        _rl(c)
    else:
        c.set(ROWS[c.stage], c.value("train.batch_size"), "train.batch_size", text="over all GPUs")
        c.set("run.epochs", c.value("train.max_epochs"), "train.max_epochs")
        c.set("data.max_tokens", c.value("data.max_len"), "data.max_len")
        c.set("data.too_long", "cut_right", text="OpenRLHF cuts long rows")
    c.apply_table()
    if c.stage == "rl":
        for name in ("betas", "eps", "weight_decay", "schedule", "warmup_ratio", "min_lr_ratio", "max_grad_norm"):  # flags for both
            if (
                f"critic.optim.{name}" in c.settings
                and f"optim.{name}" in c.settings
                and not c.settings[f"critic.optim.{name}"].keys
            ):
                c.settings[f"critic.optim.{name}"].value = c.settings[f"optim.{name}"].value


def _trackers(c: Conversion) -> None:
    wandb, tensorboard = c.given.get("logger.wandb.key"), c.given.get("logger.tensorboard_dir")
    names = [name for name, value in (("wandb", wandb), ("tensorboard", tensorboard)) if value]
    if names:
        c.set("run.trackers", names, "logger.wandb.key", "logger.tensorboard_dir")
    if wandb:
        c.remark("wandb's key does not belong in a recipe: put it into the environment as WANDB_API_KEY")
    c.no_meaning("it is off", "logger.wandb.key", "logger.tensorboard_dir")


def _rl(c: Conversion) -> None:
    _algorithm(c)
    _kl(c)
    n, update, step = (c.value(key) for key in ("rollout.n_samples_per_prompt", "train.batch_size", "rollout.batch_size"))
    if all(isinstance(one, int) and one > 0 for one in (n, update, step)) and update % n == 0:
        prompts = update // n
        c.set(
            "train.prompts_per_update",
            UNSET if prompts >= step else prompts,
            "train.batch_size",
            text=f"{update} samples, {n} per prompt",
        )
    c.needs("set train.prompts_per_update: samples per update, divided by rollout.n", "train.batch_size")
    c.set("train.epochs_per_step", c.value("train.max_epochs") or 1, "train.max_epochs")
    longest, new = c.value("data.max_len"), c.value("rollout.max_new_tokens")
    if not c.has("data.prompt_max_len"):
        both = isinstance(longest, int) and isinstance(new, int)
        prompt = max(1, longest - new) if both else longest
        c.set("data.max_prompt_tokens", prompt, "data.max_len", text="OpenRLHF limits prompt and response together")
        if new is None:
            c.set("rollout.max_new_tokens", longest, text="OpenRLHF limits prompt and response together")
    c.no_meaning("data.max_prompt_tokens and rollout.max_new_tokens are the limits", "data.max_len")
    if c.is_on("train.dynamic_batch_enable"):
        c.set(MICRO, c.value("train.max_tokens_per_gpu") or 16192, "train.max_tokens_per_gpu")
    c.no_meaning(f"{MICRO} limits a micro-batch; the gradient does not depend on it", "train.max_tokens_per_gpu")
    _rewards(c)


def _algorithm(c: Conversion) -> None:
    estimator = str(c.value("algo.advantage.estimator"))
    kind = ESTIMATORS.get(estimator)
    if kind is None:
        c.needs(f"{estimator} is not available: choose an algorithm.kind (docs/algorithms.md)", "algo.advantage.estimator")
    else:
        c.set("algorithm.kind", kind, "algo.advantage.estimator")
    divided = estimator != "dr_grpo" and c.value("algo.advantage.no_std_norm") is not True
    c.set("algorithm.divide_by_std", divided, "algo.advantage.no_std_norm")
    if kind == "ppo":
        path = c.value("critic.model_name_or_path")
        c.set("critic.path", UNSET if path in (None, c.value("actor.model_name_or_path")) else path, "critic.model_name_or_path")
    else:
        c.without("critic", f"{kind or estimator} uses no critic")
        for key in list(c.given):
            if key.startswith("critic."):
                c.no_meaning(f"{kind or estimator} uses no critic", key)
    both = c.given.get("actor.eps_clip_low_high")
    bounds = both if isinstance(both, list) and len(both) == 2 else [c.value("actor.eps_clip")] * 2
    c.set("algorithm.clip_ratio", bounds, "actor.eps_clip_low_high", "actor.eps_clip")
    if c.is_on("algo.dynamic_filtering_enable"):
        c.set(
            "algorithm.dynamic_sampling.max_rounds",
            1000,
            "algo.dynamic_filtering_enable",
            text="OpenRLHF samples until there are enough",
        )
        c.needs("groups whose rewards are all equal are dropped, whatever their mean", "algo.dynamic_filtering_range")
    c.no_meaning("it is off", "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range")
    level = c.value("algo.advantage.is_correction_level")
    correction = [f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "threshold", "gating")]
    if level in ("token", "seq"):
        c.set("algorithm.importance.level", "sequence" if level == "seq" else level, correction[0])
        c.needs("set algorithm.importance.mode, low and high", *correction[1:])
    c.no_meaning("weights by the sampler's log-probs are off", *correction)


def _kl(c: Conversion) -> None:
    coefficient, loss, kind, target, horizon = (
        f"algo.kl.{name}" for name in ("init_coef", "use_loss", "estimator", "target", "horizon")
    )
    if not c.value(coefficient):
        c.no_meaning("no KL is computed: its coefficient is 0", coefficient, loss, kind, target, horizon)
    elif c.is_on(loss):
        c.set("algorithm.kl_coefficient", c.value(coefficient), coefficient, loss)
        c.set("algorithm.kl_estimator", c.value(kind), kind)
        c.needs(
            "the coefficient of a KL loss is fixed; algorithm.kl_reward can have a target", *([target] if c.value(target) else [])
        )
    else:
        c.set("algorithm.kl_reward.coefficient", c.value(coefficient), coefficient, loss)
        c.set("algorithm.kl_reward.estimator", c.value(kind), kind)
        if c.value(target):
            c.set("algorithm.kl_reward.target", c.value(target), target)
            c.set("algorithm.kl_reward.horizon", c.value(horizon), horizon)
    c.no_meaning("the coefficient is fixed", target, horizon)


def _rewards(c: Conversion) -> None:
    path, url = c.value("reward.model_name_or_path"), c.value("reward.remote_url")
    placement = "offload" if c.is_on("reward.offload") else "resident"
    bounds = c.value("reward.clip_range") or [-10, 10]
    common: dict[str, Any] = {"bounds": bounds}
    if c.is_on("reward.normalize_enable"):
        common["normalise"] = "running"
    shared = ("reward.clip_range", "reward.normalize_enable", "reward.offload")
    if isinstance(url, str) and url.endswith(".py"):
        c.reward(
            {"kind": "function", "path": url, "function": "reward_func", "scores": "group", **common}, "reward.remote_url", *shared
        )
        c.remark(
            "rewards.0: OpenRLHF calls reward_func(queries, prompts, labels); plaudit calls it with prompts, responses, "
            "ground_truths: change its arguments (docs/rewards.md)"
        )
    elif path and not url:
        c.reward(
            {"kind": "scalar_model", "model": {"path": path, "placement": placement}, **common},
            "reward.model_name_or_path",
            *shared,
        )
    else:
        c.reward({"kind": "function", "path": "rewards.py", "scores": "group", **common}, *shared)
        c.needs(
            "put the server's scoring into rewards.py as compute_scores, or name the model: kind scalar_model (docs/rewards.md)",
            "reward.remote_url",
        )
        if not url:
            c.remark("rewards: the file names no reward: put yours into rewards.py as compute_scores (docs/rewards.md)")
    c.no_meaning("reward.remote_url is used instead", "reward.model_name_or_path")
    buffer, factor = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    if isinstance(c.value(buffer), int):
        limit = c.value("rollout.max_new_tokens") or c.value("data.max_len")
        c.reward(
            {"kind": "overlong", "max_tokens": limit, "buffer_tokens": c.value(buffer), "penalty": c.value(factor) or 1.0},
            buffer,
            factor,
        )
    c.no_meaning("the overlong penalty is off", buffer, factor)
