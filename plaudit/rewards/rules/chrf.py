"""chrF of a translation, at sentence level: F-score of its n-grams of 1 to 6 characters (sacrebleu). Needs no tokeniser.

chrF = (1 + β²) · P · R / (β² · P + R)     P, R: mean precision and recall over the orders; white space is not counted
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.translation import LiveTranslationRule, score_translation
from plaudit.types import Prompt, Sample, Score


class Chrf(Rule):
    kind: Literal["chrf"]
    """chrF against the reference translation, at sentence level."""
    word_order: Annotated[int, Field(ge=0, le=4)] = 0
    """N-grams of words up to this length count too; 2: chrF++."""
    beta: PositiveInt = 2
    """How much more recall counts than precision; 1: equally, which leaves less to earn by writing variants."""

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        def percent(response: str, references: Sequence[str]) -> float:
            return _metric(self.word_order, self.beta).sentence_score(response, references).score

        return score_translation(prompt, sample, self.kind, percent)

    def build(self) -> LiveTranslationRule:
        return LiveTranslationRule(self)


@lru_cache
def _metric(word_order: int, beta: int) -> Any:
    from sacrebleu.metrics.chrf import CHRF  # pyright: ignore[reportMissingImports]

    return CHRF(word_order=word_order, beta=beta)
