"""Rows of any known schema → conversations and prompts.

Schemas, detected by their columns: `messages` (role and content), `conversations` (sharegpt's from and value), `prompt` with
`response` or `completion` (each a string or messages), `instruction` with `output` (alpaca); and, for sampling, verl's
`prompt`, `data_source`, `reward_model.ground_truth`, `extra_info`. A LLaMA-Factory `dataset_info.json` can rename columns and tags.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.data.rows import Rows, parse_json, read_rows
from plaudit.errors import DataError, did_you_mean, nearest_path
from plaudit.types import Conversation, Message, Prompt

REASONING = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool")
SFT_HINT = (
    "Rows for SFT have `messages`, `conversations`, `prompt` and `response`, or `instruction` and `output`; "
    "other names can be mapped with data.dataset_info."
)

PROMPT_COLUMNS = ("prompt", "tools", "data_source", "reward_model", "extra_info", "rm_prompt")
"""What is read of a row to sample from."""

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
    schema: Schema = Schema()


# Which files ---------------------------------------------------------------------------------------------------------


def resolve_sources(names: Sequence[str], dataset_info: str | None, setting: str, *, ranked: bool = False) -> list[Source]:
    """Resolve a setting's names to existing files, directly or through dataset_info.json. `ranked`: files of pairs."""
    entries = _read_dataset_info(Path(dataset_info)) if dataset_info else {}
    sources = []
    for name in names:
        listed = name in entries
        source = _entry_source(name, entries[name], Path(dataset_info or ""), ranked) if listed else Source(Path(name))
        if not source.path.exists():
            hint = nearest_path(source.path) if listed else did_you_mean(name, entries) or nearest_path(source.path)
            raise DataError(f"{setting}: {source.path} does not exist.{hint}")
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
    if "file_name" not in entry or (entry.get("ranking") and not ranked):
        raise DataError(f"{info}: {name} is not a local file of conversations (it is on a hub, a script, or ranked pairs)")
    if ranked and not entry.get("ranking"):
        raise DataError(f"{info}: {name} is not a file of pairs: it has no `ranking: true`")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt"):
        raise DataError(f"{info}: {name}: formatting {formatting!r} is not one of alpaca, sharegpt")
    if not isinstance(entry["file_name"], str):
        raise DataError(f"{info}: {name}: file_name should be text, not {describe_type(entry['file_name'])}")
    schema = Schema(formatting, _names(entry, "columns", f"{info}: {name}"), _names(entry, "tags", f"{info}: {name}"), ranked)
    return Source(info.parent / entry["file_name"], schema)


def _names(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    names = entry.get(key) or {}
    if not isinstance(names, dict) or not all(value is None or isinstance(value, str) for value in names.values()):
        raise DataError(f'{where}: {key} should be {{"name": "name in the file", …}}')
    return {name: value for name, value in names.items() if value is not None}


# Conversations -------------------------------------------------------------------------------------------------------


def read_conversations(source: Source) -> Iterator[tuple[str, Conversation]]:
    """Each row as a conversation, with its location (file and row) for error messages."""
    rows = read_rows(source.path)
    convert = _converter(rows, source.schema)
    for number, row in enumerate(rows):
        where = f"{rows.source}: row {number}"
        conversation = convert(without_nulls(row) if rows.nulls_mean_absent else row, where)
        check_answers(conversation, where)
        check_text([conversation.messages, conversation.tools], where)
        yield where, conversation


def _converter(rows: Rows, schema: Schema):
    """Return the function that converts this file's rows to conversations."""
    columns = set(rows.columns)
    if schema.formatting:
        needed = ("messages",) if schema.formatting == "sharegpt" else ("prompt", "response")
        required = [name for name in DEFAULT_COLUMNS if name in needed or name in schema.columns]
        rows.require(*filter(None, map(schema.column, required)), hint="data.dataset_info sets this name.")
    if schema.formatting == "sharegpt":
        return lambda row, where: _from_sharegpt(row, schema, where)
    if schema.formatting == "alpaca":
        return lambda row, where: _from_alpaca(row, schema, where)
    if "messages" in columns:
        return lambda row, where: Conversation(parse_messages(row.get("messages"), where), parse_tools(row.get("tools"), where))
    if "conversations" in columns:
        return lambda row, where: _from_sharegpt(row, schema, where)
    answer = next((name for name in ("response", "completion") if name in columns), None)
    if "prompt" in columns and answer:
        return lambda row, where: Conversation(
            parse_messages(row.get("prompt"), where, role="user") + parse_messages(row.get(answer), where, role="assistant"),
            parse_tools(row.get("tools"), where),
        )
    if {"instruction", "output"} <= columns:
        return lambda row, where: _from_alpaca(row, schema, where)
    rows.require("messages", hint=SFT_HINT)
    raise AssertionError


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


def _from_sharegpt(row: dict[str, Any], schema: Schema, where: str) -> Conversation:
    return Conversation(sharegpt_messages(row, schema, where), parse_tools(row.get(schema.column("tools")), where))


def sharegpt_messages(row: dict[str, Any], schema: Schema, where: str) -> list[Message]:
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


def alpaca_prompt(row: dict[str, Any], schema: Schema, where: str) -> list[Message]:
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


def read_prompts(source: Source) -> Iterator[Prompt]:
    """Each row of verl's RL schema as a prompt to sample from. An id is the path as given plus the row number."""
    rows = read_rows(source.path)
    rows.require(
        "prompt",
        hint="Rows for sampling have `prompt` (messages), `data_source`, `reward_model.ground_truth`, `extra_info`.",
    )
    for number, row in enumerate(rows):
        row = _without_arrow_nulls(row) if rows.nulls_mean_absent else row
        row = _with_columns_as_extra_info(row)
        prompt = parse_prompt(row, f"{source.path}:{number}", f"{rows.source}: row {number}")
        if prompt.messages[-1]["role"] == "assistant":
            where = f"{rows.source}: row {number}"
            raise DataError(f"{where}: its prompt ends with an assistant message; it should end with the message to answer")
        yield prompt


def _without_arrow_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: without_nulls(row[name]) for name in ("prompt", "tools") if name in row}


def _with_columns_as_extra_info(row: dict[str, Any]) -> dict[str, Any]:
    """Rewards see columns that nothing else reads (TRL's rows have any) as fields of extra_info."""
    extra = row.get("extra_info") or {}
    columns = {name: value for name, value in row.items() if name not in PROMPT_COLUMNS and value is not None}
    return {**row, "extra_info": {**columns, **extra}} if columns and isinstance(extra, Mapping) else row


def parse_prompt(row: Mapping[str, Any], id: str, where: str) -> Prompt:
    """A row of verl's RL schema. The prompt may be text, or messages as text. A column `rm_prompt` goes into extra_info."""
    extra, reward_model = row.get("extra_info") or {}, row.get("reward_model") or {}
    for name, value in (("extra_info", extra), ("reward_model", reward_model)):
        if not isinstance(value, Mapping):
            raise DataError(f"{where}: {name} should be an object, not {describe_type(value)}")
    data_source, tools = row.get("data_source"), row.get("tools")
    if not isinstance(data_source, str | None):
        raise DataError(f"{where}: data_source should be text, not {describe_type(data_source)}")
    if row.get("rm_prompt") is not None:  # the reward model's prompt, where it differs from the policy's
        extra = {**extra, "rm_prompt": row["rm_prompt"]}
    check_text([row.get("prompt"), tools, data_source, reward_model, extra], where)
    return Prompt(
        id=id,
        messages=parse_messages(parse_json_messages(row.get("prompt")), where, role="user"),
        data_source=data_source or "",
        ground_truth=reward_model.get("ground_truth"),
        extra_info=extra,
        tools=parse_tools(tools, where),
        is_text=isinstance(parse_json_messages(row.get("prompt")), str),
    )
