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
from itertools import pairwise
from typing import NamedTuple

from services.gateway.runs.rewriting.languages import LANGUAGES, Language, language_of

_MARKS = re.compile(r"\[\d{1,3}\]")  # of citations
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_BREAK = re.compile(r"[.!?:;\n]")  # a name that stands behind it may be no name
_LONGEST = 12  # words that say something: such a question stands for itself
_FEW = 3  # words that say something: what points among them points back
_SUBJECT = 2  # words of its own: before "it", they are what that means; alone, too few
_TOPIC = 8  # words that are taken along
_FROM_ANSWER = 4  # of them
_SHORT_ANSWER = 3  # words that say something: they are the thing that was asked for
_TURNS = 4  # questions before that are looked at
_CHARS = 2000  # of a text that are
_THERE_IS = frozenset(["is", "are", "was", "were", "be", "isn't", "aren't"])


class Turn(NamedTuple):
    """A question of the user's, and what was answered."""

    question: str
    answer: str = ""


class Rewritten(NamedTuple):
    query: str
    why: str  # pointing, opening, short, another; first, whole, language: it is as it was
    added: int = 0  # words


class _Word(NamedTuple):
    text: str
    lower: str
    is_name: bool  # begins with a capital, where not every word does; or has a digit
    at: int  # its place


def rewrite(turns: Sequence[Turn], question: str) -> Rewritten:
    """`turns` before the question, oldest first."""
    if not turns or not question.strip():
        return Rewritten(question, "first")
    if len(question) > _CHARS:
        return Rewritten(question, "whole")
    topics = [_NOTHING]
    for turn in turns[-_TURNS:]:
        topics.append(_after(topics[-1], turn))
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
    topic = topics[1] if language.former.search(" ".join(lower)) else topics[-1]
    taken = _taken(topic, words, language, why)
    added = " ".join([word for word in taken if word.lower() not in lower][:_TOPIC])
    return Rewritten(f"{added} {question.strip()}".strip(), why, len(added.split()))


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
    answered: list[str]  # names that only the answer had, to a question for one
    aspect: list[str]  # what was asked of it


_NOTHING = _Topic([], [], [])


def _after(topic: _Topic, turn: Turn) -> _Topic:
    words = _words(turn.question)
    language = language_of([word.lower for word in words])
    if language is None:
        return _NOTHING
    own = _content(words, language)
    names = [word.text for word in own if word.is_name]
    said = _content(_words(_MARKS.sub("", turn.answer[:_CHARS])), language)
    named = [] if language.capital_nouns else [word.text for word in said if word.is_name]
    why = _leans(words, language) if topic.asked else ""
    if why in ("", "another"):
        asked = names or [word.text for word in own]
    else:
        asked = _joined(_taken(topic, words, language, why), names)
    is_for_thing = words[0].lower in language.thing and not _is_about(words, language)
    if not names and is_for_thing and not why:
        if named:
            asked = named[:_FROM_ANSWER]
        elif 0 < len(said) <= _SHORT_ANSWER:
            asked = [word.text for word in said]
    known = {word.lower() for word in asked}
    new = [word for word in named if word.lower() not in known]
    aspect = [word.text for word in own if not word.is_name]
    if why == "another":
        aspect = topic.aspect
    return _Topic(asked, new[:_FROM_ANSWER] if is_for_thing else [], aspect)


def _taken(topic: _Topic, words: Sequence[_Word], language: Language, why: str) -> list[str]:
    """What the question takes along."""
    if why == "another":
        return topic.aspect
    of_person = any(word.lower in language.person for word in words)
    if of_person and len(topic.answered) > 1:  # a person has two names, a town one
        return topic.answered
    return topic.asked if of_person else _joined(topic.asked, topic.answered)


def _leans(words: Sequence[_Word], language: Language) -> str:
    """Why the question is none without those before; empty: it is one."""
    own = _content(words, language)
    if _are_names(own, language) and _asks_nothing(words, language):
        return "another"
    if len(own) > _LONGEST or _has_name(own, language):
        return ""
    said = 0  # words that say something, so far
    for at, word in enumerate(words):
        if word.lower not in language.function:
            said += 1
        elif word.lower not in language.pointing or _is_empty(words, at):
            continue
        elif said < _SUBJECT or len(own) <= _FEW:
            return "pointing"
    if words[0].lower in language.opening and len(own) <= _SUBJECT + 1:
        return "opening"
    if not own and not language.asking & {word.lower for word in words}:
        return ""  # "thanks", "hello": it asks for nothing
    return "short" if len(own) <= _SUBJECT else ""


def _are_names(own: Sequence[_Word], language: Language) -> bool:
    """Where each noun has a capital, two that stand together are a name."""
    if language.capital_nouns and not (
        len(own) > 1 and all(two.at == one.at + 1 for one, two in pairwise(own))
    ):
        return False
    return bool(own) and all(word.is_name for word in own)


def _asks_nothing(words: Sequence[_Word], language: Language) -> bool:
    """As in "and the Glass House?" and "no, I meant the Glass House"."""
    lower = [word.lower for word in words]
    if " ".join(lower[:2]) in language.about:
        return True
    return lower[0] in language.opening and not language.asking & set(lower)


def _is_about(words: Sequence[_Word], language: Language) -> bool:
    """As in "who was Ada Brandt?" and "what did Ada Brandt write?": it asks for no other."""
    return len(words) > 2 and words[1].lower in language.function and words[2].is_name


def _has_name(words: Iterable[_Word], language: Language) -> bool:
    if language.capital_nouns:
        return any(any(map(str.isdigit, word.text)) for word in words)
    return any(word.is_name for word in words)


def _is_empty(words: Sequence[_Word], at: int) -> bool:
    """Whether the word points at nothing: "that" before a sentence of its own, "gibt es"."""
    around = {word.lower for word in words[max(0, at - 1) : at + 2]}
    if words[at].lower == "es":
        return "gibt" in around
    if words[at].lower == "there":
        return not at or bool(around & _THERE_IS)
    if words[at].lower != "that" or not at or at + 1 == len(words):
        return False
    return words[at + 1].lower in ("the", "a", "i", "we", "you", "there", "my", "our")


def _content(words: Iterable[_Word], language: Language) -> list[_Word]:
    """Those that say something. A number alone does not; right behind one that does it makes a name
    of it: "Nord 10"."""
    found: list[_Word] = []
    for word in words:
        if word.lower in language.function:
            continue
        if any(map(str.isalpha, word.lower)):
            found.append(word)
        elif found and word.at == found[-1].at + 1:
            text = f"{found[-1].text} {word.text}"
            found[-1] = _Word(text, text.lower(), True, word.at)
    return found


def _words(text: str) -> list[_Word]:
    """A sentence's first capital makes a name only before another; and none does where all words
    have one."""
    text = text[:_CHARS]
    found: list[_Word] = []
    firsts: list[int] = []
    end = 0
    for match in _WORD.finditer(text):
        word = re.sub("['’]s$", "", match.group())
        if not found or _BREAK.search(text, end, match.start()) is not None:
            firsts.append(len(found))
        is_name = word[0].isupper() or any(map(str.isdigit, word))
        found.append(_Word(word, word.lower().replace("’", "'"), is_name, len(found)))
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
