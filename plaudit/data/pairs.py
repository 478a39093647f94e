"""Preference rows → pairs of conversations → pairs of tokenised sequences.

Schemas: `chosen` and `rejected` as full conversations (messages), or as answers (text, a message, or messages that begin with
the assistant's) to `prompt` (text or messages); and LLaMA-Factory's `ranking` data sets, sharegpt or alpaca.

Only what follows the messages that both share is compared; earlier assistant turns are part of the prompt.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from plaudit.data.columns import PROMPTS, first_value
from plaudit.data.conversations import (
    Schema,
    Source,
    alpaca_prompt,
    check_answers,
    check_text,
    describe_type,
    parse_json_messages,
    parse_messages,
    parse_prompt_messages,
    parse_tools,
    sharegpt_message,
    sharegpt_messages,
    without_nulls,
)
from plaudit.data.examples import TooLong, chunks, cut
from plaudit.data.rows import Rows
from plaudit.data.token_cache import TokenCache, build_in_memory
from plaudit.data.token_store import StoredPairs, TokenWriter
from plaudit.data.tokenise_workers import Tokenise, Workers
from plaudit.errors import DataError
from plaudit.types import Conversation, Message, Pair

HINT = (
    "Preference rows have `chosen` and `rejected`: full conversations, or answers to `prompt`. Map other names in the file that "
    'data.dataset_info points to: {"mine": {"file_name": "pairs.jsonl", "ranking": true, "columns": {"prompt": "question", '
    '"chosen": "better", "rejected": "worse"}}}, with data.train: mine.'
)
PAIRS_PER_CHUNK = 128
"""Pairs that are rendered and tokenised together."""


@dataclass(frozen=True)
class Preference:
    """A row: two conversations; the chosen one is preferred."""

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0

    @property
    def equal(self) -> bool:
        return self.chosen.messages == self.rejected.messages


# Reading -------------------------------------------------------------------------------------------------------------


def read_pairs(source: Source, margin_column: str | None = None) -> Iterator[tuple[str, Preference]]:
    """Each row as two conversations, with its location (file and row) for error messages. The two may be equal."""
    rows = source.rows()
    _require_columns(rows, source.schema, margin_column)
    for where, row in rows.located():
        row = without_nulls(row) if rows.nulls_mean_absent else row
        margin = 0.0 if margin_column is None else _margin(row.get(margin_column), margin_column, where)
        yield where, parse_preference(row, where, source.schema, margin)


def parse_preference(row: Mapping[str, Any], where: str, schema: Schema | None = None, margin: float = 0.0) -> Preference:
    """A row's two conversations. They may be equal."""
    schema = schema or Schema()
    _require_both(row, schema, where)
    chosen, rejected = (_conversation(row, side, schema, where) for side in ("chosen", "rejected"))
    check_text([chosen.messages, rejected.messages, chosen.tools], where)
    preference = Preference(chosen, rejected, margin)
    return preference if preference.equal else _skip_shared_messages(preference, where)


def _require_columns(rows: Rows, schema: Schema, margin_column: str | None) -> None:
    prompt = {"sharegpt": "messages", "alpaca": "prompt"}.get(schema.formatting)
    if prompt:
        rows.require(*map(schema.column, (prompt, "chosen", "rejected")), hint="data.dataset_info sets this name.")
    if margin_column is not None:
        rows.require(margin_column, hint="data.margin_column sets this name.")


def _require_both(row: Mapping[str, Any], schema: Schema, where: str) -> None:
    """Rows of one file may have different columns."""
    for column in map(schema.column, ("chosen", "rejected")):
        if row.get(column) is None:
            found = ", ".join(name for name, value in row.items() if value is not None) or "nothing"
            raise DataError(f"{where}: column {column!r} is {'null' if column in row else 'missing'} (found: {found}). {HINT}")


def _margin(value: Any, column: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        found = value if isinstance(value, float) else describe_type(value)
        raise DataError(f"{where}: {column} should be a number, not {found}")
    return float(value)


def _conversation(row: Mapping[str, Any], side: Literal["chosen", "rejected"], schema: Schema, where: str) -> Conversation:
    """One side of a row. Error messages name the side."""
    where = f"{where}: {schema.column(side)}"
    answer = row.get(schema.column(side))
    if schema.formatting == "sharegpt":
        turns = answer if isinstance(answer, list) else [answer]
        messages = [*sharegpt_messages(row, schema, where), *(sharegpt_message(turn, schema, where) for turn in turns)]
    elif schema.formatting == "alpaca":
        messages = [*alpaca_prompt(row, schema, where), *parse_messages(answer, where, role="assistant")]
    else:
        prompt = None if first_value(row, PROMPTS) is None else parse_prompt_messages(row, where)
        messages = _messages(prompt, parse_json_messages(answer), where)
    conversation = Conversation(messages, parse_tools(row.get("tools"), where))
    check_answers(conversation, where)
    last = messages[-1]
    if last["role"] != "assistant":
        raise DataError(f"{where}: ends with a message of role {last['role']}; it should end with the answer, an assistant message")
    check_answers(Conversation([last]), where)
    return conversation


def _messages(question: list[Message] | None, answer: Any, where: str) -> list[Message]:
    """The full conversation: as given, or the prompt followed by the answer."""
    if isinstance(answer, dict):
        answer = [answer]
    if question is None:
        if isinstance(answer, str):
            raise DataError(f"{where}: is text, but the row has no `prompt`; add one, or give full conversations")
        messages = parse_messages(answer, where)
        if messages[0]["role"] == "assistant":
            raise DataError(f"{where}: begins with an assistant message, but the row has no `prompt`")
        return messages
    answers = parse_messages(answer, where, role="assistant")
    if answers[0]["role"] in ("system", "developer", "user"):  # a full conversation that repeats the prompt
        if not any(message["content"].strip() == question[-1]["content"].strip() for message in answers):
            raise DataError(f"{where}: is a full conversation that does not contain this row's `prompt`; remove one of them")
        return answers
    if question[-1]["role"] == "assistant":
        raise DataError(f"{where}: its `prompt` ends with an assistant message; it should end with the message to answer")
    return [*question, *answers]


def _skip_shared_messages(preference: Preference, where: str) -> Preference:
    """Train on both conversations only from the message where they diverge."""
    chosen, rejected = preference.chosen.messages, preference.rejected.messages
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    if shared == len(chosen) or shared == len(rejected):
        raise DataError(f"{where}: one of `chosen` and `rejected` only extends the other, so neither is preferred")
    if not chosen[shared]["role"] == rejected[shared]["role"] == "assistant":
        raise DataError(
            f"{where}: chosen and rejected differ before any answer (message {shared + 1}, of role {chosen[shared]['role']}): they "
            "should answer the same question"
        )
    return replace(
        preference,
        chosen=replace(preference.chosen, train_from=shared),
        rejected=replace(preference.rejected, train_from=shared),
    )


# Tokenising ----------------------------------------------------------------------------------------------------------


@dataclass
class PairCounts:
    rows: int = 0
    equal: int = 0
    """Rows with two identical answers: left out."""
    too_long: int = 0
    """Pairs with a sequence longer than the limit: left out, or cut."""
    emptied: int = 0
    """Pairs left out because a cut would have removed the prompt or an answer."""
    equal_when_cut: int = 0
    """Pairs left out because the cut made both sequences the same."""


@dataclass(frozen=True)
class PairSet:
    pairs: StoredPairs
    counts: PairCounts

    def summary(self, too_long: TooLong, max_tokens: int) -> str:
        counts, lengths = self.counts, self.pairs.side_lengths
        parts = [f"{len(lengths):,} of {counts.rows:,} pairs, {lengths.sum():,} tokens, longest sequence {lengths.max():,}"]
        if counts.equal:
            parts.append(f"{counts.equal:,} left out because both answers are the same")
        if counts.too_long:
            parts.append(f"{counts.too_long:,} longer than {max_tokens:,} {'left out' if too_long == 'filter' else 'cut'}")
        if counts.emptied:
            parts.append(f"{counts.emptied:,} left out because the cut would have left no prompt or no answer")
        if counts.equal_when_cut:
            parts.append(f"{counts.equal_when_cut:,} left out because the cut made both the same")
        return "; ".join(parts)


def load_pairs(
    sources: Sequence[Source],
    tokenise: Tokenise,
    *,
    max_tokens: int,
    too_long: TooLong,
    equal: Literal["error", "filter"] = "error",
    margin_column: str | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
    workers: Callable[[], Workers] | None = None,
    cache: TokenCache | None = None,
) -> PairSet:
    """Read, render and tokenise every row, unless the cache has the result."""

    def build(writer: TokenWriter) -> dict[str, int]:
        counts = PairCounts()
        preferences = (item for source in sources for item in read_pairs(source, margin_column))
        read = (
            (chunk, [(where, side) for where, row in chunk for side in (row.chosen, row.rejected)])
            for chunk in chunks(_without_equal(progress(preferences), equal, counts), PAIRS_PER_CHUNK)
        )
        with workers() if workers is not None else Workers(tokenise) as pool:
            for chunk, examples in pool.map(read):
                sequences = iter(examples)
                for where, row in chunk:
                    pair = Pair(next(sequences), next(sequences), row.margin)
                    if _same(pair):  # a template may trim contents
                        _drop_equal(where, "the same once they are rendered", equal, counts)
                        continue
                    pair = _fit(pair, where, max_tokens, too_long, counts)
                    if pair is not None:
                        writer.add_pair(pair)
        if not len(writer):
            names = ", ".join(str(source.path) for source in sources)
            raise DataError(
                f"{names}: no usable pairs among {counts.rows:,} ({counts.too_long:,} are longer than data.max_tokens = "
                f"{max_tokens:,}, {counts.equal:,} have equal answers, {counts.emptied + counts.equal_when_cut:,} could not be cut)"
            )
        return asdict(counts)

    settings = {"rows": "pairs", "max_tokens": max_tokens, "too_long": too_long, "equal": equal, "margin_column": margin_column}
    store, counts = build_in_memory(build) if cache is None else cache.load(sources, settings, build)
    return PairSet(StoredPairs(store), PairCounts(**counts))


def _without_equal(
    preferences: Iterable[tuple[str, Preference]], on_equal: Literal["error", "filter"], counts: PairCounts
) -> Iterator[tuple[str, Preference]]:
    for where, row in preferences:
        counts.rows += 1
        if not row.equal:
            yield where, row
        else:
            _drop_equal(where, "the same", on_equal, counts)


def _drop_equal(where: str, how: str, on_equal: Literal["error", "filter"], counts: PairCounts) -> None:
    if on_equal == "error":
        raise DataError(
            f"{where}: chosen and rejected are {how}, so neither is preferred. Remove the row, or set data.equal=filter."
        )
    counts.equal += 1


def _same(pair: Pair) -> bool:
    return np.array_equal(pair.chosen.tokens, pair.rejected.tokens)


def _fit(pair: Pair, where: str, max_tokens: int, too_long: TooLong, counts: PairCounts) -> Pair | None:
    """The pair, cut to the limit if needed; None if it is left out."""
    longest = max(len(pair.chosen), len(pair.rejected))
    if longest > max_tokens:
        counts.too_long += 1
        if too_long == "error":
            raise DataError(
                f"{where}: {longest:,} tokens, more than data.max_tokens = {max_tokens:,}. Raise it, or set data.too_long to "
                "filter, cut_left or cut_right."
            )
        if too_long == "filter":
            return None
        cut_pair = _cut_left(pair, longest - max_tokens) if too_long == "cut_left" else _cut_right(pair, max_tokens)
        if cut_pair is None:
            counts.emptied += 1
            return None
        pair = cut_pair
    if _same(pair):
        counts.equal_when_cut += 1
        return None
    return pair


def _cut_left(pair: Pair, excess: int) -> Pair | None:
    """Cut the same amount off both, so that they still share a prompt; None if the prompt is too short for that."""
    a, b = pair.chosen.tokens, pair.rejected.tokens
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    shared = int(differing[0]) if len(differing) else shorter
    if excess >= shared:
        return None
    chosen, rejected = (cut(example, len(example) - excess, left=True) for example in (pair.chosen, pair.rejected))
    return replace(pair, chosen=chosen, rejected=rejected)


def _cut_right(pair: Pair, limit: int) -> Pair | None:
    chosen, rejected = (e if len(e) <= limit else cut(e, limit, left=False) for e in (pair.chosen, pair.rejected))
    if pair.chosen.num_targets and not (chosen.num_targets and rejected.num_targets):
        return None
    return replace(pair, chosen=chosen, rejected=rejected)
