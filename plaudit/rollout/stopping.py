"""When a response ends, and its text."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit.errors import PlauditError


def end_tokens_of(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a response."""
    ends = model.generation_config.eos_token_id  # pyright: ignore
    return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])


class Stopping:
    """End tokens and stop strings for one call of the engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, end_tokens: frozenset[int], stop: tuple[str, ...]):
        self.tokenizer, self.end_tokens, self.stop = tokenizer, end_tokens, stop
        if tokenizer is None:
            if stop:
                raise PlauditError("stop: stop strings need a tokenizer, and the engine was built without one")
            return
        special = {token: id for id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)}
        self.end_tokens = end_tokens | {special[s] for s in stop if s in special}
        self.stop = stop = tuple(s for s in stop if s not in special)  # searched for in the text, which has no special tokens
        for s, token in ((s, token) for s in stop for token in special if token in s):
            raise PlauditError(f"stop: {s!r} contains the special token {token}; use that token alone, or text without it")
        # A stop string can only end in the newest token, and spans at most one token per byte. (Plus some, because a tokenizer may
        # trim the first token it decodes, and tokens may be empty.)
        self._reach = max((len(s.encode()) for s in stop), default=0) + 8
        self._may_complete: dict[int, bool] = {}

    def end_of(self, tokens: list[int]) -> int | None:
        """The index of the token that ends a response: an end token, or the one that completes a stop string."""
        for i, token in enumerate(tokens):
            if token in self.end_tokens or (self.stop and self.stops(tokens[max(0, i + 1 - self._reach) : i + 1])):
                return i
        return None

    def stops(self, tokens: list[int]) -> bool:
        """Whether the newest token completes a stop string."""
        if not self.stop:
            return False
        newest = tokens[-1]
        if newest not in self._may_complete:
            self._may_complete[newest] = self._may_end_stop_string(newest)
        # Decoding takes far longer than this lookup, and few tokens can complete a stop string.
        return self._may_complete[newest] and self._contains_stop(self.decode(tokens[-self._reach :]))

    def text(self, tokens: list[int]) -> str:
        """The text of a response, cut after its first stop string."""
        if self.tokenizer is None:
            return ""
        text = self.decode(tokens)
        ends = [text.index(s) + len(s) for s in self.stop if s in text]
        return text[: min(ends)] if ends else text

    def decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None
        text: Any = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _may_end_stop_string(self, token: int) -> bool:
        """False if the token contains no stop string's last character. Certain for visible ASCII only: spaces may be trimmed and
        characters split between tokens, so all other tokens count as True."""
        assert self.tokenizer is not None
        name: Any = self.tokenizer.convert_ids_to_tokens(token)
        plain = isinstance(name, str) and name.isascii() and name.isprintable() and " " not in name and not name.startswith("<")
        return not plain or any(s[-1] in name for s in self.stop)

    def _contains_stop(self, text: str) -> bool:
        return any(s in text for s in self.stop)
