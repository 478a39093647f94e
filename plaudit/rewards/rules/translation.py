"""What the rules that compare a translation with its reference have in common (sacrebleu, at sentence level, from 0 to 1).

What no translator would write is malformed, or a policy would earn a part of the reward with it:

    it is empty                                        sacrebleu gives 0 as well
    it is the source text, which is not the reference  names, numbers and cognates would count; punctuation does not matter
    it is longer than 5 times the reference            a list of variants contains the right words: recall counts most in chrF
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from plaudit.errors import RecipeError, install_extra
from plaudit.languages import base_language
from plaudit.rewards.reward import LiveRule
from plaudit.rewards.rules.ground_truth import no_truth, read_texts
from plaudit.types import Prompt, Sample, Score

SOURCE, LANGUAGE = "src_text", "trg_lang"
"""Fields of extra_info: the text to translate, and the language to translate it into."""
LONGEST_FACTOR, SPARE_CHARACTERS = 5, 200
"""A translation has at most this many times the characters of its longest reference, and some to spare."""


class LiveTranslationRule(LiveRule):
    """A rule that needs sacrebleu."""

    async def open(self) -> None:
        if find_spec("sacrebleu") is None:
            label, kind = self.settings.label, self.settings.kind
            raise RecipeError(f"reward '{label}': kind: {kind} needs sacrebleu: {install_extra('translation')}")


def score_translation(prompt: Prompt, sample: Sample, kind: str, percent: Callable[[str, Sequence[str]], float]) -> Score:
    """`percent`: the metric of a translation, given its references, as sacrebleu returns it, from 0 to 100."""
    references = list(dict.fromkeys(read_texts(prompt.ground_truth)))
    if not references:
        return no_truth(prompt, sample, kind, "a text or a list of them")
    response, source = sample.text.strip(), prompt.extra_info.get(SOURCE)
    problem = None
    if not response:
        problem = "it is empty"
    elif len(response) > LONGEST_FACTOR * max(map(len, references)) + SPARE_CHARACTERS:
        problem = f"it is longer than {LONGEST_FACTOR} times the reference"
    elif isinstance(source, str) and _folded(response) == _folded(source) not in map(_folded, references):
        problem = "it is the source text"
    if problem is not None:
        return Score(0.0, malformed=True, view=sample.text, trace={"malformed": problem})
    return Score(min(percent(response, references) / 100, 1.0), view=sample.text)


def target_language(prompt: Prompt) -> str:
    """Its English name: `Chinese` of `zh-CN`, `zho_Hans` and `Simplified Chinese`; empty if the row does not say."""
    return base_language(str(prompt.extra_info.get(LANGUAGE) or ""))


def _folded(text: str) -> str:
    """Letters and digits: a copy with other punctuation is still a copy."""
    return "".join(filter(str.isalnum, text.casefold()))
