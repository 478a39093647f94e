"""Arguments and options that several commands share: a recipe's rewards, rows to score with them, a model to sample from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from plaudit.errors import PlauditError

RecipeFile = Annotated[Path, typer.Argument(metavar="R.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="section.name=value", help="Settings that replace the recipe's own, such as optim.lr=1e-5.", show_default=False
    ),
]
RewardRecipe = Annotated[
    Path, typer.Argument(metavar="R.yaml", help="A recipe with `rewards:`, or an RL recipe.", show_default=False)
]
Rollouts = Annotated[
    list[str],
    typer.Argument(
        metavar="ROLLOUTS",
        help="Saved responses: files (.jsonl, .parquet, .json); for `score` also data sets on the hub, "
        "for `audit` a run folder, or a folder of verl or TRL dumps. "
        "Settings such as rewards.0.weight=2 override the recipe's.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A model whose tokenizer counts the tokens of responses that come without a count.")
]
DataSource = Annotated[str, typer.Option(help="data_source of rows without one, as in verl and TRL dumps.")]

ModelName = Annotated[str, typer.Argument(help="A model folder, or a model's name on the hub.", show_default=False)]
ModelTokenizer = Annotated[str | None, typer.Option(help="Another model whose tokenizer to use.")]
ChatTemplateName = Annotated[str | None, typer.Option(help="chatml, llama3, qwen, plain, a .jinja file, or a model.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU, else float32.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest response, thoughts included.")]
MaxPromptTokens = Annotated[int, typer.Option(min=1, help="Longest prompt; of a chat, all of it.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=1e-6, max=1.0, help="Sample from the most likely tokens that add up to this probability.")]


def _refuse_empty_string(stop: list[str] | None) -> list[str] | None:
    if stop and "" in stop:
        raise typer.BadParameter("an empty string would end every response at once.")
    return stop


StopStrings = Annotated[
    list[str] | None,
    typer.Option(
        callback=_refuse_empty_string,
        help="A string that ends a response; may be given again. Default: the lines of the model's stop.txt, if it has one.",
    ),
]
SamplingSeed = Annotated[int, typer.Option(min=0, help="Sampling seed.")]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        help="A server that has the model, such as http://127.0.0.1:8000; MODEL may then be a folder with its tokenizer alone."
    ),
]
ServedName = Annotated[str | None, typer.Option(help="With --url: the model's name there, if the server has several.")]
ServerCredential = Annotated[
    str | None, typer.Option(help="With --url: the NAME of the environment variable that holds the server's key.")
]
ServerDialect = Annotated[Literal["vllm", "sglang"], typer.Option(help="With --url: the server's API.")]


def _set_quiet(quiet: bool) -> bool:
    from plaudit.report.progress import set_quiet

    set_quiet(quiet)
    return quiet


# It takes effect as it is read; the verbs have nothing to do with it.
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, notes or warnings: only errors and the result.", callback=_set_quiet)
]
SpecialTokens = Annotated[
    Literal["text", "control"], typer.Option(help="What control tokens (<|im_end|>) inside messages are read as.")
]


def parse_object_option(text: str | None, option: str) -> dict[str, Any]:
    """An option whose value is a JSON object."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is not valid JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f'it should be an object such as {{"level": 3}}, not {text!r:.80}', param_hint=option)
    return value


def split_overrides(arguments: Sequence[str], verb: str, usage: str = "R.yaml ROLLOUTS") -> tuple[list[str], list[str]]:
    """Names of files, and settings that override others. `usage`: what the verb is followed by."""
    unknown = next((one for one in arguments if one.startswith("-") and "." not in one), None)
    if unknown is not None:
        raise PlauditError(f"plaudit {verb} has no option {unknown}. Usage: plaudit {verb} {usage} (see {verb} --help)")
    overrides = [one for one in arguments if one.startswith("-") or ("=" in one and not Path(one).exists())]
    names = [one for one in arguments if one not in overrides]
    if not names:
        needed = "prompts" if usage == "PROMPTS" else "saved responses"
        raise PlauditError(f"{verb} needs {needed}: plaudit {verb} {usage}")
    return names, overrides
