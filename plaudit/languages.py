"""Languages as data sets write them: codes of two or three letters, with or without a region or script, and English names.

zh, zh-CN, zh_Hans, zho_Hans, cmn    → Chinese
chinese, CHINESE                     → Chinese
Simplified Chinese                   → Simplified Chinese, a name; its language is Chinese
"""

import re

LANGUAGES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fr": "French",
    "ga": "Irish", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "is": "Icelandic",
    "it": "Italian", "ja": "Japanese", "km": "Khmer", "ko": "Korean", "lo": "Lao", "lt": "Lithuanian", "lv": "Latvian",
    "my": "Burmese", "nl": "Dutch", "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "sk": "Slovak", "sl": "Slovenian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese",
    "zh": "Chinese",
}  # fmt: skip
_OTHER_CODES = {
    "ar": "ara arb", "bg": "bul", "bn": "ben", "ca": "cat", "cs": "ces cze", "da": "dan", "de": "deu ger", "el": "ell gre",
    "en": "eng", "es": "spa", "et": "est", "fa": "fas per pes", "fi": "fin", "fr": "fra fre", "ga": "gle", "he": "heb iw",
    "hi": "hin", "hr": "hrv", "hu": "hun", "id": "ind", "is": "isl ice", "it": "ita", "ja": "jpn", "km": "khm", "ko": "kor",
    "lo": "lao", "lt": "lit", "lv": "lav lvs", "my": "mya bur", "nl": "nld dut", "no": "nor nob nno nb nn", "pl": "pol",
    "pt": "por", "ro": "ron rum", "ru": "rus", "sk": "slk slo", "sl": "slv", "sv": "swe", "th": "tha", "tr": "tur", "uk": "ukr",
    "vi": "vie", "zh": "zho chi cmn yue",
}  # fmt: skip
"""ISO 639-2 and 639-3, and further codes of two letters."""
_BY_CODE = LANGUAGES | {code: LANGUAGES[short] for short, codes in _OTHER_CODES.items() for code in codes.split()}
_BY_NAME = {name.casefold(): name for name in LANGUAGES.values()}
_BY_WORD = _BY_NAME | {"mandarin": "Chinese", "cantonese": "Chinese"}
# A name may have three letters (Twi): these are a code only with a script (twi_Latn).
_CODE = re.compile(r"([a-z]{2})(?:[-_][a-z0-9]+)*|([a-z]{3})(?:[-_][a-z0-9]+)+", re.IGNORECASE)


def language_name(text: str) -> str | None:
    """The English name for a code, a name as it is usually written, None for an unknown code."""
    text = text.strip()
    code = _CODE.fullmatch(text)
    known = _BY_CODE.get((code[1] or code[2] if code else text).lower())
    return known or (None if code else _BY_NAME.get(text.casefold(), text))


def base_language(text: str) -> str:
    """The language of a code or name, without region or script: Chinese of Simplified Chinese and Chinese (Taiwan)."""
    name = language_name(text) or text
    words = re.findall(r"\w+", name.casefold())
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), name)


def unknown_language(column: str, written: str) -> str:
    """The message about a code without a name."""
    return f"column {column!r}: {written!r} is no known language code ({' '.join(LANGUAGES)}); write the language's name instead"
