"""Keys and passwords, removed from everything that plaudit writes, prints or passes on.

Known secrets are removed by value: those of environment variables that a recipe names (`credential`), and of all whose name says
that they hold one. Servers and libraries repeat a key in other forms too, so each value is also searched for percent-encoded,
escaped as in JSON, Python and HTML, and in base64 at any offset (`Authorization: Basic …` encodes `user:password`). Strings that
look like keys of well-known services, passwords in URLs, and keys in their queries are removed without being known.

Text has to be redacted before it is shortened: half a key does not look like one.
"""

import base64
import html
import os
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

_SECRETS = (
    r"(api|access|secret|private)[-_]?keys?|(api|auth|access|hf|secret|bearer)[-_]?tokens?|secrets?|passwords?|passwd|credentials?"
)
SECRET_NAME = re.compile(f"({_SECRETS})$", re.IGNORECASE)
"""Names of settings that would hold a secret. Not every token is one: stop_token is not."""
# In the environment, any token or key counts as a secret: redacting too much does no harm there.
SECRET_VARIABLE = re.compile(f"({_SECRETS}|tokens?|(^|_)keys?)$", re.IGNORECASE)
MIN_LENGTH, MIN_NAMED_LENGTH = 8, 6
"""Of a secret: shorter values are also words (EMPTY, for a server without keys). A variable that a recipe names holds a key."""
MIN_BASE64 = 8
"""Characters of base64 that are enough to recognise a secret."""

# Formats of well-known services' keys, for keys that are not in the environment. Names such as
# hf-internal-testing/tiny-random-llama must not match.
_KEY_SHAPE = re.compile(r"\b(?:sk|pk|xoxb)[-_](?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}|\b(?:hf|ghp|gho)_[A-Za-z0-9]{16,}", re.ASCII)
_KEY_STARTS = ("sk-", "sk_", "pk-", "pk_", "xoxb-", "xoxb_", "hf_", "ghp_", "gho_")
_IN_URL = re.compile(
    r"(?<=://)[^/\s:@]+:[^/\s]+(?=@)"  # user:password@
    r"|(?<=p://)[^/\s:@?]+(?=@)|(?<=ps://)[^/\s:@?]+(?=@)"  # key@, in http and https
    r"|(?<=[?&;])(?P<name>[\w.-]{0,40}?(?:key|token|secret|password|passwd|credential|signature|sig|auth)s?)=[^&;\s#\"'<>]{4,}",
    re.ASCII | re.IGNORECASE,
)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_BASE64 = string.ascii_letters + string.digits + "+/_-"
_named: set[str] = set()


def keep_secret(variable: str) -> None:
    """Treat the value of this environment variable as a secret, whatever the variable is called."""
    _named.add(variable)


def redact(text: str) -> str:
    """The text without secrets: `$NAME` for the value of a variable, `[secret]` for others."""
    return _redact(text, _known())


def redact_all(value: Any) -> Any:
    """A value as in JSON, its keys and strings redacted. Unpaired surrogates in them, which no file can hold, become '?'."""
    if not value:
        return value
    known = _known()

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return _redact(value.encode(errors="replace").decode(), known)
        if isinstance(value, Mapping):
            return {walk(key): walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list | tuple) else value

    return walk(value)


def _redact(text: str, known: "Known") -> str:
    for value, shown in known.values:
        if value in text:
            text = text.replace(value, shown)
    if known.values and ("%" in text or "\\" in text or "&" in text):
        plain = _unescape(text)
        for value, shown in known.values:
            if _without_backslashes(value) in plain or _unescape(value) in plain:
                text = _escaped(value).sub(lambda _, shown=shown: shown, text)
    for encoded, shown in known.base64:
        if encoded in text:
            text = _without_base64(text, encoded, shown)
    if any(start in text for start in _KEY_STARTS):
        text = _KEY_SHAPE.sub("[secret]", text)
    if "://" in text or "?" in text:
        text = _IN_URL.sub(lambda found: f"{found['name']}=[secret]" if found["name"] else "[secret]", text)
    return text


# Known secrets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What to search for, and what to write instead. Longest first: a secret may begin with another one, and its tail must go
    too."""

    values: list[tuple[str, str]]
    base64: list[tuple[str, str]]
    """Within a run of base64, which is replaced as a whole."""


def _known() -> Known:
    """Of the environment as it is now. Only names that have changed are read again: that takes longer than the search in a short
    text, and so would `os.environ`, which decodes every name each time; the dict behind it has them as they are."""
    names = _secret_names(tuple(getattr(os.environ, "_data", os.environ)), len(_named))
    return _of(tuple((name, value) for name in names if (value := os.environ.get(name))), len(_named))


@lru_cache(maxsize=16)
def _secret_names(variables: tuple[str | bytes, ...], num_named: int) -> list[str]:
    return [name for name in map(os.fsdecode, variables) if name in _named or SECRET_VARIABLE.search(name)]


@lru_cache(maxsize=16)
def _of(variables: tuple[tuple[str, str], ...], num_named: int) -> Known:
    secrets = [(name, value) for name, value in variables if len(value) >= (MIN_NAMED_LENGTH if name in _named else MIN_LENGTH)]
    values = {value: f"${name}" for name, value in secrets}
    encoded = {form: f"${name}" for name, value in secrets for form in _as_base64(value)}
    return Known(*(sorted(forms.items(), key=lambda item: -len(item[0])) for forms in (values, encoded)))


# Escaped secrets -----------------------------------------------------------------------------------------------------


def _unescape(text: str) -> str:
    """Without percent-encoding, entities of HTML and escapes of JSON and Python, in any mixture. A quick search: if a secret is in
    here, `_escaped` finds its place in the text."""
    text = html.unescape(unquote(text, errors="replace"))
    text = _CODE.sub(lambda found: chr(int(found[1] or found[2], 16)), text)
    return _without_backslashes(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _without_backslashes(text: str) -> str:
    return text.replace("\\", "").replace("+", " ")


@lru_cache(maxsize=256)
def _escaped(value: str) -> re.Pattern[str]:
    """The value with each of its characters as it is, or escaped in one of those ways, once or repeatedly."""
    return re.compile("".join(f"(?:{'|'.join(_spellings(letter))})" for letter in value))


def _spellings(letter: str) -> Iterator[str]:
    backslashes = r"\\{0,16}"
    yield rf"{backslashes}{re.escape(letter)}" if letter != "\\" else r"\\{1,32}"
    data, halves = letter.encode(errors="replace"), letter.encode("utf-16-be", "surrogatepass")
    yield "(?i:" + "".join(f"%{byte:02x}" for byte in data) + ")"
    yield "(?i:" + "".join(rf"{backslashes}\\u{halves[i : i + 2].hex()}" for i in range(0, len(halves), 2)) + ")"
    if ord(letter) < 256:
        yield rf"(?i:{backslashes}\\x{ord(letter):02x})"
    yield f"(?i:&#0{{0,4}}{ord(letter)};|&#x0{{0,4}}{ord(letter):x};)"
    if (entity := html.escape(letter)) != letter:
        yield re.escape(entity)
    if letter == " ":
        yield r"\+"


def _as_base64(value: str) -> Iterator[str]:
    """The characters that it alone determines, with 0, 1 or 2 bytes before it in a triple."""
    data = value.encode(errors="replace")
    for before in range(3):
        first, last = -(-before * 8 // 6), (before + len(data)) * 8 // 6
        encoded = base64.b64encode(bytes(before) + data).decode()[first:last]
        if len(encoded) >= MIN_BASE64:
            yield encoded
            yield encoded.replace("+", "-").replace("/", "_")


def _without_base64(text: str, encoded: str, shown: str) -> str:
    """Each run of base64 that contains the secret is replaced as a whole: its ends hold the first and the last bits."""
    parts, end = [], 0
    while (at := text.find(encoded, end)) >= 0:
        parts += [text[end:at].rstrip(_BASE64), shown]
        end = len(text) - len(text[at + len(encoded) :].lstrip(_BASE64).lstrip("="))
    return "".join([*parts, text[end:]])
