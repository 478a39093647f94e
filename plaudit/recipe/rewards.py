"""Rewards: what every one of them has, whatever its kind. What a kind adds stands in its file in `plaudit/rewards/`."""

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)
from pydantic_core import PydanticCustomError

from plaudit import plugins
from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.section import Fraction, Section, one_or_more

if TYPE_CHECKING:
    from plaudit.types import Prompt


class View(Section):
    """What a reward sees of a response. The scored string is kept with the sample."""

    think: Literal["keep", "strip", "strict"] = "keep"
    """Thoughts (`<think>…</think>`): seen as they are; taken off; or taken off and required to be there and well-formed."""
    longcot_config: str | None = None
    """A longcot_config.json, whose delimiters say what is the answer, instead of `think`."""
    strict: bool = False
    """With longcot_config: where a delimiter is missing, the reward sees `[NULL]`, and the response is malformed."""
    extract: Literal["none", "line", "codeblock", "oneline", "boxed", "tag"] = "none"
    """What of the answer is scored: all; the last line; the one fenced block at its end; all, if it is one line; what the last
    \\boxed{} holds; what the last <tag> holds."""
    tag: str | None = None
    """The tag's name, for extract: tag."""

    @model_validator(mode="after")
    def _fits_together(self) -> "View":
        if self.longcot_config is not None and self.think != "keep":
            raise ValueError("give think or longcot_config, not both: each says where the thoughts end")
        if self.strict and self.longcot_config is None:
            raise ValueError("strict belongs to longcot_config; for <think> tags write think: strict")
        if (self.extract == "tag") != (self.tag is not None):
            raise ValueError("extract: tag needs the tag's name (tag: answer), and nothing else does")
        return self


class Limits(Section):
    """How hard a reward is pressed, and when it is given up. All of it counts in calls: a call scores the samples of one group."""

    at_once: PositiveInt | None = None
    """Calls under way at the same time."""
    per_s: PositiveFloat | None = None
    """Calls begun in a second."""
    timeout_s: PositiveFloat | None = None
    """The longest a call may take. Kinds that ask others have limits of their own, for each sample."""
    retries: NonNegativeInt = 0
    """How often samples that failed are asked for again."""
    backoff_s: NonNegativeFloat = 0.5
    """The wait before the first retry; it doubles with each further one."""
    give_up_after: PositiveInt | None = 10
    """After so many calls in a row in which every sample failed, calls fail at once, until pause_s have passed; null for never."""
    pause_s: NonNegativeFloat = 30.0
    """How long a reward that was given up is left alone before one call tries it again."""


class Gate(Section):
    reward: str
    """The name of a reward further up in the list."""
    above: float = 0.0
    """What its value must exceed."""


def _gate(given: Any) -> Any:
    return {"reward": given} if isinstance(given, str) else given


class RewardSettings(Section):
    """What every reward has. Its kind adds its own settings (`plaudit/rewards/`)."""

    kind: str
    """Which reward: the name of its file in plaudit/rewards."""
    name: str | None = None
    """What it is called in metrics and samples; default: its kind."""
    when: dict[str, Annotated[tuple[str, ...], BeforeValidator(one_or_more)]] = {}  # noqa: RUF012 (pydantic copies it)
    """Only rows whose fields match, all of them: {data_source: "gsm8k*"}, {extra_info.lang: [de, fr]}. Case does not matter."""
    view: View = View()
    """What it sees of a response."""
    weight: float = 1.0
    """Its share. 0: measured, not trained on."""
    combine: Literal["add", "multiply", "min", "max"] = "add"
    """How weight · value joins what the rewards before it came to. The first one that has a value begins."""
    scale: float = 1.0
    """Its value is multiplied by this. What `malformed` and `on_failure` state is not."""
    clip: tuple[float | None, float | None] | None = None
    """Least and greatest value, after scale; null for no bound."""
    normalise: Literal["none", "group", "running"] = "none"
    """Value less mean, over standard deviation: of the group (on every reward: GDPO), or of all values so far."""
    gate: Annotated[Gate | None, BeforeValidator(_gate)] = None
    """Asked only for samples to which another reward gives more than 0 ({reward: math, above: 0.5}: than 0.5)."""
    malformed: float | None = None
    """Value of an answer that cannot be read (the policy's fault); default: what the kind gives, 0 without an extract."""
    on_failure: Literal["drop", "stop"] | float = "drop"
    """When the reward itself fails (never the policy's fault): drop the sample from training, stop the run, or give this value."""
    max_failure_rate: Fraction = 0.1
    """The run stops, with the cause, when a larger share of a step's samples fails."""
    limits: Limits = Limits()
    """Concurrency, rate, retries, and when it is given up."""
    cache: bool | None = None
    """Keep scores, so that a run that was killed does not ask for them again; default: for kinds that are slow or cost money."""

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def inner(self) -> "list[RewardSettings]":
        """Rewards that it is made of."""
        return []

    @property
    def files(self) -> list[Path]:
        """What else its scores depend on: a run belongs to their content."""
        own = [] if self.view.longcot_config is None else [Path(self.view.longcot_config).expanduser()]
        return own + [file for reward in self.inner for file in reward.files]

    @property
    def own_files(self) -> list[Path]:
        """Files of plaudit's that they depend on too: they count for what is known already, not for which run it is."""
        return [file for reward in self.inner for file in reward.own_files]

    @property
    def models(self) -> list[str]:
        """Folders of models (or names on the hub) on which they depend as well."""
        return [path for reward in self.inner for path in reward.models]

    def applies_to(self, prompt: "Prompt") -> bool:
        """Whether the prompt's fields match `when`."""
        return all(
            any(fnmatch.fnmatchcase(field, pattern.casefold()) for pattern in patterns)
            for name, patterns in self.when.items()
            for field in [_field(prompt, name).strip().casefold()]
        )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "RewardSettings":
        low, high = self.clip or (None, None)
        if low is not None and high is not None and low > high:
            raise ValueError(f"clip: {low:g} is greater than {high:g}")
        return self


def _field(prompt: "Prompt", name: str) -> str:
    """A row's field as text: `data_source`, `ground_truth`, or dotted inside extra_info; what is absent is empty."""
    first, *rest = name.removeprefix("reward_model.").split(".")
    own = {"id": prompt.id, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    value: Any = {"extra_info": prompt.extra_info, **prompt.extra_info, **own}.get(first)
    for part in rest:
        value = value.get(part) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _of_its_kind(given: Any) -> Any:
    """An entry of `rewards:` as the class its kind names."""
    if not isinstance(given, dict):
        return given
    known, kind = plugins.kinds("rewards"), given.get("kind")
    if kind not in known:
        # pydantic's own words for this, so that a mistake in a list of sections is told like any other.
        tags = ", ".join(f"'{name}'" for name in known)
        if kind is None:
            raise PydanticCustomError("union_tag_not_found", "no kind", {"discriminator": "'kind'"})
        raise PydanticCustomError(
            "union_tag_invalid", "unknown kind", {"discriminator": "'kind'", "tag": str(kind), "expected_tags": tags}
        )
    return plugins.kind("rewards", kind).model_validate(given)


def _names_of_their_own(rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
    if not rewards:
        raise ValueError("has no reward, so there is nothing to learn from")
    labels = [reward.label for reward in rewards]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"two of them are called {twice}; give each a name of its own")
    if not any(reward.weight for reward in rewards):
        raise ValueError("all of them have weight 0, so there is nothing to learn from")
    for i, reward in enumerate(rewards):
        if reward.gate is not None and reward.gate.reward not in labels[:i]:
            raise ValueError(f"the gate of {reward.label} should name a reward above it, not {reward.gate.reward}")
    return rewards


OneReward = Annotated[SerializeAsAny[RewardSettings], BeforeValidator(_of_its_kind)]
"""A reward of any kind."""
Rewards = Annotated[tuple[OneReward, ...], AfterValidator(_names_of_their_own)]
"""A list of them, as under `rewards:`."""


class ScoreRecipe(Section):
    """Rewards alone, to score or audit saved responses with."""

    stage: Literal["score"] = "score"
    """Which verbs this recipe is for: score, audit and serve."""
    rewards: Rewards
    """What responses are paid for: a list, each with a kind."""
    audit: AuditSettings = AuditSettings()
    """What an audit must show."""
