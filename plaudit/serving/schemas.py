"""Request and response schemas of the API, and strict JSON.

The published schema is exact: a request is accepted if and only if it validates. So there is one form for each thing, types are not
converted, and no field depends on another. (JSON Schema cannot express a few errors, such as unpaired surrogates.)
"""

import codecs
import json
import json.scanner
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a body: more than real data needs, well below Python's recursion limit."""
MAX_RESPONSES = 1024
MAX_TEXT = 2**20
"""Maximum length of a response in characters: even a fast rule takes tens of milliseconds for one."""
MAX_TOKENS = 2**31 - 1
MAX_VALUES = 2**16
"""Maximum number of values in an item's extra_info, ground_truth or tools: they are checked and passed on in single calls."""
MAX_MESSAGES, MAX_FIELDS = 4096, 64
"""Maximum number of messages of a prompt (and parts of a message), and of fields of an object that is validated: pydantic would
list every invalid one."""


class Documented(BaseModel):
    """Attribute docstrings become field descriptions in the OpenAPI schema."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class _RequestModel(Documented):
    model_config = ConfigDict(strict=True, json_schema_extra={"maxProperties": MAX_FIELDS})

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "Input should have at most {limit} fields", {"limit": MAX_FIELDS})
        return value


class StrictModel(_RequestModel):
    model_config = ConfigDict(extra="forbid")


class OpenModel(_RequestModel):
    model_config = ConfigDict(extra="allow")


def _no_unpaired_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        message = "Input has an unpaired surrogate: {surrogate}"
        raise PydanticCustomError("surrogate", message, {"surrogate": surrogate}) from None
    return text


Text = Annotated[str, AfterValidator(_no_unpaired_surrogates)]

# Requests ------------------------------------------------------------------------------------------------------------


class TextPart(OpenModel):
    text: Text


class Message(OpenModel):
    """May have further fields that a chat template reads (`tool_calls`, `name`)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None


def _integral(value: Any) -> Any:
    """JSON does not distinguish 3.0 from 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _not_too_long(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise PydanticCustomError("too_long", "Input should have at most {limit} characters", {"limit": MAX_TEXT})
    return text


# Not Field(max_length=…): it would report an unpaired surrogate as a string that is no string.
ResponseText = Annotated[Text, AfterValidator(_not_too_long), WithJsonSchema({"type": "string", "maxLength": MAX_TEXT})]


class Response(StrictModel):
    text: ResponseText
    tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), BeforeValidator(_integral)] | None = None
    """Number of tokens, including the end token: for rewards that depend on it."""


def _union_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return {list: "<list>", dict: "<object>", Response: "<object>"}.get(type(value))


Prompt = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Message], Tag("<list>"), Field(min_length=1, max_length=MAX_MESSAGES)],
    Discriminator(_union_tag, custom_error_type="prompt", custom_error_message="Input should be text, or a list of messages"),
]
ItemResponse = Annotated[
    Annotated[ResponseText, Tag("<text>")] | Annotated[Response, Tag("<object>")],
    Discriminator(_union_tag, custom_error_type="response", custom_error_message="Input should be text, or an object with `text`"),
]


def _not_too_many_values(value: Any) -> Any:
    count, level = 0, [value]
    while level and count <= MAX_VALUES:
        count += len(level)
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if count > MAX_VALUES:
        raise PydanticCustomError("too_many_values", "Input should have at most {limit} values", {"limit": MAX_VALUES})
    return value


def _is_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
    return value


Anything = Annotated[Any, AfterValidator(_not_too_many_values)]
# Not dict[str, Any]: pydantic would copy it, in one call.
Object = Annotated[Anything, AfterValidator(_is_object), WithJsonSchema({"type": "object", "additionalProperties": True})]


class Item(StrictModel):
    """A prompt and one or more responses to it. Rewards that compare responses see those of one item together."""

    id: Text | None = None
    """Returned with the scores."""
    prompt: Prompt = ""
    responses: list[ItemResponse] = Field(min_length=1, max_length=MAX_RESPONSES)
    ground_truth: Anything = None
    data_source: Text = ""
    """Matched by the rewards' `when`."""
    extra_info: Object = {}
    """Further fields that rewards need."""
    tools: Annotated[list[Any], AfterValidator(_not_too_many_values)] | None = None

    def row(self) -> dict[str, Any]:
        """The item as a row of `plaudit score`."""
        responses = [Response(text=one) if isinstance(one, str) else one for one in self.responses]
        prompt = self.prompt if isinstance(self.prompt, str) else [one.model_dump(exclude_unset=True) for one in self.prompt]
        return {
            "id": self.id,
            "prompt": prompt,
            "responses": [one.text for one in responses],
            "tokens": [one.tokens for one in responses],
            "ground_truth": self.ground_truth,
            "data_source": self.data_source,
            "extra_info": self.extra_info,
            "tools": self.tools,
        }


class ScoreRequest(StrictModel):
    items: list[Item]
    details: bool = False
    """Also return each reward's own score, the string it scored, and its trace (a judge's prompt and answer)."""

    @classmethod
    def validate_items(cls, value: Any, max_problems: int) -> "ScoreRequest":
        """The request, validated one item after the other: a call of pydantic holds the interpreter lock. Raises InvalidFields with
        about `max_problems` problems, whatever else is wrong."""
        items = value.get("items") if isinstance(value, dict) else None
        problems: list[ErrorDetails] = []
        request, valid = None, []
        try:
            request = cls.model_validate({**value, "items": []} if isinstance(items, list) else value)
        except ValidationError as error:
            problems += _problems(error)
        for i, item in enumerate(items if isinstance(items, list) else []):
            try:
                valid.append(Item.model_validate(item))
            except ValidationError as error:
                problems += _problems(error, "items", i)
                if len(problems) >= max_problems:
                    break
        if request is None or problems:
            raise InvalidFields(problems)
        return request.model_copy(update={"items": valid})


class InvalidFields(Exception):
    """Problems as pydantic describes them."""

    def __init__(self, problems: list[ErrorDetails]):
        super().__init__(f"{len(problems)} problems")
        self.problems = problems


def _problems(error: ValidationError, *where: str | int) -> list[ErrorDetails]:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [{**one, "loc": (*where, *one["loc"])} for one in found]


# Responses -----------------------------------------------------------------------------------------------------------


class FailureInfo(Documented):
    reward: str | None
    """The reward that failed; null if none did (no reward applies, or the request timed out)."""
    cause: str
    """One word: timeout, exception, died, http, unparsable, no_ground_truth, …"""
    message: str


class RewardScore(Documented):
    """The score of one reward; with neither value nor failure, the reward was not called."""

    value: float | None
    parts: dict[str, float]
    malformed: bool
    failure: FailureInfo | None
    view: str | None
    """The string that was scored."""
    trace: dict[str, Any]


class ScoredResponse(Documented):
    reward: float | None
    """The total, without normalisation; null if a reward it needs has failed: never a hidden zero."""
    parts: dict[str, float]
    malformed: bool
    """The response could not be parsed: the policy's fault, so it still has a value."""
    failure: FailureInfo | None
    """Why there is no total; or a failure that does not affect the total."""
    by_reward: dict[str, RewardScore] | None
    """Only with `details`."""


class ScoredItem(Documented):
    index: int
    """Index of the item in the request, from 0."""
    id: str | None
    responses: list[ScoredResponse]


class ScoreResponse(Documented):
    items: list[ScoredItem]
    """In the order of the request."""


class Health(Documented):
    state: Literal["starting", "ready", "stopping"]
    version: str


class RewardInfo(Documented):
    name: str
    kind: str
    weight: float
    compares_responses: bool
    """A response's score depends on the other responses of its item."""
    settings: dict[str, Any]
    """Settings in the recipe, except how a model is reached."""


class Rewards(Documented):
    rewards: list[RewardInfo]


class Problem(Documented):
    where: str
    """For example items.3.responses.0."""
    message: str


class Error(Documented):
    cause: str
    """One word, machine-readable."""
    message: str
    problems: list[Problem]
    """The invalid fields of the request."""


# JSON ----------------------------------------------------------------------------------------------------------------


DECODED_AT_ONCE, PAIRS_AT_ONCE = 2**20, 2**12
"""Bytes of a body, and fields of an object."""


def parse(body: bytes, *, by_value: bool = False) -> Any:
    """Parse strict JSON. Raises ValueError with the problem. `by_value`: in Python, one value after the other, because json's own
    scanner, which is ten times faster, holds the interpreter lock until it has parsed all of them."""
    try:
        value = _VALUE_BY_VALUE.decode(_decode(body)) if by_value else _STRICT.decode(_decode(body))
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _decode(body: bytes) -> str:
    decoder = codecs.getincrementaldecoder(json.detect_encoding(body))("surrogatepass")
    pieces = [decoder.decode(body[start : start + DECODED_AT_ONCE]) for start in range(0, len(body), DECODED_AT_ONCE)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _object_by_pieces(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`dict(pairs)`, freeing the pairs."""
    made: dict[str, Any] = {}
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        made.update(pairs[start : start + PAIRS_AT_ONCE])
    while pairs:
        del pairs[-PAIRS_AT_ONCE:]
    return made


_STRICT = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite_float)
_VALUE_BY_VALUE = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite_float, object_pairs_hook=_object_by_pieces)
_VALUE_BY_VALUE.scan_once = json.scanner.py_make_scanner(_VALUE_BY_VALUE)  # pyright: ignore[reportAttributeAccessIssue]


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dump(value: Any) -> bytes:
    """JSON in ASCII: a reward's texts may contain unpaired surrogates, which cannot be encoded otherwise."""
    return _ENCODER.encode(value).encode()


def dump_by_value(value: Any) -> list[bytes]:
    """The same in parts, one value after the other."""
    return [text.encode() for text in _ENCODER.iterencode(value)]


def to_jsonable(value: Any) -> Any:
    """A trace as JSON values; anything else becomes a string."""
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_jsonable(inner) for inner in value]
    fits = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if fits else str(value)


def finite_only(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts that JSON can represent. (A reward of weight 0 may be infinite without affecting the total.)"""
    return {name: value for name, value in parts.items() if math.isfinite(value)}
