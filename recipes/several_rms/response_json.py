"""What the rule and the plugins of this folder share: the JSON object that a response has to be."""

import json

KEYS = ("Thought", "Solution", "Knowledge", "ResponseSolution", "Response")
"""Thoughts; numbers of the chosen solution and of the knowledge it rests on; the solution in words; the words to the customer."""


def read_response(text):
    """The object between the first { and the last }; None if it is none, or lacks a key."""
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(key in found for key in KEYS) else None


def read_marks(answer):
    """The mean of the marks (0 or 1) in the object at the end of a judge's answer, after its thoughts; None if it is unreadable."""
    answer = answer.rpartition("</think>")[2]
    try:
        marks = json.loads(answer[answer.rindex("{") : answer.rindex("}") + 1])
    except ValueError:
        return None
    valid = isinstance(marks, dict) and marks and all(mark in (0, 1) for mark in marks.values())
    return sum(marks.values()) / len(marks) if valid else None
