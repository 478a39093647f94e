"""Codes and names of languages."""

import pytest

from plaudit.languages import base_language, language_name


@pytest.mark.parametrize(
    ("written", "name", "language"),
    [
        ("de", "German", "German"),
        ("DE", "German", "German"),
        ("pt-BR", "Portuguese", "Portuguese"),
        ("zh_Hans", "Chinese", "Chinese"),
        ("zh-Hant-TW", "Chinese", "Chinese"),
        ("deu_Latn", "German", "German"),
        ("jpn", "Japanese", "Japanese"),
        ("cHINESE", "Chinese", "Chinese"),
        (" German ", "German", "German"),
        ("Brazilian Portuguese", "Brazilian Portuguese", "Portuguese"),
        ("Chinese (Taiwan)", "Chinese (Taiwan)", "Chinese"),
        ("Mandarin", "Mandarin", "Chinese"),
        ("Twi", "Twi", "Twi"),
        ("Swahili", "Swahili", "Swahili"),
        ("xx", None, "xx"),
        ("xx-YY", None, "xx-YY"),
        ("qqq_Latn", None, "qqq_Latn"),
    ],
)
def test_codes_and_names_are_resolved(written, name, language):
    assert (language_name(written), base_language(written)) == (name, language)
