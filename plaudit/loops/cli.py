"""`plaudit sample`: the verb."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plaudit.config import check_section
from plaudit.heavy_imports import heavy_imports
from plaudit.inputs import require_causal_model, require_model
from plaudit.options import (
    ChatTemplateName,
    Device,
    Dtype,
    MaxNewTokens,
    MaxPromptTokens,
    ModelName,
    ModelTokenizer,
    Quiet,
    SamplingSeed,
    ServedName,
    ServerCredential,
    ServerDialect,
    ServerUrl,
    SpecialTokens,
    StopStrings,
    Temperature,
    TopP,
)
from plaudit.recipe import ModelSettings
from plaudit.recipe.reward_models import RewardModel
from plaudit.response_files import LONGCOT, read_longcot_config, response_file, stop_strings

if TYPE_CHECKING:
    from plaudit.data.conversations import Source
    from plaudit.loops.sample import SampleJob
    from plaudit.rollout.engine import Sampling


def sample(
    model: ModelName,
    prompts: Annotated[
        list[str], typer.Argument(help="Prompts: files (.parquet, .jsonl, .json), or data sets on the hub.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The JSONL file to write or resume, one line per prompt.", show_default=False)],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses per prompt.")] = 1,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.")] = None,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=0.999, help="Drop tokens below this fraction of the best one's probability.")
    ] = 0.0,
    stop: StopStrings = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="What every response begins with. Default: start_think_marker of the model's longcot_config.json."),
    ] = None,
    seed: SamplingSeed = 0,
    max_prompt_tokens: MaxPromptTokens = 4096,
    too_long: Annotated[Literal["filter", "error", "cut_left"], typer.Option(help="What to do with longer prompts.")] = "filter",
    special_tokens: SpecialTokens = "text",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first n prompts only.")] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Sequences sampled concurrently. Default: 256 on a CPU, 1024 on a GPU or a server.")
    ] = None,
    url: ServerUrl = None,
    served_name: ServedName = None,
    credential: ServerCredential = None,
    dialect: ServerDialect = "vllm",
    tokenizer: ModelTokenizer = None,
    chat_template: ChatTemplateName = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Sample responses to prompts from any model. Run the same command again to resume.

    If the model's folder has a longcot_config.json, each response is an object: its `thought`, its `answer` (null if a delimiter
    is missing) and its `text`.
    """
    from plaudit.data.conversations import resolve_sources

    if out.suffix != ".jsonl":
        raise typer.BadParameter(f"{out} should end with .jsonl: it has a line of JSON per prompt.", param_hint="--out")
    server = read_server("sample", url, served_name, credential, dialect)
    if server is not None and (top_k is not None or min_p):
        raise typer.BadParameter("a server samples without them: leave them out.", param_hint="--top-k, --min-p")
    settings = ModelSettings(path=model, tokenizer=tokenizer, chat_template=chat_template, dtype=dtype)
    sources = resolve_sources(prompts, None, "PROMPTS")
    require_sampled_model(settings, "sample", served=server is not None)

    with heavy_imports():
        from plaudit.loops.sample import sample as run_sample
        from plaudit.rollout.engine import Sampling

    job = build_job(
        settings, sources, out, n, Sampling(max_new_tokens, temperature, top_p, top_k, min_p, seed=seed), stop, prefill,
        max_prompt_tokens=max_prompt_tokens, too_long=too_long, max_prompts=max_prompts, max_sequences=max_sequences,
        device=device, special_tokens=special_tokens, server=server,
    )  # fmt: skip
    print(f"{out}: {len(run_sample(job)):,} prompts with {n} responses each")


def require_sampled_model(settings: ModelSettings, verb: str, *, served: bool) -> None:
    require_model(settings, "", served=served)
    require_causal_model(settings.path, "MODEL", f"`plaudit {verb}` needs a model that generates text")


def build_job(
    settings: ModelSettings,
    sources: "Sequence[Source]",
    out: Path,
    n: int,
    sampling: "Sampling",
    stop: Sequence[str] | None,
    prefill: str | None = None,
    **options: Any,
) -> "SampleJob":
    """Without `stop` and `prefill`, the files in the model's folder say where responses end and begin."""
    from plaudit.loops.sample import SampleJob

    file = response_file(settings.path, LONGCOT)
    longcot = read_longcot_config(file) if file.is_file() else None
    sampling = replace(sampling, stop=stop_strings(settings.path, tuple(stop) if stop else None))
    prefill = (longcot and longcot.marker) or "" if prefill is None else prefill
    return SampleJob(settings, sources, out, n, sampling, longcot=longcot, prefill=prefill, **options)


def read_server(verb: str, url: str | None, name: str | None, credential: str | None, dialect: str) -> RewardModel | None:
    if url is None:
        if name is not None or credential is not None:
            raise typer.BadParameter("it belongs to --url.", param_hint="--served-name, --credential")
        return None
    given = {"placement": "server", "url": url, "path": name, "credential": credential, "dialect": dialect}
    return check_section(RewardModel, given, f"plaudit {verb}")
