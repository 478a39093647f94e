"""transformers' TrainingArguments, which LLaMA-Factory and TRL extend: the entries that both tables start from."""

from typing import Any

from plaudit.other_systems.entries import (
    AUTOMATIC,
    LOGGED,
    NEVER_PUSHED,
    PACKED,
    PRECISION,
    SAVED,
    SHARDED,
    Entry,
    Unfit,
    advice,
    composed,
    copy,
    given,
    no_meaning,
    positive,
    same,
    several,
    trackers,
)

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
BATCHES = ("train.rows_per_step", "train.pairs_per_step", "train.prompts_per_update")
COMPILED = "layers are fused on a GPU, without a setting"
OPTIMISERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def keep(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return value
    raise Unfit("it keeps every checkpoint; run.keep_last keeps 2 unless you set it")


KEYS: dict[str, Entry] = {
    "output_dir": copy("run.dir"),
    "num_train_epochs": copy("run.epochs", default=3.0),
    "max_steps": copy("run.max_steps", read=positive),
    "per_device_train_batch_size": composed(*BATCHES, default=8),
    "gradient_accumulation_steps": composed(*BATCHES, default=1),
    "learning_rate": copy("optim.lr", default=5e-5),
    "lr_scheduler_type": composed("optim.schedule", default="linear"),
    "lr_scheduler_kwargs": composed("optim.min_lr_ratio"),
    "warmup_steps": composed("optim.warmup_steps", default=0),
    "warmup_ratio": composed("optim.warmup_ratio", default=0.0),
    "weight_decay": copy("optim.weight_decay", default=0.0),
    "adam_beta1": composed("optim.betas", default=0.9),
    "adam_beta2": composed("optim.betas", default=0.999),
    "adam_epsilon": copy("optim.eps", default=1e-8),
    "max_grad_norm": copy("optim.max_grad_norm", read=given, default=1.0),
    "optim": same("AdamW, as here", *OPTIMISERS, otherwise="the optimiser here is AdamW", to=("optim",)),
    "seed": copy("seed", default=42),
    "data_seed": advice("`seed` is that of the row order too", "seed"),
    "bf16": composed("model.dtype"),
    "fp16": advice("train in bfloat16 (model.dtype)", "model.dtype"),
    "gradient_checkpointing": copy("model.gradient_checkpointing", default=False),
    "use_liger_kernel": copy("model.liger"),
    "save_strategy": composed("run.save_every", default="steps"),
    "save_steps": composed("run.save_every", default=500),
    "save_total_limit": copy("run.keep_last", read=keep),
    "load_best_model_at_end": advice("the best checkpoint is kept (run.keep_best), and the last one is the model", "run.keep_best"),
    "eval_strategy": composed("run.validate_every", default="no"),
    "eval_steps": composed("run.validate_every"),
    "eval_on_start": copy("run.validate_first"),
    "report_to": copy("run.trackers", read=trackers),
    "project": copy("run.project"),
    "run_name": no_meaning("a run is called after its folder, run.dir", "run.dir"),
    "resume_from_checkpoint": advice("the same command resumes a run: there is nothing to name", "run.dir"),
    "overwrite_output_dir": no_meaning("the same command resumes a run; for a new one choose another run.dir", "run.dir"),
    "do_train": same("the command trains", True, otherwise="a recipe is for training", to=("stage",)),
    "do_eval": no_meaning("data.val is validated if it is there", "data.val"),
    "do_predict": advice("to sample from a model: plaudit sample"),
    "label_smoothing_factor": advice("label smoothing is not available in SFT"),
    "neftune_noise_alpha": advice("NEFTune is not available"),
    "optim_args": advice("AdamW's settings here are optim.betas, optim.eps and optim.weight_decay", "optim"),
    "dataloader_drop_last": composed(),
    "deepspeed": no_meaning(SHARDED, "cluster.sharding"),
    "fsdp": no_meaning(SHARDED, "cluster.sharding"),
    "fsdp_config": no_meaning(SHARDED, "cluster.sharding"),
    "use_cpu": copy("run.device", values={True: "cpu", False: "auto"}),
    "full_determinism": no_meaning("run.deterministic is on by default", "run.deterministic"),
    **several(
        no_meaning(LOGGED), "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level",
            "log_level_replica",
        "log_on_each_node", "logging_nan_inf_filter", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics",
            "debug",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "include_tokens_per_second",
    ),
    **several(
        no_meaning(AUTOMATIC), "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
        "per_device_eval_batch_size", "eval_accumulation_steps", "auto_find_batch_size", "torch_empty_cache_steps", "use_cache",
        "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "prediction_loss_only", "include_for_metrics",
        "length_column_name", "label_names", "eval_delay", "tf32", "bf16_full_eval", "fp16_full_eval", "liger_kernel_config",
        "gradient_checkpointing_kwargs", "use_mps_device", "jit_mode_eval", "optim_target_modules", "hub_revision",
        "average_tokens_across_devices", "metric_for_best_model", "greater_is_better",
    ),
    **several(
        no_meaning(SHARDED, "cluster.sharding"), "ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "ddp_static_graph", "local_rank", "accelerator_config", "parallelism_config", "split_batches",
    ),
    **several(no_meaning(COMPILED), "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    **several(
        no_meaning(SAVED), "save_only_model", "save_on_each_node", "save_safetensors", "enable_jit_checkpoint", "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
    ),
    **several(advice(NEVER_PUSHED), "push_to_hub", "hub_model_id"),
    **several(no_meaning(NEVER_PUSHED), "hub_strategy", "hub_always_push", "hub_token", "hub_private_repo"),
    **several(no_meaning(PACKED), "group_by_length", "train_sampling_strategy", "pad_to_multiple_of"),
    **several(advice(PRECISION), "load_in_4bit", "load_in_8bit"),
}  # fmt: skip

ALIASES = {
    "evaluation_strategy": "eval_strategy", "use_liger": "use_liger_kernel", "lr_scheduler": "lr_scheduler_type",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
}  # fmt: skip
