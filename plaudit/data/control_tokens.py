"""Control tokens that text only quotes.

A chat template writes control tokens (`<|im_end|>`) between messages. The same characters inside a message are text: a prompt or a
response that contains them must not end its turn or speak for another role. A tokenizer cannot tell the two apart once a template
has rendered them, so quoted ones are marked before:

    1. `quote` inserts a mark, a character that the row does not contain, into every control token of the row's strings;
    2. the template renders them. A control token without a mark is now one that the template wrote;
    3. `encode` removes the marks, and tokenises with a copy of the tokenizer in which each control token has another name: only
       those that the template wrote get that name. To the copy, all else is text, so it is merged as any other text is.

A row that quotes none is tokenised by the tokenizer itself. What is no token cannot be guarded: a template that writes its roles as
ordinary words (`[INST]` in several tokenizers) reads the same words in a message as its own.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plaudit.errors import RecipeError
from plaudit.response_files import CLOSE, OPEN
from plaudit.types import Message

if TYPE_CHECKING:  # recipes with judges import this file, and need neither
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SpecialTokens = Literal["text", "control"]
THOUGHTS = (OPEN, CLOSE)
"""An assistant writes these itself, whatever the tokenizer calls them."""
THOUGHT_TAGS = re.compile("|".join(THOUGHTS))
# Unicode noncharacters, reserved for internal use. Templates render \ufdd0 to \ufdd2 for purposes of their own.
MARKS = [chr(code) for code in range(0xFDD3, 0xFDF0)] + [chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)]
LOOKED_UP_BELOW = ("tool_calls", "function", "content")
"""Fields of a message whose values have keys that templates look up."""
Encoded = tuple[list[int], np.ndarray]
"""Tokens, and the first and last + 1 character of each."""


class ControlTokens:
    """The control tokens of a tokenizer: those it calls special, and any other of its added tokens that a template writes.

    `structure`: what the template writes around messages. `special_tokens`: whether they are text or control tokens in a message.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", structure: Iterable[str] = (), special_tokens: SpecialTokens = "text"):
        self.tokenizer, self.special_tokens = tokenizer, special_tokens
        added, written = list(tokenizer.added_tokens_decoder.values()), "\n".join(structure)
        self.names = sorted(
            token.content
            for token in added
            if token.content.strip() and (token.special or (token.content in written and _is_markup(token.content)))
        )
        self._quoted = _Quoted(self.names)
        self._quoted_by_assistant = _Quoted([name for name in self.names if name not in THOUGHTS])
        # Such a token is also recognised in text that only normalises to it, which the search for it does not find.
        self._always_guarded = special_tokens == "text" and any(
            token.normalized and token.content in self.names
            for token in added
            if tokenizer.backend_tokenizer.normalizer  # pyright: ignore
        )
        self._renamed = cache(self._make_renamed)

    def contained_in(self, messages: Sequence[Message], tools: Any = None) -> bool:
        """Whether a message or a tool contains a control token."""
        return any(quoted.whole.search(text) for text, quoted in self._strings(messages, tools))

    def quote(self, messages: Sequence[Message], tools: Any = None) -> tuple[list[Message], Any, str]:
        """Messages and tools with their control tokens marked, and the mark; it is empty if there is nothing to mark."""
        messages = list(messages)
        if not self._always_guarded and not self._has_to_mark(self._strings(messages, tools)):
            return messages, tools, ""
        mark = free_mark(strings_in([messages, tools]))
        marked = [_map_message(message, partial(self._of(message).insert, mark)) for message in messages]
        return marked, map_strings(tools, partial(self._quoted.insert, mark), "changed"), mark

    def quoting(self, strings: Sequence[str]) -> "Quoting | None":
        """How to mark the strings that a prompt without a chat template quotes; None if there is nothing to mark."""
        if not self._has_to_mark((text, self._quoted) for text in strings):
            return None
        return Quoting(free_mark(strings), self._quoted)

    def text_tokens(self, text: "str | Marked") -> list[int]:
        """A complete prompt that no chat template renders."""
        marked = Marked(text, "") if isinstance(text, str) else text
        return self.encode([marked.text], [marked.mark])[0][0]

    def _of(self, message: Message) -> "_Quoted":
        return self._quoted_by_assistant if message.get("role") == "assistant" else self._quoted

    def _strings(self, messages: Sequence[Message], tools: Any) -> Iterator[tuple[str, "_Quoted"]]:
        """The strings that `quote` may mark."""
        found: list[str] = []
        for message in messages:
            _map_message(message, found.append)
            yield from ((text, self._of(message)) for text in found)
            found.clear()
        map_strings(tools, found.append, "changed")
        yield from ((text, self._quoted) for text in found)

    def _has_to_mark(self, strings: Iterable[tuple[str, "_Quoted"]]) -> bool:
        if self.special_tokens == "control":
            return False
        concerned = [(text, quoted) for text, quoted in strings if quoted.concerns(text)]
        # Text that only begins with or ends in a part of a control token is no reason to refuse a row.
        return bool(concerned) and (any(quoted.whole.search(text) for text, quoted in concerned) or self._can_be_copied)

    @cached_property
    def _can_be_copied(self) -> bool:
        try:
            self._renamed(MARKS[0])
        except RecipeError:
            return False
        return True

    # Tokens

    def encode(self, texts: Sequence[str], marks: Sequence[str]) -> list[Encoded]:
        """Tokenise rendered texts, each with its mark. Characters are counted in the text as given, marks included."""
        plain = [i for i, mark in enumerate(marks) if not mark]
        result: dict[int, Encoded] = {}
        if plain:
            encoded: Any = self.tokenizer([texts[i] for i in plain], add_special_tokens=False, return_offsets_mapping=True)
            for i, ids, offsets in zip(plain, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                result[i] = ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        for i, (text, mark) in enumerate(zip(texts, marks, strict=True)):
            if mark:
                result[i] = self._encode_marked(text, mark)
        return [result[i] for i in range(len(texts))]

    def _encode_marked(self, text: str, mark: str) -> Encoded:
        copy, original, written = self._renamed(mark)
        pieces, places = [], []  # places: for each character, the characters of `text` that it stands for
        begin = 0
        for match in written.finditer(text):
            pieces.append(text[begin : match.start()])
            places += [(place, place + 1) for place in range(begin, match.start())]
            begin = match.end()
            if match[0] != mark:
                pieces.append(self._new_name(match[0], mark))
                places += [match.span()] * len(pieces[-1])
        pieces.append(text[begin:])
        places += [(place, place + 1) for place in range(begin, len(text))]
        encoded = copy.encode("".join(pieces), add_special_tokens=False)
        places = [*places, (len(text), len(text))]
        covered = [(places[a][0], places[max(a, b - 1)][1]) if b > a else (places[a][0],) * 2 for a, b in encoded.offsets]
        return [original.get(id, id) for id in encoded.ids], np.asarray(covered, dtype=np.int64).reshape(-1, 2)

    def _new_name(self, name: str, mark: str) -> str:
        return f"{mark}{self.names.index(name)}{mark}"

    def _make_renamed(self, mark: str) -> "tuple[Tokenizer, dict[int, int], re.Pattern[str]]":
        """A copy of the tokenizer that knows control tokens by their new names only, the ids that it numbers differently, and a
        pattern of what to rename: a control token that the template wrote, or a mark."""
        from tokenizers import Tokenizer

        backend: Any = self.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        try:
            content = json.loads(backend.to_str())
            names = {name: self._new_name(name, mark) for name in self.names}
            for token in content["added_tokens"]:
                token["content"] = names.get(token["content"], token["content"])
            _rename_in_model(content["model"], names)
            copy = Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # parts written in Python cannot be copied; Rust raises a bare Exception
            raise RecipeError(
                f"{self.tokenizer.name_or_path}: control tokens in messages cannot be read as text with this tokenizer ({error}); "
                "set special_tokens to control, or use another tokenizer"
            ) from None
        copy.no_truncation()
        copy.no_padding()
        added = {token.content: id for id, token in self.tokenizer.added_tokens_decoder.items()}
        ids = {copy.token_to_id(names.get(name, name)): id for name, id in added.items()}
        single = "|".join(re.escape(name) for name in self.names if len(name) == 1)
        written = f"{_trie([name for name in self.names if len(name) > 1])}|(?:{single or '(?!)'})(?!{mark})|{mark}"
        return copy, {there: here for there, here in ids.items() if there is not None and there != here}, re.compile(written)


@dataclass(frozen=True)
class Marked:
    """A prompt in which control tokens that are text are marked."""

    text: str
    mark: str

    @property
    def unmarked(self) -> str:
        return self.text.replace(self.mark, "")


@dataclass(frozen=True)
class Quoting:
    """Marks the control tokens of a string."""

    mark: str
    _quoted: "_Quoted"

    def __call__(self, text: str) -> str:
        return self._quoted.insert(self.mark, text)


def free_mark(texts: Iterable[str]) -> str:
    """A noncharacter that none of the texts contains."""
    used = set().union(*({c for c in MARKS if c in text} for text in texts))
    mark = next((mark for mark in MARKS if mark not in used), None)
    if mark is None:
        raise ValueError("it contains every Unicode noncharacter, which leaves none to mark its control tokens with")
    return mark


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings_in(key)
            yield from strings_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings_in(inner)


def map_strings(value: Any, change: Callable[[str], Any], keys: Literal["kept", "message", "changed"] = "kept") -> Any:
    """A nested value with every string changed.

    `keys`: templates look values up by them, so they are kept; but they may write them too, as they do with names of arguments.
    "message" changes those that no template looks up: all but its own, those of its tool calls and those of its parts.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if _is_changed(key, keys) else key: map_strings(
                inner, change, "changed" if keys == "message" and key not in LOOKED_UP_BELOW else keys
            )
            for key, inner in value.items()
        }
    return [map_strings(inner, change, keys) for inner in value] if isinstance(value, list | tuple) else value


def _is_changed(key: Any, keys: str) -> bool:
    return isinstance(key, str) and (keys == "changed" or (keys == "message" and not key.isidentifier()))


def _map_message(message: Message, change: Callable[[str], Any]) -> Message:
    """Its role is one of a few words, which templates compare."""
    changed = map_strings({name: value for name, value in message.items() if name != "role"}, change, "message")
    return {"role": message["role"], **changed} if "role" in message else changed


class _Quoted:
    """Finds control tokens in strings, and what could become one next to what a template writes.

    That is the beginning of one where a string ends (or thoughts do, for templates cut there), and a whole string within one, such
    as a key that a template writes between angle brackets.
    """

    def __init__(self, names: Sequence[str]):
        self._names, self._longest = names, max(map(len, names), default=0)
        self._first_letters = {name[0] for name in names}
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self.whole = re.compile(_trie(names))
        self._begins = re.compile(f"(?={_trie(names)})")  # looks ahead, because control tokens may overlap

        self._concerns_short = lru_cache(maxsize=1024)(self._concerns)

    def concerns(self, text: str) -> bool:
        return self._concerns_short(text) if len(text) < 16 else self._concerns(text)  # roles and keys come again and again

    def _concerns(self, text: str) -> bool:
        return bool(self.whole.search(text) or self._begun(text) or self._is_within_one(text))

    def insert(self, mark: str, text: str) -> str:
        """Put the mark after the first character of each."""
        places = {match.start() for match in self._begins.finditer(text)} | set(self._begun(text))
        if self._is_within_one(text):
            places.add(0)
        cuts = [0, *(place + 1 for place in sorted(places)), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(cuts))

    def _begun(self, text: str) -> list[int]:
        """Where a control token begins that the text, or its thoughts, do not end."""
        places = []
        for end in (*(tag.start() for tag in THOUGHT_TAGS.finditer(text)), len(text)):
            while end and text[end - 1].isspace():
                end -= 1
            places += [
                place
                for place in range(max(0, end - self._longest), end)
                if text[place] in self._first_letters and text[place:end] in self._beginnings
            ]
        return places

    def _is_within_one(self, text: str) -> bool:
        return 0 < len(text) < self._longest and not text.isalnum() and any(text in name for name in self._names)


def _trie(names: Sequence[str]) -> str:
    """A pattern for the longest of the names at a place. What they share is tried once; an alternative per name would be slow."""
    if not names:
        return "(?!)"
    branches = []
    for first in sorted({name[0] for name in names}):
        alike = [name for name in names if name[0] == first]
        shared = commonprefix(alike)  # noqa: RUF071 (characters, not folders)
        rest = [name[len(shared) :] for name in alike if name != shared]
        inner = f"(?:{_trie(rest)})" if rest else ""
        branches.append(re.escape(shared) + inner + ("?" if inner and shared in alike else ""))
    return "|".join(branches)


def _is_markup(token: str) -> bool:
    """Words, white space and punctuation may be added tokens too; they are no control tokens, though templates write them."""
    return token not in THOUGHTS and re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", token) is not None


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Control tokens that are in the model's own vocabulary too, where text might find them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not {"".join(_sides(merge)), *_sides(merge)} & names.keys()]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _sides(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
