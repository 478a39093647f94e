"""The `plaudit` command. A wrong recipe is reported before torch is imported, so heavy imports stand inside the verbs."""

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer

from plaudit import __version__
from plaudit.audit.cli import audit
from plaudit.cluster.cli import cluster
from plaudit.command_help import UsageError, VerbGroup, examples, usage_problem
from plaudit.config import load
from plaudit.convert.cli import convert
from plaudit.doctor.engine_command import engine_command
from plaudit.errors import PlauditError, nearest_path
from plaudit.evaluation.cli import evaluate
from plaudit.heavy_imports import heavy_imports, set_own_process
from plaudit.host import raise_open_file_limit, require_supported_system
from plaudit.inputs import load_checked, require_causal_model, require_model, require_servers
from plaudit.loops.cli import sample
from plaudit.lora_folder import is_lora_folder
from plaudit.options import (
    ChatTemplateName,
    DataSource,
    Device,
    Dtype,
    MaxNewTokens,
    MaxPromptTokens,
    ModelName,
    ModelTokenizer,
    Overrides,
    Quiet,
    RecipeFile,
    RewardRecipe,
    Rollouts,
    SamplingSeed,
    SpecialTokens,
    Temperature,
    Tokenizer,
    TopP,
    parse_object_option,
    split_overrides,
)
from plaudit.output_folder import DEMO_FILES, require_empty
from plaudit.prepare.cli import prepare
from plaudit.recipe import ModelSettings, SampleSettings, ScoreRecipe
from plaudit.redaction import redact
from plaudit.serving.cli import serve
from plaudit.viewing.cli import view
from plaudit.wrapping import terminal_width, wrapped, wrapped_comments

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
app.add_typer(cluster, name="cluster", cls=VerbGroup)
app.add_typer(evaluate, name="eval", cls=VerbGroup)

# `--optim.lr 1e-5` must reach our parser, which explains how to write an override.
ANYTHING_MAY_FOLLOW = {"ignore_unknown_options": True}


def _print_results(files: dict[str, Path]) -> None:
    """Where a run's results are, the model first."""
    model = next(iter(files.values()))
    merge = {"merge it with": f"plaudit merge {model} --out FOLDER"} if is_lora_folder(model) else {}
    names = [*files, *merge]
    for name, value in (files | merge).items():
        print(f"{name + ':':<{max(map(len, names)) + 1}} {value}")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("sft"))
def sft(recipe: RecipeFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Supervised fine-tuning on conversations. Run the same command again to resume."""
    loaded, sources = load_checked(recipe, overrides, "sft")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    _print_results({"trained model": model, "curves": model.parent / "curves.png"})


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("dpo"))
def dpo(recipe: RecipeFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Direct preference optimisation on pairs of answers. Run the same command again to resume.

    Rows have `chosen` and `rejected`; see docs/preferences.md.
    """
    loaded, sources = load_checked(recipe, overrides, "dpo")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    _print_results({"trained model": model, "curves": model.parent / "curves.png"})


@app.command("reward-model", context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("reward-model"))
def reward_model(recipe: RecipeFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Train a Bradley–Terry reward model on pairs of answers. Run the same command again to resume.

    Rows have `chosen` and `rejected`; see docs/preferences.md. Use the result as a reward with `kind: scalar_model`.
    """
    loaded, sources = load_checked(recipe, overrides, "reward-model")

    from plaudit.loops.train import train

    model = train(loaded, sources)
    _print_results({"reward model": model, "curves": model.parent / "curves.png"})


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("rl"))
def rl(recipe: RecipeFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Reinforcement learning against rewards. Run the same command again to resume.

    `plaudit config R.yaml --explain` lists every setting; see docs/rl.md.
    """
    loaded, sources = load_checked(recipe, overrides, "rl")
    require_servers(loaded.recipe)

    from plaudit.loops.train import train

    model = train(loaded, sources)
    _print_results({"trained model": model, "curves": model.parent / "curves.png", "samples": model.parent / "samples"})


@app.command(epilog=examples("ask"))
def ask(
    model: ModelName,
    question: Annotated[
        str | None, typer.Argument(help="The question; default: a chat, or what is piped in.", show_default=False)
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of answers.")] = 1,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: SamplingSeed = 0,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    rewards: Annotated[Path | None, typer.Option(metavar="R.yaml", help="Show the rewards of this recipe.")] = None,
    ground_truth: Annotated[str | None, typer.Option(help="The right answer, for rewards that compare with it.")] = None,
    extra_info: Annotated[
        str | None, typer.Option(metavar="JSON", help="""Further columns that rewards read: '{"level": 3}'.""")
    ] = None,
    data_source: Annotated[str, typer.Option(help="The row's data_source, for rewards with `when`.")] = "",
    max_prompt_tokens: MaxPromptTokens = 4096,
    special_tokens: SpecialTokens = "text",
    tokenizer: ModelTokenizer = None,
    chat_template: ChatTemplateName = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Ask a model a question, or chat with it.

    Answers are printed to stdout; thoughts and rewards to stderr. The exit status is 1 if a reward failed.
    """
    from plaudit.inputs import load_rewards

    for option, value in (("--ground-truth", ground_truth), ("--extra-info", extra_info)):
        if value is not None and rewards is None:
            raise typer.BadParameter("it is for rewards: give --rewards too.", param_hint=option)
    extra = parse_object_option(extra_info, "--extra-info")
    if question is None and not sys.stdin.isatty() and not (question := sys.stdin.read().strip()):
        raise PlauditError("there is no question: write it after the model, or pipe it in")
    settings = ModelSettings(path=model, tokenizer=tokenizer, chat_template=chat_template, dtype=dtype)
    require_model(settings, "")
    require_causal_model(settings.path, "MODEL", "`plaudit ask` needs a model that generates text")
    scored_by = load_rewards(rewards) if rewards is not None else ()

    with heavy_imports():
        from plaudit.loops.ask import AskJob, chat
        from plaudit.loops.ask import ask as ask_once

    sampling = SampleSettings(
        n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
        max_prompt_tokens=max_prompt_tokens, special_tokens=special_tokens, device=device,
    )  # fmt: skip
    job = AskJob(settings, sampling, system, scored_by, ground_truth, data_source, extra)
    if question is None:
        chat(job)
    elif not ask_once(job, question):
        raise typer.Exit(1)


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("score"))
def score(
    recipe: RewardRecipe,
    rollouts: Rollouts,
    out: Annotated[Path, typer.Option(help="The JSONL file to write or resume, one line per row.", show_default=False)],
    details: Annotated[
        bool, typer.Option("--details", help="Also write each reward's own score, with a judge's prompt and answer.")
    ] = False,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit with status 0 although some rows have no value.")
    ] = False,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Score the first n rows only.")] = None,
    data_source: DataSource = "",
    tokenizer: Tokenizer = None,
    quiet: Quiet = False,
) -> None:
    """Score saved responses with a recipe's rewards. Run the same command again to resume.

    A row has `prompt`, `response` or `responses`, and what the rewards need: `data_source`, `ground_truth`, `extra_info`,
    `tokens`. Each line of the output is the row with `reward`, `parts`,
    `malformed`, `failure` and `view`; with `--details` also `by_reward`. The exit status is 1 while a row has no value; resuming
    scores such rows again.
    """
    from plaudit.data.conversations import resolve_sources
    from plaudit.inputs import load_rewards

    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"{out} should end with .jsonl: it has a line of JSON per row.", param_hint="--out")
    names, overrides = split_overrides(rollouts, "score")
    settings = load_rewards(recipe, overrides)
    sources = resolve_sources(names, None, "ROLLOUTS")

    from rich.console import Console

    from plaudit.loops.score import ScoreJob, rows_of_files
    from plaudit.loops.score import score as run_score
    from plaudit.report.progress import print_line

    rows = rows_of_files(sources, max_rows=max_rows, data_source=data_source)
    summary = run_score(ScoreJob(settings, rows, out, tokenizer, details, allow_failures))
    summary.print_means(Console(highlight=False))
    print(f"{out}: {summary}")
    if summary.rows_without_value and not allow_failures:
        print_line(
            f"{summary.rows_without_value:,} of {summary.rows:,} rows have no value. Run the same command to score them again, or "
            "pass --allow-failures to accept this",
            "yellow",
        )
        raise typer.Exit(1)


@app.command(epilog=examples("merge"))
def merge(
    adapter: Annotated[
        Path,
        typer.Argument(
            help="A LoRA adapter: its folder, as peft and model.lora.merge_on_save=false save it, or its name on the hub."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the complete model to.", show_default=False)],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="auto: that of the base's weights; for an adapter trained on a quantised base, that of training."),
    ] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the base model.")] = False,
) -> None:
    """Merge a LoRA adapter into its base model: a complete model for plaudit, transformers and vLLM."""
    from plaudit.lora_folder import QUANTISED, read_lora_folder

    lora = read_lora_folder(adapter)
    if lora is None:
        raise PlauditError(f"{adapter} is not a LoRA adapter: it has no adapter_config.json.{nearest_path(adapter)}")
    if out.exists():
        raise PlauditError(f"--out: {out} exists already; choose another folder")

    with heavy_imports():
        from plaudit.loops.merge import merge_adapter

    parameters = merge_adapter(lora, out, dtype, trust_remote_code)
    if lora.quantised is not None:
        print(f"{lora.base}: its linear layers are rounded to {lora.quantised.bits} bits, as in training ({QUANTISED})")
    print(f"{out}: {lora.base} with {adapter} merged in, {parameters:,} parameters")


for verb, context in ((sample, {}), (audit, ANYTHING_MAY_FOLLOW), (serve, ANYTHING_MAY_FOLLOW), (convert, {}), (view, {})):
    app.command(context_settings=context, epilog=examples(verb.__name__))(verb)


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("demo"))
def demo(
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of data, model, training and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for all of it.")] = Path("runs/demo"),
) -> None:
    """A small model, from nothing to a trained policy in minutes on a CPU: SFT cold start, then GRPO, and a picture of it."""
    require_empty(out, DEMO_FILES)  # before torch is imported

    with heavy_imports():
        from plaudit.loops.demo import run_demo

    run_demo(out, seed, overrides or ())


@app.command(epilog=examples("recipes"))
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A folder of them to copy, such as first.", show_default=False)
    ] = None,
) -> None:
    """List the recipes that ship with plaudit, or copy some of them into the current folder to edit.

    Commands accept their names in any folder: `plaudit doctor recipes/first/sft.yaml`. A copy in the current folder comes first.
    """
    from plaudit.shipped import copy_shipped, first_comment, shipped_recipes

    if name is not None:
        print("\n".join(map(str, copy_shipped(name))))
        return
    found = {shown: first_comment(file) for shown, file in shipped_recipes().items()}
    width = max(map(len, found))
    for shown, comment in found.items():
        print(wrapped(f"{shown:<{width}}  {comment}", sys.stdout, indent=width + 2))
    print("\nTo see one:                plaudit config recipes/first/sft.yaml\nTo copy a folder, to edit: plaudit recipes first")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("config"))
def config(
    recipe: RecipeFile,
    overrides: Overrides = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Describe every setting, or those named: --explain critic optim.lr")
    ] = False,
) -> None:
    """Print the resolved recipe and where each value comes from; with --explain, what each setting means and allows."""
    from plaudit.explain import WIDTH, to_yaml
    from plaudit.explain import explain as explained

    names = [argument for argument in overrides or () if explain and "=" not in argument]
    loaded = load(recipe, [argument for argument in overrides or () if argument not in names])
    width = min(WIDTH, terminal_width(sys.stdout))
    print(wrapped_comments(explained(loaded, names, width) if explain else to_yaml(loaded), sys.stdout), end="")


@app.command(context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("doctor"))
def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to render and measure; 0 for all.")] = 1000,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, metavar="GB", help="Plan for GPUs with this much memory (10⁹ bytes), here or elsewhere.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with the findings, the memory plan and lengths.", show_default=False),
    ] = None,
) -> None:
    """Check a recipe before any training: files, schema, chat template, lengths, memory."""
    from plaudit.doctor.page import write_page
    from plaudit.report.pages import require_folder

    if html is not None:
        require_folder("--html", html)
    loaded, sources = load_checked(recipe, overrides, None)

    from plaudit.rewards.judges.model_rewards import find_model_rewards

    if isinstance(loaded.recipe, ScoreRecipe) and not any(map(find_model_rewards, loaded.recipe.rewards)):
        from plaudit.doctor.rewards import check_rules

        checks = check_rules(loaded)
    else:
        with heavy_imports():
            from plaudit.doctor.checkup import run_checkup

        memory = None if gpu_memory is None else gpu_memory * 1e9
        checks = run_checkup(loaded, sources, max_rows=rows, gpu_memory=memory)
    if html is not None:
        write_page(html, loaded, checks)
        print(f"\npage: {html}")
    raise typer.Exit(0 if checks.passed else 1)


app.command("engine-command", context_settings=ANYTHING_MAY_FOLLOW, epilog=examples("engine-command"))(engine_command)


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
    set_own_process()
    try:
        require_supported_system()
        raise_open_file_limit()
        sys.exit(app(standalone_mode=False))
    except PlauditError as error:
        print(wrapped(redact(str(error)), sys.stderr), file=sys.stderr)
        sys.exit(error.exit_status)
    except UsageError as error:
        if problem := usage_problem(error):
            print(wrapped(redact(problem), sys.stderr), file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        print("stopped", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
