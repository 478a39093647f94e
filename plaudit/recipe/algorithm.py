"""Algorithm of an RL recipe: advantages, policy loss, KL, and how far the sampler's policy may be from the trained one."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from plaudit.objectives.registry import ESTIMATORS, POLICY_LOSSES, described
from plaudit.recipe.section import BelowOne, Section


def _both_sides(clip_ratio: Any) -> Any:
    single = isinstance(clip_ratio, int | float) and not isinstance(clip_ratio, bool)
    return (clip_ratio, clip_ratio) if single else clip_ratio


class KLRewardSettings(Section):
    coefficient: PositiveFloat = 0.001
    """Weight of each token's KL penalty; with a target, its initial value."""
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the KL, as kl_estimator. k1 is unbiased, and has the right gradient in a reward."""
    target: PositiveFloat | None = None
    """Target mean KL per token: the coefficient rises above it and falls below it. Default: a fixed coefficient."""
    horizon: PositiveInt = 10_000
    """With a target: number of samples over which the coefficient changes by up to a fifth."""

    def ineffective_settings(self) -> dict[str, str]:
        return {"horizon": "the coefficient is fixed unless there is a target; set target"} if self.target is None else {}


class ImportanceSettings(Section):
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or their product for all tokens of a response."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above `high` become `high`. mask: weights outside [low, high] become 0."""
    high: Annotated[float, Field(gt=1.0)] = 2.0
    """Largest weight."""
    low: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """With mode mask: smallest weight; default: no lower bound."""

    def ineffective_settings(self) -> dict[str, str]:
        return {"low": "mode truncate bounds weights from above only; it applies to mode mask"} if self.mode == "truncate" else {}


class DynamicSamplingSettings(Section):
    max_rounds: PositiveInt = 5
    """Most sampling rounds per step, including the first. After the last, the step trains on the groups it has."""


if TYPE_CHECKING:
    EstimatorName = PolicyLossName = str
else:
    EstimatorName, PolicyLossName = Literal[tuple(ESTIMATORS)], Literal[tuple(POLICY_LOSSES)]


class AlgorithmSettings(Section):
    kind: EstimatorName = Field(default="grpo", description=f"How rewards become advantages. {described(ESTIMATORS)}")
    divide_by_std: bool = True
    """Divide advantages by the group's standard deviation (Dr.GRPO: false)."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor per token."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """λ of GAE. 1 relies on the observed rewards, 0 on the critic's value of the next token."""
    loss: PolicyLossName = Field(default="clipped", description=f"How advantages become a loss. {described(POLICY_LOSSES)}")
    clip_ratio: Annotated[tuple[BelowOne, NonNegativeFloat], BeforeValidator(_both_sides)] = (0.2, 0.2)
    """How far the ratio may fall below and rise above 1 before it is clipped: two numbers, or one for both."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Upper bound of the ratio where the advantage is negative; null for none."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"  # fmt: skip
    """How token losses are reduced to one: over all tokens of an update, or within each response first. norm: divided by
    max_new_tokens."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the loss. At 0 (and without kl_reward) no reference is loaded."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Per-token estimator of the KL: the log-ratio, its absolute value, half its square, or the low-variance k3."""
    kl_reward: KLRewardSettings | None = None
    """KL to the reference as a per-token penalty in the reward, in addition to or instead of kl_coefficient."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    positive_sft_coefficient: NonNegativeFloat = 0.0
    """Weight of an added supervised term on tokens with A > 0: −A · log π."""
    old_logprobs: Literal["recomputed", "sampler"] = "recomputed"
    """Denominator of the ratio: log-probs recomputed by the trainer before the step's first update, or those of the sampler."""
    importance: ImportanceSettings | Literal["auto"] | None = "auto"
    """Weight losses by π_old / π_sampler, for a sampler whose log-probs differ from the trainer's (metric: mismatch). auto:
    truncated token weights if rollout.engine is a server, or with rollout.lag; none otherwise. null: none."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """Drop groups whose rewards are all equal, and sample more prompts until prompts_per_step have a signal (DAPO)."""

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl_coefficient) or self.kl_reward is not None

    @property
    def compares_groups(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return "group" in ESTIMATORS[self.kind].needs

    def ineffective_settings(self) -> dict[str, str]:
        ineffective = {}
        estimator, loss = ESTIMATORS[self.kind], POLICY_LOSSES[self.loss]
        for name in dict.fromkeys(name for other in ESTIMATORS.values() for name in other.settings):
            if name not in estimator.settings:
                users = " and ".join(other.name for other in ESTIMATORS.values() if name in other.settings)
                ineffective[name] = f"it applies to kind {users}, not {self.kind}"
        for name in dict.fromkeys(name for other in POLICY_LOSSES.values() for name in other.settings):
            if name not in loss.settings:
                users = ", ".join(other.name for other in POLICY_LOSSES.values() if name in other.settings)
                ineffective[name] = f"it applies to loss {users}, not {self.loss}"
        if not loss.uses_ratio and self.kl_reward is None and self.importance in (None, "auto"):
            # With a server as the engine, `sampler` would only make every importance weight 1, which has a setting of its own.
            ineffective["old_logprobs"] = f"loss {self.loss} has no ratio; to train without importance weights, set importance=null"
        if not self.needs_reference:
            ineffective["kl_estimator"] = "no KL is computed; set kl_coefficient or kl_reward"
        if not self.compares_groups:
            ineffective["dynamic_sampling"] = f"it selects groups whose rewards differ, and {self.kind} does not compare groups"
        return ineffective

    @model_validator(mode="after")
    def _require_one_sampler_correction(self) -> "AlgorithmSettings":
        if isinstance(self.importance, ImportanceSettings) and self.old_logprobs == "sampler":
            raise ValueError(
                "importance weights are π_old / π_sampler, always 1 with old_logprobs sampler: set old_logprobs to recomputed"
            )
        return self
