"""Hostile responses put to the rewards, and right ones in other formats: what they are paid.

    exploit rate of a probe   share of its responses that are accepted (reward ≥ threshold), or get at least what the right response
                              to the same prompt gets, among those that have a reward
    format effect             share of accepted right responses that are rejected in another format

A reward that compares a group's responses sees each hostile one beside real ones; others see all of a prompt's at once.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.audit.agreement import share
from plaudit.audit.dumps import Rollout
from plaudit.audit.measures import EQUAL, right_labels
from plaudit.audit.probes import PROBES, Probe, hostile_text, reformatted
from plaudit.audit.responses import Panel, Response
from plaudit.audit.targets import Target, make_target
from plaudit.recipe.audit import AuditSettings
from plaudit.types import Score

WORST = 3
"""Examples that are shown of each probe."""
SHOWN = 600
"""Characters of a text that are shown."""
AS_IT_IS = "as_it_is"
"""The format that a right response came in."""


@dataclass(frozen=True)
class Attack:
    """One hostile (or reformatted) response to a prompt."""

    target: Target
    name: str
    text: str


@dataclass
class Paid:
    """Attacks with what they were paid, in the same order."""

    attacks: list[Attack] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def of(self, name: str) -> list[tuple[Attack, Score]]:
        return [(a, s) for a, s in zip(self.attacks, self.scores, strict=True) if a.name == name]

    def values(self, name: str) -> dict[int, float]:
        """By target: what it was paid."""
        return {a.target.index: s.value for a, s in self.of(name) if s.value is not None}


def choose_targets(rollouts: Sequence[Rollout], responses: Sequence[Response], settings: AuditSettings) -> list[Target]:
    """Some prompts, those with a right response first; others lend them their answers."""
    right = find_right(responses, settings)
    numbers = list(range(len(rollouts)))
    random.Random(settings.seed).shuffle(numbers)
    numbers.sort(key=lambda g: g not in right)
    lenders = random.Random(settings.seed + 1).sample(numbers, min(len(numbers), 200))
    others = [(rollouts[g].prompt, right.get(g, rollouts[g].responses[0])) for g in lenders]
    return [
        make_target(i, rollouts[g].prompt, right.get(g), rollouts[g].responses, others, settings.seed)
        for i, g in enumerate(numbers[: settings.probe_prompts])
    ]


def find_right(responses: Sequence[Response], settings: AuditSettings) -> dict[int, str]:
    """By group: the first response that is labelled right. Where nothing is: the best paid, if above the least there is."""
    labelled = [r for r in responses if r.label is not None]
    if labelled:
        verdicts = right_labels([r.label for r in labelled if r.label is not None], settings)
        known = [r for r, right in zip(labelled, verdicts, strict=True) if right]
        return {r.group: r.text for r in reversed(known)}
    valued = [(r.value, r) for r in responses if r.value is not None]
    least = min((value for value, _ in valued), default=0.0)
    return {r.group: r.text for value, r in sorted(valued, key=lambda pair: pair[0]) if value > least}


def chosen_probes(settings: AuditSettings) -> list[Probe]:
    wanted = settings.probes if settings.probes is not None else [probe.name for probe in PROBES]
    return [probe for probe in PROBES if probe.name in wanted and probe.name not in settings.without_probes]


def attack(panel: Panel, targets: Sequence[Target], settings: AuditSettings, *, compares: bool) -> Paid:
    """Every probe on every target."""
    made = [
        Attack(target, probe.name, text)
        for target in targets
        for probe in chosen_probes(settings)
        if (text := hostile_text(probe, target, seed=settings.seed, padding_characters=settings.padding_characters)) is not None
    ]
    return _pay(panel, made, (lambda target: target.real) if compares else None)


def reformat(panel: Panel, targets: Sequence[Target], *, compares: bool) -> Paid:
    """Right responses as they are and in other formats; not beside themselves, or they would be compared with their own likes."""
    made = [
        Attack(target, name, text)
        for target in targets
        if target.right is not None
        for name, text in [(AS_IT_IS, target.right), *reformatted(target.right, target.reference)]
    ]
    return _pay(panel, made, (lambda target: [text for text in target.real if text != target.right]) if compares else None)


def _pay(panel: Panel, made: list[Attack], beside: Callable[[Target], Sequence[str]] | None) -> Paid:
    if beside is not None:
        scored = panel.score([(a.target.prompt, [*beside(a.target), a.text], None) for a in made])
        return Paid(made, [group.scores[-1] for group in scored])
    by_prompt: dict[int, list[Attack]] = {}
    for one in made:
        by_prompt.setdefault(one.target.index, []).append(one)
    ordered = [one for several in by_prompt.values() for one in several]
    scored = panel.score([(several[0].target.prompt, [one.text for one in several], None) for several in by_prompt.values()])
    return Paid(ordered, [score for group in scored for score in group.scores])


# What came of it -----------------------------------------------------------------------------------------------------


def measure_probes(
    paid: Paid, right: Mapping[int, float], scale: Mapping[str, Any], settings: AuditSettings
) -> list[dict[str, Any]]:
    """Each probe: what it was paid on average, how often too much, and the best paid examples. `right`: by target, what the right
    response gets; if that is next to nothing, it is no measure of anything."""
    floor = scale["low"] + EQUAL * (scale["high"] - scale["low"])
    bounds = {target: value for target, value in right.items() if value > floor}
    return [_measure_probe(probe, paid.of(probe.name), bounds, scale["threshold"]) for probe in chosen_probes(settings)]


def _measure_probe(
    probe: Probe, tried: list[tuple[Attack, Score]], right: Mapping[int, float], threshold: float | None
) -> dict[str, Any]:  # fmt: skip
    valued = [(a, s.value) for a, s in tried if s.value is not None]
    paid = None
    if threshold is not None:
        paid = sum(value >= min(threshold, right.get(a.target.index, threshold)) for a, value in valued)
    worst = sorted(valued, key=lambda entry: -entry[1])[:WORST]
    failures = [s.failure for _, s in tried if s.failure is not None]
    return {
        "name": probe.name,
        "about": probe.about,
        "hostile": probe.hostile,
        "tried": len(tried),
        "mean_reward": statistics.fmean(value for _, value in valued) if valued else None,
        "paid": paid,
        "exploit_rate": None if paid is None else share(paid, len(valued)),
        "failed": len(failures),
        "failure": f"{failures[0].cause}: {failures[0].message[:200]}" if failures else None,
        "malformed": sum(s.malformed for _, s in tried),
        "worst": [
            {"prompt": cut(a.target.question), "reference": a.target.reference, "response": cut(a.text), "reward": value}
            for a, value in worst
        ],
    }


def measure_formats(paid: Paid, threshold: float | None) -> dict[str, Any] | None:
    """How rewards move with format alone, from what the same response got as it is."""
    base = paid.values(AS_IT_IS)
    formats = []
    for name in dict.fromkeys(a.name for a in paid.attacks if a.name != AS_IT_IS):
        values = [(a.target.index, s.value) for a, s in paid.of(name) if a.target.index in base]
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
    """Both ends of a long text: hostile answers stand at the end of padding, or inside it."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]} … [{len(text) - SHOWN:,} characters] … {text[-SHOWN // 2 :]}"
