"""Names of settings that are in no system's table: those of earlier versions of plaudit, and generic words."""

BATCH = "train.rows_per_step or train.pairs_per_step or train.prompts_per_step"
KL = "algorithm.kl_coefficient or algorithm.kl_reward.coefficient"

OTHER_WORDS = {
    # Earlier versions of plaudit.
    "clip": "algorithm.clip_ratio or critic.clip_value", "kl_kind": "algorithm.kl_estimator", "repeatable": "run.deterministic",
    "kind": "algorithm.kl_reward.estimator or algorithm.kind or loss.kind", "reference_placement": "reference.placement",
    "coefficient": "critic.loss_coefficient or algorithm.kl_reward.coefficient", "ask_again": "audit.rescore_groups",
    "offload": "optim.placement or critic.optim.placement", "reference": "reference.path",
    "warmup_steps": "critic.pretrain_steps or optim.warmup_steps",
    # Words.
    "advantage": "algorithm.kind", "policy_loss": "algorithm.loss", "rollout_is": "algorithm.importance",
        "vf_coef": "critic.loss_coefficient",
    "margin": "data.margin_column", "batch_size": BATCH, "global_batch_size": BATCH, "train_batch_size": BATCH,
    "micro_batch_size": "train.tokens_per_micro_batch", "micro_batch_size_per_gpu": "train.tokens_per_micro_batch",
    "mini_batch_size": "train.prompts_per_update", "gen_batch_size": "train.prompts_per_step", "group_size": "rollout.n",
    "max_tokens": "rollout.max_new_tokens or data.max_tokens", "max_model_len": "data.max_prompt_tokens or data.max_tokens",
    "max_len": "data.max_tokens", "max_epochs": "run.epochs", "num_epochs": "run.epochs", "max_iters": "run.max_steps",
        "num_steps": "run.max_steps",
    "test": "data.val", "validation": "data.val", "eval": "data.val", "val_kwargs": "validation",
        "val_batch_size": "validation.max_prompts",
    "backend": "rollout.engine", "name": "rollout.engine or model.path", "do_sample": "rollout.temperature",
        "base_model": "model.path",
    "policy": "model.path", "optimizer": "optim", "warmup_steps_ratio": "optim.warmup_ratio",
        "gradient_clipping": "optim.max_grad_norm",
    "param_offload": "reference.placement", "logging": "run.trackers", "wandb": "run.trackers", "run_name": "run.dir",
        "ckpt_path": "run.dir",
    "max_async_level": "rollout.lag", "max_head_offpolicyness": "rollout.lag", "staleness_threshold": "rollout.lag",
    "load_best_model_at_end": "run.keep_best", "reward_fn": "rewards", "kl_coef": KL, "init_kl_coef": KL,
}  # fmt: skip

SYNONYMS = {
    "quantization": "quantization_bit", "qlora": "quantization_bit", "quantization_config": "quantization_bit",
        "flash_attention": "flash_attn",
    "padding_side": "pad_token", "world_size": "n_gpus_per_node", "num_processes": "n_gpus_per_node", "zero_stage": "deepspeed",
}  # fmt: skip
"""Words that mean the same as a key of a system."""

_WHOLE_BATCH = (
    "It is the whole batch of an update, not a part of it: per_device_train_batch_size × gradient_accumulation_steps × devices "
    "(for RL, of prompts: divided by num_generations). train.tokens_per_micro_batch limits what is on the device at once."
)
NOTES: dict[str, str] = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _WHOLE_BATCH)
"""Where a value cannot simply be copied: how the two settings differ."""

OTHER_WORDS_IN_REWARDS = {
    "clip": "bounds or capped", "at_once": "limits.max_concurrent_calls or limits.max_concurrent_groups",
    "max_concurrency": "limits.max_concurrent_calls or limits.max_concurrent_groups",
    "per_s": "limits.calls_per_s or limits.groups_per_s", "deadline_s": "limits.timeout_s",
    "read_timeout_s": "limits.attempt_timeout_s", "call_timeout_s": "limits.attempt_timeout_s",
    "retry": "limits.unreadable_retries", "max_retries": "limits.retries or limits.group_retries",
    "backoff": "limits.backoff_s or limits.group_backoff_s", "retry_delay": "limits.backoff_s or limits.group_backoff_s",
}  # fmt: skip
"""The same for settings of a reward, relative to it."""

OTHER_SECTIONS = {
    "actor_rollout_ref": "verl's", "actor": "verl's", "trainer": "verl's", "ref": "verl's", "custom_reward_function": "verl's",
    "reward_model": "verl's", "training_args": "TRL's", "training_arguments": "TRL's", "peft_config": "TRL's",
    "ckpt": "OpenRLHF's", "ds": "OpenRLHF's", "algo": "OpenRLHF's",
}  # fmt: skip
"""Sections of other systems' files, whose settings are looked up one by one."""
