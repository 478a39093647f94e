"""Parity with TRL's trainers: SFT, DPO and reward models step by step, GRPO by the gradients of its first step.

    make .venv-trl/installed                  # or: a venv with bench/requirements-trl.txt
    python bench/parity_trl.py                # four minutes on two CPU cores
    python bench/parity_trl.py --stage grpo --kind qwen2

**SFT, DPO, reward models.** plaudit trains a tiny fp32 model on single- and multi-turn conversations or pairs of them, with
weight decay, clipping at some steps, a cosine schedule and several epochs; SFT's last step is a short one. TRL, in its own
environment, gets the same tokens (plaudit's; loss masks are not compared here), row by row in plaudit's order. Intended
differences: plaudit packs a step's rows into micro-batches by tokens, TRL pads them two by two (or all of a step, where its loss
is a mean over a micro-batch's tokens). SFT is also run with warm-up, for which TRL gets plaudit's formula, because its own starts
at a rate of 0. Reward models start from the same head. Compared at each step: loss and margin (absolute), gradient norm and
learning rate (relative). The largest difference of the trained weights is shown.

**GRPO.** plaudit samples four answers to each of six prompts and scores them; TRL gets these samples and rewards and computes
the rest: advantages, the reference's log-probs, the loss. The reference differs from the policy, so that KL is not 0; with
`older`, samples come from a third model, so that ratios are not 1 and some are clipped. Compared: the loss, and every parameter's
gradient over the step, before clipping, absolute and relative to the largest one.

Differences in defaults that are aligned: TRL adds 1e-4 to the standard deviation of advantages, plaudit 1e-6 (TRL's is used); TRL
weights the KL term by the ratio unless `use_bias_correction_kl` is false (it is); its bound for negative advantages, `delta`, is
off by default (set to plaudit's `dual_clip`); its CISPO has no lower bound (plaudit's is 0.001).

The exit code is 1 if a difference exceeds the tolerance.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import torch
from safetensors.torch import load_file

import plaudit.objectives.advantages
import plaudit.report.curves
from plaudit.data.conversations import Source
from plaudit.data.examples import load_examples
from plaudit.data.order import RowOrder
from plaudit.data.pairs import load_pairs
from plaudit.data.prompts import load_prompts
from plaudit.data.templates import ChatTemplate, load_template, load_tokenizer
from plaudit.data.transcript import Transcript
from plaudit.inputs import load_checked
from plaudit.loops.train import train
from plaudit.models.classifier import load_classifier
from plaudit.models.reference import Reference
from plaudit.models.trainable import load_policy
from plaudit.objectives.advantages import grpo
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import ModelSettings, RLRecipe
from plaudit.rl.learner import Learner
from plaudit.rollout.engine import Sampling
from plaudit.rollout.groups import sample_groups
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Group, Pair, Score, ScoredGroup
from plaudit.world import World

REPOSITORY = Path(__file__).parent.parent
CPU = torch.device("cpu")
KINDS = ("llama", "qwen2")
STAGES = ("sft", "dpo", "reward-model", "grpo")

NUM_STEPS, NUM_ROWS, ROWS_PER_STEP = 20, 50, 8
ROWS_OF_LAST_STEP = {"sft": 5, "dpo": 8, "reward-model": 8}
TOKENS_PER_MICRO_BATCH = {"sft": 150, "dpo": 400, "reward-model": 400}
# A head learns these pairs in a few steps; at higher rates, rounding errors grow tenfold in each step.
LR = {"sft": 3e-3, "dpo": 1e-3, "reward-model": 2e-4}
OPTIM = {
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.5,
    "max_grad_norm": 2.0,
    "schedule": "cosine",
    "min_lr_ratio": 0.1,
}


@dataclass(frozen=True)
class Case:
    """The same settings in plaudit's and in TRL's names."""

    stage: str
    ours: dict = field(default_factory=dict)
    """`loss`, or for GRPO `algorithm`."""
    theirs: dict = field(default_factory=dict)
    rows_per_micro_batch: int = 2
    warmup_steps: int = 0
    margins: bool = False


STEP_BY_STEP = {
    "sft, TRL as it comes": Case("sft"),
    "sft, warm-up by plaudit's formula": Case("sft", warmup_steps=3),
    "dpo": Case("dpo", {"beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}),
    "ipo": Case("dpo", {"kind": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    "hinge": Case("dpo", {"kind": "hinge", "beta": 0.05}, {"loss_type": ["hinge"], "beta": 0.05}),
    "dpo with nll": Case(
        "dpo",
        {"beta": 0.3, "nll_coefficient": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
        rows_per_micro_batch=ROWS_PER_STEP,
    ),
    "reward model": Case("reward-model"),
    "reward model with margins and centring": Case(
        "reward-model", {"centring_coefficient": 0.05}, {"center_rewards_coefficient": 0.05}, margins=True
    ),
}

NUM_PROMPTS, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS = 6, 4, 16
SAMPLES_PER_STEP = NUM_PROMPTS * SAMPLES_PER_PROMPT
TRL_STD_EPS = 1e-4
BETA = 0.1
# By TRL's name: plaudit's algorithm, TRL's settings, and samples in TRL's micro-batch (all of the step's where it takes a mean over
# a micro-batch's tokens).
LOSSES = {
    "grpo": ({"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo", "delta": 3.0}, 4),
    "dr_grpo": (
        {"divide_by_std": False, "aggregation": "seq-mean-token-sum-norm", "dual_clip": None},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": MAX_NEW_TOKENS},
        4,
    ),
    "dapo": (
        {"clip_ratio": [0.2, 0.28], "aggregation": "token-mean"},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0},
        4,
    ),
    "bnpo": ({"aggregation": "token-mean"}, {"loss_type": "bnpo", "delta": 3.0}, SAMPLES_PER_STEP),
    "cispo": (
        {"loss": "cispo", "clip_ratio": [0.999, 0.28], "aggregation": "token-mean"},
        {"loss_type": "cispo", "epsilon_high": 1.28},
        4,
    ),
    "gspo": (
        {"loss": "gspo", "clip_ratio": [0.05, 0.08], "aggregation": "seq-mean-token-mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
        4,
    ),
}


def grpo_cases() -> dict[str, Case]:
    """Every loss with ratios of 1 and others, with and without KL; then further settings that both have."""
    cases = {}
    for name, (ours, theirs, rows) in LOSSES.items():
        for older in (False, True):
            for kl in (False, True):
                label = name + (", KL" if kl else "") + (", older" if older else "")
                algorithm = ours | ({"old_logprobs": "sampler"} if older else {}) | ({"kl_coefficient": BETA} if kl else {})
                settings = theirs | ({"beta": BETA, "use_bias_correction_kl": False} if kl else {})
                cases[label] = Case("grpo", algorithm, settings, rows)
    ours, theirs, _ = LOSSES["dapo"]
    cases["dapo, entropy"] = Case("grpo", ours | {"entropy_coefficient": 0.05}, theirs | {"entropy_coef": 0.05}, SAMPLES_PER_STEP)
    cases["dapo, temperature 0.7"] = Case("grpo", ours, theirs | {"temperature": 0.7}, 4)
    return cases


# Both sides' processes ------------------------------------------------------------------------------------------------

Comparison = Generator[list[dict], dict, bool]
"""Yields TRL's jobs, is sent what `run_trl` returns for them, and returns whether both agree."""


def run_trl(python: Path, jobs: list[dict], folder: Path) -> dict:
    """TRL's log of each step of each job, and its versions. Its output is shown only on failure."""
    jobs_file, log_file = folder / "jobs.json", folder / "log.json"
    jobs_file.write_text(json.dumps(jobs))
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(jobs_file), str(log_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    # glibc keeps freed memory: a buffer that TRL takes anew in each step is larger than all else, and would cost its page faults.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
    return json.loads(log_file.read_text())


def run_comparisons(comparisons: Sequence[Comparison], python: Path, folder: Path) -> list[bool]:
    """Whether both agree. One process of TRL trains the jobs of all comparisons: importing it takes longer than most of them."""
    jobs = [next(comparison) for comparison in comparisons]
    log = run_trl(python, list(chain(*jobs)), folder)
    steps, agree = iter(log["steps"]), []
    for comparison, own in zip(comparisons, jobs, strict=True):
        try:
            comparison.send(log | {"steps": list(islice(steps, len(own)))})
        except StopIteration as end:
            agree.append(end.value)
    return agree


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def write_rows(file: Path, rows: Sequence[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load_model_template(model: Path) -> ChatTemplate:
    return load_template(load_tokenizer(str(model)), None)


def tiny_model(kind: str, rows: Sequence[dict], folder: Path) -> Path:
    """A tiny model with a tokenizer trained on the rows (conversations or pairs)."""
    texts = [{"messages": r.get("messages") or [*r["prompt"], {"role": "assistant", "content": r["chosen"]}]} for r in rows]
    make_tiny_model([write_rows(folder / "texts.jsonl", texts)], folder / "model", kind=kind, hidden_size=64, vocabulary=320)  # pyright: ignore
    return folder / "model"


# Step by step ---------------------------------------------------------------------------------------------------------


def conversations() -> list[dict]:
    """One to three turns, short and long answers, with and without a system prompt."""
    rows = []
    for i in range(NUM_ROWS):
        messages = [{"role": "system", "content": "Answer with a number."}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            a, b = (i + turn) % 7, (3 * i + turn) % 10
            answer = f"{a} + {b} makes {a + b}, so the answer is {a + b}." if (i + turn) % 2 else str(a + b)
            messages += [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    return rows


def pairs() -> list[dict]:
    """One to three turns, answers of different lengths, with and without a system prompt."""
    rows = []
    for i in range(NUM_ROWS):
        prompt = [{"role": "system", "content": "Answer with a number."}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            a, b = (i + turn) % 7, (3 * i + turn) % 10
            prompt += [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        right = prompt.pop()["content"]
        answers = f"It makes {right}, so the answer is {right}.", f"{int(right) + 1 + i % 3}"
        chosen, rejected = answers if i % 2 else (right, f"Perhaps {int(right) + 2}, or something like {int(right) + 3}.")
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "by": 0.25 * (i % 4)})
    return rows


def recipe_of(case: Case, kind: str, folder: Path) -> dict:
    """The case's recipe; also creates its model and rows."""
    rows = conversations() if case.stage == "sft" else pairs()
    model = tiny_model(kind, rows, folder)
    if case.stage == "reward-model":
        load_classifier(ModelSettings(path=str(model)), load_model_template(model), CPU, seed=3).save(folder / "classifier")
        model = folder / "classifier"
    total_rows = (NUM_STEPS - 1) * ROWS_PER_STEP + ROWS_OF_LAST_STEP[case.stage]
    per_step = "rows_per_step" if case.stage == "sft" else "pairs_per_step"
    return {
        "stage": case.stage,
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(write_rows(folder / "rows.jsonl", rows)), **({"margin_column": "by"} if case.margins else {})},
        **({"loss": case.ours} if case.ours else {}),
        "train": {per_step: ROWS_PER_STEP, "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH[case.stage]},
        "optim": {"lr": LR[case.stage], **OPTIM, "warmup_steps": case.warmup_steps},
        "run": {"dir": str(folder / "run"), "epochs": total_rows / NUM_ROWS, "device": "cpu"},
    }


def trained_by_plaudit(recipe: dict, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step of `plaudit sft`, `dpo` or `reward-model`."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))  # which is YAML
    with quietly():
        train(*load_checked(file, [], recipe["stage"]))
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def rows_in_order(recipe: dict) -> list[dict]:
    """Every row of every step as plaudit tokenises it, in the order it trains on them, as TRL's trainers take it."""
    template, source = load_model_template(recipe["model"]["path"]), Source(Path(recipe["data"]["train"]))
    if recipe["stage"] == "sft":
        in_turns = lambda conversations: template.examples(conversations, "all")  # noqa: E731
        examples = load_examples([source], in_turns, max_tokens=4096, too_long="error").examples
        rows = [{"input_ids": e.tokens.tolist(), "assistant_masks": e.loss_mask.astype(int).tolist()} for e in examples]
    else:
        tokenise: Callable = Transcript(template.tokenizer, template.text).examples
        if recipe["stage"] == "dpo":
            tokenise = lambda conversations: template.examples(conversations, "all")  # noqa: E731
        column = recipe["data"].get("margin_column")
        loaded = load_pairs([source], tokenise, max_tokens=4096, too_long="error", margin_column=column).pairs
        rows = [pair_for_trl(pair, recipe) for pair in loaded]
    order = RowOrder(len(rows), per_step=ROWS_PER_STEP, epochs=recipe["run"]["epochs"], seed=recipe["seed"])
    return [rows[row] for step in range(order.num_steps) for row in order.rows(step)]


def pair_for_trl(pair: Pair, recipe: dict) -> dict:
    if recipe["stage"] == "reward-model":
        row = {"chosen_ids": pair.chosen.tokens.tolist(), "rejected_ids": pair.rejected.tokens.tolist()}
        return row | ({"margin": pair.margin} if "margin_column" in recipe["data"] else {})
    # TRL trains on everything after the prompt; text after the end token, which plaudit masks, changes no other log-prob.
    begin = int(pair.chosen.loss_mask.argmax())
    sides = {}
    for name, example in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        end = len(example) - int(example.loss_mask[::-1].argmax())
        assert example.loss_mask[begin:end].all()
        assert not example.loss_mask[:begin].any()
        sides[f"{name}_ids"] = example.tokens[begin:end].tolist()
    return {"prompt_ids": pair.chosen.tokens[:begin].tolist(), **sides}


def compare_steps(names: Sequence[str], kind: str, tolerance: float, folder: Path) -> Comparison:
    """Train with both and print the tables."""
    jobs, recipes, ours = [], [], []
    for name in names:
        case, place = STEP_BY_STEP[name], folder / str(len(jobs))
        place.mkdir()
        recipes.append(recipe_of(case, kind, place))
        ours.append(trained_by_plaudit(recipes[-1], place))
        jobs.append(
            {
                "stage": case.stage,
                "model": recipes[-1]["model"]["path"],
                "rows": rows_in_order(recipes[-1]),
                "rows_per_step": ROWS_PER_STEP,
                "rows_per_micro_batch": case.rows_per_micro_batch,
                "optim": recipes[-1]["optim"],
                "settings": case.theirs,
                "trained_model": str(place / "trl_model"),
            }
        )
    log = yield jobs
    agree = True
    for name, recipe, our, their in zip(names, recipes, ours, log["steps"], strict=True):
        print(f"\n{name}, {kind}")
        print(f"  plaudit   {listed({package: version(package) for package in ('transformers', 'torch')})}")
        case = STEP_BY_STEP[name]
        print(f"  TRL       {listed({**log['versions'], 'rows_per_micro_batch': case.rows_per_micro_batch, **case.theirs})}")
        for section in ("loss", "train", "optim", "run"):
            if section in recipe:
                print(f"  {section:9} {listed({key: value for key, value in recipe[section].items() if key != 'dir'})}")
        agree &= print_steps(our, their, tolerance, Path(recipe["run"]["dir"]).parent)
    return agree


def print_steps(ours: list[dict], theirs: list[dict], tolerance: float, folder: Path) -> bool:
    assert len(ours) == len(theirs) == NUM_STEPS, f"{len(ours)} steps of plaudit, {len(theirs)} of TRL, not {NUM_STEPS}"
    differences = []
    for our, their in zip(ours, theirs, strict=True):
        difference = {
            "loss": abs(our["loss"] - their["loss"]),
            "grad_norm": abs(our["grad_norm"] / their["grad_norm"] - 1),
            "lr": abs(our["lr"] / their["learning_rate"] - 1),
        }
        if "margin" in our:
            difference["margin"] = abs(our["margin"] - their["rewards/margins" if "rewards/margins" in their else "margin"])
        differences.append(difference)
    paired = "margin" in differences[0]
    more = "     margin  difference  accuracy" if paired else ""
    print(f"step  plaudit loss      TRL loss  difference  grad norm  difference         lr  difference{more}")
    for our, their, difference in zip(ours, theirs, differences, strict=True):
        line = (
            f"{our['step']:4}  {our['loss']:12.7f}  {their['loss']:12.7f}  {difference['loss']:10.1e}"
            f"  {our['grad_norm']:9.5f}  {difference['grad_norm']:10.1e}  {our['lr']:9.7f}  {difference['lr']:10.1e}"
        )
        if paired:
            line += f"  {our['margin']:9.5f}  {difference['margin']:10.1e}  {our['accuracy']:8.3f}"
        print(line)
    largest = {name: max(difference[name] for difference in differences) for name in differences[0]}
    clipped = sum(our["grad_norm"] > OPTIM["max_grad_norm"] for our in ours)
    print(f"largest differences: {listed({k: f'{v:.1e}' for k, v in largest.items()})}, ", end="")
    print(f"weights {weight_difference(folder):.1e}; clipped in {clipped} of {NUM_STEPS} steps", flush=True)
    return all(value <= tolerance for difference in differences for value in difference.values())  # false for NaN


def weight_difference(folder: Path) -> float:
    """The largest weight difference between the two trained models."""
    ours, theirs = (load_file(folder / model / "model.safetensors") for model in ("run/model", "trl_model"))
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


# First-step gradients -------------------------------------------------------------------------------------------------


def perturbed(model: Path, folder: Path, by: float, seed: int) -> Path:
    """The same model with Gaussian noise of `by` times each matrix's standard deviation."""
    policy = load_policy(ModelSettings(path=str(model), dtype="float32"), load_model_template(model), CPU)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            spread = parameter.std() if parameter.ndim > 1 else 0.02
            parameter += by * spread * torch.randn(parameter.shape, generator=rng)
    policy.save(folder)
    return folder


def sampled(model: Path, prompts: Path) -> list[Group]:
    """Groups of answers, some of which end early."""
    template = load_model_template(model)
    encoded = load_prompts([Source(prompts)], template, max_prompt_tokens=256, too_long="error").prompts
    engine = NativeEngine(load_policy(ModelSettings(path=str(model), dtype="float32"), template, CPU).model, template.tokenizer)
    sampling = Sampling(MAX_NEW_TOKENS, stop=("e", ".", "t"), seed=5)
    groups = {group.prompt.id: group for group in sample_groups(engine, encoded, SAMPLES_PER_PROMPT, sampling, version=0)}
    return [groups[one.prompt.id] for one in encoded]


def scored(group: Group) -> ScoredGroup:
    """Scored by the share of letters and digits, which differs between samples."""
    values = [sum(c.isalnum() for c in sample.text) / (1 + len(sample.text)) for sample in group.samples]
    return ScoredGroup(group, tuple(map(Score, values)), {})


def first_gradients(
    case: Case, policy: Path, reference: Path, groups: Sequence[ScoredGroup]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients (before clipping) of plaudit's first step on these groups."""
    recipe = RLRecipe.model_validate(
        {
            "model": {"path": str(policy), "dtype": "float32"},
            "data": {"train": "prompts.jsonl"},
            "rollout": {
                "n": SAMPLES_PER_PROMPT,
                "max_new_tokens": MAX_NEW_TOKENS,
                "temperature": case.theirs.get("temperature", 1.0),
            },
            "rewards": [{"kind": "exact"}],
            "algorithm": case.ours,
            "train": {"prompts_per_step": NUM_PROMPTS, "tokens_per_micro_batch": 150, "keep_logits": False},
            "run": {"dir": "run"},
        }
    )
    model = load_policy(recipe.model, load_model_template(policy), CPU)
    kl_to = Reference(recipe.model.model_copy(update={"path": str(reference)}), model) if recipe.algorithm.needs_reference else None
    learner = Learner(model, recipe, total_steps=1, world=World.alone(CPU), reference=kl_to)
    kept: dict[str, torch.Tensor] = {}
    clip = learner.trainer.optimiser.clip

    def keep_and_clip() -> torch.Tensor:
        kept.update({name: p.grad.clone() for name, p in model.trainable() if p.grad is not None})
        return clip()

    learner.trainer.optimiser.clip = keep_and_clip
    return learner.learn(groups, step=1), kept


def compare_gradients(names: Sequence[str], kind: str, tolerance: float, folder: Path) -> Comparison:
    """Compare the gradients of both, one line per case."""
    rows = conversations()
    # Far from uniform, otherwise all gradients would be small; each further model is perturbed a little more.
    reference = perturbed(tiny_model(kind, rows, folder), folder / "reference", by=4.0, seed=1)
    older = perturbed(reference, folder / "older", by=0.15, seed=2)
    policy = perturbed(older, folder / "policy", by=0.2, seed=3)
    questions = [{"prompt": row["messages"][:-1]} for row in rows[:NUM_PROMPTS]]
    groups = [scored(group) for group in sampled(older, write_rows(folder / "prompts.jsonl", questions))]
    samples = [
        {
            "prompt": f"{number}",
            "prompt_ids": scored_group.group.prompt_tokens.tolist(),
            "completion_ids": sample.tokens.tolist(),
            "logprobs": sample.sampler_logprobs.tolist(),
            "reward": score.value,
        }
        for number, scored_group in enumerate(groups)
        for sample, score in zip(scored_group.group.samples, scored_group.scores, strict=True)
    ]
    cases = {name: grpo_cases()[name] for name in names}
    jobs = [
        {
            "stage": "grpo",
            "model": str(policy),
            "reference": str(reference),
            "rows": samples,
            "rows_per_step": SAMPLES_PER_STEP,
            "rows_per_micro_batch": case.rows_per_micro_batch,
            "samples_per_prompt": SAMPLES_PER_PROMPT,
            "older": case.ours.get("old_logprobs") == "sampler",
            "settings": case.theirs,
            "gradients": str(folder / f"{number}.safetensors"),
        }
        for number, case in enumerate(cases.values())
    ]
    log = yield jobs
    plaudit.objectives.advantages.grpo = partial(grpo, eps=TRL_STD_EPS)
    lengths = [len(sample["completion_ids"]) for sample in samples]
    print(f"\ngrpo, {kind}: the gradients of the first step")
    print(f"  plaudit   {listed({package: version(package) for package in ('transformers', 'torch')})}")
    print(f"  TRL       {listed(log['versions'])}")
    prompt_lengths = [len(sample["prompt_ids"]) for sample in samples]
    print(f"  samples   {NUM_PROMPTS} prompts of {min(prompt_lengths)} to {max(prompt_lengths)} tokens, ", end="")
    print(f"{SAMPLES_PER_PROMPT} answers per prompt of {min(lengths)} to {max(lengths)}")
    print("case                       loss  difference  largest gradient  difference  relative  clipped  dual-clipped        KL")
    agree = True
    for job, (name, case), (step,) in zip(jobs, cases.items(), log["steps"], strict=True):
        metrics, ours = first_gradients(case, policy, reference, groups)
        theirs = load_file(job["gradients"])
        assert ours.keys() == theirs.keys()
        largest = max(gradient.abs().max().item() for gradient in theirs.values())
        apart = max((ours[parameter] - theirs[parameter]).abs().max().item() for parameter in ours)
        assert (metrics["clip_fraction"] > 0) == job["older"], "older samples have ratios beyond the bounds, others have none"
        loss_apart = abs(metrics["loss"] - step["loss"])
        agree &= loss_apart <= tolerance and apart <= tolerance and apart / largest <= tolerance  # false for NaN
        print(
            f"{name:22}  {metrics['loss']:8.5f}  {loss_apart:10.1e}  {largest:16.4f}  {apart:10.1e}  {apart / largest:8.1e}"
            f"  {metrics['clip_fraction']:7.3f}  {metrics['dual_clip_fraction']:12.3f}  {metrics.get('kl', 0.0):8.4f}",
            flush=True,
        )
    return agree


def new_folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def listed(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=REPOSITORY / ".venv-trl/bin/python", help="Python of TRL's environment")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=STAGES)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="for losses, norms and rates, step by step")
    parser.add_argument("--gradient-tolerance", type=float, default=1e-5, help="for GRPO's loss and gradients")
    args = parser.parse_args()
    if not args.trl_python.exists():
        sys.exit(f"{args.trl_python} does not exist: make .venv-trl/installed")
    plaudit.report.curves.draw_curves = lambda *_: None  # drawing takes longer than these runs
    step_by_step = [name for name, case in STEP_BY_STEP.items() if case.stage in args.stage]
    with tempfile.TemporaryDirectory() as temporary:
        folder, comparisons = Path(temporary), []
        for kind in args.kind:
            if step_by_step:
                comparisons.append(compare_steps(step_by_step, kind, args.tolerance, new_folder(folder, f"{kind} steps")))
            if "grpo" in args.stage:
                gradients = new_folder(folder, f"{kind} gradients")
                comparisons.append(compare_gradients(list(grpo_cases()), kind, args.gradient_tolerance, gradients))
        agree = run_comparisons(comparisons, args.trl_python, folder)
    tolerances = f"{args.tolerance:g} (steps), {args.gradient_tolerance:g} (gradients)"
    print(f"\n{'equal' if all(agree) else 'NOT EQUAL'} within {tolerances}")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
