"""Checks of the algorithm settings, of the required audit, and of rewards without a model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np
from rich.console import Console

from plaudit.audit.certificate import require_passed
from plaudit.audit.evaluated import require_evaluated
from plaudit.config import LoadedRecipe
from plaudit.doctor.findings import Checks, Finding, print_title
from plaudit.objectives.registry import ESTIMATORS, POLICY_LOSSES
from plaudit.recipe import RewardSettings, RLRecipe, ScoreRecipe
from plaudit.rewards.reward import Reward
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, Prompt, Sample

PROMPTS_PER_REWARD = 3
GSPO_WIDE_CLIP = 0.05
"""A clip that GSPO's ratio, averaged over a response's tokens, rarely reaches."""


def check_algorithm(recipe: RLRecipe) -> Iterator[Finding]:
    """Settings that are valid but rarely intended."""
    if recipe.algorithm.kl_coefficient and recipe.algorithm.kl_estimator == "k1":
        yield (
            "!",
            "algorithm.kl_estimator is k1, which as a loss does not pull towards the reference; k2 has the exact gradient, "
            "k3 a close one",
        )
    divides = "divide_by_std" in ESTIMATORS[recipe.algorithm.kind].settings and recipe.algorithm.divide_by_std
    if recipe.algorithm.kl_reward is not None and divides:
        yield (
            "!",
            "algorithm.kl_reward is divided by the group's standard deviation with the rewards: if all rewards are equal, KL alone "
            "makes full-size advantages. Use kl_coefficient, divide_by_std: false or kind: rloo to avoid this",
        )
    if recipe.algorithm.loss == "gspo" and min(recipe.algorithm.clip_ratio) >= GSPO_WIDE_CLIP:
        yield "!", "algorithm.clip_ratio: a sequence-level ratio rarely leaves these bounds; GSPO's paper uses [0.0003, 0.0004]"
    if not POLICY_LOSSES[recipe.algorithm.loss].uses_ratio and recipe.train.updates_per_step > 1:
        yield (
            "!",
            f"algorithm.loss: {recipe.algorithm.loss} has no ratio, so only the first of {recipe.train.updates_per_step} "
            "updates per step is on-policy; clipped, gspo and cispo correct for the others",
        )
    if recipe.model.lora is not None and recipe.model.lora.dropout:
        yield (
            "!",
            "model.lora.dropout: the policy is trained with it but sampled without, so ratios differ from 1 from the start",
        )


def check_rules(loaded: LoadedRecipe) -> Checks:
    """The whole checkup of a recipe that only scores, with rewards that have no model: it needs no torch."""
    rewards = loaded.recipe.rewards if isinstance(loaded.recipe, ScoreRecipe) else ()
    checks = Checks(Console(highlight=False))
    print_title(checks.console, loaded)
    for reward in rewards:
        checks.check("reward", lambda reward=reward: check_reward(reward, []))
    checks.check("rewards", lambda: check_answer_rules(rewards, []))
    return checks


def check_reward(reward: RewardSettings, prompts: list[Prompt]) -> Iterator[Finding]:
    """Start the reward and score ground truths, where there are any, and empty answers, in the process where it would run."""
    checked = reward.model_copy(update={"on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none"})
    prompts = [prompt for prompt in prompts if reward.applies_to(prompt)]
    has_truth = [prompt.ground_truth is not None for prompt in prompts]
    groups = [
        synthetic_group(prompt, [str(prompt.ground_truth), ""] if known else [""])
        for prompt, known in zip(prompts, has_truth, strict=True)
    ]
    with RewardRunner([checked]) as runner:
        scores = [scored.by_reward[checked.label] for scored in runner.collect(groups)]
    samples = sum(map(len, scores))
    failures = [score.failure for pair in scores for score in pair if score.failure is not None]
    if failures:
        cause = f"{failures[0].cause}: {failures[0].message}"
        yield (
            "✗" if len(failures) == samples else "!",
            f"{reward.label}: failed on {len(failures)} of {samples} samples: {cause}",
        )
        return
    truths = _listed([pair[0].value for pair, known in zip(scores, has_truth, strict=True) if known])
    empty = f"{_listed([pair[-1].value for pair in scores])} for an empty answer" if scores else "starts"
    values = f"{truths} for the ground truth, {empty}" if truths else empty
    yield "✓", f"{reward.label}: {values}; weight {reward.weight:g}, on failure {reward.on_failure}"


def check_answer_rules(rewards: Sequence[RewardSettings], prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Rules whose values add up although they check the same answer. Without prompts, those that `when` does not keep apart."""
    rules = [
        reward
        for reward in rewards
        if isinstance(reward, Reward) and reward.checks_answer and reward.weight > 0 and reward.combine == "add" and not reward.gate
    ]
    if prompts:
        together = Counter(tuple(rule.label for rule in rules if rule.applies_to(prompt)) for prompt in prompts)
        found = {labels: f" in {count:,} of the {len(prompts):,} rows" for labels, count in together.items() if len(labels) > 1}
    else:
        pairs = ((one, other) for one, other in combinations(rules, 2) if not (one.when and other.when) or one.when == other.when)
        found = {(one.label, other.label): "" for one, other in pairs}
    for labels, where in found.items():
        total = sum(rule.weight * rule.scale for rule in rules if rule.label in labels)
        yield (
            "!",
            f"{' and '.join(labels)} reward the same answer{where}: a right one gets {total:g}. Separate them with `when` (`when: "
            "otherwise` on the last), take the best of them with combine: max, or only measure one with weight: 0",
        )


def check_audit(recipe: RLRecipe) -> Iterator[Finding]:
    require_passed(recipe.audit, recipe.rewards)
    yield "✓", f"{recipe.audit.require} covers these rewards, and they passed"


def check_evaluation(recipe: RLRecipe) -> Iterator[Finding]:
    name = require_evaluated(recipe.eval, recipe.rewards)
    yield "✓", f"{recipe.eval.require} covers these rewards ({name}), and is within the bounds"


def select_prompts(prompts: list[Prompt], rewards: Sequence[RewardSettings]) -> list[Prompt]:
    """A few prompts for each reward."""
    chosen = {prompt.id: prompt for prompt in prompts[:PROMPTS_PER_REWARD]}
    for reward in rewards:
        chosen |= {prompt.id: prompt for prompt in islice(filter(reward.applies_to, prompts), PROMPTS_PER_REWARD)}
    return list(chosen.values())


def synthetic_group(prompt: Prompt, responses: list[str]) -> Group:
    """A group of these responses, without tokens."""
    empty = np.zeros(0, dtype=np.float32)
    samples = (Sample(prompt.id, i, empty.astype(np.int32), text, "finished", empty, empty, 0) for i, text in enumerate(responses))
    return Group(prompt, empty.astype(np.int32), tuple(samples))


def _listed(values: Sequence[float | None]) -> str:
    return ", ".join(dict.fromkeys(f"{value:g}" for value in values if value is not None))
