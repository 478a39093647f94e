"""LLaMA-Factory: every argument of its 0.9.5 (data, fine-tuning, model, training, generating)."""

from typing import Any

from plaudit.other_systems.entries import (
    AUTOMATIC,
    ENGINE,
    PACKED,
    PRECISION,
    QUANTISED,
    TEXT_ONLY,
    UNSET,
    Entry,
    Table,
    Unfit,
    advice,
    comma_list,
    composed,
    copy,
    given,
    no_meaning,
    same,
    several,
)
from plaudit.other_systems.huggingface import ALIASES as HF_ALIASES
from plaudit.other_systems.huggingface import KEYS as HF_KEYS

TEMPLATES = {"chatml": "chatml", "qwen": "qwen", "qwen2": "qwen", "qwen2_5": "qwen", "llama3": "llama3"}


def template(value: Any) -> Any:
    if value in (None, "default", "empty"):
        return UNSET
    if value in TEMPLATES:
        return TEMPLATES[value]
    raise Unfit(
        f"the template {value} is not among ours: the recipe uses the tokenizer's own; write another into a .jinja file "
        f"(model.chat_template)"
    )


def targets(value: Any) -> Any:
    return "all-linear" if value in ("all", None) else comma_list(value)


KEYS: dict[str, Entry] = {
    **HF_KEYS,
    "stage": composed("stage", default="sft"),
    "model_name_or_path": copy("model.path"),
    "adapter_name_or_path": advice("name the adapter's folder as the model: it is merged into its base", "model.path"),
    "finetuning_type": composed("model.lora", default="lora"),
    "lora_rank": copy("model.lora.rank", default=8),
    "lora_alpha": composed("model.lora.alpha"),
    "lora_dropout": copy("model.lora.dropout", default=0.0),
    "lora_target": copy("model.lora.targets", read=targets, default="all"),
    "template": copy("model.chat_template", read=template),
    "dataset": copy("data.train", read=comma_list),
    "eval_dataset": copy("data.val", read=comma_list),
    "dataset_dir": composed("data.dataset_info", default="data"),
    "cutoff_len": copy("data.max_tokens", default=2048),
    "mask_history": copy("data.train_on", values={True: "last", False: "all"}),
    "train_on_prompt": advice("the loss is on assistant turns only", "data.train_on"),
    "max_samples": composed(),
    "val_size": advice("split the file: data.val names another", "data.val"),
    "gradient_checkpointing": no_meaning("disable_gradient_checkpointing is LLaMA-Factory's switch",
        "model.gradient_checkpointing"),
    "disable_gradient_checkpointing": copy("model.gradient_checkpointing", values={True: False, False: True}, default=False),
    "enable_liger_kernel": copy("model.liger"),
    "pure_bf16": no_meaning("with bfloat16 the optimiser keeps fp32 master weights", "model.dtype"),
    "trust_remote_code": copy("model.trust_remote_code"),
    "pref_beta": copy("loss.beta", default=0.1),
    "pref_loss": copy("loss.kind", values={"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}, default="sigmoid"),
    "pref_ftx": copy("loss.nll_coefficient", default=0.0),
    "dpo_label_smoothing": copy("loss.label_smoothing", default=0.0),
    "ref_model": copy("reference.path", read=given),
    "use_swanlab": composed("run.trackers"),
    "swanlab_project": composed("run.project"),
    "disable_shuffling": advice("rows are always shuffled (by seed)"),
    "early_stopping_steps": advice("there is no early stopping: the best checkpoint is kept (run.keep_best)", "run.keep_best"),
    "default_system": advice("write the system message into the rows"),
    "streaming": no_meaning("large files stay on disk and are read as needed"),
    "tokenized_path": no_meaning("tokens are kept for the next start (PLAUDIT_CACHE)"),
    "overwrite_cache": no_meaning("tokens of changed files are computed anew"),
    "mix_strategy": same("files are joined", "concat", otherwise="files are joined and shuffled: there is no interleaving"),
    "interleave_probs": advice("files are joined and shuffled: there is no interleaving"),
    "resize_vocab": advice("add tokens to the model's folder first"),
    **several(advice("add tokens to the model's folder first"), "add_tokens", "add_special_tokens", "new_special_tokens_config"),
    "split_special_tokens": no_meaning("data.special_tokens says what control tokens in messages are", "data.special_tokens"),
    "use_fast_tokenizer": same("fast tokenizers are used", True, otherwise="only fast tokenizers are used"),
    "enable_thinking": advice("put it into the chat template (model.chat_template)", "model.chat_template", off=(True,)),
    "tool_format": advice("write tool calls into the rows' messages"),
    "rope_scaling": advice("write it into the model's config.json"),
    "moe_aux_loss_coef": advice("there is no auxiliary loss of experts"),
    "train_from_scratch": advice("make a model with random weights first: plaudit prepare tiny-model"),
    "additional_target": advice("only the adapter is trained: full fine-tuning trains all weights", "model.lora"),
    "create_new_adapter": no_meaning("with model.lora a new adapter is trained on the merged model", "model.lora"),
    **several(
        advice("LoRA here is the plain one: model.lora", "model.lora"), "use_rslora", "use_dora", "pissa_init", "loraplus_lr_ratio",
        "use_llama_pro",
    ),
    **several(no_meaning("it belongs to a variant of LoRA that is off"), "pissa_iter", "pissa_convert", "loraplus_lr_embedding"),
    **several(
        advice("the optimiser here is AdamW", "optim"), "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon",
    ),
    **several(no_meaning("it belongs to an optimiser that is off"), "galore_*", "apollo_*", "badam_*"),
    **several(advice("the SFT loss here is the mean negative log-likelihood"), "use_dft_loss", "use_asft_loss", "use_eaft_loss"),
    **several(no_meaning("it belongs to a loss that is off"), "asft_alpha", "eaft_alpha"),
    **several(advice("of preference losses there are sigmoid, ipo and hinge (loss.kind)", "loss.kind"), "pref_bco_weight",
        "ld_alpha"),
    **several(no_meaning("it belongs to a loss that is not available"), "kto_chosen_weight", "kto_rejected_weight", "simpo_gamma"),
    **several(no_meaning("it belongs to PPO: write an rl recipe (docs/rl.md)", "rewards"), "ppo_*", "reward_model",
        "reward_model_*"),
    **several(advice("merge the adapter first: plaudit merge", "reference.path"), "ref_model_adapters"),
    "quantization_bit": composed("model.lora.base_bits"),
    "quantization_type": composed("model.lora.base_bits", default="nf4"),
    "double_quantization": composed("model.lora.base_bits", default=True),
    "quantization_method": same("a quantised base is quantised as by bitsandbytes", "bnb", "bitsandbytes",
        otherwise="a base can be quantised as by bitsandbytes only", to=("model.lora.base_bits",)),
    "ref_model_quantization_bit": advice("with model.lora the reference is the policy's own base; another one is in model.dtype"),
    **several(advice(PRECISION), "export_quantization_bit", "fp8"),
    **several(no_meaning(QUANTISED), "quantization_*"),
    **several(no_meaning("the model is saved in model.dtype"), "export_quantization_*"),
    **several(no_meaning("it belongs to fp8, in which nothing is computed here"), "fp8_*"),
    **several(no_meaning("it belongs to a kind of fine-tuning that is off"), "freeze_*", "oft_*", "module_dropout"),
    **several(
        no_meaning(PACKED), "packing", "neat_packing", "ignore_pad_token_for_loss", "block_diag_attn", "preprocessing_batch_size",
    ),
    **several(
        no_meaning(AUTOMATIC), "preprocessing_num_workers", "buffer_size", "data_shared_file_system", "flash_attn",
            "low_cpu_mem_usage",
        "use_reentrant_gc", "device_map", "compute_dtype", "model_max_length", "infer_dtype", "use_kv_cache", "offload_folder",
        "print_param_status", "include_effective_tokens_per_second", "eval_on_each_dataset", "eval_num_beams",
            "init_special_tokens",
        "use_unsloth_gc", "use_v1_kernels", "upcast_layernorm", "upcast_lmhead_output", "adapter_folder", "preserve_thinking",
    ),
    **several(
        advice("the trainer is plaudit's own: there is no other one to choose"), "use_unsloth", "shift_attn", "mixture_of_depths",
            "use_mca",
        "use_hyper_parallel", "use_kt", "hyper_parallel_args",
    ),
    **several(no_meaning("it belongs to another trainer that is off"), "kt_*"),
    **several(no_meaning("models come from a folder, or from the Hugging Face hub's cache"), "cache_dir", "model_revision"),
    **several(no_meaning("tokens come from the environment (HF_TOKEN)"), "hf_hub_token", "ms_hub_token", "om_hub_token"),
    **several(no_meaning(TEXT_ONLY), "media_dir", "image_*", "video_*", "audio_*", "crop_to_patches", "use_audio_in_video"),
    **several(no_meaning("the model is saved in the run folder, as transformers reads it"), "export_*"),
    **several(no_meaning(ENGINE), "infer_backend", "vllm_*", "sglang_*"),
    **several(
        no_meaning("training samples nothing"), "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length",
            "max_new_tokens",
        "repetition_penalty", "length_penalty", "skip_special_tokens", "predict_with_generate", "generation_*",
    ),
    **several(no_meaning("curves.png is always drawn"), "plot_loss"),
    **several(no_meaning("validation reports its measures without a setting"), "compute_accuracy"),
    **several(no_meaning("profiling is not a setting of a run"), "enable_torch_profiler", "profile*"),
    **several(no_meaning("plaudit starts what it needs of Ray (docs/cluster.md)", "cluster.gpus"), "ray_*", "master_addr",
        "master_port"),
    **several(no_meaning("a run is called after its folder, run.dir", "run.dir"), "swanlab_*"),
}  # fmt: skip

TABLE = Table("llamafactory", KEYS, {**HF_ALIASES, "ddp_timeout_s": "ddp_timeout", "max_source_length": "cutoff_len"})
