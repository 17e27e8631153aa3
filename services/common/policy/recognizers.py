"""Personal data by its form: what a rule's `pii` names. A pattern finds candidates, and where the
kind has a checksum or a range, a check says which part of one is real, so that order numbers and
version numbers are left alone.

Between the groups of a number up to four characters may stand that are neither letters nor
digits: spaces and line ends, dashes, dots, commas, slashes, the edges of a table's cells. What
reads as one number to a person is one here, and a list of small numbers is not.

Every pattern is bounded: what may still become a match is all that a stream holds back. And every
check takes about a microsecond for each byte that it moves on by, whatever the text.
"""

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest

Span = tuple[int, int]
Check = Callable[[bytes, bytes], Span | int]
"""Of a candidate, and up to BEFORE bytes in front of it: which part it is; or, where it is none,
how many bytes behind its beginning the next one may begin."""
BEFORE = 20

_APART = "[^0-9a-z]{0,4}"  # between the groups of a number
_DIGITS = re.compile(rb"[0-9]+")
_LETTERS_AND_DIGITS = re.compile(rb"[0-9A-Za-z]")
_NO_LETTERS_OR_DIGITS = bytes(c for c in range(256) if not chr(c).isalnum() or c >= 128)


@dataclass(frozen=True)
class Recognizer:
    pattern: str
    check: Check | None = None


# ---- cards ---------------------------------------------------------------------------------

# First digits and numbers of digits of the schemes (ISO/IEC 7812); of Visa not the thirteen that
# it once had, which are those of products from German-speaking countries (EAN).
_CARDS = re.compile(
    rb"4(?:\d{15}|\d{18})|5[1-5]\d{14}|2(?:2[2-9]|[3-6]\d|7[01])\d{13}|2720\d{12}"
    rb"|3[47]\d{13}|3(?:0[0-5]|[689])\d{11,16}|35\d{14,17}|6(?:011|5|4[4-9]|2)\d{12,17}"
    rb"|(?:50|5[6-9]|6\d)\d{10,17}"
)
_DOUBLED = bytes(2 * (c - 48) // 10 + 2 * (c - 48) % 10 if 48 <= c < 58 else 0 for c in range(256))
_LEAST_DIGITS = 12
_CARD_DIGITS = 20  # that are looked at: the longest, and one that shows it goes on
_LONG = 4  # digits of a group that a list of numbers seldom has
_CLOSE = {b"".join(signs) for n in (1, 2) for signs in product((b" ", b"-", b"."), repeat=n)}
_BEHIND_DIGITS = re.compile(rb"[0-9]((?:[\x00-/:-@\[-`{-\x7f]|[\xc0-\xff][\x80-\xbf]*){0,4})\Z")


def _is_card(digits: bytes) -> bool:
    if not _CARDS.fullmatch(digits):
        return False
    plain = digits[::-2]
    return (sum(plain) - 48 * len(plain) + sum(digits[-2::-2].translate(_DOUBLED))) % 10 == 0


def _card(candidate: bytes, before: bytes) -> Span | int:
    digits = candidate.translate(None, _NO_LETTERS_OR_DIGITS)
    groups = [found.span() for found in _DIGITS.finditer(candidate)]
    apart = _DIGITS.split(candidate)[1:-1]
    cut = len(digits) == _CARD_DIGITS  # the last group may go on
    behind = _BEHIND_DIGITS.search(before)
    if behind is None or behind[1]:
        if behind is None and not cut and _is_card(digits):
            return 0, groups[-1][1]
        known = groups[:-1] if cut else groups
        if end := _end_of_card(digits, known, apart, behind[1] if behind else None):
            return 0, end
    for number, (start, end) in enumerate(groups[1:], 1):
        last = number == len(groups) - 1
        if end - start >= _LONG or (cut if last else apart[number] != apart[number - 1]):
            return start
    return len(candidate)


def _end_of_card(
    digits: bytes, groups: Sequence[Span], apart: Sequence[bytes], behind: bytes | None
) -> int:
    """Where the longest run of groups ends that is a card's; 0: none is. `apart`: what stands
    between them, and behind the last if more digits follow; `behind`: in front, if digits do.

    Groups are long and close together, or else what is between them stands neither before nor
    behind: of a list of numbers some part is always like a card's.
    """
    count = found = 0
    close, alike = True, behind is None or behind not in apart[:1]
    for (start, end), sign in zip_longest(groups, apart[: len(groups)]):
        count += end - start
        over = sign != apart[0] if apart else True
        if count >= _LEAST_DIGITS and (close or (alike and over)) and _is_card(digits[:count]):
            found = end
        close = close and end - start >= _LONG and sign in _CLOSE
        alike = alike and not over
        if not close and not alike:
            break
    return found


# ---- bank accounts -------------------------------------------------------------------------

_IBAN_LENGTHS = {
    country: int(length)
    for length, countries in {
        "15": "NO", "16": "BE", "18": "DK FO FI GL NL SD", "19": "MK SI",
        "20": "AT BA EE KZ LT LU XK", "21": "CH HR LI LV", "22": "BG BH CR DE GB GE IE ME RS VA",
        "23": "AE GI IL IQ OM SO TL", "24": "AD CZ ES MD PK RO SA SE SK TN VG", "25": "LY PT ST",
        "26": "IS TR", "27": "BI DJ FR GR IT MC MR SM", "28": "AL AZ BY CY DO GT HU LB NI PL SV",
        "29": "BR EG PS QA UA", "30": "JO KW MU YE", "31": "MT SC", "32": "LC", "33": "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip


_ALL_DIGITS = "at|ba|be|cz|de|dk|ee|es|fi|fo|gl|hr|hu|il|is|lt|me|no|pl|pt|rs|se|si|sk|xk"
_WITH_LETTERS = "|".join(sorted({c.lower() for c in _IBAN_LENGTHS} - {*_ALL_DIGITS.split("|")}))
_VALUES = {c: int(chr(c), 36) for c in b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def _iban(candidate: bytes, _: bytes) -> Span | int:
    """As many characters as its country's have, if the remainder by 97 is 1 (ISO 13616)."""
    written = candidate.translate(None, _NO_LETTERS_OR_DIGITS).upper()
    length = _IBAN_LENGTHS[written[:2].decode()]
    found = written[4:length] + written[:4]
    if len(found) < length or int("".join(map(str, map(_VALUES.__getitem__, found)))) % 97 != 1:
        return 2
    places = [one.start() for one in _LETTERS_AND_DIGITS.finditer(candidate)]
    return places[0], places[length - 1] + 1


# ---- numbers of persons, telephones and hosts ----------------------------------------------

_WITHIN_A_NUMBER = re.compile(rb"[0-9][ ./\-]\Z")


def _ssn(candidate: bytes, _: bytes) -> Span | int:
    groups = [found.span() for found in _DIGITS.finditer(candidate)]
    area, group, serial = (candidate[start:end] for start, end in groups)
    real = area not in (b"000", b"666") and area < b"900" and group != b"00" and serial != b"0000"
    return (groups[0][0], groups[-1][1]) if real else groups[1][0]


def _ip(candidate: bytes, _: bytes) -> Span | int:
    family = socket.AF_INET6 if b":" in candidate else socket.AF_INET
    try:
        socket.inet_pton(family, candidate.decode())
    except OSError:
        return 1
    return 0, len(candidate)


def _phone(candidate: bytes, before: bytes) -> Span | int:
    """Not a date, nor what is too long to be called (E.164), nor the middle of another number."""
    if candidate[0] != ord("+") and _WITHIN_A_NUMBER.search(before):
        return 1
    number = candidate.strip(b"_")
    start, count = candidate.index(number), sum(48 <= c < 58 for c in number)
    return (start, start + len(number)) if 8 <= count <= 15 else 1


# ---- all of them ---------------------------------------------------------------------------

_BETWEEN = r"[\s.\-/_,]{1,3}"  # of numbers that a sign less would make of any two others
_AT = r"(?:@|\s@\s|\s?[\[({<]\s?(?:at|@)\s?[\])}>]\s?)"
_DOT = r"(?:\.|\s?[\[({<]\s?(?:dot|\.)\s?[\])}>]\s?)"
_LABEL = r"[a-z0-9\-]{1,63}"
_ENDS = "com|org|net|edu|gov|io|dev|app|ai|info|biz|eu|uk|de|fr|es|it|nl|ch|at|ca|au|in|jp|us"

RECOGNIZERS = {
    "card": Recognizer(rf"\d(?:{_APART}\d){{{_LEAST_DIGITS - 1},{_CARD_DIGITS - 1}}}", _card),
    "iban": Recognizer(
        rf"(?:\b|_)(?:(?:{_ALL_DIGITS})[^0-9a-z]?\d{{2}}(?:{_APART}\d){{11,24}}"
        rf"|(?:{_WITH_LETTERS})[^0-9a-z]?\d{{2}}(?:{_APART}[a-z0-9]){{14,29}})",
        _iban,
    ),
    "email": Recognizer(
        rf"[a-z0-9._%+\-]{{1,64}}(?:{_AT}{_LABEL}(?:{_DOT}{_LABEL}){{0,4}}{_DOT}[a-z]{{2,24}}"
        rf"|\sat\s{_LABEL}(?:\sdot\s{_LABEL}){{0,3}}\sdot\s(?:{_ENDS})\b)"
    ),
    "phone": Recognizer(
        r"\+\d(?:[\s()[\].\-/_]{0,3}\d){7,14}(?:\b|_)"
        rf"|(?:\b|_|\()[2-9]\d{{2}}[)\s.\-/_,]{{1,3}}[2-9]\d{{2}}{_BETWEEN}\d{{4}}(?:\b|_)"
        r"|(?:\b|_)0\d{2,4}[\s.\-/_,]\d{3,4}(?:[\s.\-/_]?\d{2,4}){1,2}(?:\b|_)",
        _phone,
    ),
    "ssn": Recognizer(rf"(?:\b|_)\d{{3}}{_BETWEEN}\d{{2}}{_BETWEEN}\d{{4}}(?:\b|_)", _ssn),
    "ip": Recognizer(
        r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{1,4}(?::{1,2}[0-9a-f]{1,4}){2,7}\b", _ip
    ),
    "secret": Recognizer(
        r"-----BEGIN (?:[A-Z]{1,10} ){0,2}PRIVATE KEY-----"
        r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[opsur]_[A-Za-z0-9]{36,100}\b"
        r"|\b(?:sk|psk|pk|rk)[-_](?:[a-z0-9]{1,10}[-_]){0,2}[A-Za-z0-9_\-]{20,200}"
        r"|\beyJ[A-Za-z0-9_\-]{10,200}\.eyJ"
    ),
}
