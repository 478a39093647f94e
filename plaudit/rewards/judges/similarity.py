"""Semantic similarity: the cosine of the embeddings of response and ground truth, from −1 to 1.

The embedding model is a sentence-transformers model in this process, or on a server (`plaudit/reward_models/embeddings.py`). With
several accepted truths the nearest one counts. An empty response, or one longer than the model reads, is malformed: 0.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from plaudit.recipe.reward_models import EmbeddingModel
from plaudit.reward_models.backend import ScalarScore
from plaudit.rewards.judges.model_rewards import LiveModelReward, ModelReward
from plaudit.rewards.rules.ground_truth import no_truth, read_texts
from plaudit.types import Group, Message, Score


class Similarity(ModelReward):
    kind: Literal["similarity"]
    """Semantic similarity of response and ground truth."""
    model: EmbeddingModel  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which embedding model, where it runs, and how it is reached."""

    scalar: ClassVar[bool] = True

    @property
    def rounded_together(self) -> bool:
        return self.model.placement == "resident"

    def build(self) -> "LiveSimilarity":
        return LiveSimilarity(self)


class LiveSimilarity(LiveModelReward[Similarity]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        truths = [list(dict.fromkeys(read_texts(group.prompt.ground_truth))) for group in groups]
        pairs: list[list[Message]] = [
            [{"role": "user", "content": truth}, {"role": "assistant", "content": sample.text}]
            for group, accepted in zip(groups, truths, strict=True)
            for sample in group.samples
            if sample.text.strip()
            for truth in accepted
        ]
        results = iter(await self.backend.score(pairs))
        return [self._scores(group, accepted, results) for group, accepted in zip(groups, truths, strict=True)]

    def _scores(self, group: Group, accepted: Sequence[str], results: Iterator[ScalarScore]) -> list[Score]:
        """`results`: of the group's samples with text, one for each accepted truth."""
        if not accepted:
            return [no_truth(group.prompt, sample, "similarity", "a text or a list of them") for sample in group.samples]
        texts = [sample.text for sample in group.samples]
        return [
            self._score(text, accepted, [next(results) for _ in accepted]) if text.strip() else _malformed(text) for text in texts
        ]

    def _score(self, response: str, accepted: Sequence[str], found: Sequence[ScalarScore]) -> Score:
        too_long = next((one for one in found if one.too_long), None)
        if too_long is not None:
            return _malformed(response, "too long for the embedding model", transient=too_long.refused)
        failure = next((one.failure for one in found if one.failure is not None), None)
        if failure is not None:
            return Score(None, failure=failure, view=response)
        cosines = [one.value or 0.0 for one in found]
        nearest = accepted[cosines.index(max(cosines))]
        return Score(max(cosines), view=response, trace={"nearest": nearest} if len(accepted) > 1 else {})


def _malformed(response: str, why: str = "it is empty", *, transient: bool = False) -> Score:
    return Score(0.0, malformed=True, view=response, trace={"malformed": why}, transient=transient)
