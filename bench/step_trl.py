"""TRL's side of gpu_step.py, run in a separate process: steps of one section, size and kind with TRL's own trainer.

Settings are searched first: a few steps with each candidate, and the fastest is measured. Jobs of one process share vLLM's engine,
which starts once, and searches. Random weights, so vLLM starts with dummy ones: TRL hands it the trainer's before it samples.
A tokenizer of numbers ("17 4 803") gives both systems the same tokens. Only TRL has texts of them, which it makes and reads within
its steps: that is `text_s`, and no part of `step_s`; nor is making given responses, which plaudit does before its step begins.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rollout_work import config_of, weight_bytes
from step_work import (
    LORA_ALPHA,
    LORA_RANK,
    LR,
    Report,
    Steps,
    as_setting,
    memory_gb,
    now,
    pairs_of,
    prompts_of,
    random_rewards,
    reset_memory,
    responses_of,
    run_jobs,
    sft_rows,
    steps_of,
    vllm_share,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.models.qwen2 import modeling_qwen2
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer import dpo_trainer
from trl_engine import check_start, forget_ranks, has_started, start_vllm_once

END = "<0>"  # the word of token 0: special tokens are also found within words, and "0" is in "10"
BATCHES = (64, 32, 16, 8, 4)  # rows or pairs per pass, largest first
SEARCHED_STEPS = 3  # of a candidate, of which the first warms up
# What Liger replaces for good when it patches a model; every model begins with these.
PLAIN = {name: getattr(modeling_qwen2, name) for name in ("Qwen2RMSNorm", "Qwen2MLP", "apply_rotary_pos_emb")}

# TRL hashes all weights on the CPU, to find the reference's log-probs in a cache; of rows in memory there is none.
dpo_trainer.hash_module = lambda module: ""


# Phases ---------------------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """Seconds of each step and its phases, from the end of one step to the end of the next; and how many tokens it trained on."""

    def __init__(self, done: Callable[[int, dict[str, float]], None]):
        self.done, self.phases, self.counts, self.number, self.began = done, {}, {}, 0, 0.0

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def count(self, **numbers: Any) -> None:
        """Tensors are added up on the GPU: reading them here would make it wait."""
        for name, number in numbers.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def on_train_begin(self, args, state, control, **_):
        self.began = now()

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.optimiser_began = now()

    def on_optimizer_step(self, args, state, control, **_):
        self.add("optimiser_s", now() - self.optimiser_began)

    def on_step_end(self, args, state, control, **_):
        ended = now()
        phases = self.phases
        step_s = ended - self.began - phases.get("text_s", 0.0)
        apart = sum(phases.get(name, 0.0) for name in ("sample_s", "score_s", "logprobs_s", "sync_s"))
        found = {"step_s": step_s, "update_s": step_s - apart, **phases, **{name: float(n) for name, n in self.counts.items()}}
        self.done(self.number, found)
        self.phases, self.counts, self.number, self.began = {}, {}, self.number + 1, now()


class TimedGRPOTrainer(GRPOTrainer):
    clock: Clock

    def _generate(self, prompts):
        began, before = now(), self._within_sampling()
        made = super()._generate(prompts)
        given = self.rollout_func is not None
        self.clock.add("text_s" if given else "sample_s", now() - began - (self._within_sampling() - before))
        return made

    def _within_sampling(self) -> float:
        return sum(self.clock.phases.get(name, 0.0) for name in ("sync_s", "text_s"))

    def _tokenize_prompts(self, prompts):
        began = now()
        tokens = super()._tokenize_prompts(prompts)
        self.clock.add("text_s", now() - began)
        return tokens

    def _calculate_rewards(self, *arguments, **named):
        began = now()
        rewards = super()._calculate_rewards(*arguments, **named)
        self.clock.add("score_s", now() - began)
        return rewards

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*arguments, **named)
        began = now()
        logprobs = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.clock.add("logprobs_s", now() - began)
        return logprobs

    def compute_loss(self, model, inputs, *arguments, **named):
        masks = inputs["prompt_mask"], inputs["completion_mask"]
        padded = sum(mask.numel() for mask in masks)
        self.clock.count(tokens=sum(mask.sum() for mask in masks), targets=masks[1].sum(), padded=padded)
        return super().compute_loss(model, inputs, *arguments, **named)


class TimedSFTTrainer(SFTTrainer):
    clock: Clock

    def compute_loss(self, model, inputs, *arguments, **named):
        tokens, mask = inputs["input_ids"], inputs.get("attention_mask")
        targets = (inputs["labels"][:, 1:] != -100).sum()
        self.clock.count(tokens=tokens.numel() if mask is None else mask.sum(), targets=targets, padded=tokens.numel())
        return super().compute_loss(model, inputs, *arguments, **named)


class TimedDPOTrainer(DPOTrainer):
    clock: Clock

    def _prepare_dataset(self, dataset, *arguments, **settings):
        return dataset  # already tokens

    def compute_loss(self, model, inputs, *arguments, **named):
        mask, targets = inputs["attention_mask"], inputs["completion_mask"]
        self.clock.count(tokens=mask.sum(), targets=targets.sum(), padded=mask.numel())
        return super().compute_loss(model, inputs, *arguments, **named)


def time_sync(trainer: TimedGRPOTrainer, device: str) -> None:
    hand_over = trainer.vllm_generation.sync_weights

    def timed() -> None:
        began = now()
        if device != "cpu":  # vLLM's build for CPUs repacks weights when it starts and takes no others
            hand_over()
        trainer.clock.add("sync_s", now() - began)

    trainer.vllm_generation.sync_weights = timed


def time_decoding(tokenizer: PreTrainedTokenizerFast, clock: Clock) -> None:
    decode = type(tokenizer).batch_decode

    def timed(*arguments: Any, **named: Any) -> list[str]:
        began = now()
        texts = decode(tokenizer, *arguments, **named)
        clock.add("text_s", now() - began)
        return texts

    tokenizer.batch_decode = timed


# Model and rows -------------------------------------------------------------------------------------------------------


def make_folder(config: dict, folder: Path) -> PreTrainedTokenizerFast:
    """A config and a tokenizer whose words are the token numbers."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({text([i]): i for i in range(config["vocab_size"])}, unk_token=END))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END, unk_token=END, padding_side="left")
    tokenizer.save_pretrained(folder)
    return tokenizer


def build(folder: Path, job: dict, attention: str):
    vars(modeling_qwen2).update(PLAIN)
    torch.manual_seed(0)
    with torch.device(job["device"]):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["trl_dtype"]), attn_implementation=attention)
    model.config._name_or_path = str(folder)
    return model


def lora_of(job: dict) -> dict[str, Any]:
    if job["kind"] != "lora":
        return {}
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")}


def text(tokens: list[int]) -> str:
    return " ".join(str(token) if token else END for token in tokens)


# Trainers -------------------------------------------------------------------------------------------------------------


def settings_of(job: dict, folder: Path, rows: int, batch: int, steps: int) -> dict[str, Any]:
    """Arguments of all trainers: `rows` per step, `batch` of them per pass."""
    on_cpu = job["device"] == "cpu"
    return {
        "output_dir": str(folder / "out"), "max_steps": steps, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows // batch, "bf16": True, "use_cpu": on_cpu, "learning_rate": LR[job["kind"]],
        "lr_scheduler_type": "constant", "optim": "adamw_torch" if on_cpu else "adamw_torch_fused",
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_strategy": "no", "logging_nan_inf_filter": False,
        "use_liger_kernel": not on_cpu and find_spec("liger_kernel") is not None,
    }  # fmt: skip


def own_settings(job: dict) -> dict[str, Any]:
    return dict(as_setting(one) for one in job["trl_set"])


class Candidate:
    """A way to train the section: rows per pass, attention, and settings of the trainer."""

    def __init__(self, batch: int, attention: str = "sdpa", **settings: Any):
        self.batch, self.attention, self.settings = batch, attention, settings

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([f"{self.batch} rows a pass", self.attention, *settings])


def candidates(steps: Steps, checkpoint: bool, flex: bool) -> Iterator[Candidate]:
    sizes = [batch for batch in BATCHES if (steps.rows * steps.n) % batch == 0 and batch % steps.n == 0]
    if steps.shortest:
        sizes = [batch for batch in sizes if batch <= 32]
    named = {"gradient_checkpointing": True} if checkpoint else {}
    for batch in sizes:
        yield Candidate(batch, **named)
    if steps.shortest:  # rows of all lengths can also be laid end to end
        for batch in sizes:
            yield Candidate(batch, padding_free=True, **named)
        if flex:  # one: it compiles for each size
            yield Candidate(sizes[len(sizes) // 2], "flex_attention", padding_free=True, **named)


def make_trainer(
    job: dict, folder: Path, tokenizer: Any, chosen: Candidate, clock: Clock, count: int, *, passes: int | None = None,
    vllm: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """A trainer for `count` steps, each of `passes` passes (default: as many as the section's rows need)."""
    steps, work = steps_of(job)
    vocabulary = config_of(job["size"], work)["vocab_size"]
    rows = steps.rows * steps.n if passes is None else chosen.batch * passes
    settings = settings_of(job, folder, rows, chosen.batch, count) | chosen.settings | own_settings(job)
    model, shared = build(folder, job, chosen.attention), {"processing_class": tokenizer, "callbacks": [clock], **lora_of(job)}
    if steps.stage == "sft":
        made = [{"input_ids": row} for number in range(count) for row in sft_rows(steps, vocabulary, number)[-rows:]]
        settings |= {"max_length": None, "train_sampling_strategy": "sequential"}
        trainer = TimedSFTTrainer(model, SFTConfig(**settings), train_dataset=Dataset.from_list(made), **shared)
    elif steps.stage == "dpo":
        made = [row for number in range(count) for row in pairs_of(steps, vocabulary, number)[:rows]]
        settings |= {"max_length": None, "train_sampling_strategy": "sequential", "precompute_ref_log_probs": True}
        trainer = TimedDPOTrainer(model, args=DPOConfig(**settings), train_dataset=Dataset.from_list(made), **shared)
    else:
        prompts = [{"prompt": text(p)} for number in range(count) for p in prompts_of(steps, vocabulary, number)[: rows // steps.n]]
        settings |= {
            "num_generations": steps.n, "max_completion_length": steps.new_tokens, "beta": 0.0, "num_iterations": 1,
            "temperature": 1.0, "shuffle_dataset": False, **(vllm or {}),
        }  # fmt: skip
        given = None if vllm else partial(given_responses, steps, vocabulary, clock)
        trainer = TimedGRPOTrainer(
            model, lambda completions, **_: random_rewards(len(completions), clock.number), GRPOConfig(**settings),
            Dataset.from_list(prompts), rollout_func=given, **shared,
        )  # fmt: skip
    trainer.clock = clock
    return trainer


def given_responses(steps: Steps, vocabulary: int, clock: Clock, prompts: list[str], _) -> dict[str, list]:
    responses = [tokens for of_prompt in responses_of(steps, vocabulary, clock.number) for tokens in of_prompt][: len(prompts)]
    ids = [[int(word.strip("<>")) for word in prompt.split()] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": responses, "logprobs": [[-1.0] * len(r) for r in responses]}


# Search and measurement -----------------------------------------------------------------------------------------------


def search(job: dict, folder: Path, tokenizer: Any, share: float) -> tuple[Candidate, dict[str, str]]:
    """The candidate with the fewest seconds per row, in `share` of the GPU's memory; and what was found for each.
    Checkpointing is tried only if nothing fits without."""
    steps, _ = steps_of(job)
    cuda, found, fastest, most = job["device"] == "cuda", {}, None, job["max_batch"]
    for checkpoint in (True,) if job["checkpoint"] else (False, True):
        slower = 0
        for candidate in candidates(steps, checkpoint, job["flex"]):
            if candidate.batch > most or slower >= 2:  # smaller passes will not be faster than these
                continue
            if cuda:
                several = candidate.batch < steps.rows * steps.n
                torch.cuda.set_per_process_memory_fraction(share - (gradient_share(job) if several else 0.0))
            seconds: list[float] = []
            clock = Clock(lambda number, row, seconds=seconds: seconds.append(row["update_s"] - row.get("optimiser_s", 0.0)))
            failure, began = "", time.perf_counter()
            try:
                make_trainer(job, folder, tokenizer, candidate, clock, SEARCHED_STEPS, passes=1).train()
            except torch.OutOfMemoryError:
                failure = "out of memory"
            except Exception as error:  # this way of training does not work here
                failure = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            per_row = min(seconds[1:]) / candidate.batch if seconds[1:] and not failure else float("inf")
            found[str(candidate)] = failure or f"{1000 * per_row:.2f} ms a row"
            print(f"search: {candidate}: {found[str(candidate)]} ({time.perf_counter() - began:.0f} s)", flush=True)
            if not failure and (fastest is None or per_row < fastest[0]):
                fastest, slower = (per_row, candidate), 0
            elif not failure and not steps.shortest:
                slower += 1
        if fastest is not None:
            break
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    reset_memory()
    if fastest is None and "use_liger_kernel=false" not in job["trl_set"] and find_spec("liger_kernel") is not None:
        job["trl_set"].append("use_liger_kernel=false")
        return search(job, folder, tokenizer, share)
    if fastest is None:
        raise RuntimeError(f"no candidate works: {found}")
    return fastest[1], found


_chosen: dict[tuple[str, ...], tuple[Candidate, dict[str, str], list[str]]] = {}


def choose(job: dict, folder: Path, tokenizer: Any, share: float) -> tuple[Candidate, dict[str, str]]:
    """As the job says, or by a search; the search of another job of this process whose training is the same counts, too."""
    if job["batch"] is not None:
        return Candidate(job["batch"]), {}
    case = (job["section"], job["size"], job["kind"])
    if case not in _chosen:
        _chosen[case] = (*search(job, folder, tokenizer, share), job["trl_set"])
    chosen, searched, job["trl_set"] = _chosen[case]  # a search may give up Liger
    return chosen, searched


def vllm_settings(job: dict) -> tuple[dict[str, Any], float]:
    """Of vLLM in the trainer's process; and the share of the GPU's memory that it leaves to the trainer."""
    steps, work = steps_of(job)
    config, total = config_of(job["size"], work), 24e9
    if job["device"] == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
    share, sleeps = vllm_share(config, steps.rows * steps.n, steps.longest, total), job["system"] == "trl-sleep"
    settings = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": round(share, 2),
        "vllm_max_model_length": steps.longest, "vllm_enable_sleep_mode": sleeps,
        "vllm_importance_sampling_correction": job["system"] != "trl-uncorrected",
        # All responses have the full length, as plaudit's; nobody needs vLLM's text.
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }  # fmt: skip
    # Of an engine that has started, the share is in use already, by this process. One that sleeps keeps some memory.
    return settings, 0.93 if sleeps else 0.97 if has_started() else 0.97 - share


def gradient_share(job: dict) -> float:
    """Of the GPU, for the gradients of full training: they stay from one pass of a step to the next, which a search does not
    have."""
    if job["kind"] != "full":
        return 0.0
    size = weight_bytes(config_of(job["size"], steps_of(job)[1])) * (1 if job["trl_dtype"] == "bfloat16" else 2)
    return size / torch.cuda.get_device_properties(0).total_memory


def check_packages(jobs: list[dict]) -> None:
    """Without Liger's kernels TRL would be slower than it has to be."""
    with_liger = any(own_settings(job).get("use_liger_kernel") is not False for job in jobs)
    needed = [*(["liger_kernel"] if with_liger else []), *(["peft"] if any(job["kind"] == "lora" for job in jobs) else [])]
    if missing := [name for name in needed if find_spec(name) is None]:
        sys.exit(
            f"TRL's Python lacks {' and '.join(missing)}: install what bench/requirements-gpu-peers.txt lists"
            + (", or give --trl-set use_liger_kernel=false" if "liger_kernel" in missing else "")
        )


def prepare(jobs: list[dict]) -> None:
    """vLLM starts with dummy weights."""
    if jobs[0]["device"] == "cuda":
        check_packages(jobs)
    if any(steps_of(job)[0].samples and steps_of(job)[0].stage == "rl" for job in jobs):
        start_vllm_once(load_format="dummy", **({"enforce_eager": True} if jobs[0]["device"] == "cpu" else {}))


def run(job: dict, report: Report) -> dict[str, float]:
    steps, work = steps_of(job)
    total, samples = job["warm_up"] + job["steps"], steps.stage == "rl" and steps.samples
    # The same for every process of these results: vLLM finds what it has compiled by the model's folder.
    folder = Path(job["results"]).resolve().parent / f"model-{'tiny' if job['tiny'] else job['size']}"
    tokenizer = make_folder(config_of(job["size"], work), folder)
    vllm, share = vllm_settings(job) if samples else (None, 0.97)
    check_start()
    forget_ranks()
    began = time.time()
    chosen, searched = choose(job, folder, tokenizer, share)
    report.chosen(chosen.batch)
    search_s = time.time() - began
    clock = Clock(report.step)
    trainer = make_trainer(job, folder, tokenizer, chosen, clock, total, vllm=vllm)
    if samples:
        time_sync(trainer, job["device"])
    if steps.stage == "rl":  # TRL decodes given responses, too
        time_decoding(tokenizer, clock)
    args = trainer.args
    report.settings(
        {
            "chosen": str(chosen), "gradient checkpointing": args.gradient_checkpointing, "searched": searched,
            "optimiser": f"{args.optim.value}, weights and moments in {job['trl_dtype']}", "liger": args.use_liger_kernel,
            **({} if job["kind"] == "full" else {"LoRA": f"rank {LORA_RANK}, all-linear, fp32 adapters"}),
            **({"vLLM": version_of("vllm"), **{k: v for k, v in vllm.items() if k != "use_vllm"}} if vllm else {}),
            **({"overrides": " ".join(job["trl_set"])} if job["trl_set"] else {}),
        },
        search_s,
    )  # fmt: skip
    trainer.train()
    if clock.number != total:
        raise RuntimeError(f"{clock.number} steps instead of {total}")
    return memory_gb()


def version_of(package: str) -> str:
    module = __import__(package)
    return getattr(module, "__version__", None) or version(package)


def about(job: dict) -> str:
    device = torch.cuda.get_device_name() if job["device"] == "cuda" else "CPU"
    return f"{device}, " + ", ".join(f"{name} {version_of(name)}" for name in ("trl", "torch", "transformers"))


if __name__ == "__main__":
    run_jobs(sys.argv[1], run, about, prepare)
