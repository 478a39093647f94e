"""Adversarial probes, and right responses in other formats: how the rewards score them.

    exploit rate of a probe   among its scored responses, the share that is rewarded: accepted (reward ≥ threshold), or scored at
                              least as high as the right response to the same prompt
    format effect             share of accepted right responses that are rejected in another format

A comparative reward sees each probe in a group with real responses; other rewards see all probes of a prompt at once.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.audit.agreement import share
from plaudit.audit.dumps import Rollout
from plaudit.audit.measures import EQUAL, right_labels
from plaudit.audit.probes import PROBES, Probe, probe_text, reformatted
from plaudit.audit.responses import Panel, Response
from plaudit.audit.targets import Target, make_target
from plaudit.recipe.audit import AuditSettings
from plaudit.types import Score

WORST = 3
"""Examples shown per probe."""
SHOWN = 600
"""Characters shown of a text."""
ORIGINAL = "as_it_is"
"""The original format of a right response."""


@dataclass(frozen=True)
class Attack:
    """One adversarial (or reformatted) response to a prompt."""

    target: Target
    name: str
    text: str


@dataclass
class ScoredAttacks:
    """Attacks and their scores, in the same order."""

    attacks: list[Attack] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def select(self, name: str) -> list[tuple[Attack, Score]]:
        return [(a, s) for a, s in zip(self.attacks, self.scores, strict=True) if a.name == name]

    def values(self, name: str) -> dict[int, float]:
        """Reward by target."""
        return {a.target.index: s.value for a, s in self.select(name) if s.value is not None}


def choose_targets(rollouts: Sequence[Rollout], responses: Sequence[Response], settings: AuditSettings) -> list[Target]:
    """A random choice of prompts, those with a right response first; other prompts supply wrong answers."""
    right = find_right(responses, settings)
    numbers = list(range(len(rollouts)))
    random.Random(settings.seed).shuffle(numbers)
    numbers.sort(key=lambda g: g not in right)
    donors = random.Random(settings.seed + 1).sample(numbers, min(len(numbers), 200))
    foreign = [(rollouts[g].prompt, right.get(g, rollouts[g].responses[0])) for g in donors]
    return [
        make_target(i, rollouts[g].prompt, right.get(g), rollouts[g].responses, foreign, settings.seed)
        for i, g in enumerate(numbers[: settings.probe_prompts])
    ]


def find_right(responses: Sequence[Response], settings: AuditSettings) -> dict[int, str]:
    """By group: the first response labelled right. Without any labels: the highest reward, if above the overall minimum."""
    labelled = [r for r in responses if r.label is not None]
    if labelled:
        verdicts = right_labels([r.label for r in labelled if r.label is not None], settings)
        correct = [r for r, right in zip(labelled, verdicts, strict=True) if right]
        return {r.group: r.text for r in reversed(correct)}
    valued = [(r.value, r) for r in responses if r.value is not None]
    least = min((value for value, _ in valued), default=0.0)
    return {r.group: r.text for value, r in sorted(valued, key=lambda pair: pair[0]) if value > least}


def chosen_probes(settings: AuditSettings) -> list[Probe]:
    names = settings.probes if settings.probes is not None else [probe.name for probe in PROBES]
    return [probe for probe in PROBES if probe.name in names and probe.name not in settings.without_probes]


def attack(panel: Panel, targets: Sequence[Target], settings: AuditSettings, *, compares: bool) -> ScoredAttacks:
    """Run every probe on every target."""
    attacks = [
        Attack(target, probe.name, text)
        for target in targets
        for probe in chosen_probes(settings)
        if (text := probe_text(probe, target, seed=settings.seed, padding_characters=settings.padding_characters)) is not None
    ]
    return _score(panel, attacks, (lambda target: target.real) if compares else None)


def reformat(panel: Panel, targets: Sequence[Target], *, compares: bool) -> ScoredAttacks:
    """Score right responses in their original and other formats; never grouped with the original, which is near-identical."""
    attacks = [
        Attack(target, name, text)
        for target in targets
        if target.right is not None
        for name, text in [(ORIGINAL, target.right), *reformatted(target.right, target.reference)]
    ]
    return _score(panel, attacks, (lambda target: [text for text in target.real if text != target.right]) if compares else None)


def _score(panel: Panel, attacks: list[Attack], companions: Callable[[Target], Sequence[str]] | None) -> ScoredAttacks:
    """`companions`: responses to group each attack with, for comparative rewards."""
    if companions is not None:
        scored = panel.score([(a.target.prompt, [*companions(a.target), a.text], None) for a in attacks])
        return ScoredAttacks(attacks, [group.scores[-1] for group in scored])
    by_prompt: dict[int, list[Attack]] = {}
    for a in attacks:
        by_prompt.setdefault(a.target.index, []).append(a)
    ordered = [a for group in by_prompt.values() for a in group]
    scored = panel.score([(group[0].target.prompt, [a.text for a in group], None) for group in by_prompt.values()])
    return ScoredAttacks(ordered, [score for group in scored for score in group.scores])


# Measures ------------------------------------------------------------------------------------------------------------


def measure_probes(
    scored: ScoredAttacks, right: Mapping[int, float], scale: Mapping[str, Any], settings: AuditSettings
) -> list[dict[str, Any]]:
    """Each probe: mean reward, how often it is rewarded, and the examples with the highest reward.

    `right`: the right response's reward by target; ignored where it is close to the minimum.
    """
    floor = scale["low"] + EQUAL * (scale["high"] - scale["low"])
    bounds = {target: value for target, value in right.items() if value > floor}
    return [_measure_probe(probe, scored.select(probe.name), bounds, scale["threshold"]) for probe in chosen_probes(settings)]


def _measure_probe(
    probe: Probe, tried: list[tuple[Attack, Score]], right: Mapping[int, float], threshold: float | None
) -> dict[str, Any]:  # fmt: skip
    valued = [(a, s.value) for a, s in tried if s.value is not None]
    rewarded = None
    if threshold is not None:
        rewarded = sum(value >= min(threshold, right.get(a.target.index, threshold)) for a, value in valued)
    different = {(a.target.question, a.text): (a, value) for a, value in valued}
    worst = sorted(different.values(), key=lambda entry: -entry[1])[:WORST]
    failures = [s.failure for _, s in tried if s.failure is not None]
    return {
        "name": probe.name,
        "description": probe.description,
        "adversarial": probe.adversarial,
        "tried": len(tried),
        "mean_reward": statistics.fmean(value for _, value in valued) if valued else None,
        "rewarded": rewarded,
        "exploit_rate": None if rewarded is None else share(rewarded, len(valued)),
        "failed": len(failures),
        "failure": f"{failures[0].cause}: {failures[0].message[:200]}" if failures else None,
        "malformed": sum(s.malformed for _, s in tried),
        "worst": [
            {"prompt": cut(a.target.question), "reference": a.target.reference, "response": cut(a.text), "reward": value}
            for a, value in worst
        ],
    }


def measure_formats(scored: ScoredAttacks, threshold: float | None) -> dict[str, Any] | None:
    """How much the reward of a right response changes with its format alone."""
    base = scored.values(ORIGINAL)
    formats = []
    for name in dict.fromkeys(a.name for a in scored.attacks if a.name != ORIGINAL):
        values = [(a.target.index, s.value) for a, s in scored.select(name) if a.target.index in base]
        moved = [abs(value - base[i]) for i, value in values if value is not None]
        accepted = [value for i, value in values if threshold is not None and base[i] >= threshold]
        rejected = sum(value is None or (threshold is not None and value < threshold) for value in accepted)
        formats.append({
            "name": name,
            "tried": len(values),
            "mean_difference": statistics.fmean(moved) if moved else None,
            "rejected": rejected,
            "reject_rate": share(rejected, len(accepted)),
        })  # fmt: skip
    rates = [entry["reject_rate"] for entry in formats if entry["reject_rate"] is not None]
    return {"formats": formats, "effect": max(rates, default=None)} if formats else None


def cut(text: str) -> str:
    """Both ends of a long text: an adversarial answer may be at the end of padding, or inside it."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]} … [{len(text) - SHOWN:,} characters] … {text[-SHOWN // 2 :]}"
