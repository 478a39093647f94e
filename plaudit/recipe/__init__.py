"""Every setting a recipe may have, with what it means: one class per section, one recipe class per stage.

`plaudit config R.yaml --explain` prints these descriptions; `plaudit.config` reads the files. Nothing here imports torch:
a wrong recipe is told in well under a second.
"""

from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.preference import (
    DPOLossSettings,
    DPORecipe,
    PairDataSettings,
    PairTrainSettings,
    RewardModelDataSettings,
    RewardModelLossSettings,
    RewardModelRecipe,
)
from plaudit.recipe.rewards import RewardSettings, ScoreRecipe, View
from plaudit.recipe.rl import (
    AlgorithmSettings,
    CriticSettings,
    DynamicSamplingSettings,
    ImportanceSettings,
    KLRewardSettings,
    RLDataSettings,
    RLOptimSettings,
    RLRecipe,
    RLTrainSettings,
    RolloutSettings,
    ValidationSettings,
)
from plaudit.recipe.section import Section
from plaudit.recipe.sft import SFTDataSettings, SFTRecipe, SFTTrainSettings
from plaudit.recipe.training import LoraSettings, ModelSettings, OptimSettings, RunSettings

__all__ = [
    "STAGES", "AlgorithmSettings", "AuditSettings", "CriticSettings", "DPOLossSettings", "DPORecipe", "DynamicSamplingSettings",
    "ImportanceSettings", "KLRewardSettings", "LoraSettings", "ModelSettings", "OptimSettings", "PairDataSettings",
    "PairTrainSettings", "PreferenceRecipe", "RLDataSettings", "RLOptimSettings", "RLRecipe", "RLTrainSettings", "Recipe",
    "RewardModelDataSettings", "RewardModelLossSettings", "RewardModelRecipe", "RewardSettings", "RewardedRecipe",
    "RolloutSettings", "RunSettings", "SFTDataSettings", "SFTRecipe", "SFTTrainSettings", "ScoreRecipe", "Section",
    "TrainingRecipe", "ValidationSettings", "View",
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
