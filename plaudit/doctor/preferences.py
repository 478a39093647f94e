"""Checks of preference pairs: rendering, lengths, and length bias that a model could pick up instead of quality."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from plaudit.data.conversations import Source
from plaudit.data.pairs import Preference
from plaudit.data.templates import ChatTemplate
from plaudit.data.transcript import Transcript
from plaudit.doctor import rows
from plaudit.doctor.findings import Excerpt, Finding, mark_spans
from plaudit.models.classifier import is_classifier
from plaudit.models.folder import architecture, read_config
from plaudit.models.scalar import value_head_file
from plaudit.recipe import PreferenceRecipe, RewardModelRecipe
from plaudit.types import Example

MAX_LONGER_SHARE = 0.7
"""Share of pairs won by the longer (or the shorter) answer above which a model may learn length alone."""


def render_pairs(
    recipe: PreferenceRecipe, template: ChatTemplate, pairs: Sequence[tuple[str, Preference]]
) -> list[tuple[Example, Example]]:
    """Tokenise the pairs as training does."""
    both = [(where, side) for where, pair in pairs for side in (pair.chosen, pair.rejected)]
    if isinstance(recipe, RewardModelRecipe):
        examples = Transcript(template.tokenizer, template.text, recipe.data.special_tokens).examples(both)
    else:
        examples = template.examples(both, "all")
    return list(zip(examples[0::2], examples[1::2], strict=True))


def check_pairs(
    recipe: PreferenceRecipe, part: str, pairs: Sequence[tuple[str, Preference]], rendered: Sequence[tuple[Example, Example]]
) -> Iterator[Finding]:
    """`rendered`: the pairs whose two sides differ."""
    equal = len(pairs) - len(rendered)
    if equal:
        fails = recipe.data.equal == "error" or not rendered
        action = "an error" if recipe.data.equal == "error" else "filtered out"
        yield "✗" if fails else "!", f"{part}: {equal:,} pairs have identical chosen and rejected answers: {action} (data.equal)"
    if not rendered:
        return
    lengths = np.array([max(len(chosen), len(rejected)) for chosen, rejected in rendered])
    yield "✓", f"{part}: {len(rendered):,} pairs rendered: {rows.spread(lengths)} (the longer of each)"
    yield from rows.check_too_long(part, lengths, "data.max_tokens", recipe.data.max_tokens, recipe.data.too_long)
    longer = np.mean([np.sign(len(chosen) - len(rejected)) for chosen, rejected in rendered]) / 2 + 0.5
    text = f"{part}: the chosen answer is the longer one in {longer:.0%} of the pairs"
    if longer >= MAX_LONGER_SHARE or longer <= 1 - MAX_LONGER_SHARE:
        yield "!", f"{text}: the model may learn length instead of quality"
    else:
        yield "✓", text


def count_differences(part: str, differences: np.ndarray) -> dict[str, Any]:
    """`differences`: tokens of each chosen side minus those of its rejected one."""
    title = f"{part}: how many tokens longer the chosen side is than the rejected one"
    note = "If most of them are on one side of 0, the model may learn length instead of quality."
    return rows.count_lengths(title, note, differences, {"equally long": 0})


def check_margins(recipe: PreferenceRecipe, sources: Sequence[Source]) -> Iterator[Finding]:
    if isinstance(recipe, RewardModelRecipe) and recipe.data.margin_column is None:
        unused = [str(source.path) for source in sources if "margin" in source.rows().columns]
        if unused:
            yield "!", f"{', '.join(unused)}: the column `margin` is not used; set data.margin_column=margin to use it"


def check_head(recipe: RewardModelRecipe) -> Iterator[Finding]:
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    has_head = is_classifier(recipe.model.path, config) or value_head_file(recipe.model.path) is not None
    yield "✓", f"{architecture(config) or 'a model'}: {'keeps its own score head' if has_head else 'gets a new score head'}"


def first_pair(template: ChatTemplate, recipe: PreferenceRecipe, pair: Preference) -> Iterator[Excerpt]:
    for name, conversation in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        title = f"The first pair's {name} conversation as the"
        if isinstance(recipe, RewardModelRecipe):
            text = Transcript(template.tokenizer, template.text, recipe.data.special_tokens).render(conversation.messages)
            yield Excerpt(f"{title} reward model sees it; its last token is scored", Text(text))
        else:
            marked = mark_spans(*template.spans(conversation, "the first row"))
            yield Excerpt(f"{title} model sees it", marked, "the compared tokens")
