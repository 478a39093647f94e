"""Every setting a recipe may have, with what it means: one class per section, one recipe class per stage.

`plaudit config R.yaml --explain` prints these descriptions; `plaudit.config` reads the files. Nothing here imports torch:
a wrong recipe is told in well under a second.
"""

from plaudit.recipe.audit import Audit
from plaudit.recipe.rewards import RewardSettings, ScoreRecipe, View
from plaudit.recipe.rl import (
    Algorithm,
    Critic,
    DynamicSampling,
    Importance,
    KLReward,
    RLData,
    RLOptim,
    RLRecipe,
    RLTrain,
    Rollout,
    Validation,
)
from plaudit.recipe.section import Section
from plaudit.recipe.sft import SFTData, SFTRecipe, SFTTrain
from plaudit.recipe.shared import Lora, Model, Optim, Run

__all__ = [
    "STAGES", "Algorithm", "Audit", "Critic", "DynamicSampling", "Importance", "KLReward", "Lora", "Model", "Optim", "RLData",
    "RLOptim", "RLRecipe", "RLTrain", "Recipe", "RewardSettings", "Rollout", "Run", "SFTData", "SFTRecipe", "SFTTrain",
    "ScoreRecipe", "Section", "TrainingRecipe", "Validation", "View",
]  # fmt: skip

TrainingRecipe = SFTRecipe | RLRecipe
Recipe = TrainingRecipe | ScoreRecipe
STAGES: dict[str, type[Recipe]] = {"sft": SFTRecipe, "rl": RLRecipe, "score": ScoreRecipe}
