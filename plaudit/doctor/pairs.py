"""A good and a bad answer to the same question: what a reward model must tell apart before it is worth asking.

They come from the recipe's rows: the ground truth, and the ground truth of another row. Where rows have none that is an answer, and
where there are no rows, three obvious ones are taken. Either way they are dressed so that the reward's `view` finds them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from plaudit.recipe import RewardSettings, View
from plaudit.rewards.view import read_longcot_config
from plaudit.types import Prompt

FROM_ROWS = 2
GIBBERISH = "wug the 77 of blorp blorp ] and and zzt"


class Pair(NamedTuple):
    prompt: Prompt
    good: str
    bad: str


def _pair(question: str, truth: str, good: str, bad: str) -> Pair:
    return Pair(Prompt(f"built-in: {question}", [{"role": "user", "content": question}], "", truth), good, bad)


BUILT_IN = (
    _pair("What is 7 + 5?", "12", "7 + 5 = 12", "7 + 5 = 31"),
    _pair("What is the capital of France?", "Paris", "The capital of France is Paris.", "The capital of France is Berlin."),
    _pair(
        "How do I boil an egg?",
        "Eight to ten minutes in boiling water, then cold water.",
        "Put it into boiling water for eight to ten minutes, then cool it under cold water so that it peels well.",
        GIBBERISH,
    ),
)

BUILT_IN_IDS = frozenset(pair.prompt.id for pair in BUILT_IN)


def pairs_for(reward: RewardSettings, prompts: Sequence[Prompt]) -> list[Pair]:
    """As the policy would write them."""
    told = [(prompt, truth) for prompt in prompts if reward.applies_to(prompt) and (truth := _truth(prompt.ground_truth))]
    others = [truth for _, truth in told]
    found = [
        Pair(prompt, truth, next((one for one in others if one.casefold() != truth.casefold()), GIBBERISH))
        for prompt, truth in told
    ]
    chosen = found[:FROM_ROWS] or BUILT_IN
    return [Pair(pair.prompt, dressed(reward.view, pair.good), dressed(reward.view, pair.bad)) for pair in chosen]


def _truth(given: Any) -> str | None:
    """The ground truth, if it is an answer and not something to compute one with."""
    if isinstance(given, list) and given:
        given = given[0]
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return None
    text = str(given).strip()
    try:
        return None if isinstance(json.loads(text), dict | list) else text
    except ValueError:
        return text or None


def dressed(view: View, answer: str) -> str:
    """A response in which the view finds this answer."""
    match view.extract:
        case "boxed":
            answer = f"\\boxed{{{answer}}}"
        case "codeblock":
            answer = f"```\n{answer}\n```"
        case "tag":
            answer = f"<{view.tag}>{answer}</{view.tag}>"
        case _:
            pass
    if view.longcot_config is not None:
        delimiters = read_longcot_config(view.longcot_config)
        return f"{delimiters.start or ''}{answer}{delimiters.end or ''}"
    return f"<think>\nLet me see.\n</think>\n\n{answer}" if view.think == "strict" else answer
