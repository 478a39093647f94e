"""Text that a model wrote, made safe for a terminal."""

import unicodedata

UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn")
"""Unicode categories of control and format characters, surrogates, and code points without a character."""
HARMLESS = "\n\t\u200c\u200d\u00ad"
"""Line breaks, tabs, and what joins emoji and letters."""


def safe_text(text: str) -> str:
    """Escape what could move the cursor, change colours, or hide and reorder text: `\\x1b[2J` is shown, not obeyed."""
    return "".join(c if c in HARMLESS or unicodedata.category(c) not in UNSAFE else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
