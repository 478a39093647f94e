"""When a response is over, and what its text is."""

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from plaudit.errors import PlauditError
from plaudit.rollout.native.scheduler import Running


class Stopping:
    """End tokens, stop strings and limits for one call of the engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: frozenset[int], stop: tuple[str, ...]):
        special = {token: id for id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)}
        self.tokenizer, self.end_tokens = tokenizer, end_tokens | {special[s] for s in stop if s in special}
        self.stop = stop = tuple(s for s in stop if s not in special)  # the rest is looked for in text, which has no special tokens
        for s, token in ((s, token) for s in stop for token in special if token in s):
            raise PlauditError(f"stop: {s!r} contains the special token {token}; use that token alone, or text without it")
        # A stop string can only end in the newest token, and reaches no further back than a token per byte of it. (Some more,
        # because a tokenizer may trim the first token it decodes, and tokens may be empty.)
        self._reach = max((len(s.encode()) for s in stop), default=0) + 8

    def status(self, sequence: Running) -> Literal["finished", "truncated"] | None:
        """None while it goes on."""
        if sequence.tokens[-1] in self.end_tokens or (self.stop and self._found(self.decode(sequence.tokens[-self._reach :]))):
            return "finished"
        return "truncated" if len(sequence.tokens) >= sequence.limit else None

    def text(self, tokens: list[int]) -> str:
        """Of a whole response, cut behind its first stop string."""
        text = self.decode(tokens)
        ends = [text.index(s) + len(s) for s in self.stop if s in text]
        return text[: min(ends)] if ends else text

    def decode(self, tokens: list[int]) -> str:
        text: Any = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _found(self, text: str) -> bool:
        return any(s in text for s in self.stop)
