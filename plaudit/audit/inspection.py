"""The audit, from saved rollouts to a verdict.

The rewards are asked five times: about the rollouts; about some groups again, in the same order and in another one; about
hostile responses; and about right responses in other formats. Nothing is cached, a failing reward stops nothing, and values are
the raw ones: `normalise` would make them relative to whatever else is in the group.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from plaudit import __version__
from plaudit.audit.attacks import AS_IT_IS, attack, choose_targets, measure_formats, measure_probes, reformat
from plaudit.audit.certificate import digest_rewards
from plaudit.audit.checks import Check, check_all
from plaudit.audit.dumps import Rollout
from plaudit.audit.measures import (
    measure_again,
    measure_agreement,
    measure_failures,
    measure_length,
    measure_rewards,
    measure_saved,
    measure_scale,
    measure_signal,
)
from plaudit.audit.responses import Panel, Response, flatten, tokens_per_character
from plaudit.errors import DataError
from plaudit.recipe import RewardSettings
from plaudit.recipe.audit import AuditSettings
from plaudit.report.progress import print_line
from plaudit.rewards.reward import Reward, Rule
from plaudit.rewards.runner import RewardRunner
from plaudit.types import ScoredGroup


@dataclass(frozen=True)
class Report:
    """Everything an audit found."""

    title: str
    """The recipe it is of."""
    files: tuple[str, ...]
    settings: AuditSettings
    rewards: list[list[str]]
    """Of each reward: its name, and a digest of what its scores and their use depend on."""
    numbers: dict[str, Any]
    checks: list[Check]

    @property
    def failed(self) -> list[str]:
        return [check.name for check in self.checks if check.state == "fail"]

    @property
    def passed(self) -> bool:
        """No check failed, and some check was made."""
        return not self.failed and any(check.state == "pass" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "plaudit": __version__,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": self.title,
            "rollouts": list(self.files),
            "passed": self.passed,
            "failed": self.failed,
            "rewards": self.rewards,
            "checks": [check.as_dict() for check in self.checks],
            "settings": self.settings.model_dump(mode="json"),
            "numbers": self.numbers,
        }


def inspect(
    title: str, files: Sequence[str], rewards: Sequence[RewardSettings], rollouts: Sequence[Rollout], settings: AuditSettings
) -> Report:
    """Ask the rewards, measure, and hold it against the settings."""
    compare = [reward.label for reward in rewards if isinstance(reward, Reward) and not reward.scores_alone]
    with RewardRunner([_raw(reward) for reward in rewards], tolerant=True) as runner:
        panel = Panel(runner, compare=compare, tokens_per_character=tokens_per_character(rollouts))
        numbers = _measure(panel, rollouts, settings, compares=bool(compare))
    return Report(title, tuple(files), settings, digest_rewards(rewards), numbers, check_all(numbers, settings))


def _raw(reward: RewardSettings) -> RewardSettings:
    changed: dict[str, Any] = {"normalise": "none"}
    if reward.on_failure == "stop":
        changed["on_failure"] = "drop"
    if isinstance(reward, Rule):  # it costs nothing to ask on, and every failure then tells its own cause
        changed["limits"] = reward.limits.model_copy(update={"give_up_after": None})
    return reward.model_copy(update=changed)


def _measure(panel: Panel, rollouts: Sequence[Rollout], settings: AuditSettings, *, compares: bool) -> dict[str, Any]:
    print_line(f"scoring {sum(map(len, rollouts)):,} responses to {len(rollouts):,} prompts")
    scored = panel.score([(rollout.prompt, rollout.responses, rollout.tokens) for rollout in rollouts])
    responses = flatten(rollouts, scored)
    _require_some_value(responses)
    cost = _cost(panel)

    targets = choose_targets(rollouts, responses, settings)
    paid = attack(panel, targets, settings, compares=compares)
    formats = reformat(panel, targets, compares=compares)
    values = [r.value for r in responses if r.value is not None]
    # The references too: where no saved response is right, they show what a right one gets.
    scale = measure_scale(values + [s.value for _, s in paid.of("reference") if s.value is not None], settings)
    threshold, span = scale["threshold"], scale["high"] - scale["low"]
    right = formats.values(AS_IT_IS)
    again, order = _ask_again(panel, rollouts, scored, settings, span)
    return {
        "responses": len(responses),
        "groups": len(rollouts),
        "not_asked": sum(not r.causes and r.value is None for r in responses),
        "mean_reward": sum(values) / len(values) if values else None,
        "scale": scale,
        "agreement": measure_agreement(responses, threshold, settings),
        "length": measure_length(responses, _unit(rollouts)),
        "formats": measure_formats(formats, threshold),
        "again": again,
        "order": order,
        "signal": measure_signal(responses),
        "failures": measure_failures(responses),
        "rewards": measure_rewards(responses),
        "saved": measure_saved(responses, span),
        "probes": measure_probes(paid, right, scale, settings),
        "cost": cost,
    }


def _require_some_value(responses: Sequence[Response]) -> None:
    if not any(score.asked for r in responses for score in r.by_reward.values()):
        raise DataError(
            "no reward applies to any of these rows: their `data_source` matches no `when` of the recipe. Dumps of verl and TRL "
            "have none; give them one with --data-source"
        )


def _ask_again(
    panel: Panel, rollouts: Sequence[Rollout], scored: Sequence[ScoredGroup], settings: AuditSettings, span: float
) -> tuple[Any, Any]:  # fmt: skip
    """Some groups a second time, and those of two or more in another order."""
    draw = random.Random(settings.seed + 2)
    chosen = sorted(draw.sample(range(len(rollouts)), min(settings.rescore_groups, len(rollouts))))
    same = [list(range(len(rollouts[g]))) for g in chosen]
    again = measure_again([scored[g] for g in chosen], _ask(panel, rollouts, chosen, same), same, span) if chosen else None
    several = [g for g in chosen if len(rollouts[g]) > 1]
    orders = [_another_order(len(rollouts[g]), draw) for g in several]
    order = measure_again([scored[g] for g in several], _ask(panel, rollouts, several, orders), orders, span) if several else None
    return again, order


def _ask(panel: Panel, rollouts: Sequence[Rollout], chosen: Sequence[int], orders: Sequence[Sequence[int]]) -> list[ScoredGroup]:
    return panel.score([
        (rollouts[g].prompt, [rollouts[g].responses[i] for i in order], [rollouts[g].tokens[i] for i in order])
        for g, order in zip(chosen, orders, strict=True)
    ])  # fmt: skip


def _another_order(count: int, draw: random.Random) -> list[int]:
    order = list(range(count))
    while order == sorted(order):
        draw.shuffle(order)
    return order


def _unit(rollouts: Sequence[Rollout]) -> str:
    return "tokens" if all(count is not None for rollout in rollouts for count in rollout.tokens) else "characters"


def _cost(panel: Panel) -> dict[str, Any]:
    """Of the first pass, per 1,000 responses: what a step of training will pay."""
    asked = panel.asked
    per = 1000 / max(asked.responses, 1)
    return {
        "responses": asked.responses,
        "seconds": asked.seconds,
        "seconds_per_1000": asked.seconds * per,
        "usage_per_1000": {name: amount * per for name, amount in asked.usage.items()},
    }
