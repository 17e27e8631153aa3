"""Personal data by its form: what reads as a number to a person is found however it is written, in
a text that is here whole as in one that comes character by character; and what only has digits is
left alone.
"""

import json
import random
from collections.abc import Callable

import pytest

from services.common.policy import Policy, Subject, load_rules
from services.common.policy.trial import trial

ZERO_WIDTH = ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u0301", "\ufe0f"]
SPACES = [" ", "\u00a0", "\u2007", "\u2009", "\u202f", "\u205f", "\u3000"]
APART = [*SPACES, "-", "\u2013", "\u2212", ".", "\n", "\r\n", "\t", "/", "_", ", ", ",", ";", ":"]
APART += [" - ", " / ", "\u2028", "|", '", "', "*", "\u00b7", "\u2022", "\n- ", "  ", "\u2800"]


def written(groups: list[str], apart: list[str]) -> list[str]:
    return [sign.join(groups) for sign in apart]


def wide(number: str) -> str:
    return "".join(chr(0xFF10 + int(c)) if c.isdigit() else c for c in number)


VISA = ["4111", "1111", "1111", "1111"]
EVASIONS = {
    "card": [
        *written(VISA, [*APART, *ZERO_WIDTH]),
        *written([*"4111111111111111"], [*APART, *ZERO_WIDTH]),
        *written(["3782", "822463", "10005"], [" ", "-", "/"]),
        *written(["41", "11", "11", "11", "11", "11", "11", "11"], [" ", "\n", "_"]),
        wide("4111 1111 1111 1111"), "٤١١١ ١١١١ ١١١١ ١١١١", "④①①① ①①①① ①①①① ①①①①",
        "4\ufe0f\u20e31\ufe0f\u20e31\ufe0f\u20e31\ufe0f\u20e3" + "1" * 12,
        "4111-1111 1111 1111", "4111 1111 1111 1111 12/27 123", "2026, 4111/1111/1111/1111 12/27",
        "1. 4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "x4111111111111111y", "_4111111111111111_",
        "5555555555554444,4111111111111112", "4111111111111112;5555555555554444",
        "name,4111 1111 1111 1111,12,5500 0000 0000 0004,7",
    ],
    "iban": [
        *written(["DE89", "3704", "0044", "0532", "0130", "00"], [*APART, *ZERO_WIDTH]),
        *written(["gb82", "west", "1234", "5698", "7654", "32"], [*APART, *ZERO_WIDTH]),
        wide("DE89370400440532013000"), "ＤＥ８９ 3704 0044 0532 0130 00",
        "_DE89370400440532013000_",
        "DE 89 3704 0044 0532 0130 00", "dе89 3704 0044 0532 0130 00", "iban:NL91ABNA0417164300.",
    ],
    "email": [
        "jane.doe@example.com", "jane\u200b.doe@exa\u00admple.com", "jane.doe＠example．com",
        "ｊａｎｅ@example.com", "jane.doe (at) example (dot) com", "jane[at]example[dot]com",
        "jane {at} example {dot} com", "jane<at>example.com", "jane at example dot com",
        "jane.doe at mail dot example dot co dot uk", "jane @ example.com", "jаne@exаmple.com",
        "jane\u00a0@\u00a0example.com", "jane(@)example(.)com", "mailto:jane@example.com?x=1",
    ],
    "phone": [
        *written(["+49", "171", "123", "4567"], [*SPACES, "-", ".", "/", "_", "\n", "\t", " - "]),
        *written(["415", "555", "2671"], [*SPACES, "-", ".", "/", "_", "\n", "\t", ", ", " - "]),
        *written(["+49", "171", "123", "4567"], ZERO_WIDTH), wide("+49 171 1234567"),
        "+1 (415) 555-2671", "(415) 555-2671", "(415)555-2671", "_415-555-2671_",
        "0049 171 1234567", "030/1234567", "0171\u00a01234567",
    ],
    "ssn": [
        *written(["078", "05", "1120"], [*SPACES, "-", ".", "/", "_", "\n", "\t", ", ", " - "]),
        "07\u200b8-05-11\u00ad20", wide("078-05-1120"), "_078-05-1120_", "SSN:078-05-1120;",
    ],
    "ip": ["10.1.2.3", "10．1．2．3", "10.1\u200b.2.3", "2001:db8::1:2", wide("10.1.2.3")],
}  # fmt: skip
LOOK_ALIKES = {
    "card": [
        "4111 1111 1111 1112", "41111111111111111", "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "4111, 1111, 1111, 1111, 1111, 1111", "7 " * 20 + "4" + " 1" * 15 + ", 7, 7, 7, 7, 7",
        "0, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2",
        "40063813339310", "4006381333931",
    ],
    "iban": ["DE88 3704 0044 0532 0130 00", "it is 10 metres long, at 12 coins", "DE89 3704"],
    "email": ["thanks @jane.doe", "look at the polka dot dress", "a@b", "@media print", "a @ b"],
    "phone": ["2026-11-22", "100, 200, 3000", "+1, +2", "12:30:45.123", "port 8080"],
    "ssn": ["000-12-3456", "666-12-3456", "078-05-11201", "12-05-1120"],
    "ip": ["1.2.3.400", "1.2.3", "12:30:45", "a::b::c"],
}  # fmt: skip


@pytest.mark.parametrize("kind", EVASIONS)
def test_what_reads_as_one_is_one_and_what_does_not_is_none(kind: str) -> None:
    """By the rule's own test cases, in whole texts and in streams."""
    cases = {
        "match": [f"It is {text} I think" for text in EVASIONS[kind]],
        "pass": [f"It is {text} I think" for text in LOOK_ALIKES[kind]],
    }
    assert len(cases["match"]) > 4
    wrong = []
    for at in range(0, max(map(len, cases.values())), 64):  # as many as a rule may name
        tests = {name: texts[at : at + 64] for name, texts in cases.items()}
        rule = {"name": kind, "pii": [kind], "where": ["input", "output"], "tests": tests}
        rules = load_rules(json.dumps({"rules": [rule]}).encode())
        wrong += [(case.text, case.place) for case in trial(rules) if not case.passed]
    assert wrong == []


NUMBERS = random.Random(7)


def some(count: int, apart: str, one: Callable[[], str]) -> str:
    return apart.join(one() for _ in range(count))


TABLES = {
    "small ones": lambda: some(100, " ", lambda: str(NUMBERS.randint(0, 99))),
    "with commas": lambda: some(100, ", ", lambda: str(NUMBERS.randint(0, 999))),
    "ratings": lambda: some(100, " ", lambda: str(NUMBERS.randint(1, 5))),
    "measured": lambda: some(50, " ", lambda: f"{NUMBERS.random():.3f}"),
    "of four digits": lambda: some(50, ", ", lambda: str(NUMBERS.randint(1000, 9999))),
    "rows": lambda: some(30, "\n", lambda: f"{NUMBERS.randint(1, 9999)},{NUMBERS.random():.2f},7"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_numbers_hold_no_personal_data(kind: str) -> None:
    """Some part of such a list nearly always has a card's first digit, length and checksum."""
    kinds = ["card", "iban", "phone", "ssn"]
    file = json.dumps({"rules": [{"name": kind, "pii": [kind]} for kind in kinds]})
    made = Policy.of(load_rules(file.encode()))
    found = 0
    for _ in range(20):
        found += bool(made.texts.check([Subject("text", "input", TABLES[kind](), "user")]).hits)
    assert found == 0
