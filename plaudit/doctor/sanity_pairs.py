"""Sanity pairs: a good and a bad answer to the same question, which any useful reward model tells apart.

They come from the recipe's rows: the ground truth, against that of another row. Without rows, or if no ground truth is a plain
answer, three built-in pairs are used. Answers are formatted so that the reward's `view` extracts them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from plaudit.recipe import RewardSettings, View
from plaudit.response_files import join_thought, read_longcot_config
from plaudit.types import Prompt

MAX_PAIRS_FROM_ROWS = 2
GIBBERISH = "wug the 77 of blorp blorp ] and and zzt"


class Pair(NamedTuple):
    prompt: Prompt
    good: str
    bad: str


def _pair(question: str, truth: str, good: str, bad: str) -> Pair:
    return Pair(Prompt(f"built-in: {question}", [{"role": "user", "content": question}], "", truth), good, bad)


BUILT_IN_PAIRS = (
    _pair("What is 7 + 5?", "12", "7 + 5 = 12", "7 + 5 = 31"),
    _pair("What is the capital of France?", "Paris", "The capital of France is Paris.", "The capital of France is Berlin."),
    _pair(
        "How do I boil an egg?",
        "Eight to ten minutes in boiling water, then cold water.",
        "Put it into boiling water for eight to ten minutes, then cool it under cold water so that it peels well.",
        GIBBERISH,
    ),
)

BUILT_IN_IDS = frozenset(pair.prompt.id for pair in BUILT_IN_PAIRS)


def make_pairs(reward: RewardSettings, prompts: Sequence[Prompt]) -> list[Pair]:
    """Pairs for this reward, formatted as the policy would write them."""
    answered = [(prompt, answer) for prompt in prompts if reward.applies_to(prompt) and (answer := _answer(prompt.ground_truth))]
    answers = [answer for _, answer in answered]
    from_rows = [
        Pair(prompt, good, next((bad for bad in answers if bad.casefold() != good.casefold()), GIBBERISH))
        for prompt, good in answered
    ]
    pairs = from_rows[:MAX_PAIRS_FROM_ROWS] or BUILT_IN_PAIRS
    return [Pair(pair.prompt, format_answer(reward.view, pair.good), format_answer(reward.view, pair.bad)) for pair in pairs]


def _answer(ground_truth: Any) -> str | None:
    """The ground truth if it is a plain answer, not structured data for a rule."""
    if isinstance(ground_truth, list) and ground_truth:
        ground_truth = ground_truth[0]
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        return None
    text = str(ground_truth).strip()
    try:
        return None if isinstance(json.loads(text), dict | list) else text
    except ValueError:
        return text or None


def format_answer(view: View, answer: str) -> str:
    """A response from which the view extracts this answer."""
    match view.extract:
        case "boxed" | "answer":
            answer = f"\\boxed{{{answer}}}"
        case "codeblock":
            answer = f"```\n{answer}\n```"
        case "tag":
            answer = f"<{view.tag}>{answer}</{view.tag}>"
        case _:
            pass
    if (file := view.longcot_file) is not None:
        delimiters = read_longcot_config(file)
        return f"{delimiters.start or ''}{answer}{delimiters.end or ''}"
    return join_thought("Let me see.", answer) if view.think == "strict" else answer
