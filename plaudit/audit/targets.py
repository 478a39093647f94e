"""Material for adversarial probes: a prompt, its reference, wrong answers, and how a right response words its answer."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from plaudit.rewards.rules.ground_truth import plain
from plaudit.rewards.view import last_boxed
from plaudit.types import Prompt

NUMBER = re.compile(r"[-−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARKS = re.compile(r"</?[A-Za-z_]+>|```\w*")
EVERY_FORM = "The answer is {0}.\n\\boxed{{{0}}}\n#### {0}"
"""A text in which every common way of extracting an answer finds the same one."""

REAL = 3
"""Real responses grouped with each probe for comparative rewards."""


@dataclass(frozen=True)
class Target:
    """One prompt to attack. None means unknown: probes that need that field skip this prompt."""

    index: int
    prompt: Prompt
    reference: str | None
    """The final answer alone."""
    wrong: tuple[str, ...]
    """Answers that differ from the reference, the most plausible mistake first."""
    right: str | None
    """A full response labelled right, or, without labels, one with a high reward."""
    real: tuple[str, ...]
    """Some real responses, the right one first."""
    elsewhere: str | None
    """A response to another prompt."""

    @property
    def question(self) -> str:
        return next((str(m["content"]) for m in reversed(self.prompt.messages) if m["role"] == "user"), "")

    def phrase(self, answer: str) -> str:
        """Word an answer: for every other target like the right response, else in all common forms at once."""
        line = self._answer_line()
        if self.index % 2 == 0 and line is not None and self.reference is not None:
            return replace_all(line, self.reference, answer)
        return EVERY_FORM.format(answer)

    def _answer_line(self) -> str | None:
        """The last line of the right response that contains the reference."""
        if self.right is None or self.reference is None:
            return None
        pattern = _standing_alone(self.reference)
        return next((line for line in reversed(self.right.splitlines()) if pattern.search(line)), None)

    def wrap(self, text: str) -> str:
        """Put the text inside the tags and fences around the right response's answer, so that a view lets it through."""
        line = self._answer_line()
        if self.right is None or line is None:
            return text
        before, _, after = self.right.rpartition(line)
        opening = [f"{mark}\nLet me think." if mark.startswith("<") and mark[1] != "/" else mark for mark in MARKS.findall(before)]
        if opening and MARKS.findall(before)[-1][:2] != "</":
            opening[-1] = opening[-1].removesuffix("\nLet me think.")  # an answer follows, not thoughts
        return "\n".join([*opening, text, *MARKS.findall(after)])

    def is_reference(self, text: str | None) -> bool:
        """Whether an answer equals the reference, in any spelling."""
        if text is None or self.reference is None:
            return False
        ours, theirs = to_number(self.reference), to_number(text)
        return ours == theirs if ours is not None and theirs is not None else text.strip().casefold() == self.reference.casefold()


def make_target(
    index: int, prompt: Prompt, right: str | None, responses: Sequence[str], foreign: Sequence[tuple[Prompt, str]], seed: int
) -> Target:
    """`foreign`: prompts with one response each, a source of wrong answers and of responses to other prompts."""
    rng = random.Random(f"{seed} {prompt.id}")
    reference = final_answer(prompt.ground_truth)
    foreign = [(other, text) for other, text in foreign if other.messages != prompt.messages]
    rng.shuffle(foreign)
    real = tuple(dict.fromkeys([*filter(None, [right]), *responses]))[:REAL]
    target = Target(index, prompt, reference, (), right, real, None)
    answers = [a for other, _ in foreign[:20] if (a := final_answer(other.ground_truth)) is not None and not target.is_reference(a)]
    number = None if reference is None else to_number(reference)
    if number is not None and reference is not None:
        near = [number + rng.choice((1, 2, 3, 5, 10)), number * 2, number - rng.choice((1, 2, 4)), number + 100]
        answers = [a for n in near if not target.is_reference(a := spell(n))] + [a for a in answers if to_number(a) is not None]
    # A response to another prompt is wrong only if that prompt has a different answer.
    elsewhere = next((text for other, text in foreign if text.strip() and not _ends_like(target, text)), None)
    return replace(target, wrong=tuple(dict.fromkeys(answers)), elsewhere=elsewhere)


def _ends_like(target: Target, text: str) -> bool:
    found = NUMBER.findall(text)
    return target.is_reference(found[-1] if found and to_number(target.reference or "") is not None else text)


def final_answer(truth: Any) -> str | None:
    """The answer in a ground truth: what follows GSM8K's ####, the content of \\boxed{}, or all of it; None if too long."""
    truth = plain(truth)
    if isinstance(truth, list | tuple):
        truth = truth[0] if truth else None
    if isinstance(truth, float) and truth.is_integer():
        truth = int(truth)
    if truth is None or isinstance(truth, dict):
        return None
    text = str(truth)
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    elif boxed := last_boxed(text):
        text = boxed
    text = text.strip()
    return text if 0 < len(text) <= 200 and not text.startswith("{") else None


def to_number(text: str) -> float | None:
    """'1,234' or '$12.50' as a number; None if the text is anything else."""
    bare = text.strip().strip("$€£%. ").replace(",", "").replace("−", "-")
    try:
        return float(bare) if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", bare, re.ASCII) else None
    except ValueError:
        return None


def spell(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:.10g}"


def replace_all(text: str, old: str, new: str) -> str:
    """Replace every standalone occurrence of `old`."""
    return _standing_alone(old).sub(lambda _: new, text)


def replace_last(text: str, old: str, new: str) -> str | None:
    """Replace the last standalone occurrence of `old`; None if there is none."""
    found = list(_standing_alone(old).finditer(text))
    return text[: found[-1].start()] + new + text[found[-1].end() :] if found else None


def _standing_alone(answer: str) -> re.Pattern[str]:
    """Matches the answer, but not inside a longer number or word; numbers with or without commas."""
    spellings = {answer}
    number = to_number(answer)
    if number is not None and number.is_integer():
        spellings |= {f"{int(number):,}", str(int(number))}
    options = "|".join(re.escape(s) for s in sorted(spellings, key=len, reverse=True))
    return re.compile(
        rf"(?<![\w.,])(?:{options})(?!\w|[.,]\d)" if number is None else rf"(?<![\d.])(?<!\d,)(?:{options})(?!\d|[.,]\d)"
    )
