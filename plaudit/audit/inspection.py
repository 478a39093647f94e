"""The audit, from saved rollouts to a verdict.

The rewards score five sets: the rollouts; some groups again, in the same order and in another; adversarial probes; and right
responses in other formats. Nothing is cached, a failing reward does not stop the audit, and values are raw: `normalise` would make
them relative to the rest of the group.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from plaudit import __version__
from plaudit.audit.attacks import ORIGINAL, attack, choose_targets, measure_formats, measure_probes, reformat
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
    """The result of an audit."""

    title: str
    """The audited recipe."""
    files: tuple[str, ...]
    settings: AuditSettings
    rewards: list[list[str]]
    """For each reward: its name, and a digest of everything its scores and their use depend on."""
    numbers: dict[str, Any]
    checks: list[Check]

    @property
    def failed(self) -> list[str]:
        return [check.name for check in self.checks if check.state == "fail"]

    @property
    def not_measured(self) -> list[str]:
        return [check.name for check in self.checks if check.state == "not measured"]

    @property
    def passed(self) -> bool:
        """No check failed, and at least one passed."""
        return not self.failed and any(check.state == "pass" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "plaudit": __version__,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": self.title,
            "rollouts": list(self.files),
            "passed": self.passed,
            "failed": self.failed,
            "not_measured": self.not_measured,
            "rewards": self.rewards,
            "checks": [check.as_dict() for check in self.checks],
            "settings": self.settings.model_dump(mode="json"),
            "numbers": self.numbers,
        }


def inspect(
    title: str, files: Sequence[str], rewards: Sequence[RewardSettings], rollouts: Sequence[Rollout], settings: AuditSettings
) -> Report:
    """Score, measure, and check against the settings."""
    comparative = [reward.label for reward in rewards if isinstance(reward, Reward) and not reward.scores_alone]
    with RewardRunner([_raw(reward) for reward in rewards], tolerant=True) as runner:
        panel = Panel(runner, comparative=comparative, tokens_per_character=tokens_per_character(rollouts))
        numbers = _measure(panel, rollouts, settings, compares=bool(comparative))
    return Report(title, tuple(files), settings, digest_rewards(rewards), numbers, check_all(numbers, settings))


def _raw(reward: RewardSettings) -> RewardSettings:
    changed: dict[str, Any] = {"normalise": "none"}
    if reward.on_failure == "stop":
        changed["on_failure"] = "drop"
    if isinstance(reward, Rule):  # calls are cheap, and this way every failure reports its own cause
        changed["limits"] = reward.limits.model_copy(update={"give_up_after": None})
    return reward.model_copy(update=changed)


def _measure(panel: Panel, rollouts: Sequence[Rollout], settings: AuditSettings, *, compares: bool) -> dict[str, Any]:
    print_line(f"scoring {sum(map(len, rollouts)):,} responses to {len(rollouts):,} prompts")
    scored = panel.score([(rollout.prompt, rollout.responses, rollout.tokens) for rollout in rollouts])
    responses = flatten(rollouts, scored)
    _require_some_value(responses)
    cost = _cost(panel)

    targets = choose_targets(rollouts, responses, settings)
    probes = attack(panel, targets, settings, compares=compares)
    formats = reformat(panel, targets, compares=compares)
    values = [r.value for r in responses if r.value is not None]
    # Including the references: if no saved response is right, they show what a right one gets.
    scale = measure_scale(values + [s.value for _, s in probes.select("reference") if s.value is not None], settings)
    threshold, span = scale["threshold"], scale["high"] - scale["low"]
    right = formats.values(ORIGINAL)
    again, order = _score_again(panel, rollouts, scored, settings, span)
    return {
        "responses": len(responses),
        "groups": len(rollouts),
        "not_scored": sum(not r.causes and r.value is None for r in responses),
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
        "probes": measure_probes(probes, right, scale, settings),
        "cost": cost,
    }


def _require_some_value(responses: Sequence[Response]) -> None:
    if not any(score.applies for r in responses for score in r.by_reward.values()):
        raise DataError(
            "no reward applies to any of these rows: their `data_source` matches no `when` of the recipe. verl and TRL dumps have "
            "none; set one with --data-source"
        )


def _score_again(
    panel: Panel, rollouts: Sequence[Rollout], scored: Sequence[ScoredGroup], settings: AuditSettings, span: float
) -> tuple[Any, Any]:  # fmt: skip
    """Score some groups a second time, and those of two or more also in another order."""
    rng = random.Random(settings.seed + 2)
    chosen = sorted(rng.sample(range(len(rollouts)), min(settings.rescore_groups, len(rollouts))))
    same = [list(range(len(rollouts[g]))) for g in chosen]
    again = measure_again([scored[g] for g in chosen], _score(panel, rollouts, chosen, same), same, span) if chosen else None
    several = [g for g in chosen if len(rollouts[g]) > 1]
    orders = [_another_order(len(rollouts[g]), rng) for g in several]
    order = measure_again([scored[g] for g in several], _score(panel, rollouts, several, orders), orders, span) if several else None
    return again, order


def _score(panel: Panel, rollouts: Sequence[Rollout], chosen: Sequence[int], orders: Sequence[Sequence[int]]) -> list[ScoredGroup]:
    return panel.score([
        (rollouts[g].prompt, [rollouts[g].responses[i] for i in order], [rollouts[g].tokens[i] for i in order])
        for g, order in zip(chosen, orders, strict=True)
    ])  # fmt: skip


def _another_order(count: int, rng: random.Random) -> list[int]:
    order = list(range(count))
    while order == sorted(order):
        rng.shuffle(order)
    return order


def _unit(rollouts: Sequence[Rollout]) -> str:
    return "tokens" if all(count is not None for rollout in rollouts for count in rollout.tokens) else "characters"


def _cost(panel: Panel) -> dict[str, Any]:
    """Cost of the first pass, per 1,000 responses: an estimate for training."""
    cost = panel.cost
    per = 1000 / max(cost.responses, 1)
    return {
        "responses": cost.responses,
        "seconds": cost.seconds,
        "seconds_per_1000": cost.seconds * per,
        "usage_per_1000": {name: amount * per for name, amount in cost.usage.items()},
    }
