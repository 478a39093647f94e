"""`plaudit prepare …` for thinking models: the verbs that make their data and their zero models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.config import check_section
from plaudit.options import ChatTemplateName, ModelTokenizer, split_overrides
from plaudit.prepare.row_files import require_row_file

RowFile = Annotated[Path, typer.Option(help="The file to write: NAME.jsonl or NAME.parquet.", show_default=False)]


def prepare_thoughts(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPTS",
            help="Files of prompts or conversations (.parquet, .jsonl, .json), or data sets on the hub; of a conversation, what "
            "precedes its last answer. Further settings follow as name=value: limits.max_concurrent_calls=50, "
            "sampling.temperature=0.7, model.prompt_price=0.4.",
            show_default=False,
        ),
    ],
    out: RowFile,
    url: Annotated[
        str | None, typer.Option(help="The model's OpenAI-compatible server, such as http://127.0.0.1:8000 (model.url).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name there, if the server has several (model.path).")] = None,
    credential: Annotated[
        str | None, typer.Option(help="NAME of the environment variable that holds the server's key (model.credential).")
    ] = None,
    without_thoughts: Annotated[
        bool, typer.Option("--without-thoughts", help="Answers alone: the prompts are sent as they are.")
    ] = False,
    tries: Annotated[int, typer.Option(min=1, help="Answers requested for a prompt until one has the right form.")] = 2,
    english: Annotated[bool, typer.Option("--english", help="Leave out prompts that are not in English.")] = False,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first n prompts only.")] = None,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit with status 0 although calls for some prompts failed.")
    ] = False,
) -> None:
    """Have a strong model write thoughts and answers for prompts. Run the same command again to resume.

    Rows: `id`, `messages`, `thought`, `response`, `source`, in the order of the prompts. Every answer is kept in OUT.answers.jsonl
    as it arrives: after a kill, no call is repeated. The exit status is 1 while calls for some prompts failed. Prompts that the
    server rejects though it answers others are left out, and counted.
    """
    from plaudit.data.conversations import resolve_sources
    from plaudit.recipe.thoughts import ThoughtsSettings

    require_row_file(out, new=False)
    names, overrides = split_overrides(prompts, "prepare thoughts", "PROMPTS")
    given = {"url": url, "path": model, "credential": credential}
    served = {"placement": "server", "dialect": "openai"}
    values = {"model": served | {name: value for name, value in given.items() if value is not None}}
    settings = check_section(ThoughtsSettings, values, "plaudit prepare thoughts", overrides)
    sources = resolve_sources(names, None, "PROMPTS")

    from plaudit.prepare.thoughts import ThoughtsJob, write_thoughts
    from plaudit.report.progress import print_line

    job = ThoughtsJob(settings, sources, out, not without_thoughts, tries, english, max_prompts, allow_failures)
    summary = write_thoughts(job)
    print(f"{out}: {summary}")
    if summary.unanswered and not allow_failures:
        print_line("Run the same command to call for the others again, or pass --allow-failures to accept this", "yellow")
        raise typer.Exit(1)


def prepare_thoughts_sft(
    rows: Annotated[
        list[str],
        typer.Argument(
            help="Output of `prepare thoughts`: `messages` or `prompt`, `thought`, `response`, `id`.", show_default=False
        ),
    ],
    out: RowFile,
    without_thoughts: Annotated[
        bool, typer.Option("--without-thoughts", help="The response alone, from the same rows or from rows without thoughts.")
    ] = False,
) -> None:
    """Thoughts and responses → conversations for `plaudit sft`.

    Leaves out rows with an id that an earlier row has, and rows whose thought or response contains `<think>`, `</think>`,
    `<response>` or `</response>`.
    """
    from plaudit.data.conversations import resolve_sources

    require_row_file(out)
    sources = resolve_sources(rows, None, "ROWS")

    from plaudit.prepare.thoughts_sft import make_thoughts_sft

    print(f"{out}: {make_thoughts_sft(sources, out, thoughts=not without_thoughts)}")


def prepare_zero_model(
    base: Annotated[str, typer.Argument(help="A base model: its folder, or its name on the hub.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.", show_default=False)],
    without_thoughts: Annotated[
        bool, typer.Option("--without-thoughts", help="The template asks for a reply in `<response>` tags, without thoughts.")
    ] = False,
    eos: Annotated[
        str | None, typer.Option(help="The token that ends a turn. Default: <|eot_id|> or <|im_end|>, whichever its tokenizer has.")
    ] = None,
    tokenizer: ModelTokenizer = None,
) -> None:
    """Make a base model trainable by RL without SFT: a chat template asks it in plain text for thoughts and a reply.

    Copies the weights, and writes the tokenizer with template and end token, `stop.txt` (a response ends at `</response>`) and
    `longcot_config.json` (rewards see the reply; a response begins with `<think>`).
    """
    from plaudit.output_folder import require_empty

    require_empty(out)

    from plaudit.prepare.zero_model import make_zero_model

    made = make_zero_model(base, out, thinking=not without_thoughts, eos=eos, tokenizer=tokenizer)
    print(f"{out}: {base} with end token {made['eos']}; the template's shortest prompt has {made['prompt_tokens']:,} tokens")


def prepare_conversations(
    conversations: Annotated[
        list[str],
        typer.Argument(
            help="Files (.parquet, .jsonl, .json) or data sets on the hub with `messages`, `conversations` or WildChat's "
            "`conversation`, or with `prompt` or `instruction`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write train and val to.", show_default=False)],
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="Keep the conversation up to its last user message, not only to its first.")
    ] = False,
    english: Annotated[
        bool,
        typer.Option("--english", help="Leave out other languages, by the row's `language` or else by the words of the prompt."),
    ] = False,
    min_characters: Annotated[int, typer.Option(min=1, help="Leave out shorter prompts.")] = 1,
    max_characters: Annotated[int | None, typer.Option(min=1, help="Leave out longer prompts.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out longer prompts, in tokens; needs --tokenizer.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model that is to be trained: its tokenizer and chat template count --max-tokens.")
    ] = None,
    chat_template: ChatTemplateName = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep prompts that an earlier row has too (case and white space aside).")
    ] = False,
    data_source: Annotated[
        str | None, typer.Option(help="data_source of the rows, for `when` and for metrics. Default: the file's name.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Keep this many, chosen at random.")] = None,
    val: Annotated[int | None, typer.Option(min=0, help="Prompts for validation. Default: 3 % of them.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shuffle, and with it of the split.")] = 0,
    format: Annotated[Literal["parquet", "jsonl"], typer.Option(help="Of the files to write.")] = "parquet",
) -> None:
    """Conversations with users (WildChat) → prompts for `plaudit rl` with a reward model, and for `prepare thoughts`."""
    from plaudit.data.conversations import resolve_sources
    from plaudit.output_folder import require_empty

    if (max_tokens is None) != (tokenizer is None):
        raise typer.BadParameter("--max-tokens and --tokenizer belong together.", param_hint="--max-tokens")
    sources = resolve_sources(conversations, None, "CONVERSATIONS")
    require_empty(out)

    from plaudit.prepare.conversations import PromptRules, make_prompts
    from plaudit.prepare.token_counts import TokenCounter

    counter = None if tokenizer is None else TokenCounter(tokenizer, chat_template)
    rules = PromptRules(all_turns, english, min_characters, max_characters, max_tokens, counter, keep_duplicates)
    summary = make_prompts(
        sources, out, rules=rules, data_source=data_source, max_prompts=max_prompts, val=val, seed=seed, format=format
    )
    print(f"{out}: {summary}")


THINKING_VERBS = {
    "conversations": prepare_conversations,
    "thoughts": prepare_thoughts,
    "thoughts-sft": prepare_thoughts_sft,
    "zero-model": prepare_zero_model,
}
"""By name."""
