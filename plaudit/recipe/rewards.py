"""Settings that every reward has. Each kind adds its own, in its file in `plaudit/rewards/`."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    PrivateAttr,
    SerializeAsAny,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from plaudit import plugins
from plaudit.errors import RecipeError
from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.limits import Limits, ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.recipe.section import Fraction, Section, one_or_more
from plaudit.response_files import LONGCOT, response_file

if TYPE_CHECKING:
    from plaudit.types import Prompt


OF_MODEL = "model"
"""view.longcot_config: the policy's own."""


class View(Section):
    """What a reward sees of a response. The scored string is stored with the sample."""

    think: Literal["keep", "strip", "strict"] = "keep"
    """Thoughts (`<think>…</think>`): kept; stripped; or stripped, and malformed where they are missing or not well-formed."""
    longcot_config: str | None = None
    """A longcot_config.json whose delimiters mark the answer, instead of `think`. model: the one in the policy's folder
    (model.path)."""
    strict: bool = False
    """With longcot_config: where a delimiter is missing, the reward sees `[NULL]` and the response is malformed."""
    extract: Literal["none", "line", "codeblock", "oneline", "boxed", "answer", "tag"] = "none"
    """The part of the answer that is scored: all of it; the last line; the single fenced block at its end; all of it if it is one
    line; the contents of the last \\boxed{}; the final answer as the math rule reads it; the contents of the last <tag>."""
    tag: str | None = None
    """The tag's name, for extract: tag."""
    _policy: str | None = PrivateAttr(default=None)
    """longcot_config: model. That model."""

    @property
    def longcot_file(self) -> Path | None:
        if self.longcot_config != OF_MODEL:
            return None if self.longcot_config is None else Path(self.longcot_config).expanduser()
        if self._policy is None:
            raise RecipeError(
                f"view.longcot_config: {OF_MODEL} is the policy's {LONGCOT}, and there is no policy here: name a file"
            )
        return response_file(self._policy, LONGCOT)

    def of_policy(self, model: str) -> "View":
        """This view of the responses of a policy."""
        if self.longcot_config != OF_MODEL:
            return self
        view = self.model_copy()
        view._policy = model
        return view

    @model_validator(mode="after")
    def _check_combination(self) -> "View":
        if self.longcot_config is not None and self.think != "keep":
            raise ValueError("give think or longcot_config, not both: each defines where the thoughts end")
        if self.strict and self.longcot_config is None:
            raise ValueError("strict belongs to longcot_config; for <think> tags write think: strict")
        if (self.extract == "tag") != (self.tag is not None):
            raise ValueError("extract: tag needs the tag's name (tag: answer), and nothing else does")
        return self


class Gate(Section):
    reward: str
    """The name of a reward further up in the list."""
    above: float = 0.0
    """The value it must exceed."""


def _expand_gate(gate: Any) -> Any:
    return {"reward": gate} if isinstance(gate, str) else gate


OTHERWISE = "otherwise"
Fields = dict[str, Annotated[tuple[str, ...], BeforeValidator(one_or_more)]]
"""A row's fields by name, each with patterns of which one must match."""


def _check_when(when: Any) -> Any:
    if isinstance(when, str) and when != OTHERWISE:
        raise ValueError(f"{when!r:.80} is neither `otherwise` nor fields of a row, such as {{data_source: gsm8k*}}")
    return when


When = Annotated[
    Annotated[Fields, Tag("fields")] | Annotated[Literal["otherwise"], Tag(OTHERWISE)],
    Discriminator(lambda when: OTHERWISE if isinstance(when, str) else "fields"),  # so that only one of them is reported
    BeforeValidator(_check_when),
]


class RewardSettings(Section):
    """Settings of every reward. Its kind adds its own (`plaudit/rewards/`)."""

    kind: str
    """The kind of reward: the name of its file in plaudit/rewards."""
    name: str | None = None
    """Its name in metrics and samples; default: its kind."""
    when: When = {}  # noqa: RUF012 (pydantic copies it)
    """Only rows in which all these fields match: {data_source: "gsm8k*"}, {extra_info.lang: [de, fr]}. Case is ignored. Or
    `otherwise`: only rows that no reward above it with such fields and a weight matches."""
    view: View = View()
    """What it sees of a response."""
    weight: float = 1.0
    """Its weight. 0: measured, not trained on."""
    combine: Literal["add", "multiply", "min", "max"] = "add"
    """How weight · value is combined with the result of the rewards above it. The first one with a value starts."""
    scale: float = 1.0
    """Its value is multiplied by this. The values that `malformed` and `on_failure` state are not."""
    bounds: tuple[float | None, float | None] | None = None
    """Lowest and highest value, after scale; values beyond are clipped. null for no bound."""
    normalise: Literal["none", "group", "running"] = "none"
    """(value − mean) / standard deviation: of the group (on every reward: GDPO), or of all values so far."""
    gate: Annotated[Gate | None, BeforeValidator(_expand_gate)] = None
    """Scores only samples to which another reward gives more than 0 ({reward: math, above: 0.5}: more than 0.5)."""
    malformed: float | None = None
    """Value of an unreadable response (the policy's fault); default: the kind's own, and 0 if there is nothing to extract."""
    on_failure: Literal["drop", "stop"] | float = "drop"
    """When the reward itself fails (not the policy): drop the sample from training, stop the run, or give it this value."""
    max_failure_rate: Fraction = 0.1
    """The run stops and reports the cause when a larger share of a step's samples fails."""
    limits: Limits = Limits()
    """Concurrency, rates, time limits, retries, and when it is given up."""
    cache: bool | None = None
    """Cache scores on disk, so that a resumed run need not compute them again; default: for kinds that are slow or cost money."""

    _matched_above: tuple[Fields, ...] | None = PrivateAttr(None)
    """when: otherwise. The fields of the rewards above it, whose rows it leaves to them; set by the list it is in."""

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def inner(self) -> "list[RewardSettings]":
        """The rewards this one is composed of."""
        return []

    @property
    def files(self) -> list[Path]:
        """Files its scores depend on; their contents are part of a run's identity."""
        own = self.view.longcot_file
        return ([] if own is None else [own]) + [file for reward in self.inner for file in reward.files]

    @property
    def own_files(self) -> list[Path]:
        """plaudit's own files its scores depend on: part of the cache key, not of a run's identity."""
        return [file for reward in self.inner for file in reward.own_files]

    @property
    def models(self) -> list[str]:
        """Model folders (or names on the hub) its scores depend on."""
        return [path for reward in self.inner for path in reward.models]

    def applies_to(self, prompt: "Prompt") -> bool:
        """Whether the prompt's fields match `when`."""
        if not isinstance(self.when, str):
            return _matches(self.when, prompt)
        assert self._matched_above is not None, "when: otherwise has a meaning only in a recipe's list of rewards"
        return not any(_matches(fields, prompt) for fields in self._matched_above)

    @property
    def reads_answers(self) -> bool:
        """Whether it reads an answer from a response, so that equal ones can be counted (majority votes)."""
        return self.view.extract != "none"

    def of_policy(self, model: str) -> Self:
        """This reward for the responses of a policy: `view.longcot_config: model` refers to it."""
        inside = {name: getattr(self, name) for name in type(self).model_fields}
        inside = {name: value for name, value in inside.items() if isinstance(value, RewardSettings | View)}
        placed = {name: value.of_policy(model) for name, value in inside.items()}
        return self.model_copy(update=placed) if any(placed[name] is not inside[name] for name in placed) else self

    def after(self, above: "Sequence[RewardSettings]") -> Self:
        """This reward below these in a list: `when: otherwise` refers to them."""
        if self.when != OTHERWISE:
            return self
        fields = tuple(reward.when for reward in above if reward.when and not isinstance(reward.when, str) and reward.weight)
        if not fields:
            raise ValueError(
                f"{self.label} has `when: otherwise`, so it needs a reward above it with a weight and a `when` of fields; it "
                "applies to the rows that none of those matches"
            )
        placed = self.model_copy()
        placed._matched_above = fields
        return placed

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "RewardSettings":
        low, high = self.bounds or (None, None)
        if low is not None and high is not None and low > high:
            raise ValueError(f"bounds: {low:g} is greater than {high:g}")
        return self


def _matches(fields: Fields, prompt: "Prompt") -> bool:
    return all(
        any(fnmatch.fnmatchcase(field, pattern.casefold()) for pattern in patterns)
        for name, patterns in fields.items()
        for field in [_field(prompt, name).strip().casefold()]
    )


def _field(prompt: "Prompt", name: str) -> str:
    """A row's field as text: `data_source`, `ground_truth`, or a dotted path in extra_info; empty if it is missing."""
    first, *rest = name.removeprefix("reward_model.").split(".")
    own = {"id": prompt.id, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth}
    value: Any = {"extra_info": prompt.extra_info, **prompt.extra_info, **own}.get(first)
    for part in rest:
        value = value.get(part) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _as_kind(given: Any) -> Any:
    """An entry of `rewards:` as the class of its kind."""
    if not isinstance(given, dict):
        return given
    known, kind = plugins.kinds("rewards"), given.get("kind")
    if kind not in known:
        # pydantic's own error types, so that this mistake is reported like any other in a list of sections.
        tags = ", ".join(f"'{name}'" for name in known)
        if kind is None:
            raise PydanticCustomError("union_tag_not_found", "no kind", {"discriminator": "'kind'"})
        raise PydanticCustomError(
            "union_tag_invalid", "unknown kind", {"discriminator": "'kind'", "tag": str(kind), "expected_tags": tags}
        )
    return plugins.kind("rewards", kind).model_validate(given)


def _check_rewards(rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
    if not rewards:
        raise ValueError("is empty: training needs at least one reward")
    labels = [reward.label for reward in rewards]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"two rewards are called {twice}; give each its own name")
    if not any(reward.weight for reward in rewards):
        raise ValueError("every reward has weight 0, so there is nothing to train on")
    for i, reward in enumerate(rewards):
        if reward.gate is not None and reward.gate.reward not in labels[:i]:
            raise ValueError(f"the gate of {reward.label} must name a reward above it, not {reward.gate.reward}")
    _check_shared_limits([named for reward in rewards for named in nested_rewards(reward, reward.label)])
    return tuple(reward.after(rewards[:i]) for i, reward in enumerate(rewards))


def nested_rewards(reward: RewardSettings, name: str) -> Iterator[tuple[str, RewardSettings]]:
    """The reward and the rewards inside it, with their names."""
    yield name, reward
    for field in type(reward).model_fields:
        if isinstance(inner := getattr(reward, field), RewardSettings):
            yield from nested_rewards(inner, f"{name}/{field}")


def _check_shared_limits(rewards: Sequence[tuple[str, RewardSettings]]) -> None:
    """Rewards with the same model share its servers and connections, and so their limits."""
    first: dict[tuple[RewardModel, bool], tuple[str, ModelLimits]] = {}
    for name, reward in rewards:
        model, limits = getattr(reward, "model", None), reward.limits
        if not isinstance(model, RewardModel) or not isinstance(limits, ModelLimits) or not model.is_served:
            continue
        other, shared = first.setdefault((model, bool(getattr(reward, "sampling", None))), (name, limits))
        for setting in limits.shared:
            if getattr(limits, setting) != getattr(shared, setting):
                raise ValueError(
                    f"{other} and {name} use the same model, so they share its connections and must agree in limits.{setting}: "
                    f"{_shown(getattr(shared, setting))} and {_shown(getattr(limits, setting))}"
                )


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:g}"


OneReward = Annotated[SerializeAsAny[RewardSettings], BeforeValidator(_as_kind)]
"""A reward of any kind."""
Rewards = Annotated[tuple[OneReward, ...], AfterValidator(_check_rewards)]
"""The list under `rewards:`."""


class ScoreRecipe(Section):
    """Rewards only: to score, audit or serve."""

    stage: Literal["score"] = "score"
    """The commands this recipe is for: score, audit and serve."""
    rewards: Rewards
    """The rewards: a list, each with a kind."""
    audit: AuditSettings = AuditSettings()
    """What an audit must show to pass."""
