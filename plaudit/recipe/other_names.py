"""Names of settings in earlier versions and in other trainers, so that an unknown one gets a useful suggestion."""

OTHER_NAMES = {
    # Earlier versions of plaudit.
    "clip": "algorithm.clip_ratio or critic.clip_value", "kl_kind": "algorithm.kl_estimator", "repeatable": "run.deterministic",
    "kind": "algorithm.kl_reward.estimator or algorithm.kind or loss.kind", "reference_placement": "reference.placement",
    "coefficient": "critic.loss_coefficient or algorithm.kl_reward.coefficient", "ask_again": "audit.rescore_groups",
    "offload": "optim.placement or critic.optim.placement", "reference": "reference.path",
    "warmup_steps": "critic.pretrain_steps or optim.warmup_steps",
    # Other trainers.
    "learning_rate": "optim.lr", "lr_scheduler_type": "optim.schedule", "adam_epsilon": "optim.eps",
    "num_train_epochs": "run.epochs", "output_dir": "run.dir", "save_steps": "run.save_every", "eval_steps": "run.validate_every",
    "report_to": "run.trackers", "train_batch_size": "train.rows_per_step or train.pairs_per_step or train.prompts_per_step",
    "per_device_train_batch_size": "train.rows_per_step or train.pairs_per_step or train.prompts_per_update",
    "ppo_mini_batch_size": "train.prompts_per_update", "ppo_epochs": "train.epochs_per_step", "num_generations": "rollout.n",
    "max_completion_length": "rollout.max_new_tokens", "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens", "kl_loss_coef": "algorithm.kl_coefficient",
    "beta": "algorithm.kl_coefficient or loss.beta",
    "entropy_coeff": "algorithm.entropy_coefficient", "loss_agg_mode": "algorithm.aggregation",
    "clip_ratio_low": "algorithm.clip_ratio", "clip_ratio_high": "algorithm.clip_ratio", "adv_estimator": "algorithm.kind",
    "advantage": "algorithm.kind", "use_kl_in_reward": "algorithm.kl_reward", "kl_ctrl": "algorithm.kl_reward",
    "target_kl": "algorithm.kl_reward.target", "policy_loss": "algorithm.loss", "loss_mode": "algorithm.loss",
    "gamma": "algorithm.discount", "rollout_is": "algorithm.importance", "rollout_is_threshold": "algorithm.importance.high",
    "lam": "algorithm.gae_lambda", "cliprange_value": "critic.clip_value", "critic_warmup": "critic.pretrain_steps",
    "vf_coef": "critic.loss_coefficient",
    "filter_groups": "algorithm.dynamic_sampling", "max_num_gen_batches": "algorithm.dynamic_sampling.max_rounds",
    "importance_sampling_level": "algorithm.loss",
    "use_kl_loss": "algorithm.kl_coefficient", "loss_type": "algorithm.aggregation or loss.kind",
    "scale_rewards": "algorithm.divide_by_std",
    "reward_funcs": "rewards", "custom_reward_function": "rewards", "total_epochs": "run.epochs",
    "total_training_steps": "run.max_steps",
    "test_freq": "run.validate_every", "save_freq": "run.save_every", "use_peft": "model.lora",
    "kl_loss_type": "algorithm.kl_estimator", "norm_adv_by_std_in_grpo": "algorithm.divide_by_std",
    "epsilon": "algorithm.clip_ratio",
    "pref_beta": "loss.beta", "pref_loss": "loss.kind", "pref_ftx": "loss.nll_coefficient", "rpo_alpha": "loss.nll_coefficient",
    "dpo_label_smoothing": "loss.label_smoothing", "ref_model": "reference.path",
    "center_rewards_coefficient": "loss.centring_coefficient", "margin": "data.margin_column",
    "gradient_accumulation_steps": "train.tokens_per_micro_batch", "cutoff_len": "data.max_tokens", "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens", "train_files": "data.train", "val_files": "data.val", "dataset": "data.train",
    "model_name_or_path": "model.path", "template": "model.chat_template", "bf16": "model.dtype", "torch_dtype": "model.dtype",
    "r": "model.lora.rank", "lora_r": "model.lora.rank", "lora_rank": "model.lora.rank", "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout", "lora_target": "model.lora.targets", "target_modules": "model.lora.targets",
}  # fmt: skip

OTHER_NAMES_IN_REWARDS = {
    "clip": "bounds or capped", "at_once": "limits.max_concurrent_calls or limits.max_concurrent_groups",
    "max_concurrency": "limits.max_concurrent_calls or limits.max_concurrent_groups",
    "per_s": "limits.calls_per_s or limits.groups_per_s", "deadline_s": "limits.timeout_s",
    "read_timeout_s": "limits.attempt_timeout_s", "call_timeout_s": "limits.attempt_timeout_s",
    "retry": "limits.unreadable_retries", "max_retries": "limits.retries or limits.group_retries",
}  # fmt: skip
"""The same for settings of a reward, relative to it."""
