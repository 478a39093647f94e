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
from plaudit.errors import Interrupted, PlauditError, did_you_mean, redact
from plaudit.recipe import SFTData

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
    _require_model(loaded)
    return loaded, sources


def _require_model(loaded: LoadedRecipe) -> None:
    """A model setting that must be a folder here, and is not. (`org/name` may be on the hub; transformers will tell.)"""
    from plaudit.errors import nearest_path

    templates = [file.stem for file in (Path(__file__).parent / "data/named_templates").glob("*.jinja")]
    for setting, names in (("path", []), ("tokenizer", []), ("chat_template", templates)):
        given = getattr(loaded.recipe.model, setting)
        if given is None or given in names or Path(given).exists():
            continue
        looks_local = given.startswith((".", "/", "~")) or given.count("/") != 1 or Path(given).parent.is_dir()
        if looks_local:
            raise PlauditError(f"model.{setting}: {given} does not exist.{did_you_mean(given, names) or nearest_path(Path(given))}")
    model = Path(loaded.recipe.model.path)
    if model.exists() and not (model / "config.json").is_file():
        raise PlauditError(f"model.path: {model} is not a model in Hugging Face format: there is no config.json in it")


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
