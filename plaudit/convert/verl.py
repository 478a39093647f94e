"""verl's rules: settings that several of its keys decide together."""

from typing import Any

from plaudit.convert.conversion import Conversion
from plaudit.convert.values import is_unresolved
from plaudit.convert.verl_rewards import convert_rewards
from plaudit.other_systems.entries import UNSET
from plaudit.other_systems.verl import ACTOR, ESTIMATORS, KL_ESTIMATORS, LOSSES, MODEL, ROLLOUT, SCHEDULES

MICRO = "train.tokens_per_micro_batch"


def fork_of(settings: dict[str, Any]) -> str:
    """Whose defaults apply, by keys that only a fork has."""
    if "reward_model.tinyv_setup" not in settings:
        return "verl"
    return "rrm" if any(key.lstrip("+") == "trainer.validation_data_dir" for key in settings) else "tinyv"


def convert_verl(conversion: Conversion) -> None:
    _data(conversion)
    _algorithm(conversion)
    _loss(conversion)
    _kl(conversion)
    _batches(conversion)
    for theirs, ours in ((f"{ACTOR}.optim", ""), ("critic.optim", "critic.")):
        _optimiser(conversion, theirs, ours)
    _model(conversion)
    _validation(conversion)
    _run(conversion)
    convert_rewards(conversion)
    if "algorithm.kind" in conversion.settings and conversion.settings["algorithm.kind"].value == "gdpo":
        conversion.rewards[:] = [reward | {"normalise": "group"} for reward in conversion.rewards]
    conversion.apply_table()


def _data(c: Conversion) -> None:
    keys = ("data.filter_overlong_prompts", "data.truncation")
    truncation = str(c.value("data.truncation"))
    if c.is_on("data.filter_overlong_prompts"):
        c.set("data.too_long", "filter", "data.filter_overlong_prompts")
        c.no_meaning("prompts that are too long are filtered out before", "data.truncation")
    elif truncation in ("left", "error"):
        c.set("data.too_long", "cut_left" if truncation == "left" else "error", *keys)
    else:
        c.needs(f"prompts cannot be cut on the side {truncation!r}: data.too_long is filter, error or cut_left", "data.truncation")
        c.no_meaning("data.too_long says what happens to long prompts", "data.filter_overlong_prompts")


def _algorithm(c: Conversion) -> None:
    key = "algorithm.adv_estimator"
    estimator = str(c.value(key)).lower().removeprefix("advantageestimator.")
    if estimator in ESTIMATORS:
        c.set("algorithm.kind", ESTIMATORS[estimator], key)
    else:
        c.needs(f"{estimator} is not available: choose an algorithm.kind (docs/algorithms.md)", key)
    kind = ESTIMATORS.get(estimator, "grpo")
    if kind == "ppo":
        path = c.value("critic.model.path")
        c.set(
            "critic.path",
            UNSET if path in (None, c.value(f"{MODEL}.path")) else path,
            "critic.model.path",
            text="from the policy's weights",
        )
        c.no_meaning("ppo has a critic", "critic.enable")
    else:
        c.without("critic", f"{kind} uses no critic")
        for given in list(c.given):
            if given.startswith("critic."):
                c.no_meaning(f"{kind} uses no critic", given)
    for theirs, ours in (("ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"), ("ppo_epochs", f"{ACTOR}.ppo_epochs"),
                         ("shuffle", f"{ACTOR}.shuffle"), ("loss_agg_mode", f"{ACTOR}.loss_agg_mode")):  # fmt: skip
        if c.value(f"critic.{theirs}") not in (None, c.value(ours)):
            c.needs("the critic is trained in the policy's updates: it has no batches of its own", f"critic.{theirs}")
        c.no_meaning("the same as the policy's, as always here", f"critic.{theirs}")
    enabled = c.is_on("algorithm.filter_groups.enable")
    rounds = c.value("algorithm.filter_groups.max_num_gen_batches")
    filters = ("enable", "max_num_gen_batches", "metric")
    if enabled:
        unlimited = not isinstance(rounds, int) or rounds <= 0
        text = "verl's 0 is no limit; this is a large one" if unlimited else ""
        c.set(
            "algorithm.dynamic_sampling.max_rounds",
            1000 if unlimited else rounds,
            *(f"algorithm.filter_groups.{name}" for name in filters),
            text=text,
        )
    c.no_meaning("it is off", *(f"algorithm.filter_groups.{name}" for name in filters))
    _importance(c)


def _importance(c: Conversion) -> None:
    level, cap = "algorithm.rollout_correction.rollout_is", f"{ACTOR}.tis_imp_ratio_cap"
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    chosen = c.value(level)
    if chosen in ("token", "sequence", True):
        c.set("algorithm.importance.level", "token" if chosen is True else chosen, level)
        c.set("algorithm.importance.high", c.value(threshold), threshold)
    elif isinstance(c.value(cap), int | float) and c.value(cap) > 0:
        c.set("algorithm.importance.high", c.value(cap), cap)
    c.no_meaning("weights by the sampler's log-probs are off", level, threshold, cap)


def _loss(c: Conversion) -> None:
    mode_key, aggregation_key = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
    mode = str(c.value(mode_key))
    if mode in LOSSES:
        c.set("algorithm.loss", LOSSES[mode], mode_key)
    else:
        c.needs(f"{mode} is not available: choose an algorithm.loss (docs/algorithms.md)", mode_key)
    if mode == "gspo":
        c.set("algorithm.aggregation", "seq-mean-token-mean", aggregation_key, text="verl's gspo always aggregates so")
    else:
        c.set("algorithm.aggregation", c.value(aggregation_key), aggregation_key)
    both, low, high = (f"{ACTOR}.clip_ratio{side}" for side in ("", "_low", "_high"))
    bounds = [c.given.get(side) if c.given.get(side) is not None else 0.2 for side in (low, high)]
    if c.has(both) and c.whose == "tinyv":
        bounds = [c.given[both]] * 2
        c.set("algorithm.clip_ratio", bounds, both)
    elif c.given.get(both, 0.2) != 0.2 and not c.has(low, high):
        c.needs(
            "verl reads clip_ratio_low and clip_ratio_high (0.2 unless given), not this key: the recipe has 0.2. If you meant it, "
            f"set algorithm.clip_ratio to {c.given[both]}",
            both,
        )
    c.no_meaning("verl reads clip_ratio_low and clip_ratio_high", both)
    c.set("algorithm.clip_ratio", bounds, low, high)


def _kl(c: Conversion) -> None:
    use, coefficient, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    estimator = KL_ESTIMATORS.get(str(c.value(kind)).removesuffix("+"))
    if c.is_on(use):
        c.set("algorithm.kl_coefficient", c.value(coefficient), use, coefficient)
        if estimator is None:
            c.needs("choose an algorithm.kl_estimator: k1, abs, k2 or k3", kind)
        elif str(c.value(kind)).endswith("+"):
            c.set("algorithm.kl_estimator", estimator, kind, text="verl's + takes the gradient of k2 instead")
        else:
            c.set("algorithm.kl_estimator", estimator, kind)
    c.no_meaning("the KL loss is off", use, coefficient, kind)
    in_reward, penalty = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
    control = {name: f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type", "target_kl", "horizon")}
    if c.is_on(in_reward):
        c.set("algorithm.kl_reward.coefficient", c.value(control["kl_coef"]), in_reward, control["kl_coef"])
        in_penalty = KL_ESTIMATORS.get(str(c.value(penalty)).removesuffix("+"))
        if in_penalty is not None:
            c.set("algorithm.kl_reward.estimator", in_penalty, penalty)
        c.needs("choose an algorithm.kl_reward.estimator: k1, abs, k2 or k3", penalty)
        if c.value(control["type"]) == "adaptive":
            c.set("algorithm.kl_reward.target", c.value(control["target_kl"]), control["type"], control["target_kl"])
            c.set("algorithm.kl_reward.horizon", c.value(control["horizon"]), control["horizon"])
        c.no_meaning("the coefficient is fixed", *control.values())
    c.no_meaning("KL in the reward is off", in_reward, penalty, *control.values())


def _batches(c: Conversion) -> None:
    c.set("train.last_batch", "drop")
    step, update_key = c.value("data.train_batch_size"), f"{ACTOR}.ppo_mini_batch_size"
    update = c.value(update_key)
    if isinstance(update, int) and isinstance(step, int) and update >= step:
        c.set("train.prompts_per_update", UNSET, update_key, text="all prompts of a step are one update")
    else:
        c.set("train.prompts_per_update", update, update_key, text="prompts, in both")
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    per_gpu = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    lengths = (c.value("data.max_prompt_length"), c.value("data.max_response_length"))
    if c.is_on(dynamic):
        c.set(MICRO, c.value(tokens), tokens, dynamic)
        c.no_meaning("use_dynamic_bsz is on, so verl ignores it", per_gpu, f"{ACTOR}.ppo_micro_batch_size")
    elif isinstance(c.value(per_gpu), int) and all(isinstance(length, int) for length in lengths):
        longest = sum(lengths)
        c.set(
            MICRO,
            c.value(per_gpu) * longest,
            per_gpu,
            text=f"{c.value(per_gpu)} sequences of up to {longest} tokens; the gradient does not depend on it",
        )
        c.no_meaning("use_dynamic_bsz is off, so verl ignores it", tokens)
        c.no_meaning("batches are always packed by tokens", dynamic)
    c.no_meaning(f"{MICRO} limits a micro-batch; the gradient does not depend on it", dynamic, tokens, per_gpu)


def _optimiser(c: Conversion, theirs: str, ours: str) -> None:
    style, kind = f"{theirs}.warmup_style", f"{theirs}.lr_scheduler_type"
    key = style if c.given.get(style) is not None else kind
    schedule = str(c.value(key))
    if schedule in SCHEDULES:
        c.set(f"{ours}optim.schedule", SCHEDULES[schedule], key)
    else:
        c.needs(f"choose {ours}optim.schedule: constant, linear, cosine or wsd", key)
    c.no_meaning("lr_scheduler_type is its later name", style)
    c.no_meaning("warmup_style is given, which verl reads first", kind)
    steps, ratio = f"{theirs}.lr_warmup_steps", f"{theirs}.lr_warmup_steps_ratio"
    if isinstance(c.value(steps), int) and c.value(steps) > 0:
        c.set(f"{ours}optim.warmup_steps", c.value(steps), steps)
    elif c.value(ratio):
        c.set(f"{ours}optim.warmup_ratio", c.value(ratio), ratio)
    c.no_meaning("there is no warm-up, or the other key says how long it is", steps, ratio)
    clip, later = (f"{ACTOR}.grad_clip" if not ours else "critic.grad_clip"), f"{theirs}.clip_grad"
    c.set(f"{ours}optim.max_grad_norm", c.given[later] if c.has(later) and not c.has(clip) else c.value(clip), clip, later)


def _model(c: Conversion) -> None:
    for theirs, ours in ((MODEL, "model"), ("critic.model", "critic")):
        rank = c.value(f"{theirs}.lora_rank") or c.value(f"{theirs}.lora.rank") or 0
        if not is_unresolved(rank) and (not isinstance(rank, int) or rank <= 0):
            c.without(f"{ours}.lora", "all weights are trained: lora_rank is 0")
            c.no_meaning("all weights are trained: the rank is 0", f"{theirs}.lora.rank")
        elif not c.value(f"{theirs}.lora_rank"):
            c.set(f"{ours}.lora.rank", rank, f"{theirs}.lora.rank")
    dtype = f"{ACTOR}.fsdp_config.model_dtype"
    text = str(c.value(dtype)).lower()
    if text in ("bf16", "bfloat16"):
        c.set("model.dtype", "bfloat16", dtype, text="the optimiser keeps fp32 master weights here")
    c.no_meaning("fp32 master weights and bf16 passes, as model.dtype auto on a GPU", dtype)
    c.no_meaning("it has the dtype that the policy has", "actor_rollout_ref.ref.fsdp_config.model_dtype", "critic.fsdp.model_dtype")


def _validation(c: Conversion) -> None:
    keys = {name: f"{ROLLOUT}.val_kwargs.{name}" for name in ("do_sample", "temperature", "top_p", "top_k")}
    values = {name: c.given.get(key) for name, key in keys.items()}
    temperature = values["temperature"] or 0
    if values["do_sample"] is True and temperature:
        c.set("validation.temperature", temperature, keys["temperature"], keys["do_sample"])
        c.set("validation.top_p", 1.0 if values["top_p"] is None else values["top_p"], keys["top_p"])
        top_k = values["top_k"]
        c.set("validation.top_k", top_k if isinstance(top_k, int) and top_k > 0 else UNSET, keys["top_k"], text="off, as here")
    else:
        c.set("validation.temperature", 0.0, keys["do_sample"], keys["temperature"], text="greedy")
        c.no_meaning("validation is greedy", keys["top_p"], keys["top_k"])


def _run(c: Conversion) -> None:
    folder, name = "trainer.default_local_dir", "trainer.experiment_name"
    if c.has(folder) or c.has(name):
        c.set("run.dir", c.value(folder) if c.has(folder) else f"runs/{c.value(name)}", *((folder,) if c.has(folder) else (name,)))
    c.no_meaning("a run is called after its folder, run.dir", name)
    keep = "trainer.max_actor_ckpt_to_keep"
    number, interval = c.value(keep), c.value("trainer.save_freq")
    if interval is None or (isinstance(interval, int) and interval <= 0):
        c.no_meaning("no checkpoint is saved before the last step: trainer.save_freq is off", keep)
    elif isinstance(number, str):  # not in the file
        c.set("run.keep_last", number, keep)
    elif number:  # an earlier version's true deletes the previous one
        c.set("run.keep_last", int(number), keep)
    else:
        c.set("run.keep_last", "all", keep)
        c.set("run.save_every_minutes", None, text="checkpoints by steps only")
