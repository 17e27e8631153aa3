"""Kinds of values with figures: dates, times, counts, measures, money."""

from models.recipe.bank.values.kinds import Draw, Value, kind
from models.recipe.bank.values.lexicon import words

MONEY = (
    "£{}", "£{}", "£{}", "${}", "${}", "€{}", "€{}", "{} euros", "{} pounds", "{} dollars",
    "CHF {}", "{} kr",
)  # fmt: skip
CENTS = ("50", "25", "75", "99", "20", "80", "95", "40", "00", "10")
MINUTES = ("00", "00", "30", "30", "15", "45", "05", "10", "20", "40", "50", "55")
SPANS = (("minute", 90), ("hour", 48), ("day", 30), ("week", 12), ("month", 24), ("year", 30))
# Units, each with its least and greatest number.
MEASURES = {
    "distance": (
        ("{} miles", 2, 90), ("{} km", 2, 300), ("{} kilometres", 2, 90), ("{} metres", 20, 900),
        ("{} m", 20, 900), ("{} yards", 20, 900),
    ),
    "weight": (
        ("{} kg", 2, 900), ("{} kilos", 2, 90), ("{} grams", 20, 900), ("{} g", 20, 900),
        ("{} tonnes", 2, 90), ("{} lb", 2, 200), ("{} ounces", 2, 30),
    ),
    "height": (
        ("{} metres", 2, 300), ("{} m", 2, 300), ("{} feet", 3, 900), ("{} cm", 20, 300),
        ("{} ft", 3, 900),
    ),
    "area": (
        ("{} hectares", 2, 900), ("{} acres", 2, 900), ("{} square metres", 12, 9000),
        ("{} m²", 12, 900), ("{} sq ft", 100, 9000),
    ),
    "volume": (
        ("{} litres", 2, 900), ("{} ml", 20, 900), ("{} gallons", 2, 90), ("{} pints", 2, 30),
        ("{} cubic metres", 2, 900),
    ),
    "temperature": (("{}°C", 2, 250), ("{} °C", 2, 250), ("{} degrees", 2, 90), ("{}°F", 30, 450)),
    "speed": (("{} mph", 5, 90), ("{} km/h", 5, 300), ("{} knots", 3, 40), ("{} rpm", 200, 9000)),
}  # fmt: skip


def _grouped(number: int, d: Draw) -> str:
    """A number, from a thousand on mostly with a comma."""
    commas = number >= 10000 or (number >= 1000 and d.chance(0.6))
    return f"{number:,}" if commas else str(number)


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@kind("date")
def _date(d: Draw) -> Value:
    day, month, year = d.whole(1, 28), d.whole(1, 12), d.whole(1950, 2031)
    name = words("month")[month - 1]
    return d.any((
        f"{day} {name} {year}", f"{day} {name} {year}", f"{name} {day}, {year}",
        f"{_ordinal(day)} {name} {year}", f"{day} {name[:3]} {year}",
        f"{day:02}/{month:02}/{year}", f"{year}-{month:02}-{day:02}",
    ))  # fmt: skip


@kind("day", split=False)
def _day(d: Draw) -> Value:
    day, name = d.whole(1, 28), d.word("month")
    shapes = (f"{day} {name}", f"{day} {name}", f"{name} {day}", f"{_ordinal(day)} {name}")
    return d.any(shapes)


@kind("month", split=False)
def _month(d: Draw) -> Value:
    return d.word("month")


@kind("weekday", split=False)
def _weekday(d: Draw) -> Value:
    return d.word("weekday")


@kind("year")
def _year(d: Draw) -> Value:
    return str(d.whole(1700 if d.chance(0.5) else 1930, 2029))


@kind("time", split=False)
def _time(d: Draw) -> Value:
    hour, minute = d.whole(5, 22), d.any(MINUTES)
    twelve, half = (hour - 1) % 12 + 1, "am" if hour < 12 else "pm"
    shapes = [
        f"{hour}:{minute}", f"{hour:02}:{minute}", f"{twelve}.{minute} {half}",
        f"{twelve}:{minute} {half}", f"{twelve}.{minute} {half[0]}.m.",
        f"{twelve}:{minute} {half.upper()}",
    ]  # fmt: skip
    if minute == "00":
        shapes += [f"{twelve} {half}", f"{twelve}{half}", f"{twelve} o'clock"]
    return d.any(shapes)


@kind("duration", split=False)
def _duration(d: Draw) -> Value:
    unit, most = d.rng.choice(SPANS)
    number = d.whole(2, most)
    worded = number <= 12 and d.chance(0.5)
    return f"{words('number')[number - 2] if worded else number} {unit}s"


@kind("count", split=False)
def _count(d: Draw) -> Value:
    number = d.whole(2, 20)
    return words("number")[number - 2] if d.chance(0.5) else str(number)


@kind("number")
def _number(d: Draw) -> Value:
    return _grouped(d.whole(21, d.rng.choice((99, 999, 999, 9999))), d)


@kind("percent", split=False)
def _percent(d: Draw) -> Value:
    number = str(d.whole(2, 98)) if d.chance(0.7) else f"{d.whole(1, 40)}.{d.whole(1, 9)}"
    return number + d.any(("%", "%", "%", " per cent", " percent"))


@kind("money")
def _money(d: Draw) -> Value:
    roll = d.rng.random()
    if roll < 0.45:
        amount = f"{d.whole(1, 60)}.{d.any(CENTS)}"
    elif roll < 0.88:
        amount = str(d.whole(2, d.rng.choice((20, 60, 400))))
    else:
        amount = _grouped(d.whole(4, 400) * d.rng.choice((50, 100, 125)), d)
    return d.any(MONEY).format(amount)


def _measure(name: str, units: tuple[tuple[str, int, int], ...]) -> None:
    def make(d: Draw) -> Value:
        unit, low, high = d.rng.choice(units)
        number = d.whole(low, high)
        tenths = number < 20 and d.chance(0.3)
        return unit.format(f"{number}.{d.whole(1, 9)}" if tenths else _grouped(number, d))

    kind(name, split=False)(make)


for _name, _units in MEASURES.items():
    _measure(_name, _units)
