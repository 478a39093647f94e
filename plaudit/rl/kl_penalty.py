"""KL in the reward: each token pays β · kl(π_old, ref) for its distance from the reference.

β stays as it is, or follows a target; then it is part of the run's state.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plaudit.objectives.kl import adapted, kl
from plaudit.recipe import KLRewardSettings
from plaudit.types import Experience


class KLPenalty:
    """A run's β, which a checkpoint keeps (it is a `Companion` of the run)."""

    def __init__(self, settings: KLRewardSettings):
        self.settings = settings
        self.coefficient = settings.coefficient

    def charge(self, experiences: Sequence[Experience]) -> tuple[list[np.ndarray], dict[str, float]]:
        """What each token of a step's samples pays, and metrics; then β moves on."""
        distances = [self._distance(experience) for experience in experiences]
        beta = self.coefficient
        metrics = {"kl_reward_coefficient": beta}
        if experiences:
            metrics["kl_reward"] = kl_now = float(np.concatenate(distances).mean())
            if self.settings.target is not None and np.isfinite(kl_now):
                self.coefficient = adapted(
                    beta, kl_now, target=self.settings.target, samples=len(experiences), horizon=self.settings.horizon
                )
        return [beta * distance for distance in distances], metrics

    def _distance(self, experience: Experience) -> np.ndarray:
        old, ref = experience.old_logprobs, experience.ref_logprobs
        assert old is not None, "the log-probs of the policy that wrote the tokens"
        assert ref is not None
        return kl(
            torch.from_numpy(old.astype(np.float64)), torch.from_numpy(ref.astype(np.float64)), self.settings.estimator
        ).numpy()

    # What a checkpoint holds

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, Any]) -> None:
        self.coefficient = state.get("coefficient", self.settings.coefficient)

    def saved(self) -> None:
        pass
