"""Advantage estimators and policy losses as data: the names a recipe may use, and what each of them needs.

Nothing here imports torch, because recipes are checked against these tables before torch is imported. To add one, write its
function in `advantages.py` or `policy.py`, its line here, and its test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Need = Literal["group", "critic", "greedy", "lengths", "normalised rewards"]


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages (`algorithm.kind`)."""

    name: str
    function: str
    """Its name in `advantages.py`."""
    scope: Literal["group", "step", "token"]
    """group: called for each group, `(rewards_G) → A_G`. step: called once, `(StepRewards) → A_S`, a number per sample.
    token: called once, `(StepRewards) → A_N`, a number per token; with a critic `(A_N, returns_N)`."""
    summary: str
    """For `plaudit config --explain`."""
    needs: tuple[Need, ...] = ()
    """group: two or more samples per prompt. critic: values. greedy: one more sample per prompt, drawn greedily. lengths: also gets
    `lengths_G`. normalised rewards: every reward is normalised by its group before they are combined."""
    settings: tuple[str, ...] = ()
    """Settings of `algorithm` that it takes, as keyword arguments of the same names."""

    def __post_init__(self) -> None:
        assert "lengths" not in self.needs or self.scope == "group", "a StepRewards has the lengths"
        assert "critic" not in self.needs or self.scope == "token", "values are of tokens"
        assert "greedy" not in self.needs or self.scope != "group", "a group's function gets no baseline"
        assert not {"group", "greedy"} <= {*self.needs}, "dynamic sampling, which compares groups, samples no baseline"

    def load(self) -> Callable[..., Any]:
        return getattr(import_module("plaudit.objectives.advantages"), self.function)


@dataclass(frozen=True)
class PolicyLoss:
    """How advantages become a loss per token (`algorithm.loss`)."""

    name: str
    function: str
    """Its name in `policy.py`: `(policy_logprobs_N, old_logprobs_N, advantages_N) → TokenLoss`."""
    summary: str
    needs: tuple[Literal["lengths"], ...] = ()
    """lengths: also gets `lengths_S`, the tokens of each sequence."""
    settings: tuple[str, ...] = ()
    """Settings of `algorithm` that it takes: `clip_ratio` as `clip_low` and `clip_high`, others by their own names."""
    uses_ratio: bool = True
    """Its gradient depends on π / π_old, and so on which log-probs are the old ones."""

    def load(self) -> Callable[..., Any]:
        return getattr(import_module("plaudit.objectives.policy"), self.function)


ESTIMATORS = {
    estimator.name: estimator
    for estimator in (
        Estimator("grpo", "grpo", "group", "a sample against the mean of its group", ("group",), ("divide_by_std",)),
        Estimator("rloo", "rloo", "group", "a sample against the mean of the others in its group", ("group",)),
        Estimator("opo", "opo", "group", "a sample against its group's mean weighted by length", ("group", "lengths")),
        Estimator(
            "gdpo", "gdpo", "step", "grpo for each reward separately, then whitened over the step", ("group", "normalised rewards")
        ),
        Estimator("reinforce++", "reinforce_pp", "token", "whitened over all tokens of the step", settings=("discount",)),
        Estimator(
            "reinforce++-baseline", "reinforce_pp_baseline", "token",
            "reward minus the mean of its group, whitened over the step", ("group",),
        ),
        Estimator("remax", "remax", "token", "a sample against an additional greedy sample", ("greedy",)),
        Estimator(
            "ppo", "ppo", "token", "a token against the critic's value (GAE), whitened over the step", ("critic",),
            ("discount", "gae_lambda"),
        ),
    )
}  # fmt: skip

POLICY_LOSSES = {
    loss.name: loss
    for loss in (
        PolicyLoss("clipped", "clipped", "PPO's ratio, clipped", settings=("clip_ratio", "dual_clip")),
        PolicyLoss("gspo", "gspo", "clipped, with one ratio per response", ("lengths",), ("clip_ratio",)),
        PolicyLoss("cispo", "cispo", "log π weighted by the clipped ratio", settings=("clip_ratio",)),
        PolicyLoss("policy_gradient", "policy_gradient", "log π, no ratio", uses_ratio=False),
    )
}


def described(table: dict[str, Estimator] | dict[str, PolicyLoss]) -> str:
    """The entries of a table, for a setting's description."""
    return "; ".join(f"{name}: {entry.summary}" for name, entry in table.items()) + "."
