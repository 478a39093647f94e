"""A data set as tokenised examples, with counts of the rows left out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

from plaudit.data.conversations import Source, read_conversations
from plaudit.errors import DataError
from plaudit.types import Example

if TYPE_CHECKING:  # it imports transformers, and reading pairs takes none of it
    from plaudit.data.templates import ChatTemplate

T = TypeVar("T")
TooLong = Literal["filter", "error", "cut_left", "cut_right"]


@dataclass
class ExampleSet:
    examples: list[Example] = field(default_factory=list)
    rows: int = 0
    too_long: int = 0
    """Rows longer than the limit: left out, or cut."""
    emptied: int = 0
    """Rows left out because cutting removed all their target tokens."""

    @property
    def longest(self) -> int:
        return max(map(len, self.examples))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.examples))

    def summary(self, too_long: TooLong, max_tokens: int) -> str:
        parts = [f"{len(self.examples):,} of {self.rows:,} rows, {self.num_tokens:,} tokens, longest {self.longest:,}"]
        if self.too_long:
            parts.append(f"{self.too_long:,} longer than {max_tokens:,} {'left out' if too_long == 'filter' else 'cut'}")
        if self.emptied:
            parts.append(f"{self.emptied:,} left out because the cut removed all their answers")
        return "; ".join(parts)


def load_examples(
    sources: Sequence[Source],
    template: "ChatTemplate",
    *,
    max_tokens: int,
    too_long: TooLong,
    train_on: Literal["all", "last"] = "all",
    progress: Callable[[Iterable], Iterable] = iter,
) -> ExampleSet:
    """Read, render, tokenise and mask every row."""
    result = ExampleSet()
    conversations = (item for source in sources for item in read_conversations(source))
    for chunk in chunks(progress(conversations), 256):
        for (where, _), example in zip(chunk, template.examples(chunk, train_on), strict=True):
            result.rows += 1
            if len(example) > max_tokens:
                result.too_long += 1
                if too_long == "error":
                    raise DataError(
                        f"{where}: {len(example):,} tokens, more than data.max_tokens = {max_tokens:,}. Raise it, or set "
                        "data.too_long to filter, cut_left or cut_right."
                    )
                if too_long == "filter":
                    continue
                example = cut(example, max_tokens, left=too_long == "cut_left")
                if not example.num_targets:
                    result.emptied += 1
                    continue
            result.examples.append(example)
    if not result.examples:
        names = ", ".join(str(source.path) for source in sources)
        raise DataError(
            f"{names}: no row is left of {result.rows:,} ({result.too_long:,} are longer than data.max_tokens = {max_tokens:,})"
        )
    return result


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
