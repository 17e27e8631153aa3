"""Texts that say the same."""

import re

# What may differ between copies of a text: marks of a list's entries, and stops behind words. Not
# signs, symbols and marks within words: they tell -5 from 5, and a word from another.
_NO_WORDS = re.compile(r"^\s*[-*•–]\s+|[.,;:!?]+(?=\s|$)", re.MULTILINE)


def words_of(text: str) -> str:
    """Equal for texts that are the same word for word."""
    return " ".join(_NO_WORDS.sub(" ", text).casefold().split())
