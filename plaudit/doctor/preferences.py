"""Pairs of answers: can they be read and rendered, how long are they, and what a model could learn from them by mistake."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from plaudit.data.conversations import Source
from plaudit.data.pairs import Preference
from plaudit.data.rows import read_rows
from plaudit.data.templates import ChatTemplate
from plaudit.doctor import rows
from plaudit.doctor.findings import Finding, print_text
from plaudit.models.classifier import is_classifier
from plaudit.models.folder import architecture, read_config
from plaudit.models.scalar import Transcript, value_head_file
from plaudit.recipe import PreferenceRecipe, RewardModelRecipe
from plaudit.types import Example

LOPSIDED = 0.7
"""The share of pairs from which on a model may learn their lengths and nothing else."""


def render_pairs(
    recipe: PreferenceRecipe, template: ChatTemplate, pairs: Sequence[tuple[str, Preference]]
) -> list[tuple[Example, Example]]:
    """As training will have them."""
    both = [(where, side) for where, pair in pairs for side in (pair.chosen, pair.rejected)]
    if isinstance(recipe, RewardModelRecipe):
        examples = Transcript(template.tokenizer, template.text).examples(both)
    else:
        examples = template.examples(both, "all")
    return list(zip(examples[0::2], examples[1::2], strict=True))


def check_pairs(
    recipe: PreferenceRecipe, part: str, pairs: Sequence[tuple[str, Preference]], rendered: Sequence[tuple[Example, Example]]
) -> Iterator[Finding]:
    """`rendered`: those of the pairs that differ."""
    equal = len(pairs) - len(rendered)
    if equal:
        fails = recipe.data.equal == "error" or not rendered
        fate = "an error" if recipe.data.equal == "error" else "left out"
        yield "✗" if fails else "!", f"{part}: {equal:,} of them have the same chosen and rejected: {fate} (data.equal)"
    if not rendered:
        return
    lengths = np.array([max(len(chosen), len(rejected)) for chosen, rejected in rendered])
    yield "✓", f"{part}: {len(rendered):,} pairs rendered: {rows.spread(lengths)} (the longer of each)"
    yield from rows.check_too_long(part, lengths, "data.max_tokens", recipe.data.max_tokens, recipe.data.too_long)
    longer = np.mean([np.sign(len(chosen) - len(rejected)) for chosen, rejected in rendered]) / 2 + 0.5
    text = f"{part}: the chosen answer is the longer one in {longer:.0%} of the pairs"
    if longer >= LOPSIDED or longer <= 1 - LOPSIDED:
        yield "!", f"{text}: length alone would tell them apart, and may be all that is learnt"
    else:
        yield "✓", text


def check_margins(recipe: PreferenceRecipe, sources: Sequence[Source]) -> Iterator[Finding]:
    if isinstance(recipe, RewardModelRecipe) and recipe.data.margin_column is None:
        unused = [str(source.path) for source in sources if "margin" in read_rows(source.path).columns]
        if unused:
            yield "!", f"{', '.join(unused)}: has a column `margin`, which is not used; data.margin_column=margin uses it"


def check_head(recipe: RewardModelRecipe) -> Iterator[Finding]:
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    goes_on = is_classifier(recipe.model.path, config) or value_head_file(recipe.model.path) is not None
    yield "✓", f"{architecture(config) or 'a model'}: {'goes on with its own head' if goes_on else 'gets a new head for scores'}"


def show_pair(console: Console, template: ChatTemplate, recipe: PreferenceRecipe, pair: Preference) -> None:
    for name, conversation in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if isinstance(recipe, RewardModelRecipe):
            shown = Text(Transcript(template.tokenizer, template.text).render(conversation.messages))
            title = f"The first pair's {name} conversation as the reward model sees it; its last token is scored"
        else:
            text, spans = template.spans(conversation, "the first row")
            shown = Text(text)
            for start, end in spans:
                shown.stylize("black on green", start, end)
            title = f"The first pair's {name} conversation as the model sees it; what is compared is green"
        print_text(console, title, shown)
