"""Kinds of values that are typed to the letter: codes, numbers to dial, addresses, file names."""

import re

from models.recipe.bank.values.kinds import Draw, Value, kind
from models.recipe.bank.values.names import coined

LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
OFFICES = (
    "info", "hello", "bookings", "office", "help", "enquiries", "contact", "team", "orders", "jobs",
    "press", "events", "accounts", "membership", "support", "quotes",
)  # fmt: skip
PAGES = ("tickets", "book", "help", "join", "map", "jobs", "news", "apply", "menu", "returns")
SUFFIXES = ("online", "hall", "club", "arts", "group", "works", "care", "farm", "shop")
DOMAINS = ("com", "org", "co.uk", "org.uk", "net", "eu", "example", "info", "de")


@kind("code")
def _code(d: Draw) -> Value:
    letters = "".join(d.rng.choices(LETTERS, k=3))
    return d.any((
        f"{letters[:2]}-{d.whole(100, 999)}", f"{letters}-{d.whole(1000, 9999)}",
        f"{letters[0]}-{d.whole(10, 999)}-{letters[1]}", f"{letters[0]}{d.whole(2, 99)}",
        f"{letters[:2]}{d.whole(1000, 9999)}", f"#{d.whole(100, 9999)}",
        str(d.whole(1000, 99999)),
    ))  # fmt: skip


@kind("phone")
def _phone(d: Draw) -> Value:
    return d.any((
        f"0{d.whole(1, 9)}{d.digits(3)} {d.digits(6)}",
        f"0{d.whole(1, 9)}{d.digits(2)} {d.digits(3)} {d.digits(4)}",
        f"+{d.whole(31, 98)} {d.whole(10, 99)} {d.digits(3)} {d.digits(4)}",
        f"({d.whole(201, 989)}) {d.whole(200, 999)}-{d.digits(4)}",
        f"{d.whole(200, 999)}-{d.digits(4)}", f"07{d.digits(3)} {d.digits(6)}",
        str(d.whole(10000, 99999)), f"extension {d.whole(10, 999)}",
    ))  # fmt: skip


def _plain(name: str) -> str:
    """The letters of a name that an address may hold."""
    return re.sub(r"[^a-z]", "", name.lower()) or "kit"


def _domain(d: Draw) -> str:
    name = d.any((coined(d), d.family(), d.of("town"), d.word("building name")))
    tail = f"-{d.any(SUFFIXES)}" if d.chance(0.25) else ""
    return f"{_plain(name)}{tail}.{d.any(DOMAINS)}"


@kind("email")
def _email(d: Draw) -> Value:
    first, last = _plain(d.of("first")), _plain(d.family())
    personal = (f"{first}.{last}", first, f"{first[0]}.{last}", f"{first}_{last}")
    return f"{d.any(OFFICES) if d.chance(0.35) else d.any(personal)}@{_domain(d)}"


@kind("url")
def _url(d: Draw) -> Value:
    path = d.any(("", "", f"/{d.any(PAGES)}", f"/{d.whole(100, 9999)}"))
    return d.any(("www.", "www.", "https://", "")) + _domain(d) + path


@kind("file")
def _file(d: Draw) -> Value:
    stem = d.word("file word")
    year, part, version = d.whole(2001, 2029), d.word("file word"), d.whole(2, 9)
    tail = d.any((f"_{year}", f"-{part}", f"_v{version}", str(d.whole(2, 99))))
    return f"{stem}{tail}.{d.word('file end')}"
