"""Help for the command line: examples of every verb, and what to type instead of a verb that does not exist."""

from typing import Any

import typer
from typer.core import TyperGroup

from plaudit.errors import PlauditError, nearest
from plaudit.shipped import DOCS

EXAMPLES = {
    "sft": ("plaudit sft recipes/first/sft.yaml", "plaudit sft recipes/first/sft.yaml optim.lr=1e-4 run.dir=runs/second"),
    "dpo": ("plaudit dpo recipes/preferences/dpo.yaml", "plaudit dpo recipes/preferences/dpo.yaml loss.beta=0.05"),
    "reward-model": ("plaudit reward-model recipes/preferences/reward_model.yaml",),
    "rl": ("plaudit rl recipes/smollm2/grpo.yaml", "plaudit rl recipes/smollm2/grpo.yaml rollout.n=8 model.lora.rank=16"),
    "sample": (
        "plaudit sample runs/smollm2/model data/arithmetic/val.parquet --out answers.jsonl -n 4",
        "plaudit sample models/policy prompts.parquet --out answers.jsonl -n 8 --url http://127.0.0.1:8000",
    ),
    "ask": (
        'plaudit ask runs/smollm2/model "What is 17 + 4?"',
        'plaudit ask runs/smollm2/model "What is 17 + 4?" -n 4 --rewards recipes/smollm2/grpo.yaml --ground-truth 21',
        "plaudit ask runs/smollm2/model",
        "cat question.txt | plaudit ask runs/smollm2/model --temperature 0",
    ),
    "score": ("plaudit score recipes/smollm2/grpo.yaml answers.jsonl --out scored.jsonl",),
    "eval rewards": (
        "plaudit eval rewards recipes/preferences/val.jsonl --rewards recipes/audit/favours_length.yaml",
        "plaudit eval rewards reward-bench-2.parquet --rewards bt=bradley_terry.yaml judge.yaml --markdown",
    ),
    "eval ranking": (
        "plaudit eval ranking recipes/eval/translations.jsonl --rewards recipes/eval/ranking_chrf.yaml",
        "plaudit eval ranking groups.parquet --rewards grrm=group_judge.yaml bt=bradley_terry.yaml --runs 4",
    ),
    "eval verifier": (
        "plaudit eval verifier recipes/eval/answers.jsonl --rewards recipes/eval/verifier_rule.yaml",
        "plaudit eval verifier answers.jsonl --rewards rule.yaml judge.yaml addon.yaml --threshold 0.75 --label correct",
    ),
    "eval policy": (
        "plaudit eval policy runs/smollm2/model data/arithmetic/val.parquet --rewards recipes/smollm2/grpo.yaml -n 16",
        "plaudit eval policy before=models/smollm2 after=runs/smollm2/model prompts.jsonl --rewards rule.yaml judge.yaml",
    ),
    "audit": ("plaudit audit recipes/audit/gsm8k.yaml answers.jsonl",),
    "serve": ("plaudit serve recipes/audit/gsm8k.yaml --port 8700",),
    "view": ("plaudit view runs/demo/rl", "plaudit view runs/a runs/b", "plaudit view runs/demo/rl --out demo.html"),
    "merge": ("plaudit merge runs/first/model --out models/merged",),
    "recipes": ("plaudit recipes", "plaudit recipes first"),
    "demo": ("plaudit demo", "plaudit demo --seed 1 --out runs/demo1", "plaudit demo cluster.gpus=2"),
    "cluster up": ("plaudit cluster up", "plaudit cluster up --join 10.0.0.1:6379"),
    "cluster status": ("plaudit cluster status",),
    "cluster down": ("plaudit cluster down",),
    "config": ("plaudit config recipes/smollm2/grpo.yaml", "plaudit config recipes/smollm2/grpo.yaml --explain optim rollout.n"),
    "convert": (
        "plaudit convert run_grpo.sh --out grpo.yaml",
        "plaudit convert sft.yaml --from llamafactory --gpus 8 --out sft_recipe.yaml",
    ),
    "prepare tiny-model": ("plaudit prepare tiny-model recipes/first/train.jsonl --out models/tiny",),
    "prepare smollm2": ("plaudit prepare smollm2 --out models/smollm2",),
    "prepare sorting": ("plaudit prepare sorting --out data/sorting",),
    "prepare arithmetic": ("plaudit prepare arithmetic --out data/arithmetic --train 4000 --val 500",),
    "prepare pairs": (
        "plaudit prepare pairs scored.jsonl --out data/pairs --min-margin 0.5",
        "plaudit prepare pairs scored.jsonl --out data/pairs --min-responses 4 --max-tokens 4096 --tokenizer models/policy",
        "plaudit prepare pairs groups.parquet --out data/bt_pairs --all-pairs",
    ),
    "prepare conversations": (
        "plaudit prepare conversations allenai/WildChat-1M --out data/wildchat --english --max-characters 4000 --val 250",
        "plaudit prepare conversations chats.jsonl --out data/chats --all-turns --max-tokens 1024 --tokenizer models/policy",
    ),
    "prepare thoughts": (
        "plaudit prepare thoughts prompts.jsonl --out thoughts.jsonl --url https://api.openai.com --model gpt-4.1-mini "
        "--credential OPENAI_API_KEY",
        "plaudit prepare thoughts prompts.parquet --out thoughts.jsonl --url http://127.0.0.1:8000 limits.max_concurrent_calls=64",
    ),
    "prepare thoughts-sft": (
        "plaudit prepare thoughts-sft thoughts.jsonl --out data/sft.parquet",
        "plaudit prepare thoughts-sft thoughts.jsonl --out data/sft_nothink.parquet --without-thoughts",
    ),
    "prepare zero-model": (
        "plaudit prepare zero-model Qwen/Qwen2.5-7B --out models/qwen_zero",
        "plaudit prepare zero-model meta-llama/Llama-3.1-8B --out models/llama_zero_nothink --without-thoughts",
    ),
    "prepare ranking-sft": ("plaudit prepare ranking-sft groups.jsonl --out data/ranking_sft.parquet --shuffle-augment 2",),
    "prepare ranking-rl": ("plaudit prepare ranking-rl groups.jsonl --out data/ranking_rl.parquet",),
    "prepare pointwise-sft": ("plaudit prepare pointwise-sft groups.jsonl --out data/pointwise_sft.parquet",),
    "prepare pointwise-rl": ("plaudit prepare pointwise-rl groups.jsonl --out data/pointwise_rl.parquet --rule grade",),
    "prepare translation-sft": ("plaudit prepare translation-sft demonstrations.parquet --out data/translation_sft.parquet",),
    "prepare translation-rl": (
        "plaudit prepare translation-rl texts.parquet --out data/translation_rl.parquet --cross-lingual",
        "plaudit prepare translation-rl test.parquet --out data/translation_test.parquet --test-set",
    ),
    "prepare math-rl": (
        "plaudit prepare math-rl gsm8k_train.jsonl --out data/gsm8k.parquet --answer-in hashes --data-source openai/gsm8k",
        "plaudit prepare math-rl bigmath.parquet --out data/train.parquet --data-source bigmath_rl_tinyv --sample 5000",
    ),
    "prepare verifier-sft": (
        "plaudit prepare verifier-sft labelled.jsonl --out data/verdicts.parquet --balance",
        "plaudit prepare verifier-sft responses.parquet --out data/verdicts.parquet --extract answer --label-column is_correct",
    ),
    "prepare rubric-rl": ("plaudit prepare rubric-rl graded.jsonl --out data/train_rrm.parquet --highest 10",),
    "doctor": (
        "plaudit doctor recipes/smollm2/grpo.yaml",
        "plaudit doctor recipes/smollm2/grpo.yaml rollout.n=4 --rows 0",
        "plaudit doctor recipes/smollm2/grpo.yaml cluster.gpus=8 --gpu-memory 141",
        "plaudit doctor recipes/smollm2/grpo.yaml --html doctor.html",
    ),
    "engine-command": ("plaudit engine-command recipes/smollm2/grpo.yaml rollout.engine=vllm",),
}

OTHER_VERBS = {
    **dict.fromkeys(
        ("train", "fit", "finetune", "fine-tune", "run", "launch"),
        "To train, name the stage: plaudit sft, dpo, reward-model or rl, then R.yaml.",
    ),
    **dict.fromkeys(
        ("grpo", "ppo", "rloo", "reinforce", "dapo", "gspo", "remax", "cispo", "drgrpo"),
        "It is an algorithm of plaudit rl: plaudit rl R.yaml (algorithm.kind, docs/algorithms.md).",
    ),
    **dict.fromkeys(("ipo", "hinge"), "It is a loss of plaudit dpo: plaudit dpo R.yaml loss.kind=…"),
    **dict.fromkeys(("rm", "reward", "reward_model", "rewardmodel", "bradley-terry"), "Did you mean plaudit reward-model?"),
    **dict.fromkeys(("evaluate", "evaluation", "validate", "test", "benchmark"), "Did you mean plaudit eval?"),
    **dict.fromkeys(("generate", "infer", "inference", "predict", "rollout"), "Did you mean plaudit sample, or plaudit ask?"),
    **dict.fromkeys(("chat", "talk", "prompt", "query"), "Did you mean plaudit ask?"),
    **dict.fromkeys(("check", "lint", "verify", "dry-run"), "Did you mean plaudit doctor?"),
    **dict.fromkeys(("explain", "show", "settings", "recipe"), "Did you mean plaudit config R.yaml --explain?"),
    **dict.fromkeys(("data", "preprocess", "download"), "Did you mean plaudit prepare?"),
    **dict.fromkeys(("server", "api", "deploy"), "Did you mean plaudit serve?"),
    **dict.fromkeys(("viewer", "look", "dashboard", "browse", "ui", "plot", "inspect"), "Did you mean plaudit view?"),
    **dict.fromkeys(("help", "version"), "Did you mean plaudit --help, or plaudit --version?"),
    "resume": "To resume a run, repeat the command that started it: plaudit rl R.yaml.",
}  # fmt: skip
"""Verbs of other systems, and what does the same here."""


def examples(verb: str) -> str:
    """The end of a verb's help. An empty line ends a paragraph, so that each example has its own line."""
    return "\n\n".join(["Examples:", *(f"`{example}`" for example in EXAMPLES[verb])])


UsageError: Any = typer.BadParameter.__base__
"""Of click, or of the copy of it inside newer versions of typer."""


def usage_problem(error: Any) -> str:
    """A mistake in options or arguments as one line. Without arguments, the help that was printed says enough."""
    message = error.format_message()
    if error.ctx is None or not message:
        return message
    path = error.ctx.command_path.replace("python -m plaudit", "plaudit")
    return f"{path}: {message[0].lower()}{message[1:].rstrip('.')}. See {path} --help"


def _without_types_of_flags(command: Any, ctx: Any) -> Any:
    """`--version`, not `--version <bool>`, in its help."""
    for param in command.get_params(ctx):
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return command


class VerbGroup(TyperGroup):
    """The verbs; one that does not exist is answered with the one that was probably meant."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return command and _without_types_of_flags(command, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _without_types_of_flags(self, ctx)
        super().format_help(ctx, formatter)
        if ctx.parent is None:
            typer.echo(f" Pages that messages name, such as docs/rl.md, are in\n {DOCS}\n")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0] if args else ""
        if verb and not verb.startswith("-") and self.get_command(ctx, verb) is None and not ctx.resilient_parsing:
            own = "plaudit" if ctx.parent is None else f"plaudit {ctx.info_name}"  # not what `python -m` calls it
            near = nearest(verb, self.list_commands(ctx))
            hint = (ctx.parent is None and OTHER_VERBS.get(verb.lower())) or (near and f"Did you mean {own} {near}?")
            raise PlauditError(f"{own} {verb} is not a command. {hint or f'{own} --help lists all of them.'}")
        return super().resolve_command(ctx, args)
