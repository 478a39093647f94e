"""Checks of the algorithm settings, of the required audit, and of rewards without a model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from plaudit.audit.certificate import require_passed
from plaudit.doctor.findings import Finding
from plaudit.objectives.registry import ESTIMATORS, POLICY_LOSSES
from plaudit.recipe import RewardSettings, RLRecipe
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


def check_reward(reward: RewardSettings, prompts: list[Prompt]) -> Iterator[Finding]:
    """Start the reward and score the ground truth and an empty answer, in the process where it would run."""
    checked = reward.model_copy(update={"on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none"})
    prompts = [prompt for prompt in prompts if reward.applies_to(prompt)]
    groups = [synthetic_group(prompt, ["" if prompt.ground_truth is None else str(prompt.ground_truth), ""]) for prompt in prompts]
    with RewardRunner([checked]) as runner:
        scores = [scored.by_reward[checked.label] for scored in runner.collect(groups)]
    failures = [score.failure for pair in scores for score in pair if score.failure is not None]
    if failures:
        cause = f"{failures[0].cause}: {failures[0].message}"
        yield (
            "✗" if len(failures) == 2 * len(scores) else "!",
            f"{reward.label}: failed on {len(failures)} of {2 * len(scores)} samples: {cause}",
        )
        return
    truth, empty = ([pair[i].value for pair in scores] for i in (0, 1))
    values = f"{_listed(truth)} for the ground truth, {_listed(empty)} for an empty answer" if scores else "starts"
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
