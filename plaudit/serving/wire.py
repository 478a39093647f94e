"""What goes over the wire: requests and answers, as the API's description has them.

The description is exact: what it allows is accepted, and nothing else is. So there is one way to say each thing, types are not
converted, and no field depends on another one. (What JSON Schema cannot say, such as half a character, is refused besides.)
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

DEEPEST = 64
"""Levels of lists and objects in a body. Deeper ones are nobody's data, and Python's own limits are not far."""
MOST_RESPONSES = 1024
MOST_TOKENS = 2**31 - 1


class Told(BaseModel):
    """The texts under its fields are part of the API's description."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Closed(Told):
    model_config = ConfigDict(extra="forbid", strict=True)


class Free(Told):
    model_config = ConfigDict(extra="allow", strict=True)


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise PydanticCustomError("half", "Input has half a character: {half} lacks its other half", {"half": half}) from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]

# What is asked -------------------------------------------------------------------------------------------------------


class TextPart(Free):
    text: Text


class Message(Free):
    """Whatever else a chat template reads (`tool_calls`, `name`) may stand in it too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None


def _whole(value: Any) -> Any:
    """3.0 is an integer in JSON, whatever Python says."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Response(Closed):
    text: Text
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS), BeforeValidator(_whole)] | None = None
    """How many it has, the end token included: for rewards that count them."""


def _either(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return {list: "<list>", dict: "<object>", Response: "<object>"}.get(type(value))


Prompt = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Message], Tag("<list>"), Field(min_length=1)],
    Discriminator(_either, custom_error_type="prompt", custom_error_message="Input should be text, or a list of messages"),
]
OneResponse = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Response, Tag("<object>")],
    Discriminator(_either, custom_error_type="response", custom_error_message="Input should be text, or an object with `text`"),
]


class Item(Closed):
    """A prompt and one or more responses to it. Rewards that compare responses see those of one item together."""

    id: Text | None = None
    """Comes back with the scores."""
    prompt: Prompt = ""
    responses: list[OneResponse] = Field(min_length=1, max_length=MOST_RESPONSES)
    ground_truth: Any = None
    data_source: Text = ""
    """What `when` of rewards looks at."""
    extra_info: dict[str, Any] = {}
    """Other fields that rewards need."""
    tools: list[Any] | None = None

    def row(self) -> dict[str, Any]:
        """As `plaudit score` reads it."""
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


class ScoreRequest(Closed):
    items: list[Item]
    details: bool = False
    """Also what each reward says by itself, the string it scored, and its trace (a judge's prompt and answer)."""


# What is answered ----------------------------------------------------------------------------------------------------


class WhyNot(Told):
    reward: str | None
    """Whose failure it is; null if it is no reward's (no reward applies, or the time was up)."""
    cause: str
    """One word: timeout, exception, died, http, unparsable, no_ground_truth, …"""
    message: str


class RewardScore(Told):
    """What one reward says; neither value nor failure: it was not asked."""

    value: float | None
    parts: dict[str, float]
    malformed: bool
    failure: WhyNot | None
    view: str | None
    """The string that was scored."""
    trace: dict[str, Any]


class ScoredResponse(Told):
    reward: float | None
    """The total, nothing normalised; null if a reward that it needs has failed: never a hidden zero."""
    parts: dict[str, float]
    malformed: bool
    """The policy's fault: the answer could not be read. It has a value all the same."""
    failure: WhyNot | None
    """Why there is no total; or what failed besides, though the total does not need it."""
    by_reward: dict[str, RewardScore] | None
    """With `details`."""


class ScoredItem(Told):
    index: int
    """Which item of the request, from 0."""
    id: str | None
    responses: list[ScoredResponse]


class ScoreAnswer(Told):
    items: list[ScoredItem]
    """In the order of the request."""


class Health(Told):
    state: Literal["starting", "ready", "stopping"]
    version: str


class RewardAbout(Told):
    name: str
    kind: str
    weight: float
    compares_responses: bool
    """A response's score depends on the others of its item."""
    settings: dict[str, Any]
    """What the recipe sets, but for how a model is reached."""


class Rewards(Told):
    rewards: list[RewardAbout]


class Problem(Told):
    where: str
    """Such as items.3.responses.0."""
    message: str


class Error(Told):
    cause: str
    """One word, for programs."""
    message: str
    problems: list[Problem]
    """What is wrong with the request, place by place."""


# JSON ----------------------------------------------------------------------------------------------------------------


def parse(body: bytes) -> Any:
    """Strict JSON. Raises ValueError with what is wrong with it."""
    try:
        value = json.loads(body, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def dump(value: Any) -> bytes:
    """In ASCII: what rewards say may hold half a character, which has no other encoding."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def plain(value: Any) -> Any:
    """A trace as JSON, whatever a reward has put there."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    fits = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if fits else str(value)


def finite(parts: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers. (A reward of weight 0 may come to infinity: nobody needs it.)"""
    return {name: value for name, value in parts.items() if math.isfinite(value)}
