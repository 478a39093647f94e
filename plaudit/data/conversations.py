"""Rows of any known schema → conversations and prompts.

columns.py says which column means what. A LLaMA-Factory `dataset_info.json` can rename columns and tags.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plaudit.data.columns import (
    CONVERSATIONS,
    GROUND_TRUTHS,
    PROMPTS,
    TARGETS,
    find_column,
    first_value,
    has_prompt,
    listed,
    parse_object,
    with_columns_as_extra_info,
)
from plaudit.data.hub_datasets import HubDataset, parse_hub_name
from plaudit.data.rows import Rows, parse_json, read_rows
from plaudit.errors import DataError, did_you_mean, nearest_path
from plaudit.files import fingerprint
from plaudit.shipped import find_shipped
from plaudit.types import Conversation, Message, Prompt

REASONING = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool")
SFT_HINT = (
    f"Rows for SFT have {listed(CONVERSATIONS)}; or a prompt ({listed(PROMPTS)}) and an answer ({listed(TARGETS)}). Other names "
    "can be mapped with data.dataset_info."
)
PROMPT_HINT = f"Rows to sample from have {listed(PROMPTS)} (text or messages), or {listed(CONVERSATIONS)}."

DEFAULT_COLUMNS = {
    "messages": "conversations",
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "chosen": "chosen",
    "rejected": "rejected",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Schema:
    """Names of a file's columns and tags: LLaMA-Factory's terms, with its defaults."""

    formatting: str = ""
    """sharegpt or alpaca; empty: detected by the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    ranked: bool = False
    """Rows are preference pairs: `chosen` and `rejected` instead of an answer."""

    def column(self, name: str) -> str:
        """The file's name for a column. As in LLaMA-Factory, listing columns drops the optional ones not listed."""
        optional = name in ("query", "history", "system", "tools")
        return self.columns.get(name, "" if self.columns and optional else DEFAULT_COLUMNS[name])


@dataclass(frozen=True)
class Source:
    """A data file and its schema."""

    path: Path
    """As given; of a data set on the hub, its name."""
    schema: Schema = Schema()
    hub: HubDataset | None = None
    """Set if this is a data set on the hub, not a file."""

    def __str__(self) -> str:
        return str(self.path)

    def name(self, folders: int = 0) -> str:
        """The name of the file, with as many of its folders; of a data set on the hub, the whole name."""
        return str(self.path) if self.hub is not None else "/".join(Path(os.path.abspath(self.path)).parts[-1 - folders :])

    def rows(self) -> Rows:
        return read_rows(self.path) if self.hub is None else self.hub.rows()

    def fingerprint(self) -> str:
        return fingerprint(self.path) if self.hub is None else self.hub.fingerprint()

    def num_bytes(self) -> int:
        """Size of its files, which says how long reading takes."""
        if self.hub is not None:
            return self.hub.num_bytes()
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file())


# Which files ---------------------------------------------------------------------------------------------------------


def resolve_sources(names: Sequence[str], dataset_info: str | None, setting: str, *, ranked: bool = False) -> list[Source]:
    """Resolve a setting's names to existing files or data sets on the hub, directly or through dataset_info.json.

    `ranked`: files of pairs. A name on the hub without a split is its `train` split for data.train, else its only one."""
    entries = _read_dataset_info(Path(dataset_info)) if dataset_info else {}
    sources = []
    for name in names:
        listed = name in entries
        source = (
            _entry_source(name, entries[name], Path(dataset_info or ""), ranked) if listed else Source(find_shipped(Path(name)))
        )
        if source.hub is None and not os.path.exists(source.path):  # unlike Path.exists, False for any text that cannot be a path
            source = replace(source, hub=parse_hub_name(name, "train" if setting == "data.train" else None))
            if listed or source.hub is None:
                hint = nearest_path(source.path) if listed else did_you_mean(name, entries) or nearest_path(source.path)
                raise DataError(f"{setting}: {source.path} does not exist.{hint}")
        if source.hub is not None:
            try:
                source.rows()
            except DataError as error:
                raise DataError(f"{setting}: {error}") from None
        sources.append(source)
    return sources


def _read_dataset_info(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"data.dataset_info: {path} is not a file.{nearest_path(path)}")
    entries = parse_json(path.read_bytes(), path)
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DataError(f'{path}: should be LLaMA-Factory\'s {{"name": {{"file_name": …}}, …}}')
    return entries


def _entry_source(name: str, entry: dict[str, Any], info: Path, ranked: bool) -> Source:
    if entry.get("ranking") and not ranked:
        raise DataError(f"{info}: {name} has ranked pairs, not conversations")
    if ranked and not entry.get("ranking"):
        raise DataError(f"{info}: {name} is not a file of pairs: it has no `ranking: true`")
    key = next((key for key in ("file_name", "hf_hub_url") if key in entry), None)
    if key is None:
        raise DataError(f"{info}: {name} has neither file_name nor hf_hub_url (other hubs and scripts are not supported)")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt"):
        raise DataError(f"{info}: {name}: formatting {formatting!r} is not one of alpaca, sharegpt")
    if not isinstance(entry[key], str):
        raise DataError(f"{info}: {name}: {key} should be text, not {describe_type(entry[key])}")
    schema = Schema(formatting, _names(entry, "columns", f"{info}: {name}"), _names(entry, "tags", f"{info}: {name}"), ranked)
    if key == "file_name":
        return Source(info.parent / entry[key], schema)
    full_name = f"{entry[key]}{'/' * bool(entry.get('subset'))}{entry.get('subset') or ''}:{entry.get('split') or 'train'}"
    hub = parse_hub_name(full_name)
    if hub is None:
        raise DataError(f"{info}: {name}: {entry[key]} is not the name of a data set on the hub (org/name)")
    return Source(Path(full_name), schema, hub)


def _names(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    names = entry.get(key) or {}
    if not isinstance(names, dict) or not all(value is None or isinstance(value, str) for value in names.values()):
        raise DataError(f'{where}: {key} should be {{"name": "name in the file", …}}')
    return {name: value for name, value in names.items() if value is not None}


# Conversations -------------------------------------------------------------------------------------------------------


def read_conversations(source: Source) -> Iterator[tuple[str, Conversation]]:
    """Each row as a conversation, with its location (file and row) for error messages."""
    rows = source.rows()
    convert = _converter(rows, source.schema)
    for where, row in rows.located():
        conversation = convert(without_nulls(row) if rows.nulls_mean_absent else row, where)
        check_answers(conversation, where)
        check_text([conversation.messages, conversation.tools], where)
        yield where, conversation


def _converter(rows: Rows, schema: Schema):
    """Return the function that converts this file's rows to conversations."""
    if schema.formatting:
        needed = ("messages",) if schema.formatting == "sharegpt" else ("prompt", "response")
        required = [name for name in DEFAULT_COLUMNS if name in needed or name in schema.columns]
        rows.require(*filter(None, map(schema.column, required)), hint="data.dataset_info sets this name.")
    if schema.formatting == "sharegpt":
        return lambda row, where: _from_sharegpt(row, schema, where)
    if schema.formatting == "alpaca":
        return lambda row, where: _from_alpaca(row, schema, where)
    if not find_column(rows.columns, CONVERSATIONS) and not all(find_column(rows.columns, names) for names in (PROMPTS, TARGETS)):
        rows.require("messages", hint=SFT_HINT)
    return _from_columns


def _from_columns(row: dict[str, Any], where: str) -> Conversation:
    """A row's conversation; without one, its prompt and its target. The rows of a file may differ in this."""
    prompt, target, tools = find_column(row, PROMPTS), find_column(row, TARGETS), parse_tools(row.get("tools"), where)
    if not (prompt and target) or first_value(row, CONVERSATIONS) is not None:
        return Conversation(parse_conversation(row, where), tools)
    if (prompt, target) == ("instruction", "output"):
        return _from_alpaca(row, Schema(), where)
    answer = parse_messages(first_value(row, TARGETS), where, role="assistant")
    return Conversation([*parse_prompt_messages(row, where), *answer], tools)


def parse_conversation(row: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of a row that has its conversation in one column."""
    if find_column(row, CONVERSATIONS) == "conversations":
        return sharegpt_messages(row, Schema(), where)
    return parse_messages(parse_json_messages(row.get("messages")), where)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def parse_messages(value: Any, where: str, role: str | None = None) -> list[Message]:
    """Messages in the form templates expect; a plain string is one message of `role`."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: has no messages (found {describe_type(value)})")
    return [_message(item, where) for item in value]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        found = ", ".join(item) if isinstance(item, dict) and item else describe_type(item)
        raise DataError(f"{where}: a message should have `role` and `content`, not {found}")
    # Templates test `is defined`, which is true of null.
    message = {key: value for key, value in item.items() if value is not None}
    if message["role"] not in ROLES:
        raise DataError(
            f"{where}: role {message['role']!r} is not one of {', '.join(ROLES)}.{did_you_mean(message['role'], ROLES)}"
        )
    if "content" not in item and not message.keys() & {"tool_calls", *REASONING}:
        raise DataError(f"{where}: a message should have `role` and `content`, not {', '.join(item)}")
    message["content"] = join_text(message.get("content"), where)
    return message


def join_text(content: Any, where: str) -> str:
    """Content as one string: a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise DataError(f"{where}: content should be text, not {describe_type(content)} (images and audio are not supported)")


def parse_tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: tools are not valid JSON: {error}") from None
        except RecursionError:
            raise DataError(f"{where}: tools are nested too deeply") from None
    if value and not isinstance(value, list):
        raise DataError(f"{where}: tools should be a list, not {describe_type(value)}")
    return value or None


def _from_sharegpt(row: Mapping[str, Any], schema: Schema, where: str) -> Conversation:
    return Conversation(sharegpt_messages(row, schema, where), parse_tools(row.get(schema.column("tools")), where))


def sharegpt_messages(row: Mapping[str, Any], schema: Schema, where: str) -> list[Message]:
    """A row's system prompt and turns."""
    turns = row.get(schema.column("messages"))
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: has no messages (found {describe_type(turns)})")
    messages = [sharegpt_message(turn, schema, where) for turn in turns]
    system = row.get(schema.column("system"))
    if system and messages[0]["role"] != "system":  # as in LLaMA-Factory, a system message in the conversation takes precedence
        messages.insert(0, {"role": "system", "content": join_text(system, where)})
    return messages


def sharegpt_message(turn: Any, schema: Schema, where: str) -> Message:
    tags = DEFAULT_TAGS | schema.tags
    roles = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "tool",
        tags["function_tag"]: "assistant",
        tags["system_tag"]: "system",
    }
    if not isinstance(turn, dict) or tags["role_tag"] not in turn:
        found = ", ".join(turn) if isinstance(turn, dict) and turn else describe_type(turn)
        raise DataError(
            f"{where}: a message should have `{tags['role_tag']}` and `{tags['content_tag']}`, not {found}; "
            "map the names in dataset_info.json"
        )
    role = roles.get(str(turn[tags["role_tag"]]))
    if role is None:
        raise DataError(
            f"{where}: role {turn[tags['role_tag']]!r} is not one of the tags {', '.join(roles)}; map it in dataset_info.json"
        )
    return {"role": role, "content": join_text(turn.get(tags["content_tag"]), where)}


def _from_alpaca(row: dict[str, Any], schema: Schema, where: str) -> Conversation:
    answer = {"role": "assistant", "content": join_text(row.get(schema.column("response")), where)}
    return Conversation([*alpaca_prompt(row, schema, where), answer], parse_tools(row.get(schema.column("tools")), where))


def alpaca_prompt(row: Mapping[str, Any], schema: Schema, where: str) -> list[Message]:
    """The messages before a row's answer: system prompt, history, question."""

    def value(name: str) -> Any:
        return row.get(schema.column(name))

    messages: list[Message] = []
    if system := value("system"):
        messages.append({"role": "system", "content": join_text(system, where)})
    history = value("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(f"{where}: history should be a list of [question, answer]")
    for question, answer in history:
        messages.append({"role": "user", "content": join_text(question, where)})
        messages.append({"role": "assistant", "content": join_text(answer, where)})
    question = [join_text(value("prompt"), where), join_text(value("query"), where)]
    messages.append({"role": "user", "content": "\n".join(part for part in question if part)})
    return messages


def check_answers(conversation: Conversation, where: str) -> None:
    answers = [m for m in conversation.messages if m["role"] == "assistant"]
    if not answers:
        raise DataError(f"{where}: has no assistant message, so there is nothing to train on")
    if not any(m["content"].strip() or m.get("tool_calls") or m.get("reasoning_content") for m in answers):
        raise DataError(f"{where}: every assistant message is empty")


def check_text(values: list[Any], where: str) -> None:
    """Reject unpaired surrogates (`\\ud800`): Python reads them from JSON, but no tokenizer accepts them."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{where}: its text has an unpaired surrogate: {surrogate}") from None
    except RecursionError:
        raise DataError(f"{where}: is nested too deeply") from None


def describe_type(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"an empty {type(value).__name__}" if value in ([], {}, "") else type(value).__name__


def parse_json_messages(prompt: Any) -> Any:
    """Decode messages stored as a JSON string, as CSV files and spreadsheets do; other values are returned unchanged."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        with suppress(ValueError):
            messages = json.loads(prompt)
            if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
                return messages
    return prompt


# Prompts -------------------------------------------------------------------------------------------------------------


def read_prompts(source: Source, name: str | None = None) -> Iterator[Prompt]:
    """Each row as a prompt to sample from. An id is `name` (default: the file's) plus the row's number."""
    name = name or source.name()
    rows = source.rows()
    if not has_prompt(rows.columns):
        rows.require("prompt", hint=PROMPT_HINT)
    for number, (where, row) in enumerate(rows.located(), 1):
        row = _without_arrow_nulls(row) if rows.nulls_mean_absent else row
        row = with_columns_as_extra_info(row)
        prompt = parse_prompt(row, f"{name}:{number}", where)
        if prompt.messages[-1]["role"] == "assistant":
            raise DataError(f"{where}: its prompt ends with an assistant message; it should end with the message to answer")
        yield prompt


def _without_arrow_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: without_nulls(row[name]) for name in (*PROMPTS, *CONVERSATIONS, "tools") if name in row}


def parse_prompt(row: Mapping[str, Any], id: str, where: str) -> Prompt:
    """A row's prompt, and what its rewards need. A column `rm_prompt` goes into extra_info."""
    extra, ground_truth = parse_object(row.get("extra_info")) or {}, parse_ground_truth(row, where)
    if not isinstance(extra, Mapping):
        raise DataError(f"{where}: extra_info should be an object, not {describe_type(extra)}")
    data_source, tools = row.get("data_source"), row.get("tools")
    if not isinstance(data_source, str | None):
        raise DataError(f"{where}: data_source should be text, not {describe_type(data_source)}")
    if row.get("rm_prompt") is not None:  # the reward model's prompt, where it differs from the policy's
        extra = {**extra, "rm_prompt": row["rm_prompt"]}
    messages = parse_prompt_messages(row, where)
    check_text([messages, tools, data_source, ground_truth, extra], where)
    return Prompt(
        id=id,
        messages=messages,
        data_source=data_source or "",
        ground_truth=ground_truth,
        extra_info=extra,
        tools=parse_tools(tools, where),
        is_text=isinstance(parse_json_messages(first_value(row, PROMPTS)), str),
    )


def parse_prompt_messages(row: Mapping[str, Any], where: str) -> list[Message]:
    """The messages that a row's responses answer."""
    column = find_column(row, PROMPTS)
    if (column is None or row[column] is None) and find_column(row, CONVERSATIONS):
        return split_answer(parse_conversation(row, where), where)[0]
    if column == "instruction":
        return alpaca_prompt(row, Schema(), where)
    return parse_messages(parse_json_messages(row.get(column or "prompt")), where, role="user")


def split_answer(messages: list[Message], where: str) -> tuple[list[Message], Message | None]:
    """A conversation as prompt and answer; the answer is None if the last message is not the assistant's."""
    prompt, answer = (messages[:-1], messages[-1]) if messages[-1]["role"] == "assistant" else (messages, None)
    if not prompt:
        raise DataError(f"{where}: has no message before the assistant's, so there is no prompt")
    return prompt, answer


def parse_ground_truth(row: Mapping[str, Any], where: str) -> Any:
    """The reference answer: in verl's `reward_model.ground_truth`, in `reward_model` itself, or in a column of its own."""
    given = parse_object(row.get("reward_model"), key="ground_truth")
    if not isinstance(given, Mapping | str | int | float | None):
        raise DataError(
            f"{where}: reward_model should be an object with ground_truth, or the reference answer, not {describe_type(given)}"
        )
    truth = given.get("ground_truth") if isinstance(given, Mapping) else given
    return first_value(row, GROUND_TRUTHS) if truth in (None, "") else truth
