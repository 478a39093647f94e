"""A reward's view of a response: without its thoughts, reduced to the answer.

A response without an answer is the policy's fault: it is malformed, and the reward is not called for it. One exception: with
`longcot_config` and `strict` the reward scores the placeholder `[NULL]`, as the systems that write such files do.

    thoughts   keep      the whole text
               strip     the text after the last </think>; nothing if <think> is opened and never closed
               strict    one closed pair of tags at the beginning (the opening one may be in the prompt), then an answer
               longcot   the text between the first start delimiter and the end delimiter, trimmed
    then       extract   the last line, the fenced block at the end, …
"""

import re
from dataclasses import dataclass

from plaudit.recipe import View
from plaudit.response_files import CLOSE, OPEN, Longcot, read_longcot_config

PLACEHOLDER = "[NULL]"
FENCE = "```"


@dataclass(frozen=True)
class Seen:
    """The text to score; `problem` is why the response is malformed, if it is."""

    text: str
    problem: str | None = None

    @property
    def scorable(self) -> bool:
        return self.problem is None or self.text == PLACEHOLDER


def see(view: View, text: str) -> Seen:
    """Apply a view to a response."""
    seen = _without_thoughts(view, text)
    if seen.problem is not None or view.extract == "none":
        return seen
    found = _extract(view, seen.text)
    return Seen("", f"it has no {_WHAT[view.extract]}") if found is None else Seen(found)


# Thoughts ------------------------------------------------------------------------------------------------------------


def _without_thoughts(view: View, text: str) -> Seen:
    if (file := view.longcot_file) is not None:
        return _longcot(read_longcot_config(file), text, strict=view.strict)
    if view.think == "keep":
        return Seen(text)
    before, closed, answer = text.rpartition(CLOSE)
    if not closed:
        if view.think == "strict":
            return Seen("", f"its thoughts do not end with {CLOSE}")
        return Seen("", f"its thoughts are not closed by {CLOSE}") if OPEN in text else Seen(text)
    if view.think == "strict":
        thoughts = before.lstrip().removeprefix(OPEN)
        if OPEN in thoughts or CLOSE in thoughts or OPEN in answer:
            return Seen("", "its thoughts are not one pair of tags at the beginning")
        if not answer.strip():
            return Seen("", "there is no answer after its thoughts")
    elif OPEN in answer:
        return Seen("", f"thoughts after its answer are not closed by {CLOSE}")
    return Seen(answer.strip())


def _longcot(delimiters: Longcot, text: str, *, strict: bool) -> Seen:
    if delimiters.start is None:
        return Seen(text)
    _, found_start, rest = text.partition(delimiters.start)
    answer = rest.lstrip() if found_start else text
    found_end = True
    if delimiters.end is not None:
        answer, found_end, _ = answer.partition(delimiters.end)
        answer = answer.rstrip() if found_end else answer
    if strict and not (found_start and found_end):
        missing = delimiters.end if found_start else delimiters.start
        return Seen(PLACEHOLDER, f"{missing} is missing")
    return Seen(answer)


# Extracts ------------------------------------------------------------------------------------------------------------

_WHAT = {
    "line": "line with text",
    "codeblock": "single fenced block at its end",
    "oneline": "single line that is all of it",
    "boxed": "\\boxed{…}",
    "answer": "final answer",
    "tag": "closed tag",
}


def _extract(view: View, text: str) -> str | None:
    match view.extract:
        case "line":
            found = text.strip().rpartition("\n")[2]
        case "codeblock":
            found = _codeblock(text)
        case "oneline":
            found = None if "\n" in text.strip() else text
        case "boxed":
            found = last_boxed(text)
        case "answer":
            found = _final_answer(text)
        case _:
            found = _tagged(text, view.tag or "")
    return None if found is None or not found.strip() else found.strip()


def _codeblock(text: str) -> str | None:
    """The content of the only fenced block, if nothing follows it."""
    text = text.rstrip()
    if text.count(FENCE) != 2:
        return None
    fences = list(re.finditer(r"^[ \t]*```.*$", text, re.M))
    if len(fences) != 2 or fences[1].group().strip() != FENCE or fences[1].end() != len(text):
        return None
    return text[fences[0].end() : fences[1].start()]


def _final_answer(text: str) -> str | None:
    """The answer as the math rule reads it. A judge is easier to fool than that rule, so some that the rule would compare are none
    here: prose that nothing announces as the answer ("Let us think."), signs without a letter or a digit, and long texts."""
    from plaudit.rewards.rules.maths.answers import LONGEST_ANSWER, announces_answer, find_answer, normalise

    # On one line: it cannot imitate the headings of a judge's prompt.
    found = " ".join((find_answer(text) or "").split())
    if len(found) > LONGEST_ANSWER or not re.search(r"\w", normalise(found)):
        return None
    return found if announces_answer(text) or re.search(r"\d", found) else None


def last_boxed(text: str) -> str | None:
    """The content of the last closed \\boxed{…} or \\fbox{…}. One pass: a policy may write any number of boxes."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces: list[int | None] = []
    last = None
    for found in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.S):
        if found.group() == "{":
            open_braces.append(None)
        elif found.group() == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (last is None or start > last[0]):
                last = start, found.start()
        elif found.group().endswith("{") and len(found.group()) > 2:
            open_braces.append(found.end())
    return text[slice(*last)] if last else None


def _tagged(text: str, tag: str) -> str | None:
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside if closed and opened else None
