"""A question that leans on the turns before, made whole by rule: "and when does it open?" behind a
question on a museum is searched for with the museum's name.

A question leans if it names nothing and points back ("it", "those"), opens as one that goes on
("and …"), or has at most two words that say what it is about. What it then takes along, in front of
its own words, is what the question before was about (names if it had some, else its words; one that
leaned itself has its own from the one before it), and names in the answer to that. Its own words
all stay. All else is left as it is: longer questions, first ones, and those in languages without
lists (languages.py).
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.gateway.runs.rewriting.languages import LANGUAGES, Language, language_of

_MARKS = re.compile(r"\[\d{1,3}\]")  # of citations
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_BREAK = re.compile(r"[.!?:;\n]")  # a name that stands behind it may be no name
_LONGEST = 12  # words that say something: such a question stands for itself
_SUBJECT = 2  # words of its own: before "it", they are what that means; alone, too few
_TOPIC = 8  # words that are taken along
_FROM_ANSWER = 4  # of them
_SHORT_ANSWER = 3  # words that say something: they are the thing that was asked for
_TURNS = 4  # questions before that are looked at
_CHARS = 2000  # of a text that are


class Turn(NamedTuple):
    """A question of the user's, and what was answered."""

    question: str
    answer: str = ""


class Rewritten(NamedTuple):
    query: str
    why: str  # pointing, opening, short; first, whole, language: it is as it was
    added: int = 0  # words


class _Word(NamedTuple):
    text: str
    lower: str
    is_name: bool  # begins with a capital, where not every word does; or has a digit


def rewrite(turns: Sequence[Turn], question: str) -> Rewritten:
    """`turns` before the question, oldest first."""
    if not turns or not question.strip():
        return Rewritten(question, "first")
    if len(question) > _CHARS:
        return Rewritten(question, "whole")
    topic = _Topic([], [])
    for turn in turns[-_TURNS:]:
        topic = _after(topic, turn)
    words = _words(question)
    lower = [word.lower for word in words]
    language = language_of(lower)
    if language is None and question.isascii():  # two words may hold nothing of a list
        language = language_of([*lower, *_lower(turns[-1].question)])
    if not words or language is None:
        return Rewritten(question, "language")
    why = _leans(words, language)
    if not why:
        return Rewritten(question, "whole")
    of_person = any(word in language.person for word in lower)
    taken = topic.answered if of_person and topic.answered else topic.all
    added = [word for word in taken if word.lower() not in lower][:_TOPIC]
    return Rewritten(" ".join([*added, question.strip()]), why, len(added))


def plain(query: str) -> str:
    """A query without what stands before it for courtesy: "Could you tell me …"."""
    for language in LANGUAGES:
        found = language.courtesy.match(query, 0, _CHARS)
        if found and query[found.end() :].strip():
            return query[found.end() :].strip()
    return query


class _Topic(NamedTuple):
    """What a conversation is about, in words."""

    asked: list[str]
    answered: list[str]  # names that only the answer had

    @property
    def all(self) -> list[str]:
        return _joined(self.asked, self.answered)


def _after(topic: _Topic, turn: Turn) -> _Topic:
    words = _words(turn.question)
    language = language_of([word.lower for word in words])
    if language is None:
        return _Topic([], [])
    own = _content(words, language)
    names = [word.text for word in own if word.is_name]
    said = _content(_words(_MARKS.sub("", turn.answer[:_CHARS])), language)
    if topic.all and _leans(words, language):
        asked = _joined(topic.all, names)
    elif names:
        asked = names
    elif words[0].lower in language.thing and 0 < len(said) <= _SHORT_ANSWER:
        asked = [word.text for word in said]
    else:
        asked = [word.text for word in own]
    are_names = not language.capital_nouns
    answered = [word.text for word in said if are_names and word.is_name]
    known = {word.lower() for word in asked}
    new = [word for word in answered if word.lower() not in known]
    return _Topic(asked, new[:_FROM_ANSWER])


def _leans(words: Sequence[_Word], language: Language) -> str:
    """Why the question is none without those before; empty: it is one."""
    own = _content(words, language)
    if len(own) > _LONGEST or _has_name(own, language):
        return ""
    said = 0  # words that say something, so far
    for at, word in enumerate(words):
        if word.lower not in language.function:
            said += 1
        elif word.lower in language.pointing and said < _SUBJECT and not _is_empty(words, at):
            return "pointing"
    if words and words[0].lower in language.opening and len(own) <= _SUBJECT + 1:
        return "opening"
    return "short" if len(own) <= _SUBJECT else ""


def _has_name(words: Iterable[_Word], language: Language) -> bool:
    if language.capital_nouns:
        return any(any(map(str.isdigit, word.text)) for word in words)
    return any(word.is_name for word in words)


def _is_empty(words: Sequence[_Word], at: int) -> bool:
    """Whether the word points at nothing: "that" before a sentence of its own, "gibt es"."""
    around = {word.lower for word in words[max(0, at - 1) : at + 2]}
    if words[at].lower == "es":
        return "gibt" in around
    if words[at].lower != "that" or not at or at + 1 == len(words):
        return False
    return words[at + 1].lower in ("the", "a", "i", "we", "you", "there", "my", "our")


def _content(words: Iterable[_Word], language: Language) -> list[_Word]:
    """Those that say something. A number alone does not."""
    return [
        word
        for word in words
        if word.lower not in language.function and any(map(str.isalpha, word.lower))
    ]


def _words(text: str) -> list[_Word]:
    """A sentence's first capital makes a name only before another; and none does where all words
    have one."""
    text = text[:_CHARS]
    found: list[_Word] = []
    firsts: list[int] = []
    end = 0
    for match in _WORD.finditer(text):
        word = match.group()
        if not found or _BREAK.search(text, end, match.start()) is not None:
            firsts.append(len(found))
        is_name = word[0].isupper() or any(map(str.isdigit, word))
        found.append(_Word(word, word.lower().replace("’", "'"), is_name))
        end = match.end()
    if len(found) > 2 and all(word.text[0].isupper() for word in found):
        return [word._replace(is_name=False) for word in found]
    for at in firsts:
        if found[at].text.isalpha() and not (at + 1 < len(found) and found[at + 1].is_name):
            found[at] = found[at]._replace(is_name=False)
    return found


def _lower(text: str) -> list[str]:
    return [word.lower for word in _words(text)]


def _joined(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Each word once, where it stands first."""
    found: dict[str, str] = {}
    for word in (*first, *second):
        found.setdefault(word.lower(), word)
    return list(found.values())
