"""A reward manager for verl 0.9's reward loop: as its own, but rewards see the prompt's messages and the response's tokens too.

    reward.reward_manager.source=importlib reward.reward_manager.name=RewardManager \\
    reward.reward_manager.module.path=pkg://plaudit.adapters.verl_manager

beside the settings of `plaudit/adapters/verl.py`, whose `rewards` it reads. Needed by rewards that look at the prompt, or at
lengths in tokens (`overlong`).
"""

import asyncio
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase  # pyright: ignore[reportMissingImports]

from plaudit.adapters.scorer import refuse_groups, shared_scorer
from plaudit.adapters.verl import as_verl_wants, plain
from plaudit.errors import PlauditError


class RewardManager(RewardManagerBase):
    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any):
        super().__init__(config, tokenizer, compute_score)
        given = config.reward.custom_reward_function.get("reward_kwargs") or {}
        if "rewards" not in given:
            raise PlauditError("verl: set +reward.custom_reward_function.reward_kwargs.rewards=FILE (plaudit/adapters/verl.py)")
        self._shared = shared_scorer(given["rewards"])
        refuse_groups(self._shared.scorer, "verl")

    async def run_single(self, data: Any) -> dict[str, Any]:
        """One sample's reward; of several turns the last, as verl does."""
        [result] = await asyncio.wrap_future(self._shared.submit([self._row(data[-1])]))
        given = as_verl_wants(result, self._shared)
        return {"reward_score": given["score"], "reward_extra_info": given}

    def _row(self, sample: Any) -> dict[str, Any]:
        fields = {name: plain(value) for name, value in sample.non_tensor_batch.items()}
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
