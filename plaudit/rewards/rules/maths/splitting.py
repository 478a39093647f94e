r"""Splitting a text at separators outside brackets. Every function here takes time linear in its input."""

import re

OPEN, CLOSE = frozenset("([{"), frozenset(")]}")
_PIECES = re.compile(r"\\[a-zA-Z]+|\\.|[a-zA-Z]+|.", re.S)
_TEXT_JOINTS = re.compile(r"\\text\s*{\s*(or|and|if and only if|where)\s*}")


def split(text: str, at: set[str]) -> tuple[list[str], list[str]]:
    """The pieces between separators outside brackets, and the separators."""
    text = _TEXT_JOINTS.sub(r" \1 ", text) if "\\text" in text else text
    if not any(separator in text for separator in at):
        return ([text.strip()] if text.strip() else []), []
    pieces, joints, start, depth, end = [], [], 0, 0, 0
    for found in _PIECES.finditer(text):
        piece = found[0]
        depth += (piece[-1] in OPEN) - (piece[-1] in CLOSE) if len(piece) == 1 or piece in ("\\{", "\\}") else 0
        if depth <= 0 and piece in at and not (piece == "," and is_thousands(text, found.start())):
            pieces.append(text[start : found.start()].strip())
            joints.append(piece)
            start = found.end()
        end = found.end()
    pieces.append(text[start:end].strip())
    # 'a, and b' is one joint.
    kept = [(piece, joint) for piece, joint in zip(pieces, [*joints, ""], strict=True) if piece]
    return [piece for piece, _ in kept], [joint for _, joint in kept[:-1]]


def is_thousands(text: str, comma: int) -> bool:
    """A comma without a space between one to three digits and exactly three: 81,213. In brackets a comma always separates."""
    return bool(
        re.match(r",\d{3}(?![\d])", text[comma : comma + 5])
        and re.search(r"(?<![\d.])(?:[1-9]\d{0,2}(?:,\d{3})*)$", text[max(0, comma - 40) : comma])
    )


def balanced(text: str) -> bool:
    depth = 0
    for found in _PIECES.finditer(text):
        if len(found[0]) == 1 or found[0] in ("\\{", "\\}"):
            depth += (found[0][-1] in OPEN) - (found[0][-1] in CLOSE)
            if depth < 0:
                return False
    return depth == 0
