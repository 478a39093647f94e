"""Request and response schemas of the API, and strict JSON.

The published schema is exact: a request is accepted if and only if it validates. So there is one form for each thing, types are not
converted, and no field depends on another. (JSON Schema cannot express a few errors, such as unpaired surrogates.)
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a body: more than real data needs, well below Python's recursion limit."""
MAX_RESPONSES = 1024
MAX_TEXT = 2**20
"""Maximum length of a response in characters: even a fast rule takes tens of milliseconds for one."""
MAX_TOKENS = 2**31 - 1


class Documented(BaseModel):
    """Attribute docstrings become field descriptions in the OpenAPI schema."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class StrictModel(Documented):
    model_config = ConfigDict(extra="forbid", strict=True)


class OpenModel(Documented):
    model_config = ConfigDict(extra="allow", strict=True)


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
    content: Text | list[TextPart] | None


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
    Annotated[Text, Tag("<text>")] | Annotated[list[Message], Tag("<list>"), Field(min_length=1)],
    Discriminator(_union_tag, custom_error_type="prompt", custom_error_message="Input should be text, or a list of messages"),
]
ItemResponse = Annotated[
    Annotated[ResponseText, Tag("<text>")] | Annotated[Response, Tag("<object>")],
    Discriminator(_union_tag, custom_error_type="response", custom_error_message="Input should be text, or an object with `text`"),
]


class Item(StrictModel):
    """A prompt and one or more responses to it. Rewards that compare responses see those of one item together."""

    id: Text | None = None
    """Returned with the scores."""
    prompt: Prompt = ""
    responses: list[ItemResponse] = Field(min_length=1, max_length=MAX_RESPONSES)
    ground_truth: Any = None
    data_source: Text = ""
    """Matched by the rewards' `when`."""
    extra_info: dict[str, Any] = {}
    """Further fields that rewards need."""
    tools: list[Any] | None = None

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


def parse(body: bytes) -> Any:
    """Parse strict JSON. Raises ValueError with the problem."""
    try:
        value = json.loads(body, parse_constant=_reject_constant, parse_float=_finite_float)
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


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def dump(value: Any) -> bytes:
    """JSON in ASCII: a reward's texts may contain unpaired surrogates, which cannot be encoded otherwise."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


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
