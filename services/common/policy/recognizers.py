"""Personal data by its form: what a rule's `pii` names. A pattern finds candidates, and where the
kind has a checksum or a range, a check says which part of one is real, so that order numbers and
version numbers are left alone.

Every pattern is bounded: what may still become a match is all that a stream holds back.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

Span = tuple[int, int]
Check = Callable[[bytes, bytes], Span | None]
"""Of a candidate, and the byte before it, if any: which part it is; None: none that begins with
it. Looks at ASCII alone."""


@dataclass(frozen=True)
class Recognizer:
    pattern: str
    check: Check | None = None


def _luhn(digits: str) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) << (place & 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


# First digits and numbers of digits of the schemes (ISO/IEC 7812).
_CARDS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:2[2-9]|[3-6]\d|7[01])\d{13}|2720\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[689])\d{11,16}|35\d{14,17}|6(?:011|5|4[4-9]|2)\d{12,17}|(?:50|5[6-9]|6\d)\d{10,17}"
)


def _card(candidate: bytes, before: bytes) -> Span | None:
    """The longest run of whole groups that it begins with."""
    digits, best = "", None
    if before.isdigit():
        return None
    for at in range(len(candidate)):
        char = candidate[at : at + 1]
        if not char.isdigit():
            continue
        digits += char.decode()
        group_ends = not candidate[at + 1 : at + 2].isdigit()
        if group_ends and len(digits) >= 12 and _CARDS.fullmatch(digits) and _luhn(digits):
            best = 0, at + 1
    return best


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


def _iban(candidate: bytes, _: bytes) -> Span | None:
    """As many characters as its country's have, if the remainder by 97 is 1 (ISO 13616)."""
    length = _IBAN_LENGTHS.get(candidate[:2].decode().upper(), 0)
    found = ""
    for at in range(len(candidate)):
        char = candidate[at : at + 1]
        if not char.isalnum():
            continue
        found += char.decode().upper()
        if len(found) == length:
            number = "".join(str(int(c, 36)) for c in found[4:] + found[:4])
            return (0, at + 1) if int(number) % 97 == 1 else None
    return None


def _ssn(candidate: bytes, _: bytes) -> Span | None:
    area, group, serial = candidate[:3], candidate[4:6], candidate[7:]
    real = area not in (b"000", b"666") and area < b"900" and group != b"00" and serial != b"0000"
    return (0, len(candidate)) if real else None


def _ip(candidate: bytes, _: bytes) -> Span | None:
    try:
        ipaddress.ip_address(candidate.decode())
    except ValueError:
        return None
    return 0, len(candidate)


def _phone(candidate: bytes, _: bytes) -> Span | None:
    """Not a date, nor what is too long to be called (E.164)."""
    digits = bytes(takewhile(lambda c: c != ord("x"), candidate.lower()))
    count = sum(48 <= c < 58 for c in digits)
    return (0, len(candidate)) if 8 <= count <= 15 else None


RECOGNIZERS = {
    "card": Recognizer(r"(?:\d[ .\-]{0,2}){11,18}\d(?:\b|[a-z_])", _card),
    "iban": Recognizer(r"\b[a-z]{2}\d{2}(?:[ \-]?[a-z0-9]){11,30}\b", _iban),
    "email": Recognizer(
        r"[a-z0-9._%+\-]{1,64}(?:@|\s?[\[(]at[\])]\s?)[a-z0-9\-]{1,63}"
        r"(?:(?:\.|\s?[\[(]dot[\])]\s?)[a-z0-9\-]{1,63}){0,4}(?:\.|\s?[\[(]dot[\])]\s?)[a-z]{2,24}"
    ),
    "phone": Recognizer(
        r"\+\d(?:[ ()./\-]{0,2}\d){7,14}\b"
        r"|(?:\b|\()\d{3}\)?[ .\-]\d{3}[ .\-]\d{4}\b"
        r"|\b0\d{2,4}[ /\-]\d{3,4}(?:[ \-]?\d{2,4}){1,2}\b",
        _phone,
    ),
    "ssn": Recognizer(r"\b\d{3}[ \-]\d{2}[ \-]\d{4}\b", _ssn),
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
