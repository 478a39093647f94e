"""Unidiomatic phrases stay out of code, messages and documents."""

import re

from support.paths import REPOSITORY

# Each with its replacement.
BANNED = {
    r"foretold|foretell\w*": "predicted, predictions",
    r"untold": "unmatched",
    r"(?:goes|going|gone|go) on (?:with|from)|goes on|gone on|went on": "resumes, continues",
    r"mends?|mended|mending": "fix, fixed",
    r"at hand": "on device, available",
    r"so many": "n, this many",
    r"comes? to|came to|coming to": "amounts to, is",
    r"is paid|are paid|was paid|pays? for": "is rewarded, rewards",
    r"learnt|learnt from": "trained on",
    r"like_it": "sibling",
    r"half a character": "unpaired surrogate",
    r"files? of lines": "JSONL file",
    r"in vain": "has no effect",
    r"hostile": "adversarial",
}
PATTERN = re.compile("|".join(rf"(?P<p{i}>\b(?:{phrase})\b)" for i, phrase in enumerate(BANNED)), re.IGNORECASE)
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".jinja")
FILES = sorted(
    file
    for place in ("plaudit", "docs", "recipes", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    for file in ([REPOSITORY / place] if place.endswith(".md") else (REPOSITORY / place).rglob("*"))
    if file.suffix in SUFFIXES
)


def test_no_banned_phrase():
    found = [
        f"{file.relative_to(REPOSITORY)}:{number}: {match[0]!r} (write: {list(BANNED.values())[int(match.lastgroup[1:])]})"
        for file in FILES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in PATTERN.finditer(line)
        if match.lastgroup
    ]
    assert not found, "\n".join(found)
