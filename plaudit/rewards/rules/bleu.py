"""BLEU of a translation, at sentence level: how many of its n-grams of 1 to 4 words the reference has (sacrebleu).

    BLEU = min(1, exp(1 − r/h)) · (p₁ p₂ p₃ p₄)^(1/4)     pₙ: share of its n-grams that the reference has; r, h: words of both

With sacrebleu's defaults for sentences: exponential smoothing of pₙ = 0, and no n-grams longer than the response (effective order).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.translation import LiveTranslationRule, score_translation, target_language
from plaudit.types import Prompt, Sample, Score

TOKENIZERS = {"Chinese": "zh"} | dict.fromkeys(("Japanese", "Thai", "Lao", "Khmer", "Burmese"), "char")
"""By language, of those that are written without spaces; others have sacrebleu's default, 13a."""


class Bleu(Rule):
    kind: Literal["bleu"]
    """BLEU against the reference translation, at sentence level."""
    tokenizer: Literal["auto", "13a", "intl", "zh", "char", "none"] = "auto"
    """sacrebleu's tokeniser. auto: by the row's extra_info.trg_lang (a code or an English name): zh for Chinese, char for Japanese,
    Thai, Lao, Khmer and Burmese, else 13a."""

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        name = TOKENIZERS.get(target_language(prompt), "13a") if self.tokenizer == "auto" else self.tokenizer

        def percent(response: str, references: Sequence[str]) -> float:
            return _metric(name).sentence_score(response, references).score

        return score_translation(prompt, sample, self.kind, percent)

    def build(self) -> LiveTranslationRule:
        return LiveTranslationRule(self)


@lru_cache
def _metric(tokenizer: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU  # pyright: ignore[reportMissingImports]

    return BLEU(tokenize=tokenizer, effective_order=True)
