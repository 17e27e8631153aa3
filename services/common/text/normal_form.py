"""Unicode's normal forms, in time that grows with the text.

The library puts the marks that stand on one letter into their order in time that grows with the
square of how many they are: for a megabyte of marks it takes minutes, in which nothing else runs.
"""

import unicodedata
from typing import Literal

Form = Literal["NFC", "NFKC"]

_MOST = 256  # characters at a time: hardly a word has as many


def normalized(text: str, form: Form) -> str:
    """With one space where there were any. Of a word that is longer, each piece is taken by itself:
    a mark that begins one stays apart from its letter."""
    if text.isascii():
        return " ".join(text.split())
    words = " ".join(_word(word, form) for word in text.split())
    return " ".join(words.split())  # some characters become spaces


def _word(word: str, form: Form) -> str:
    pieces = (word[at : at + _MOST] for at in range(0, len(word), _MOST))
    return "".join(unicodedata.normalize(form, piece) for piece in pieces)
