"""Rows with existing responses → groups for rewards to score.

columns.py says which columns hold prompt, responses and ground truth. `tokens` may hold the length of each response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plaudit.data.columns import (
    CONVERSATIONS,
    RESPONSES,
    find_column,
    has_pair,
    has_prompt,
    has_several_responses,
    listed,
    plain,
    with_columns_as_extra_info,
)
from plaudit.data.conversations import parse_conversation, parse_messages, parse_prompt, split_answer
from plaudit.data.pairs import parse_preference
from plaudit.errors import DataError
from plaudit.response_files import join_thought
from plaudit.types import Group, SavedSample

NOTHING = np.zeros(0, dtype=np.float32)
HINT = (
    "A row to score has `prompt` and `response` (text, or an object with `thought` and `answer`) or `responses` (a list of these); "
    "`chosen` and `rejected`; or `messages` "
    f"that end with the answer. Responses may also be in {listed([name for name in RESPONSES if not name.startswith('response')])}"
)


def parse_group(row: Mapping[str, Any], id: str, where: str) -> Group:
    """A row's responses as a group. A rule may need no prompt, so a row may lack it."""
    row, texts = split_responses(row, where)
    counts = parse_token_counts(row.get("tokens"), len(texts), where)
    row = with_columns_as_extra_info(row if has_prompt(list(row)) else {**row, "prompt": ""})
    prompt = parse_prompt(row, str(row.get("id") or id), where)
    tokens = NOTHING.astype(np.int32)
    samples = [
        SavedSample(prompt.id, i, tokens, text, "finished", NOTHING, NOTHING, 0, count, answer)
        for i, (text, count, answer) in enumerate(zip(texts, counts, split_answers(row, len(texts)), strict=True))
    ]
    return Group(prompt, tokens, tuple(samples))


def split_responses(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The row with what its responses answer in `prompt`, and the responses."""
    row = {name: plain(value) for name, value in row.items()}
    column = find_column(row, RESPONSES)
    if has_pair(row):
        return _split_pair(row, where)
    if column is None:
        if not find_column(row, CONVERSATIONS):
            raise DataError(f"{where}: has no response (found: {', '.join(map(str, row)) or 'nothing'}). {HINT}")
        prompt, answer = split_answer(parse_conversation(row, where), where)
        if answer is None:
            raise DataError(f"{where}: its messages do not end with an assistant message, so there is no response. {HINT}")
        return {**row, "prompt": prompt}, [answer["content"]]
    if row.get("response") is not None and row.get("responses") is not None:
        raise DataError(f"{where}: has both `response` and `responses`. {HINT}")
    return row, _parse_responses(row, column, where)


def _split_pair(row: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    pair = parse_preference(row, where)
    shared = pair.chosen.train_from or len(pair.chosen.messages) - 1
    answers = [side.messages[shared:] for side in (pair.chosen, pair.rejected)]
    if any(message["role"] == "user" for messages in answers for message in messages):
        raise DataError(f"{where}: chosen and rejected differ before their last answers, so these do not answer the same prompt")
    return {**row, "prompt": pair.chosen.messages[:shared]}, [parse_response(messages, where) for messages in answers]


def _parse_responses(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    if not has_several_responses(row):
        return [parse_response(row[column], where)]
    responses = row[column]
    if not isinstance(responses, list | tuple) or not responses:
        raise DataError(f"{where}: `{column}` should be a list of texts, not {responses!r:.80}")
    return [parse_response(response, where) for response in responses]


def is_split(response: Any) -> bool:
    """Whether a response has its thought and its answer apart: `{"thought": …, "answer": …}`."""
    return isinstance(response, Mapping) and "answer" in response and "role" not in response


def split_answers(row: Mapping[str, Any], count: int) -> list[str | None]:
    """The answers of responses that have them apart from the thoughts; empty where there is none."""
    found = plain(row.get(find_column(row, RESPONSES) or ""))
    responses = found if isinstance(found, list | tuple) else [found]
    split = [(response["answer"] or "") if is_split(response) else None for response in responses]
    return split if len(split) == count else [None] * count


def _join_thought(response: Mapping[str, Any], where: str) -> str:
    """Thought and answer as one text: as it was sampled, if the row has that, else as SFT on thoughts writes it."""
    parts = {name: response.get(name) for name in ("thought", "answer", "text")}
    if not all(isinstance(part, str | None) for part in parts.values()):
        raise DataError(f"{where}: the thought and the answer of a response should be text, not {dict(response)!r:.80}")
    if parts["text"] is not None:
        return parts["text"]
    answer = parts["answer"] or ""
    return join_thought(parts["thought"], answer) if parts["thought"] else answer


def parse_response(response: Any, where: str) -> str:
    """A response as text; of messages, which may include tool results, the last one of the assistant."""
    if is_split(response):
        return _join_thought(response, where)
    if isinstance(response, Mapping):
        response = [response]
    if isinstance(response, Sequence) and not isinstance(response, str):
        messages = parse_messages(list(response), where)
        response = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), None)
    if not isinstance(response, str):
        raise DataError(f"{where}: a response should be text, not {response!r:.80}")
    return response


def parse_token_counts(tokens: Any, responses: int, where: str) -> list[int | None]:
    """The number of tokens of each response, None where it is unknown."""
    given: Any = plain(tokens)
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * (1 if given is not None else responses)
    counts: list[Any] = [int(count) if isinstance(count, float) and count.is_integer() else count for count in listed]
    if len(counts) != responses or not all(isinstance(count, int | None) for count in counts):
        raise DataError(f"{where}: `tokens` should be the number of tokens of each response, not {tokens!r:.80}")
    return counts


def token_counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """Return a function that counts a response's tokens, including the end token that its text does not show."""
    if tokenizer is None:
        return None
    from plaudit.data.templates import load_tokenizer

    encode = load_tokenizer(tokenizer)
    return lambda text: len(encode(text, add_special_tokens=False)["input_ids"]) + 1  # pyright: ignore


def with_token_counts(group: Group, count: Callable[[str], int] | None) -> Group:
    """Count the tokens of responses that came without a count; unchanged if `count` is None."""
    if count is None:
        return group
    samples = [
        replace(sample, token_count=count(sample.text))
        if isinstance(sample, SavedSample) and sample.token_count is None
        else sample
        for sample in group.samples
    ]
    return replace(group, samples=tuple(samples))
