"""verl's keys about rewards, and those of its forks."""

from plaudit.other_systems.entries import Entry, advice, composed, named, no_meaning

RM_ENGINE = "the model of a reward has its own engine or server (docs/reward_models/README.md)"

REWARD_KEYS: dict[str, Entry] = {
    **named(
        "reward", composed("rewards"),
        "custom_reward_function.path", "custom_reward_function.name", "custom_reward_function.reward_kwargs.*",
            "reward_manager.name",
        "reward_manager.source", "reward_model.enable", "reward_model.model_path", "sandbox_fusion.url", "reward_kwargs.*",
    ),
    "reward.reward_manager.module.path": advice("rewards are settings, and your own are functions (docs/rewards.md)", "rewards"),
    "reward.reward_manager.module.name": no_meaning("there are no reward managers", "rewards"),
    "reward.sandbox_fusion.*": advice("run the sandbox from a reward function", "rewards", switch="reward.sandbox_fusion.url"),
    "reward.num_workers": no_meaning("each reward has its own `workers`", "rewards"),
    "reward.reward_model.*": no_meaning(RM_ENGINE, "rewards"),
    **named(
        "reward_model", composed("rewards"),
        "enable", "reward_manager", "strategy", "model.path", "model.model_type", "model.input_tokenizer",
            "model.trust_remote_code",
        "model.fsdp_config.param_offload", "max_length", "reward_kwargs.overlong_buffer_cfg.enable",
            "reward_kwargs.overlong_buffer_cfg.len",
        "reward_kwargs.overlong_buffer_cfg.penalty_factor", "reward_kwargs.max_resp_len", "overlong_buffer.enable",
            "overlong_buffer.len",
        "overlong_buffer.penalty_factor",
        # DoubleVII/verl, branch gen_rm.
        "keep_group", "prompt_length", "score_scale_factor", "default_reward", "custom_processor.path", "custom_processor.name",
        "custom_processor.extractor_type", "custom_processor.overlong_buffer.enable",
            "custom_processor.overlong_buffer.max_resp_len",
        "custom_processor.overlong_buffer.len", "custom_processor.overlong_buffer.penalty_factor",
            "custom_processor.group_prompt_type",
        "custom_processor.group_add_example", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.response_length",
        "rollout.free_cache_engine",
        # TinyV, rrm-cure-miracle-steps.
        "tinyv_setup", "tinyv_weight",
        # VeRL-with-rms.
        "reward_function", "reward_weight", "reward_combine_func", "reward_model_type", "use_bge", "bge_weight", "combine_reward",
        "reward_vllm_rollout.temperature",
        # RLMT.
        "longcot_config", "strict",
    ),
    **named(
        "reward_model", no_meaning(RM_ENGINE, "rewards"),
        "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu",
            "ulysses_sequence_parallel_size",
        "model.use_remove_padding", "model.use_fused_kernels", "model.use_shm", "model.external_lib",
            "model.tensor_model_parallel_size",
        "model.fsdp_config.*", "rollout.*", "reward_vllm_rollout.*", "enable_resource_pool", "n_gpus_per_node", "nnodes",
        "reward_kwargs.overlong_buffer_cfg.log", "overlong_buffer.log", "num_workers", "launch_reward_fn_async",
    ),
    **named("reward_model", advice("rewards are settings, and your own are functions (docs/rewards.md)", "rewards"),
        "reward_loop_*"),
    "reward_model.sandbox_fusion.*": advice("run the sandbox from a reward function", "rewards",
        switch="reward_model.sandbox_fusion.url"),
    "custom_reward_function": composed("rewards"),
    "reward_model": composed("rewards"),
}  # fmt: skip
