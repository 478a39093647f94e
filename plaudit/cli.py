"""The `plaudit` command. A wrong recipe is reported before torch is imported, so heavy imports stand inside the verbs."""

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer

from plaudit import __version__
from plaudit.audit.cli import audit
from plaudit.command_help import VerbGroup, examples
from plaudit.config import load
from plaudit.errors import Interrupted, PlauditError, redact
from plaudit.inputs import load_checked, require_causal_model, require_model
from plaudit.prepare.cli import prepare
from plaudit.recipe import ModelSettings, SampleSettings
from plaudit.serving.cli import serve

app = typer.Typer(
    name="plaudit",
    help="Train language models with reward models.",
    no_args_is_help=True,
    cls=VerbGroup,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(prepare, name="prepare", cls=VerbGroup)

# `--optim.lr 1e-5` must reach our parser, which explains how to write an override.
ANYTHING_MAY_FOLLOW = {"ignore_unknown_options": True}
RecipeFile = Annotated[Path, typer.Argument(metavar="R.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.name=value]…", help="Settings that replace the recipe's own, such as optim.lr=1e-5.", show_default=False
    ),
]


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("sft"))
def sft(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Supervised fine-tuning on conversations. Run the same command again to resume."""
    loaded, sources = load_checked(recipe, overrides, "sft")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    print(f"trained model: {model}\ncurves:        {model.parent / 'curves.png'}")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("dpo"))
def dpo(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Direct preference optimisation on pairs of answers. Run the same command again to resume.

    Rows have `chosen` and `rejected`; see docs/preferences.md.
    """
    loaded, sources = load_checked(recipe, overrides, "dpo")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    print(f"trained model: {model}\ncurves:        {model.parent / 'curves.png'}")


@app.command("reward-model", context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("reward-model"))
def reward_model(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train a Bradley–Terry reward model on pairs of answers. Run the same command again to resume.

    Rows have `chosen` and `rejected`; see docs/preferences.md. Use the result as a reward with `kind: scalar_model`.
    """
    loaded, sources = load_checked(recipe, overrides, "reward-model")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    print(f"reward model: {model}\ncurves:       {model.parent / 'curves.png'}")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("rl"))
def rl(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Reinforcement learning against rewards. Run the same command again to resume.

    `plaudit config R.yaml --explain` lists every setting; see docs/rl.md.
    """
    loaded, sources = load_checked(recipe, overrides, "rl")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    print(f"trained model: {model}\ncurves:        {model.parent / 'curves.png'}\nsamples:       {model.parent / 'samples'}")


@app.command(epilog=examples("sample"))
def sample(
    model: Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.", show_default=False)],
    prompts: Annotated[list[Path], typer.Argument(help="Files of prompts (.parquet, .jsonl, .json).", show_default=False)],
    out: Annotated[Path, typer.Option(help="The JSONL file to write or resume, one line per prompt.", show_default=False)],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Sample from the most likely tokens that add up to this probability.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.")] = None,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=0.999, help="Drop tokens below this fraction of the best one's probability.")
    ] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a response; may be given again.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = 4096,
    too_long: Annotated[Literal["filter", "error", "cut_left"], typer.Option(help="What to do with longer prompts.")] = "filter",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first n prompts only.")] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences sampled concurrently. Default: 256 on a CPU, 1024 on a GPU.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Another model whose tokenizer to use.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, llama3, qwen, plain, a .jinja file, or a model.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU, else float32.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")] = "auto",
) -> None:
    """Sample responses to prompts from any model. Run the same command again to resume."""
    from plaudit.data.conversations import resolve_sources

    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"{out} should end with .jsonl: it has a line of JSON per prompt.", param_hint="--out")
    if stop and "" in stop:
        raise typer.BadParameter("an empty string would end every response at once.", param_hint="--stop")
    settings = ModelSettings(path=model, tokenizer=tokenizer, chat_template=chat_template, dtype=dtype)
    sources = resolve_sources([str(path) for path in prompts], None, "PROMPTS")
    require_model(settings, "")
    require_causal_model(settings.path, "MODEL", "`plaudit sample` needs a model that generates text")

    from plaudit.loops.sample import SampleJob
    from plaudit.loops.sample import sample as run_sample
    from plaudit.rollout.engine import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, tuple(stop or ()), seed)
    job = SampleJob(settings, sources, out, n, sampling, max_prompt_tokens, too_long, max_prompts, max_sequences, device)
    print(f"{out}: {run_sample(job):,} prompts with {n} responses each")


@app.command(epilog=examples("ask"))
def ask(
    model: Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.", show_default=False)],
    question: Annotated[
        str | None, typer.Argument(help="The question; default: a chat, or what is piped in.", show_default=False)
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of answers.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, thoughts included.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Sample from the most likely tokens that add up to this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    rewards: Annotated[Path | None, typer.Option(metavar="R.yaml", help="Show the rewards of this recipe.")] = None,
    truth: Annotated[str | None, typer.Option(help="The right answer, for rewards that compare with it.")] = None,
    data_source: Annotated[str, typer.Option(help="The row's data_source, for rewards with `when`.")] = "",
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest question or chat.")] = 4096,
    tokenizer: Annotated[str | None, typer.Option(help="Another model whose tokenizer to use.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, llama3, qwen, plain, a .jinja file, or a model.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU, else float32.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")] = "auto",
) -> None:
    """Ask a model a question, or chat with it.

    Answers are printed to stdout; thoughts and rewards to stderr.
    """
    from plaudit.inputs import load_rewards

    if truth is not None and rewards is None:
        raise typer.BadParameter("it is what rewards compare with: give --rewards too.", param_hint="--truth")
    if question is None and not sys.stdin.isatty() and not (question := sys.stdin.read().strip()):
        raise PlauditError("there is no question: write it after the model, or pipe it in")
    settings = ModelSettings(path=model, tokenizer=tokenizer, chat_template=chat_template, dtype=dtype)
    require_model(settings, "")
    require_causal_model(settings.path, "MODEL", "`plaudit ask` needs a model that generates text")
    scored_by = load_rewards(rewards) if rewards is not None else ()

    from plaudit.loops.ask import AskJob, chat
    from plaudit.loops.ask import ask as ask_once

    sampling = SampleSettings(
        n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
        max_prompt_tokens=max_prompt_tokens, device=device,
    )  # fmt: skip
    job = AskJob(settings, sampling, system, scored_by, truth, data_source)
    if question is None:
        chat(job)
    else:
        ask_once(job, question)


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("score"))
def score(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows with responses (.parquet, .jsonl, .json).", show_default=False)],
    rewards: Annotated[Path, typer.Option(help="A recipe with a list of rewards, or an RL recipe.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The JSONL file to write or resume, one line per row.", show_default=False)],
    tokenizer: Annotated[str | None, typer.Option(help="A model whose tokenizer counts tokens where rows do not say.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Use the first n rows only.")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", help="Replaces a setting of the recipe: rewards.0.weight=2.")] = None,
) -> None:
    """Score saved responses with a recipe's rewards. Run the same command again to resume.

    A row has `prompt`, `response` or `responses`, and what the rewards need: `data_source`, `reward_model.ground_truth`,
    `extra_info`, `tokens`. Each line of the output is the row with `reward`, `parts`, `malformed`, `failure` and `view`.
    """
    from plaudit.data.conversations import resolve_sources
    from plaudit.inputs import load_rewards

    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"{out} should end with .jsonl: it has a line of JSON per row.", param_hint="--out")
    settings = load_rewards(rewards, set)
    sources = resolve_sources([str(path) for path in rows], None, "ROWS")

    from plaudit.loops.score import ScoreJob
    from plaudit.loops.score import score as run_score

    print(f"{out}: {run_score(ScoreJob(settings, sources, out, tokenizer, max_rows))}")


app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("audit"))(audit)
app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("serve"))(serve)


@app.command(epilog=examples("demo"))
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of data, model, training and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for all of it.")] = Path("runs/demo"),
) -> None:
    """A small model, from nothing to a trained policy in minutes on a CPU: SFT cold start, then GRPO, and a picture of it."""
    from plaudit.loops.demo import run_demo

    run_demo(out, seed)


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("config"))
def config(
    recipe: RecipeFile,
    overrides: Overrides = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Describe every setting, or those named: --explain critic optim.lr")
    ] = False,
) -> None:
    """Print the resolved recipe and where each value comes from; with --explain, what each setting means and allows."""
    from plaudit.explain import explain as explained
    from plaudit.explain import to_yaml

    names = [argument for argument in overrides or () if explain and "=" not in argument]
    loaded = load(recipe, [argument for argument in overrides or () if argument not in names])
    print(explained(loaded, names) if explain else to_yaml(loaded), end="")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("doctor"))
def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to render and measure; 0 for all.")] = 1000,
) -> None:
    """Check a recipe before any training: files, schema, chat template, lengths, memory."""
    loaded, sources = load_checked(recipe, overrides, None)

    from plaudit.doctor.checkup import run_checkup

    raise typer.Exit(0 if run_checkup(loaded, sources, max_rows=rows) else 1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"plaudit {__version__}")
        raise typer.Exit


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def main() -> None:
    """Run the command; user errors are one line on stderr, others keep their traceback (secrets redacted)."""
    sys.excepthook = _show_traceback
    try:
        app()
    except PlauditError as error:
        print(redact(str(error)), file=sys.stderr)
        sys.exit(130 if isinstance(error, Interrupted) else 2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
