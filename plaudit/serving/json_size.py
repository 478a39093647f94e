"""How many values a JSON body has, and how long its texts are, counted while it arrives: a value may take far more time and memory
to parse than its bytes, and a text is parsed in a single call."""

import re

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(")(?:[^"\\]++|\\.)*+\\?\Z', re.DOTALL)
"""A string, or the beginning of one that the next chunk continues: its quote is captured."""
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class ValueCounter:
    """Commas and opening brackets outside of strings. Text is free: a formula is full of them."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_text = 0
        """Bytes of the longest text of several chunks, without those in its first."""
        self._text_bytes = 0
        self._in_string = self._escaped = False
        """At the end of the last chunk: within a string; right after a backslash."""

    def add(self, chunk: bytes) -> None:
        if not chunk:
            return
        start = 1 if self._escaped else 0
        self._escaped = False
        if self._in_string:
            end = _REST_OF_STRING.match(chunk, start).end()  # pyright: ignore[reportOptionalMemberAccess] (it matches nothing, too)
            self._text_bytes += end
            self.longest_text = max(self.longest_text, self._text_bytes)
            if end == len(chunk) or chunk[end] == ord("\\"):
                self._escaped = end < len(chunk)
                return
            start, self._in_string = end + 1, False
        outside = _STRING.sub(rb"\1", chunk[start:])
        if outside.endswith(b'"'):
            self._in_string, self._text_bytes = True, 0
            self._escaped = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 == 1
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
