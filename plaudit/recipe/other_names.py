"""Names of settings in earlier versions and in other trainers, so that an unknown one gets a useful suggestion."""

BATCH = "train.rows_per_step or train.pairs_per_step or train.prompts_per_step"
UPDATE_BATCH = "train.rows_per_step or train.pairs_per_step or train.prompts_per_update"
KL = "algorithm.kl_coefficient or algorithm.kl_reward.coefficient"

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
    "report_to": "run.trackers", "train_batch_size": BATCH,
    "per_device_train_batch_size": UPDATE_BATCH, "gradient_accumulation_steps": UPDATE_BATCH,
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
    "cutoff_len": "data.max_tokens", "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens", "train_files": "data.train", "val_files": "data.val", "dataset": "data.train",
    "model_name_or_path": "model.path", "template": "model.chat_template", "bf16": "model.dtype", "torch_dtype": "model.dtype",
    "r": "model.lora.rank", "lora_r": "model.lora.rank", "lora_rank": "model.lora.rank", "lora_alpha": "model.lora.alpha",
    "batch_size": BATCH, "micro_batch_size": "train.tokens_per_micro_batch", "global_batch_size": BATCH,
    "micro_batch_size_per_gpu": "train.tokens_per_micro_batch", "ppo_micro_batch_size_per_gpu": "train.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch", "gen_batch_size": "train.prompts_per_step",
    "rollout_batch_size": "train.prompts_per_step", "generation_batch_size": "train.prompts_per_step",
    "steps_per_generation": "train.prompts_per_update", "num_iterations": "train.epochs_per_step",
    "mini_batch_size": "train.prompts_per_update", "n_samples_per_prompt": "rollout.n", "group_size": "rollout.n",
    "generate_max_len": "rollout.max_new_tokens", "max_tokens": "rollout.max_new_tokens or data.max_tokens",
    "prompt_max_len": "data.max_prompt_tokens", "max_len": "data.max_tokens",
    "max_model_len": "data.max_prompt_tokens or data.max_tokens", "truncation": "data.too_long", "truncation_mode": "data.too_long",
    "filter_overlong_prompts": "data.too_long", "prompt_data": "data.train", "train_dataset": "data.train", "test": "data.val",
    "validation": "data.val", "eval": "data.val", "eval_dataset": "data.val", "backend": "rollout.engine",
    "name": "rollout.engine or model.path", "max_async_level": "rollout.lag", "max_head_offpolicyness": "rollout.lag",
    "staleness_threshold": "rollout.lag",
    "pretrain": "model.path", "base_model": "model.path", "policy": "model.path", "tokenizer_path": "model.tokenizer",
    "optimizer": "optim", "lr_scheduler": "optim.schedule", "warmup_steps_ratio": "optim.warmup_ratio",
    "lr_warmup_steps": "optim.warmup_steps", "lr_warmup_steps_ratio": "optim.warmup_ratio", "grad_clip": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm", "clip_grad": "optim.max_grad_norm", "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas", "optimizer_offload": "optim.placement", "adam_offload": "optim.placement",
    "param_offload": "reference.placement", "num_epochs": "run.epochs", "max_epochs": "run.epochs", "num_episodes": "run.epochs",
    "max_iters": "run.max_steps", "num_steps": "run.max_steps", "save_strategy": "run.save_every",
    "eval_strategy": "run.validate_every",
    "evaluation_strategy": "run.validate_every", "save_total_limit": "run.keep_last", "max_actor_ckpt_to_keep": "run.keep_last",
    "load_best_model_at_end": "run.keep_best", "logger": "run.trackers", "logging": "run.trackers", "wandb": "run.trackers",
    "project_name": "run.project", "experiment_name": "run.dir", "run_name": "run.dir", "default_local_dir": "run.dir",
    "ckpt_path": "run.dir", "save_path": "run.dir", "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "val_batch_size": "validation.max_prompts", "val_kwargs": "validation", "do_sample": "rollout.temperature",
    "reward_fn": "rewards", "reward_function": "rewards", "reward_model": "rewards", "reward_pretrain": "rewards",
    "remote_rm_url": "rewards", "reward_weights": "rewards", "init_kl_coef": KL, "kl_coef": KL,
    "eps_clip": "algorithm.clip_ratio", "epsilon_high": "algorithm.clip_ratio", "advantage_estimator": "algorithm.kind",
    "lambd": "algorithm.gae_lambda", "value_clip": "critic.clip_value", "critic_pretrain": "critic.path",
    "lora_dropout": "model.lora.dropout", "lora_target": "model.lora.targets", "target_modules": "model.lora.targets",
}  # fmt: skip

_WHOLE_BATCH = (
    "It is the whole batch of an update, not a part of it: per_device_train_batch_size × gradient_accumulation_steps × devices "
    "(for RL, of prompts: divided by num_generations). train.tokens_per_micro_batch limits what is on the device at once."
)
NOTES: dict[str, str] = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _WHOLE_BATCH)
"""Where a value cannot simply be copied: how the two settings differ."""

OTHER_NAMES_IN_REWARDS = {
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
}  # fmt: skip
"""Sections of other trainers' files, whose settings are looked up one by one."""

_PACKED = "Sequences are always packed without padding: remove it."
_PRECISION = (
    "Weights are trained in float32 or bfloat16. To save memory: model.lora.rank, model.gradient_checkpointing, "
    "optim.placement=offload (docs/memory.md)."
)
_ENGINE = (
    "plaudit samples with its own engine, on the trainer's weights: remove it, or set rollout.engine=vllm or sglang "
    "(docs/engine.md)."
)
_ONE_DEVICE = "A run uses one process and one device: remove it."
_AUTOMATIC = "It is chosen automatically: remove it."
UNNEEDED = {
    **dict.fromkeys(("packing", "neat_packing", "padding_free", "use_remove_padding", "use_dynamic_bsz", "eval_packing"), _PACKED),
    **dict.fromkeys(
        ("quantization", "quantization_bit", "quantization_config", "load_in_4bit", "load_in_8bit", "qlora", "fp16", "fp8"),
        _PRECISION,
    ),
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "gpu_memory_utilization", "enforce_eager", "vllm_num_engines"),
        _ENGINE,
    ),
    **dict.fromkeys(
        (
            "deepspeed", "fsdp", "fsdp_config", "zero_stage", "n_gpus_per_node", "nnodes", "num_processes", "world_size",
            "tensor_model_parallel_size", "tensor_parallel_size", "vllm_tensor_parallel_size",
        ),
        _ONE_DEVICE,
    ),
    **dict.fromkeys(
        (
            "attn_implementation", "flash_attn", "flash_attention", "remove_unused_columns", "dataloader_num_workers",
            "pad_token", "padding_side", "use_cache", "ddp_timeout",
        ),
        _AUTOMATIC,
    ),
}  # fmt: skip
"""Settings of other trainers that have no counterpart, and what to do instead."""
