"""Made-up names, codes, sums and dates, drawn from a seeded generator."""

from collections.abc import Callable
from pathlib import Path
from random import Random

_NAMES = {
    kind: names.split(", ")
    for kind, names in (
        line.split(": ")
        for line in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines()
    )
}
_LETTERS = "ABCDEFGHKLMNPRSTUVWX"


def _name(draw: Random, *kinds: str) -> str:
    return " ".join(draw.choice(_NAMES[kind]) for kind in kinds)


def _code(draw: Random, letters: int) -> str:
    return "".join(draw.choice(_LETTERS) for _ in range(letters))


def _model(draw: Random) -> str:
    tail = draw.choice(["", "0", "5", "00", "0S"])
    return f"{draw.choice('KTX')}{draw.choice('DLX')}-{draw.randint(1, 9)}{tail}"


VALUES: dict[str, Callable[[Random], str]] = {
    "person": lambda r: _name(r, "first", "last"),
    "place": lambda r: _name(r, "place", "street"),
    "ship": lambda r: _name(r, "ship", "ship_tail"),
    "maker": lambda r: _name(r, "maker"),
    "model": _model,
    "software": lambda r: _name(r, "software") + _name(r, "software_tail"),
    "tail": lambda r: r.choice(["", "-eu", "-us", "-beta", "-next"]),
    "company": lambda r: _name(r, "company", "company_tail"),
    "contract": lambda r: f"{r.randint(2200, 2299)}-{r.choice('ABC')}",
    "fault": lambda r: f"{r.choice('EFH')}-{r.choice([44, 41, 14, 71])}{r.randint(10, 79)}",
    "time": lambda r: f"{r.randint(5, 22)}:{r.choice(['00', '15', '30', '40', '45'])}",
    "money": lambda r: f"£{r.randint(3, 98)}.{r.choice(['00', '20', '50', '80'])}",
    "number": lambda r: str(r.randint(12, 9_800)),
    "year": lambda r: str(r.randint(1870, 2009)),
    "weekday": lambda r: _name(r, "weekday"),
    "month": lambda r: _name(r, "month"),
    "phone": lambda r: f"0{r.randint(1200, 1999)} {r.randint(100_000, 999_999)}",
    "code": lambda r: f"{_code(r, 2)}-{r.randint(100, 999)}{_code(r, 1)}",
    "variable": lambda r: f"{_code(r, 3)}_{r.choice(['WORKERS', 'THREADS', 'LANES', 'POOL'])}",
}


def value(kind: str, draw: Random) -> str:
    """Of a kind above, or one of "=choice|choice"."""
    if kind.startswith("="):
        return draw.choice(kind[1:].split("|"))
    return VALUES[kind](draw)
