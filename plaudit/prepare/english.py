"""Whether a text is English, without a model: by its letters, and by the short words that every sentence of a language needs.

A text that shows no language (numbers, code, a name) passes: only what is recognisably something else does not.
"""

import re
import unicodedata
from collections import Counter

MAX_CHARACTERS = 4000
"""Of a text that are read."""
LATIN_SHARE = 0.7
"""The least share of Latin letters in an English text."""
_WORD = re.compile(r"[^\W\d_]+")
SHORT_WORDS = {
    "en": "the of and to in is that it for was on are as with this have from or by not but what which you your my we can how "
    "would should could i me if an at do does be so here am has had make write give explain please about into their there they "
    "will between using",
    "de": "der die das und ist nicht ein eine einen mit für auf von zu den dem wie ich sie es auch sich wir kann bitte oder aus",
    "fr": "le la les des est et un une que qui dans pour pas sur avec je vous nous ce cette au du en il elle sont comment moi",
    "es": "el la los las que de y en un una es por con para no se del como más su al lo qué me mi puedes sobre cómo está son",
    "pt": "o a os as que de e em um uma é por com para não se do da como mais seu ao na no me meu você sobre são foi isso",
    "it": "il la che di e un una è per con non si del della come più sono nel gli lo mi questo anche ho dei alla ma puoi",
    "nl": "de het een en van is dat niet op te zijn voor met die aan er ook als maar naar bij hoe wat je ik kun om dit",
    "pl": "nie i w na się że z do jest to jak co ale po od za przez czy tak są tego dla ma być może oraz który",
    "tr": "ve bir bu için ile da de ne nasıl çok olarak daha gibi olan mi mı en ben sen var yok kadar sonra",
    "id": "yang dan di ini itu dengan untuk tidak dari dalam akan pada adalah saya ke bisa juga apa atau karena ada",
    "ro": "și este nu un o în de la cu pe care ce sa pentru mai din sunt cum a fi ca se îmi",
    "sv": "och det att en är som på för av med inte den till jag har om ett vad kan du hur var från",
    "vi": "và của là không có cho được trong một với người này các đã tôi bạn những để khi như",
}
_LANGUAGES_OF: dict[str, list[str]] = {}
for _language, _words in SHORT_WORDS.items():
    for _word in (word for word in _words.split() if len(word) > 1):  # single letters are variables, too
        _LANGUAGES_OF.setdefault(_word, []).append(_language)


def is_english(text: str) -> bool:
    """Mostly Latin letters, and no other language has more of its short words in it."""
    words = ["".join(filter(str.isalpha, word)) for word in _WORD.findall(text[:MAX_CHARACTERS].lower())]  # without the ² of x²
    letters = "".join(word for word in words if not _is_variable(word))
    if sum(map(_is_latin, letters)) < LATIN_SHARE * len(letters):
        return False
    found = Counter(language for word in words for language in _LANGUAGES_OF.get(word, ()))
    return found["en"] >= max(found.values(), default=0)


def _is_latin(letter: str) -> bool:
    return letter.isascii() or unicodedata.name(letter, "").startswith("LATIN")


def _is_variable(word: str) -> bool:
    """A single letter, as in Σ x². A character of Chinese has no upper case, and is a word."""
    return len(word) == 1 and word != word.upper()
