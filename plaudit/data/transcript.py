"""Conversations as scalar models read them: those to score, and those to train on."""

import re
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from plaudit.data.control_tokens import ControlTokens, SpecialTokens
from plaudit.data.rendering import render_chat
from plaudit.data.templates import RENDER_ERRORS
from plaudit.errors import DataError, RecipeError
from plaudit.types import Conversation, Example, Message


class Transcript:
    """Conversations as the reward model sees them: with its own tokenizer and template, and no generation prompt.

    The rendered text is tokenised in one piece, as transformers does and as published models were trained. The tokenizer adds no
    special tokens: templates write their own BOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, special_tokens: SpecialTokens = "text"):
        """`special_tokens`: what control tokens in messages are."""
        self.tokenizer, self.template = tokenizer, template
        probe: list[Message] = [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong."}]
        try:
            shown = self.render(probe)
        except RENDER_ERRORS as error:
            raise RecipeError(
                f"{tokenizer.name_or_path}: the chat template cannot render a user and an assistant message: {error}"
            ) from None
        self.control_tokens = ControlTokens(tokenizer, re.split("Ping[?]|Pong[.]", shown), special_tokens)
        if "Ping?" not in shown or "Pong." not in shown:
            raise RecipeError(
                f"{tokenizer.name_or_path}: the chat template does not show what the user and the assistant say; choose another "
                "with model.chat_template"
            )

    def render(self, messages: Sequence[Message]) -> str:
        return render_chat(self.tokenizer, self.template, messages)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        marked, _, mark = self.control_tokens.quote(messages)
        return self.control_tokens.encode([self.render(marked)], [mark])[0][0]

    def examples(self, conversations: Sequence[tuple[str, Conversation]]) -> list[Example]:
        """`tokens` for many conversations, each with its location for error messages: sequences to score, without target tokens."""
        texts, marks = [], []
        for where, conversation in conversations:
            if conversation.tools:
                raise DataError(f"{where}: has tools, which reward models are not shown; leave that column out")
            try:
                messages, _, mark = self.control_tokens.quote(conversation.messages)
                texts.append(self.render(messages))
                marks.append(mark)
            except RENDER_ERRORS as error:
                raise DataError(f"{where}: the chat template cannot render these messages: {error}") from None
        encoded = self.control_tokens.encode(texts, marks)
        return [Example(np.asarray(tokens, dtype=np.int32), np.zeros(len(tokens), dtype=bool)) for tokens, _ in encoded]
