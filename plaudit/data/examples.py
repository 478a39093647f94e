"""A data set as tokenised examples, with counts of the rows left out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Literal, TypeVar

from plaudit.data.conversations import Source, read_conversations
from plaudit.data.token_cache import TokenCache, build_in_memory
from plaudit.data.token_store import StoredExamples, TokenWriter
from plaudit.data.tokenise_workers import Tokenise, Workers
from plaudit.errors import DataError
from plaudit.types import Example

T = TypeVar("T")
TooLong = Literal["filter", "error", "cut_left", "cut_right"]
ROWS_PER_CHUNK = 256
"""Rows that are rendered and tokenised together."""


@dataclass
class ExampleCounts:
    rows: int = 0
    too_long: int = 0
    """Rows longer than the limit: left out, or cut."""
    emptied: int = 0
    """Rows left out because cutting removed all their target tokens."""


@dataclass(frozen=True)
class ExampleSet:
    examples: StoredExamples
    counts: ExampleCounts

    def summary(self, too_long: TooLong, max_tokens: int) -> str:
        counts, lengths = self.counts, self.examples.lengths
        parts = [f"{len(lengths):,} of {counts.rows:,} rows, {sum(lengths):,} tokens, longest {max(lengths):,}"]
        if counts.too_long:
            parts.append(f"{counts.too_long:,} longer than {max_tokens:,} {'left out' if too_long == 'filter' else 'cut'}")
        if counts.emptied:
            parts.append(f"{counts.emptied:,} left out because the cut removed all their answers")
        return "; ".join(parts)


def load_examples(
    sources: Sequence[Source],
    tokenise: Tokenise,
    *,
    max_tokens: int,
    too_long: TooLong,
    progress: Callable[[Iterable], Iterable] = iter,
    workers: Callable[[], Workers] | None = None,
    cache: TokenCache | None = None,
) -> ExampleSet:
    """Read, render, tokenise and mask every row, unless the cache has the result."""

    def build(writer: TokenWriter) -> dict[str, int]:
        counts = ExampleCounts()
        conversations = (item for source in sources for item in read_conversations(source))
        read = ((chunk, chunk) for chunk in chunks(progress(conversations), ROWS_PER_CHUNK))
        with workers() if workers is not None else Workers(tokenise) as pool:
            for chunk, examples in pool.map(read):
                for (where, _), example in zip(chunk, examples, strict=True):
                    counts.rows += 1
                    fitting = _fit(example, where, max_tokens, too_long, counts)
                    if fitting is not None:
                        writer.add(fitting)
        if not len(writer):
            names = ", ".join(str(source.path) for source in sources)
            raise DataError(
                f"{names}: no row is left of {counts.rows:,} ({counts.too_long:,} are longer than data.max_tokens = {max_tokens:,})"
            )
        return asdict(counts)

    settings = {"rows": "examples", "max_tokens": max_tokens, "too_long": too_long}
    store, counts = build_in_memory(build) if cache is None else cache.load(sources, settings, build)
    return ExampleSet(StoredExamples(store), ExampleCounts(**counts))


def _fit(example: Example, where: str, max_tokens: int, too_long: TooLong, counts: ExampleCounts) -> Example | None:
    """The example, cut to the limit if needed; None if it is left out."""
    if len(example) <= max_tokens:
        return example
    counts.too_long += 1
    if too_long == "error":
        raise DataError(
            f"{where}: {len(example):,} tokens, more than data.max_tokens = {max_tokens:,}. Raise it, or set "
            "data.too_long to filter, cut_left or cut_right."
        )
    if too_long == "filter":
        return None
    example = cut(example, max_tokens, left=too_long == "cut_left")
    if not example.num_targets:
        counts.emptied += 1
        return None
    return example


def cut(example: Example, limit: int, *, left: bool) -> Example:
    """Keep the last (`left`) or first `limit` tokens."""
    keep = slice(len(example) - limit, None) if left else slice(0, limit)
    mask = example.loss_mask[keep].copy()
    mask[0] = False  # its context has been cut off
    return Example(example.tokens[keep].copy(), mask)  # a view would keep the full row in memory


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
