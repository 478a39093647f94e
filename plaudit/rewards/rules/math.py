r"""Mathematical equivalence: 1 if the answer equals the reference, else 0. No answer found: 0, malformed.

The answer is the content of the last `\boxed{}` (`maths/boxes.py`), else the text after the last 'the answer is', 'Answer:' or
`####`, else the last line or the last formula in it. Most answers are decided here, as text or as exact numbers; the others are
compared in worker processes (`maths/worker.py`). When in doubt, an answer is wrong: rewarding a wrong answer is worse than missing
a right one.

    reference           right                                     wrong
    1/3                 2/6, \frac13, 0.\overline{3}              0.33, 0.333333 (unless `tolerance`)
    30.52               1587/52 (unless `strict`)                 30.519, 1588/52
    50\%                50, 0.5, 1/2                              5, 50 cm
    50                  50\%, 50 cm, 50 apples, x = 50            0.5, 50 million, 50 squared, 50 wrong
    0.5                 50\%, \frac{5}{10}                        50, 0.5\%
    5 cm                5, 5 centimeters                          5 m, 50 mm (no conversions)
    45°                 45, \pi/4                                 45 for a reference of \pi/4
    x = 5               5, 2x = 10                                y = 5
    xy = 6              y = 6/x, 6/x                              6/t, x(xy - 6) = 0
    f(x) = x^2          f(t) = t^2, y = x^2, x^2 for all real x   g(x) = x^2, x^2 for all x > 1
    k\pi                n\pi                                      n for a reference of k
    2, -8               -8 or 2, \{2, -8\}, x = 2 or x = -8       2, (2, -8)
    1, 3                Maximum: 3, Minimum: 1 (unless `strict`)  Maximum: 1, Minimum: 3
    (1, 2)              (x, y) = (1, 2), x = 1, y = 2             (2, 1), [1, 2], 1, 2
    (0, 2)              0 < x < 2                                 0 \le x < 2
    A                   (A), A. 5 cm, Option A                    B, a, A or B
    60 km/h             60, 60 kmph, 60km/h                       60 mph
    P(1 + r)            P + Pr                                    P + r
    Team A              team A                                    team
    Possible            possible.                                 Yes, -Possible

`maths/forms.py` has the order in which an answer is taken apart; every step has a file of its own there.

Differs from math-verify: names, units and brackets are parsed, formulas are compared by value, exactly or
at points drawn from the run's seed and the row, no answer is rounded.
Differs from verl, where an answer that takes too long silently scores 0: here it is malformed, and the trace gives the reason.
"""

import asyncio
from collections.abc import Hashable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from plaudit.recipe.limits import Limits
from plaudit.rewards.functions.process import Answer
from plaudit.rewards.functions.worker_pool import UserCode, WorkerPool
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.rewards.rules.ground_truth import no_truth, plain
from plaudit.rewards.rules.maths.answers import LONGEST_ANSWER, compare_plainly, find_answer, normalise, plain_number
from plaudit.rewards.rules.maths.answers import key as text_key
from plaudit.seeding import stable_seed
from plaudit.turns import turns
from plaudit.types import Group, Prompt, Sample, Score

LONGEST_READ = 4000
"""Longer answers are not parsed at all."""
Comparisons = dict[tuple[str, str, int], asyncio.Future[Answer]]
"""By answer, reference and the key of the row's random points."""
WORKER = Path(__file__).with_name("maths") / "worker.py"


class MathLimits(Limits):
    timeout_s: PositiveFloat = 5.0
    """Time limit for one call, which compares one answer; an answer that takes longer is malformed."""
    worker_memory_gb: PositiveFloat | None = 2.0
    """Memory of one worker process (GB in RAM); an answer that takes more is malformed. null for no limit."""


class Math(Reward):
    kind: Literal["math"]
    """The final answer equals the reference, mathematically."""
    tolerance: NonNegativeFloat = 0.0
    """Relative tolerance for numbers, as a share of the reference; 0: exact equality."""
    strict: bool = False
    """Lists only in the reference's order, no labels that it does not have, no exact value for a rounded reference."""
    limits: MathLimits = MathLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""
    workers: PositiveInt = 2
    """Processes that compare formulas in parallel."""

    cached: ClassVar[bool] = False  # faster than a lookup
    checks_answer: ClassVar[bool] = True
    reads_answers: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    def read_answer(self, text: str) -> Hashable | None:
        """Numbers by their value, other answers as text without what spellings differ in."""
        found = find_answer(text)
        answer = normalise(found) if found and len(found) <= LONGEST_READ else ""
        number = plain_number(answer)
        return (text_key(answer) or None) if number is None else number

    def build(self) -> "LiveMath":
        return LiveMath(self)


class LiveMath(LiveReward[Math]):
    def __init__(self, settings: Math):
        super().__init__(settings)
        arguments = {"tolerance": settings.tolerance, "strict": settings.strict}
        code = UserCode(str(WORKER), ("compare",), ("solution_str", "ground_truth", "key"), arguments=arguments)
        limits = settings.limits
        self._workers = WorkerPool(
            code, settings.label, count=settings.workers, timeout_s=limits.timeout_s, memory_gb=limits.worker_memory_gb
        )

    async def open(self) -> None:
        await self._workers.open()

    async def close(self) -> None:
        await self._workers.close()

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        comparisons: Comparisons = {}  # samples of a group often agree: each answer is compared once
        judged = [[await self._judge_in_turn(group.prompt, sample, comparisons) for sample in group.samples] for group in groups]
        await asyncio.gather(*comparisons.values())
        return [
            [one if isinstance(one, Score) else _as_score([each.result() for each in one], sample.text) for one, sample in pairs]
            for pairs in (zip(row, group.samples, strict=True) for row, group in zip(judged, groups, strict=True))
        ]

    async def _judge_in_turn(
        self, prompt: Prompt, sample: Sample, comparisons: Comparisons
    ) -> Score | list[asyncio.Future[Answer]]:
        if (turn := turns()).over:
            await turn.take()
        return self._judge(prompt, sample, comparisons)

    def _judge(self, prompt: Prompt, sample: Sample, comparisons: Comparisons) -> Score | list[asyncio.Future[Answer]]:
        """The score, or the pending comparisons that decide it."""
        truths = references(prompt.ground_truth)
        if not truths:
            return no_truth(prompt, sample, "math", "a text, a number or a list of them")
        found = find_answer(sample.text)
        answer = normalise(found) if found and len(found) <= LONGEST_READ else ""
        if not answer:
            return Score(0.0, malformed=True, view=sample.text, trace={"answer": "none found" if not found else "too long"})
        verdicts = [compare_plainly(answer, truth, self.settings.tolerance, self.settings.strict) for truth in truths]
        if any(verdicts) or None not in verdicts or len(answer) > LONGEST_ANSWER:
            return Score(float(any(verdicts)), view=sample.text, trace={"answer": answer[:LONGEST_ANSWER]})
        undecided = [truth for truth, verdict in zip(truths, verdicts, strict=True) if verdict is None]
        key = stable_seed("math points", self.seed, prompt.id)
        return [self._compare(answer, truth, key, comparisons) for truth in undecided]

    def _compare(self, answer: str, truth: str, key: int, comparisons: Comparisons) -> asyncio.Future[Answer]:
        if (answer, truth, key) not in comparisons:
            comparisons[answer, truth, key] = self._workers.call("compare", solution_str=answer, ground_truth=truth, key=key)
        return comparisons[answer, truth, key]


def references(truth: Any) -> tuple[str, ...]:
    """All accepted answers, normalised: a text, a number, or any entry of a list. Blank text is not accepted.

    Of a worked solution, only the final answer counts, if it is boxed or follows ####.
    """
    truth = plain(truth)
    if isinstance(truth, list | tuple):
        return tuple(text for one in truth for text in references(one))
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        return ()
    return _reference(str(truth))


@lru_cache(maxsize=4096)
def _reference(text: str) -> tuple[str, ...]:
    if "\\boxed" in text or "####" in text:
        text = find_answer(text) or text
    text = normalise(text)
    return (text,) if text else ()


def _as_score(answers: list[Answer], text: str) -> Score:
    """The best of the comparisons. A timeout, too much memory or a crash counts against the answer."""
    best = max(answers, key=lambda answer: answer.get("value", -1.0))
    if "value" in best:
        return Score(best["value"], malformed=best.get("malformed", False), view=text, trace=best.get("trace", {}))
    if best["cause"] in ("timeout", "memory", "died"):
        return Score(0.0, malformed=True, view=text, trace={"cause": best["cause"], "message": best["message"]})
    return failed(best["cause"], best["message"], view=text)
