"""Every recipe setting and its description: one `…Settings` class per section, one `…Recipe` class per stage.

`plaudit config R.yaml --explain` prints the descriptions; `plaudit.config` reads the files. Nothing here imports torch, so that
mistakes in a recipe are reported in well under a second.
"""

from plaudit.recipe.algorithm import AlgorithmSettings, DynamicSamplingSettings, ImportanceSettings, KLRewardSettings
from plaudit.recipe.audit import AuditSettings
from plaudit.recipe.preference import (
    DPOLossSettings,
    DPORecipe,
    DPOTrainSettings,
    PairDataSettings,
    PairTrainSettings,
    RewardModelDataSettings,
    RewardModelLossSettings,
    RewardModelRecipe,
)
from plaudit.recipe.rewards import RewardSettings, ScoreRecipe, View
from plaudit.recipe.rl import (
    CriticSettings,
    RLDataSettings,
    RLOptimSettings,
    RLRecipe,
    RLReferenceSettings,
    RLTrainSettings,
)
from plaudit.recipe.rollout import RolloutSettings, ValidationSettings
from plaudit.recipe.sample import SampleSettings
from plaudit.recipe.section import Section
from plaudit.recipe.sft import SFTDataSettings, SFTRecipe, SFTTrainSettings
from plaudit.recipe.training import (
    ClusterSettings,
    LoraSettings,
    ModelSettings,
    OptimSettings,
    ReferenceSettings,
    RLRunSettings,
    RunSettings,
)

__all__ = [
    "STAGES", "AlgorithmSettings", "AuditSettings", "ClusterSettings", "CriticSettings", "DPOLossSettings", "DPORecipe",
    "DPOTrainSettings", "DynamicSamplingSettings", "ImportanceSettings", "KLRewardSettings", "LoraSettings", "ModelSettings",
    "OptimSettings", "PairDataSettings", "PairTrainSettings", "PreferenceRecipe", "RLDataSettings", "RLOptimSettings", "RLRecipe",
    "RLReferenceSettings", "RLRunSettings", "RLTrainSettings", "Recipe", "ReferenceSettings", "RewardModelDataSettings",
    "RewardModelLossSettings", "RewardModelRecipe", "RewardSettings", "RewardedRecipe", "RolloutSettings", "RunSettings",
    "SFTDataSettings", "SFTRecipe", "SFTTrainSettings", "SampleSettings", "ScoreRecipe", "Section", "TrainingRecipe",
    "ValidationSettings", "View", "quantised_bases",
]  # fmt: skip

PreferenceRecipe = DPORecipe | RewardModelRecipe
"""Recipes that train on pairs."""
RewardedRecipe = RLRecipe | ScoreRecipe
"""Recipes with rewards."""
TrainingRecipe = SFTRecipe | PreferenceRecipe | RLRecipe
Recipe = TrainingRecipe | ScoreRecipe
STAGES: dict[str, type[Recipe]] = {
    "sft": SFTRecipe,
    "dpo": DPORecipe,
    "reward-model": RewardModelRecipe,
    "rl": RLRecipe,
    "score": ScoreRecipe,
}


def quantised_bases(recipe: TrainingRecipe) -> dict[str, ModelSettings]:
    """The models that are trained on a base in 8 or 4 bits (lora.base_bits), by their section."""
    models = {"model": recipe.model}
    if isinstance(recipe, RLRecipe) and recipe.critic is not None and not recipe.critic.shared:
        models["critic"] = recipe.critic.model(recipe.model)
    return {name: model for name, model in models.items() if model.lora is not None and model.lora.base_bits is not None}
