"""A reward manager for verl 0.9's reward loop that also passes the prompt's messages and the response's token count to rewards.

    reward.reward_manager.source=importlib reward.reward_manager.name=RewardManager \\
    reward.reward_manager.module.path=pkg://plaudit.adapters.verl_manager

in addition to the settings in `plaudit/adapters/verl.py`, whose `rewards` it reads. Needed by rewards that use the prompt or the
length in tokens (`overlong`).
"""

import asyncio
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase  # pyright: ignore[reportMissingImports]

from plaudit.adapters.shared_scorer import refuse_groups, shared_scorer
from plaudit.adapters.verl import to_builtin, to_verl_result
from plaudit.errors import PlauditError


class RewardManager(RewardManagerBase):
    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any):
        super().__init__(config, tokenizer, compute_score)
        kwargs = config.reward.custom_reward_function.get("reward_kwargs") or {}
        if "rewards" not in kwargs:
            raise PlauditError("verl: set +reward.custom_reward_function.reward_kwargs.rewards=FILE (plaudit/adapters/verl.py)")
        self._shared = shared_scorer(kwargs["rewards"])
        refuse_groups(self._shared.scorer, "verl")

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of one sample; with several turns, of the last one, as in verl."""
        [result] = await asyncio.wrap_future(self._shared.submit([self._row(data[-1])]))
        scores = to_verl_result(result, self._shared)
        return {"reward_score": scores["score"], "reward_extra_info": scores}

    def _row(self, sample: Any) -> dict[str, Any]:
        fields = {name: to_builtin(value) for name, value in sample.non_tensor_batch.items()}
        padded = sample.batch["responses"]
        tokens = padded[: int(sample.batch["attention_mask"][-len(padded) :].sum())].tolist()
        return {
            "prompt": fields.get("raw_prompt") or "",
            "response": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": len(tokens),
            "data_source": str(fields.get("data_source", "")),
            "ground_truth": (fields.get("reward_model") or {}).get("ground_truth"),
            "extra_info": {**(fields.get("extra_info") or {}), **(fields.get("tool_extra_fields") or {})},
        }
