"""Checks of the data: files, chat template, lengths, the model's context and the number of steps."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.templates import RENDER_ERRORS, ChatTemplate
from plaudit.doctor.findings import Excerpt, Finding, mark_spans
from plaudit.errors import DataError
from plaudit.models.folder import read_config, require_same_tokens
from plaudit.recipe import PreferenceRecipe, RewardModelRecipe, RLRecipe, SFTRecipe, TrainingRecipe
from plaudit.types import Conversation, Example, Message, Prompt

MAX_SHOWN_TOKENS = 3
MAX_COLUMNS = 40
"""Of a histogram."""
Row = tuple[list[Message], list[Any] | None]
"""Messages and tools."""


def check_files(sources: dict[str, list[Source]]) -> Iterator[Finding]:
    for part, files in sources.items():
        for source in files:
            rows = source.rows()
            yield "✓", f"{part}: {source.path} has {len(rows):,} rows with {', '.join(rows.columns)}"


def check_tokens(path: str, template: ChatTemplate, role: str, *, trust_remote_code: bool) -> Iterator[Finding]:
    """Check that a model which reads the policy's token ids has the same vocabulary."""
    if renamed := require_same_tokens(path, template.tokenizer, role, trust_remote_code=trust_remote_code):
        shown = ", ".join(renamed[:MAX_SHOWN_TOKENS]) + (", …" if len(renamed) > MAX_SHOWN_TOKENS else "")
        yield "!", f"{path}: {len(renamed):,} of the policy's token ids stand for different text in its own tokenizer: {shown}"


def check_template(template: ChatTemplate, recipe: TrainingRecipe) -> Iterator[Finding]:
    name = recipe.model.chat_template or "the tokenizer's own"
    end = template.end_token
    if isinstance(recipe, RewardModelRecipe):
        yield "✓", f"{name}"
    elif end is None:
        yield (
            "!",
            f"{name}: turns end without a special token, so the model will not learn to stop; set another model.chat_template",
        )
    else:
        yield "✓", f"{name}; turns end with {template.tokenizer.convert_ids_to_tokens(end)!r} (token {end})"


def check_lengths(recipe: SFTRecipe, part: str, examples: list[Example]) -> Iterator[Finding]:
    lengths = np.array([len(example) for example in examples])
    target_share = sum(example.num_targets for example in examples) / lengths.sum()
    yield "✓", f"{part}: {len(lengths):,} rows rendered: {spread(lengths)}; {target_share:.0%} of the tokens are targets"
    yield from check_too_long(part, lengths, "data.max_tokens", recipe.data.max_tokens, recipe.data.too_long)


def check_control_tokens(part: str, template: ChatTemplate, recipe: TrainingRecipe, rows: Sequence[Row]) -> Iterator[Finding]:
    """Count the rows whose messages contain control tokens. `rows`: the messages and tools of each."""
    found = sum(template.control_tokens.contained_in(messages, tools) for messages, tools in rows)
    if not found:
        return
    effects = {
        "text": "read as text (data.special_tokens: text)",
        "control": "read as control tokens (data.special_tokens: control), so a message can end its turn or speak for another role",
    }
    yield (
        "!",
        f"{part}: {found:,} of {len(rows):,} rows contain control tokens in their messages: {effects[recipe.data.special_tokens]}",
    )


def spread(lengths: np.ndarray) -> str:
    median, p95 = int(np.median(lengths)), int(np.quantile(lengths, 0.95))
    return f"median {median:,} tokens, 95th percentile {p95:,}, longest {lengths.max():,}"


def count_lengths(title: str, note: str, lengths: np.ndarray, limits: dict[str, int]) -> dict[str, Any]:
    """A histogram in columns of equal width. `limits` are marked; one that is far away does not make it narrow."""
    low, longest = min(int(lengths.min()), *limits.values()), int(lengths.max())
    high = max([longest, *(limit for limit in limits.values() if limit <= 2 * longest)])
    width = -(-(high + 1 - low) // MAX_COLUMNS)
    counts = np.bincount((lengths - low) // width, minlength=-(-(high + 1 - low) // width)).tolist()
    return {
        "title": title,
        "note": note,
        "low": low,
        "high": low + width * len(counts),
        "counts": counts,
        "limits": [{"name": name, "at": limit, "over": int((lengths > limit).sum())} for name, limit in limits.items()],
    }


def check_too_long(part: str, lengths: np.ndarray, setting: str, limit: int, action: str) -> Iterator[Finding]:
    over = int((lengths > limit).sum())
    if over:
        actions = {"filter": "filtered out", "error": "an error", "cut_left": "cut on the left", "cut_right": "cut on the right"}
        fails = action == "error" or (action == "filter" and over == len(lengths))
        share = f"{over:,} of {len(lengths):,} ({over / len(lengths):.1%})"
        yield "✗" if fails else "!", f"{part}: {share} are longer than {setting} = {limit:,}: {actions[action]}"


def check_row_limit(part: str, rows: int, max_rows: int) -> Iterator[Finding]:
    if rows == max_rows:
        yield "!", f"{part}: checked only the first {max_rows:,} rows; --rows 0 checks all of them"


def prompt_tokens(template: ChatTemplate, prompt: Prompt) -> list[int]:
    try:
        return template.prompt_tokens(prompt.messages, prompt.tools)
    except RENDER_ERRORS as error:
        raise DataError(f"{prompt.id}: the chat template cannot render these messages: {error}") from None


def check_prompts(template: ChatTemplate, samples: list[tuple[str, Conversation, Example]]) -> Iterator[Finding]:
    """Check that a prompt has the same tokens in training and in sampling."""
    different = 0
    for _, conversation, example in samples[:100]:
        last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        with suppress(*RENDER_ERRORS):  # some templates reject a conversation without a user turn, so it is never sampled
            prompt = template.prompt_tokens(conversation.messages[:last], conversation.tools) if last else []
            different += prompt != example.tokens[: len(prompt)].tolist()
    if different:
        yield "!", f"in {different} of {min(100, len(samples))} rows the prompt is tokenised differently in training and sampling"
    else:
        yield "✓", "prompts have the same tokens in training and sampling"


def row_order(recipe: TrainingRecipe, train: Sequence[Source]) -> RowOrder:
    """Of all rows: filtering may leave fewer."""
    if isinstance(recipe, SFTRecipe):
        per_step = recipe.train.rows_per_step
    elif isinstance(recipe, PreferenceRecipe):
        per_step = recipe.train.pairs_per_step
    else:
        per_step = recipe.train.prompts_per_step
    rows = sum(len(source.rows()) for source in train)
    return RowOrder(rows, per_step=per_step, epochs=recipe.run.epochs, seed=recipe.seed, last_batch=recipe.train.last_batch)


def check_steps(recipe: TrainingRecipe, order: RowOrder) -> Iterator[Finding]:
    setting, noun = "train.rows_per_step", "rows"
    if isinstance(recipe, PreferenceRecipe):
        setting, noun = "train.pairs_per_step", "pairs"
    elif isinstance(recipe, RLRecipe):
        updates = recipe.train.updates_per_step
        setting, noun = (
            "train.prompts_per_step",
            f"prompts × {recipe.rollout.n} samples, {updates} update{'s' * (updates > 1)} per step",
        )
    steps = order.steps(recipe.run.max_steps)
    dropped = f"; {text}" if (text := order.dropped()) else ""
    yield "✓", f"at most {steps:,} step{'s' * (steps != 1)} of {min(order.per_step, order.total_rows):,} {noun}{dropped}"
    if repeats := order.repeats(setting, "rows"):
        yield "!", repeats
    elif early := order.ends_early(recipe.run.max_steps):
        yield "!", early


def first_row(template: ChatTemplate, conversation: Conversation, train_on: Literal["all", "last"]) -> Excerpt:
    marked = mark_spans(*template.spans(conversation, "the first row", train_on))
    return Excerpt("The first row as the model sees it", marked, "target tokens")


def check_context(recipe: RLRecipe, longest_prompt: int) -> Iterator[Finding]:
    """Check that the longest prompt plus max_new_tokens fits into the model's context."""
    config: Any = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    context = getattr(config, "max_position_embeddings", None)
    needed = longest_prompt + max(recipe.rollout.max_new_tokens, recipe.validation.max_new_tokens or 0)
    limit = f"{context:,}" if context else "unlimited"
    text = f"the longest prompt plus max_new_tokens is {needed:,} tokens; the model's context is {limit}"
    yield ("✗" if context and needed > context else "✓"), text
