"""Rows and prompts: can they be read and rendered, how long are they, how many steps do they make."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import AutoConfig

from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.rows import read_rows
from plaudit.data.templates import RENDER_ERRORS, ChatTemplate
from plaudit.doctor.findings import Finding, print_text
from plaudit.errors import DataError
from plaudit.models.folder import require_same_tokens
from plaudit.recipe import PreferenceRecipe, RewardModelRecipe, RLRecipe, SFTRecipe, TrainingRecipe
from plaudit.types import Conversation, Example, Prompt

SHOWN_TOKENS = 3


def check_files(sources: dict[str, list[Source]]) -> Iterator[Finding]:
    for part, files in sources.items():
        for source in files:
            rows = read_rows(source.path)
            yield "✓", f"{part}: {source.path} has {len(rows):,} rows with {', '.join(rows.columns)}"


def check_tokens(path: str, template: ChatTemplate, role: str, *, trust_remote_code: bool) -> Iterator[Finding]:
    """Of a model that reads the policy's tokens by number."""
    if renamed := require_same_tokens(path, template.tokenizer, role, trust_remote_code=trust_remote_code):
        shown = ", ".join(renamed[:SHOWN_TOKENS]) + (", …" if len(renamed) > SHOWN_TOKENS else "")
        yield "!", f"{path}: {len(renamed):,} of the policy's tokens have another name in its own tokenizer: {shown}"


def check_template(template: ChatTemplate, recipe: TrainingRecipe) -> Iterator[Finding]:
    name = recipe.model.chat_template or "the tokenizer's own"
    end = template.end_token
    if isinstance(recipe, RewardModelRecipe):
        yield "✓", f"{name}"
    elif end is None:
        yield (
            "!",
            f"{name}: turns end without a special token, so the model will not learn to stop; model.chat_template chooses another",
        )
    else:
        yield "✓", f"{name}; turns end with {template.tokenizer.convert_ids_to_tokens(end)!r} (token {end})"


def check_lengths(recipe: SFTRecipe, part: str, examples: list[Example]) -> Iterator[Finding]:
    lengths = np.array([len(example) for example in examples])
    learnt = sum(example.num_targets for example in examples) / lengths.sum()
    yield "✓", f"{part}: {len(lengths):,} rendered: {spread(lengths)}; {learnt:.0%} of them learnt"
    yield from check_too_long(part, lengths, "data.max_tokens", recipe.data.max_tokens, recipe.data.too_long)


def spread(lengths: np.ndarray) -> str:
    middle, most = int(np.median(lengths)), int(np.quantile(lengths, 0.95))
    return f"{middle:,} tokens in the median, 95 % within {most:,}, longest {lengths.max():,}"


def check_too_long(part: str, lengths: np.ndarray, setting: str, limit: int, fate: str) -> Iterator[Finding]:
    over = int((lengths > limit).sum())
    if over:
        fates = {"filter": "left out", "error": "an error", "cut_left": "cut on the left", "cut_right": "cut on the right"}
        fails = fate == "error" or (fate == "filter" and over == len(lengths))
        share = f"{over:,} of them ({over / len(lengths):.1%})"
        yield "✗" if fails else "!", f"{part}: {share} are longer than {setting} = {limit:,}: {fates[fate]}"


def check_looked_at(part: str, rows: int, max_rows: int) -> Iterator[Finding]:
    if rows == max_rows:
        yield "!", f"{part}: only the first {max_rows:,} rows were looked at; --rows 0 looks at all of them"


def prompt_tokens(template: ChatTemplate, prompt: Prompt) -> list[int]:
    try:
        return template.prompt_tokens(prompt.messages, prompt.tools)
    except RENDER_ERRORS as error:
        raise DataError(f"{prompt.id}: the chat template cannot render these messages: {error}") from None


def check_prompts(template: ChatTemplate, samples: list[tuple[str, Conversation, Example]]) -> Iterator[Finding]:
    """What is trained must continue the very tokens that the policy is given when it is sampled."""
    apart = 0
    for _, conversation, example in samples[:100]:
        last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        with suppress(*RENDER_ERRORS):  # some templates take no conversation without a user's turn; then nobody samples one
            prompt = template.prompt_tokens(conversation.messages[:last], conversation.tools) if last else []
            apart += prompt != example.tokens[: len(prompt)].tolist()
    if apart:
        yield "!", f"in {apart} of {min(100, len(samples))} rows the prompt is tokenised differently in training than in sampling"
    else:
        yield "✓", "prompts are the same tokens in training and in sampling"


def check_steps(recipe: TrainingRecipe, sources: dict[str, list[Source]]) -> Iterator[Finding]:
    rows = sum(len(read_rows(source.path)) for source in sources["train"])
    if isinstance(recipe, SFTRecipe):
        setting, per_step, noun = "train.rows_per_step", recipe.train.rows_per_step, "rows"
    elif isinstance(recipe, PreferenceRecipe):
        setting, per_step, noun = "train.pairs_per_step", recipe.train.pairs_per_step, "pairs"
    else:
        setting, per_step = "train.prompts_per_step", recipe.train.prompts_per_step
        noun = f"prompts × {recipe.rollout.n} samples, {recipe.train.updates_per_step} updates each"
    order = RowOrder(rows, per_step=per_step, epochs=recipe.run.epochs, seed=recipe.seed)
    steps = min(order.num_steps, recipe.run.max_steps or order.num_steps)
    yield "✓", f"at most {steps:,} steps of {per_step:,} {noun}"
    if rows < per_step:
        yield "!", f"{setting} = {per_step:,} is more than all {rows:,} rows"


def show_row(console: Console, template: ChatTemplate, conversation: Conversation, train_on: Literal["all", "last"]) -> None:
    text, spans = template.spans(conversation, "the first row", train_on)
    shown = Text(text)
    for start, end in spans:
        shown.stylize("black on green", start, end)
    print_text(console, "The first row as the model sees it; what it learns to write is green", shown)


def check_context(recipe: RLRecipe, longest_prompt: int) -> Iterator[Finding]:
    """Whether the longest prompt and the longest answer fit into what the model can read."""
    config: Any = AutoConfig.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    context = getattr(config, "max_position_embeddings", None)
    needed = longest_prompt + max(recipe.rollout.max_new_tokens, recipe.validation.max_new_tokens or 0)
    takes = f"{context:,}" if context else "any number"
    text = f"the longest prompt and max_new_tokens are {needed:,} tokens; the model takes {takes}"
    yield ("✗" if context and needed > context else "✓"), text
