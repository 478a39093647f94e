"""Rows → the policy's prompts: rendered with its template, tokenised, limited in length."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from plaudit.data.conversations import Source, read_prompts
from plaudit.data.row_ids import name_sources
from plaudit.data.templates import RENDER_ERRORS, ChatTemplate
from plaudit.errors import DataError
from plaudit.types import Prompt


@dataclass(frozen=True)
class EncodedPrompt:
    prompt: Prompt
    tokens: np.ndarray


@dataclass
class PromptSet:
    prompts: list[EncodedPrompt] = field(default_factory=list)
    rows: int = 0
    too_long: int = 0
    """Rows longer than the limit: left out, or cut."""
    shortest_left_out: int | None = None
    """Length of the shortest row that was left out."""
    limit: str | None = None
    """The setting that limits the number of prompts, if it left some out."""

    def use_first(self, count: int | None, setting: str) -> None:
        """Keep the first `count` prompts, as `setting` says."""
        if count is not None and count < len(self.prompts):
            self.prompts, self.limit = self.prompts[:count], setting

    def summary(self, too_long: str, max_prompt_tokens: int) -> str:
        longest = max(len(p.tokens) for p in self.prompts)
        parts = [f"{len(self.prompts):,} of {self.rows:,} prompts, longest {longest:,} tokens"]
        if self.too_long:
            parts.append(f"{self.too_long:,} longer than {max_prompt_tokens:,} {'left out' if too_long == 'filter' else 'cut'}")
        if self.limit is not None:
            parts.append(f"the others left out by {self.limit}")
        return "; ".join(parts)


def load_prompts(
    sources: Sequence[Source],
    template: ChatTemplate,
    *,
    max_prompt_tokens: int,
    too_long: Literal["filter", "error", "cut_left"],
    others: Sequence[Source] = (),
    progress: Callable[[Iterable], Iterable] = iter,
) -> PromptSet:
    """Read, render and tokenise every row. `others`: files of the same recipe, whose rows have other ids."""
    result = PromptSet()
    named = list(zip(sources, name_sources(sources, others), strict=True))
    for prompt in progress(prompt for source, name in named for prompt in read_prompts(source, name)):
        result.rows += 1
        try:
            tokens = template.prompt_tokens(prompt.messages, prompt.tools)
        except RENDER_ERRORS as error:
            raise DataError(f"{prompt.id}: the chat template cannot render these messages: {error}") from None
        if len(tokens) > max_prompt_tokens:
            result.too_long += 1
            if too_long == "error":
                raise DataError(
                    f"{prompt.id}: {len(tokens):,} tokens, more than data.max_prompt_tokens = {max_prompt_tokens:,}. Raise it, or "
                    "set data.too_long to filter or cut_left."
                )
            if too_long == "filter":
                result.shortest_left_out = min(len(tokens), result.shortest_left_out or len(tokens))
                continue
            tokens = tokens[-max_prompt_tokens:]
        result.prompts.append(EncodedPrompt(prompt, np.asarray(tokens, dtype=np.int32)))
    if not result.prompts:
        names = ", ".join(str(source.path) for source in sources)
        raise DataError(
            f"{names}: all {result.rows:,} prompts are longer than data.max_prompt_tokens = {max_prompt_tokens:,}. Raise it: the "
            f"shortest has {result.shortest_left_out:,} tokens."
        )
    result.prompts = with_unique_ids(result.prompts)
    return result


def with_unique_ids(prompts: Iterable[EncodedPrompt]) -> list[EncodedPrompt]:
    """Make ids unique: a repeated prompt gets `#2`, `#3`, … and is sampled again.

    A prompt repeats if its file is listed twice, or if a step spans two epochs.
    """
    used: set[str] = set()
    result = []
    for encoded in prompts:
        id, occurrence = encoded.prompt.id, 1
        while id in used:
            occurrence += 1
            id = f"{encoded.prompt.id}#{occurrence}"
        used.add(id)
        result.append(encoded if occurrence == 1 else replace(encoded, prompt=replace(encoded.prompt, id=id)))
    return result
