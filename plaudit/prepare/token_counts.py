"""Lengths in tokens, as the model that is to be trained will see them."""

from collections.abc import Callable

from plaudit.data.templates import RENDER_ERRORS, load_template, load_tokenizer
from plaudit.errors import DataError
from plaudit.types import Message


class TokenCounter:
    """Counts with a model's tokenizer and chat template. `where`: the row, for messages."""

    def __init__(self, tokenizer: str, chat_template: str | None = None):
        self._template = load_template(load_tokenizer(tokenizer), chat_template)

    def prompt(self, messages: list[Message], where: str) -> int:
        """Tokens of a prompt, with what begins the answer."""
        return self._count(self._template.prompt_tokens, messages, where)

    def conversation(self, messages: list[Message], where: str) -> int:
        """Tokens of a complete conversation."""
        return self._count(self._template.conversation_tokens, messages, where)

    def _count(self, encode: Callable[[list[Message]], list[int]], messages: list[Message], where: str) -> int:
        try:
            return len(encode(messages))
        except RENDER_ERRORS as error:
            raise DataError(f"{where}: the chat template cannot render these messages: {error}") from None
