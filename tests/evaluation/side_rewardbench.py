"""Scores by RewardBench's own code: reads items with scores as JSON from stdin, writes what the package makes of them.

Runs in a process of its own, with the package's folder in sys.argv[1]. Importing the package as it is would import every reward
model that it knows, with old versions of their libraries. Its scoring functions need none of these: placeholders stand in for them.
"""

import json
import sys
from types import ModuleType

package, models, conversation = (ModuleType(name) for name in ("rewardbench", "rewardbench.models", "fastchat.conversation"))
package.__path__ = [f"{sys.argv[1]}/rewardbench"]
models.__dict__["REWARD_MODEL_CONFIG"] = {}
conversation.__dict__["Conversation"] = object
placeholders = {"rewardbench": package, "rewardbench.models": models, "fastchat": ModuleType("fastchat")}
sys.modules |= {**placeholders, "fastchat.conversation": conversation}

from datasets import Dataset  # noqa: E402
from rewardbench.constants import EXAMPLE_COUNTS, SUBSET_MAPPING  # noqa: E402  # pyright: ignore[reportMissingImports]
from rewardbench.utils import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    calculate_scores_per_section,
    process_single_model,
    reroll_and_score_dataset,
)


def best_of_four(items: list[dict]) -> list[float]:
    flat = [{"text": str(i), "scores": score, "id": item["id"]} for item in items for i, score in enumerate(item["scores"])]
    rolled = reroll_and_score_dataset(Dataset.from_list(flat), [len(item["scores"]) for item in items])
    return list(rolled["results"])


given = json.load(sys.stdin)
results = {
    "sections": [calculate_scores_per_section(EXAMPLE_COUNTS, SUBSET_MAPPING, metrics) for metrics in given["metrics"]],
    "best_of_four": [best_of_four(items) for items in given["best_of_four"]],
    "ties": [float(process_single_model(Dataset.from_list(items))[1]) for items in given["ties"]],
    "subsets": list(EXAMPLE_COUNTS),
}
json.dump(results, sys.stdout)
