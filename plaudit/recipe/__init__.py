"""Every setting a recipe may have, with what it means: one class per section, one recipe class per stage.

`plaudit config R.yaml --explain` prints these descriptions; `plaudit.config` reads the files. Nothing here imports torch:
a wrong recipe is told in well under a second.
"""

from plaudit.recipe.audit import Audit
from plaudit.recipe.preference import (
    DPOLoss,
    DPORecipe,
    PairData,
    PairTrain,
    RewardModelData,
    RewardModelLoss,
    RewardModelRecipe,
)
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
from plaudit.recipe.training import Lora, Model, Optim, Run

__all__ = [
    "STAGES", "Algorithm", "Audit", "Critic", "DPOLoss", "DPORecipe", "DynamicSampling", "Importance", "KLReward", "Lora", "Model",
    "Optim", "PairData", "PairTrain", "PreferenceRecipe", "RLData", "RLOptim", "RLRecipe", "RLTrain", "Recipe", "RewardModelData",
    "RewardModelLoss", "RewardModelRecipe", "RewardSettings", "RewardedRecipe", "Rollout", "Run", "SFTData", "SFTRecipe",
    "SFTTrain", "ScoreRecipe", "Section", "TrainingRecipe", "Validation", "View",
]  # fmt: skip

PreferenceRecipe = DPORecipe | RewardModelRecipe
"""Those that learn from pairs."""
RewardedRecipe = RLRecipe | ScoreRecipe
"""Those that have rewards."""
TrainingRecipe = SFTRecipe | PreferenceRecipe | RLRecipe
Recipe = TrainingRecipe | ScoreRecipe
STAGES: dict[str, type[Recipe]] = {
    "sft": SFTRecipe,
    "dpo": DPORecipe,
    "reward-model": RewardModelRecipe,
    "rl": RLRecipe,
    "score": ScoreRecipe,
}
