"""KL in the reward: each token costs β · kl(π_old, ref), its distance from the reference.

β is constant, or follows a target; then it is part of the run's state.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plaudit.objectives.kl import adapted, kl
from plaudit.recipe import KLRewardSettings


class KLPenalty:
    """The penalty with its current β."""

    def __init__(self, settings: KLRewardSettings):
        self.settings = settings
        self.coefficient = settings.coefficient

    def costs(
        self, old_logprobs: Sequence[np.ndarray], ref_logprobs: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """What each token of a step's samples costs, and metrics; then β adapts."""
        distances = [self._distance(old, ref) for old, ref in zip(old_logprobs, ref_logprobs, strict=True)]
        beta = self.coefficient
        metrics = {"kl_reward_coefficient": beta}
        if distances:
            metrics["kl_reward"] = mean_kl = float(np.concatenate(distances).mean())
            if self.settings.target is not None and np.isfinite(mean_kl):
                self.coefficient = adapted(
                    beta, mean_kl, target=self.settings.target, samples=len(distances), horizon=self.settings.horizon
                )
        return [beta * distance for distance in distances], metrics

    def _distance(self, old: np.ndarray, ref: np.ndarray) -> np.ndarray:
        return kl(
            torch.from_numpy(old.astype(np.float64)), torch.from_numpy(ref.astype(np.float64)), self.settings.estimator
        ).numpy()

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, Any]) -> None:
        self.coefficient = state.get("coefficient", self.settings.coefficient)
