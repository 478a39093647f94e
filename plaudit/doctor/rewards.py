"""Rewards without a model behind them, asked where they would run; and what a recipe allows that is seldom meant."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from plaudit.audit.certificate import require_passed
from plaudit.doctor.findings import Finding
from plaudit.recipe import RewardSettings, RLRecipe
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, Prompt, Sample

TRIED = 3  # prompts that every reward is tried on
GSPO_WIDE = 0.05  # a clip that a ratio per response, a mean over its tokens, seldom reaches


def check_algorithm(recipe: RLRecipe) -> Iterator[Finding]:
    """What is allowed and yet seldom meant."""
    if recipe.algorithm.kl_coefficient and recipe.algorithm.kl_estimator == "k1":
        yield (
            "!",
            "algorithm.kl_estimator: k1 as a loss has no pull towards the reference; k2 has the right gradient, k3 nearly",
        )
    if recipe.algorithm.kl_reward is not None and recipe.algorithm.kind == "grpo" and recipe.algorithm.divide_by_std:
        yield (
            "!",
            "algorithm.kl_reward is divided by the group's deviation with the rest: where all rewards are equal, KL alone makes "
            "advantages of full size. kl_coefficient, divide_by_std: false or kind: rloo do not do that",
        )
    if recipe.algorithm.loss == "gspo" and min(recipe.algorithm.clip_ratio) >= GSPO_WIDE:
        yield (
            "!",
            "algorithm.clip_ratio: the ratio of a whole response hardly ever leaves such bounds; GSPO's own are [0.0003, 0.0004]",
        )
    if recipe.algorithm.loss == "policy_gradient" and recipe.train.updates_per_step > 1:
        yield (
            "!",
            f"algorithm.loss: policy_gradient has no ratio, so only the first of {recipe.train.updates_per_step} updates a step is "
            "of tokens that the policy would draw; clipped, gspo and cispo correct for the others",
        )
    if recipe.model.lora is not None and recipe.model.lora.dropout:
        yield "!", "model.lora.dropout: the policy is sampled without it and trained with it, so ratios are off 1 from the start"


def check_reward(reward: RewardSettings, prompts: list[Prompt]) -> Iterator[Finding]:
    """Started, and asked what it pays for the ground truth itself and for nothing at all, where it would run."""
    patient = reward.model_copy(update={"on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none"})
    prompts = [prompt for prompt in prompts if reward.applies_to(prompt)]
    groups = [pretended(prompt, ["" if prompt.ground_truth is None else str(prompt.ground_truth), ""]) for prompt in prompts]
    with RewardRunner([patient]) as runner:
        scores = [scored.by_reward[patient.label] for scored in runner.collect(groups)]
    failures = [score.failure for pair in scores for score in pair if score.failure is not None]
    if failures:
        told = f"{failures[0].cause}: {failures[0].message}"
        yield (
            "✗" if len(failures) == 2 * len(scores) else "!",
            f"{reward.label}: failed on {len(failures)} of {2 * len(scores)}: {told}",
        )
        return
    truth, nothing = ([pair[i].value for pair in scores] for i in (0, 1))
    paid = f"pays {_listed(truth)} for the ground truth, {_listed(nothing)} for an empty answer" if scores else "starts"
    yield "✓", f"{reward.label}: {paid}; weight {reward.weight:g}, on failure {reward.on_failure}"


def check_audit(recipe: RLRecipe) -> Iterator[Finding]:
    require_passed(recipe.audit, recipe.rewards)
    yield "✓", f"{recipe.audit.require} is of these rewards, and they passed"


def tried(prompts: list[Prompt], rewards: Sequence[RewardSettings]) -> list[Prompt]:
    """A few for each reward."""
    chosen = {prompt.id: prompt for prompt in prompts[:TRIED]}
    for reward in rewards:
        chosen |= {prompt.id: prompt for prompt in islice(filter(reward.applies_to, prompts), TRIED)}
    return list(chosen.values())


def pretended(prompt: Prompt, responses: list[str]) -> Group:
    none = np.zeros(0, dtype=np.float32)
    samples = (Sample(prompt.id, i, none.astype(np.int32), text, "finished", none, none, 0) for i, text in enumerate(responses))
    return Group(prompt, none.astype(np.int32), tuple(samples))


def _listed(values: Sequence[float | None]) -> str:
    return ", ".join(dict.fromkeys(f"{value:g}" for value in values if value is not None))
