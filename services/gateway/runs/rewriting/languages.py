"""Words by which a question says that it goes on with what was said before.

A language that is not here has its questions left as they are.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Language(NamedTuple):
    function: frozenset[str]  # words that say nothing of what a question is about
    pointing: frozenset[str]  # of them: words that stand for something said before
    opening: frozenset[str]  # of them: words that go on with the question before
    thing: frozenset[str]  # of `function`: words that ask for a thing or a person
    person: frozenset[str] = frozenset()  # of `pointing`: words for people alone
    courtesy: re.Pattern[str] = re.compile("(?!)")  # what stands before the question itself
    capital_nouns: bool = False  # a capital makes no name
    about: frozenset[str] = frozenset()  # pairs of words that ask the same of something else
    asking: frozenset[str] = frozenset()  # words that ask for something themselves
    former: re.Pattern[str] = re.compile("(?!)")  # what points at what was talked about first


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _courtesy(*forms: str) -> re.Pattern[str]:
    return re.compile(rf"\s*(?:(?:{'|'.join(forms)})\b[\s,.!:]*)+", re.IGNORECASE)


_ENGLISH_POINTING = _words(
    """it its they they're them their he his him she her hers this that these those one
    ones other others another same former latter else there"""
)
_ENGLISH_OPENING = _words("and but or also no sorry oh wait")
ENGLISH = Language(
    function=_ENGLISH_POINTING
    | _ENGLISH_OPENING
    | _words(
        """a an the of in on at to from for with by about as into over under after before during
        until since between within per than if because while though although whether not no yes
        do does did done doing don't doesn't didn't is isn't are aren't was were be been being
        am i'm has have had having can can't cannot could would should will won't shall may
        might must i me my we us our you your who whom whose what which when where why
        how please tell show give explain describe say know like want need let just only
        really very much many more meant mean most less least some any all every each few long
        far often here now so too even still again ok okay thanks thank hello hi bye goodbye cheers
        well mondays tuesdays wednesdays thursdays fridays saturdays sundays monday tuesday
        wednesday thursday friday saturday sunday january february march april june july august
        september october november december"""
    ),
    pointing=_ENGLISH_POINTING,
    opening=_ENGLISH_OPENING,
    thing=_words("which who what whom whose"),
    person=_words("he him his she her hers"),
    courtesy=_courtesy(
        "hello|hi|hey|please|thanks|thank you",
        "(?:can|could|would|will) you(?: please)? (?:tell|show|explain to|give) (?:me|us)",
        "(?:please )?(?:tell|show) (?:me|us)(?: about)?",
        "i(?:'d| would| want) (?:like )?to know(?: about)?",
        "i (?:was|am|'m) wondering",
        "do you know|i have a question(?: about)?",
    ),
    about=frozenset({"what about", "how about"}),
    asking=_words("who whom whose what which when where why how"),
    former=re.compile(r"\bthe (?:first one|former)\b"),
)
_GERMAN_POINTING = _words(
    """er ihn ihm ihr ihre ihren ihrem ihnen sie es dieser diese dieses diesen diesem jener jene
    dort davon dafür damit dazu darin daran daraus dessen deren andere anderen anderer beide"""
)
_GERMAN_OPENING = _words("und aber oder auch nein doch")
GERMAN = Language(
    function=_GERMAN_POINTING
    | _GERMAN_OPENING
    | _words(
        """der die das den dem des ein eine einen einem einer eines von in im an am auf zu zum zur
        aus für mit bei über als nach vor während bis seit zwischen wenn weil ob nicht kein keine ja
        nein ist sind war waren sein bin bist hat habe haben hatte kann können könnte könnten würde
        sollte wird werden muss müssen darf ich mich mir mein wir uns unser du dein wer wen wem was
        welche welcher welches wann wo warum wieso wie viel viele mehr weniger bitte sag sage erklär
        zeig gib nur sehr noch mal hier jetzt so danke hallo tschüss man gibt um uhr euro montag
        dienstag mittwoch donnerstag freitag samstag sonntag"""
    ),
    pointing=_GERMAN_POINTING,
    opening=_GERMAN_OPENING,
    thing=_words("welche welcher welches wer wen wem was"),
    courtesy=_courtesy(
        "hallo|guten tag|bitte|danke",
        "(?:kannst du|können sie|könnten sie|könntest du)(?: mir| uns)?(?: bitte)? "
        "(?:sagen|zeigen|erklären)",
        "(?:sag|zeig|erklär)e? mir",
        "ich (?:möchte|würde gern|will) wissen",
        "weißt du|wissen sie",
    ),
    asking=_words("wer wen wem was welche welcher welches wann wo wohin woher warum wieso wie"),
    former=re.compile(r"\b(?:ersterer?s?|(?:der|die|das) erste)\b"),
    capital_nouns=True,
)
LANGUAGES: Sequence[Language] = (ENGLISH, GERMAN)


def language_of(words: Sequence[str]) -> Language | None:
    """Whose function words stand most often among these; None: nobody's do, or two's as often."""
    counts = [sum(word in one.function for word in words) for one in LANGUAGES]
    best = max(counts)
    return LANGUAGES[counts.index(best)] if best and counts.count(best) == 1 else None
