"""Made-up names and values, split once and for all into a training and a held-out half.

A name belongs to the held-out side if its checksum says so. The split therefore needs no list,
and holds for the practically endless set of names that the syllables can form. What few words
make up (colours, days, hours, numbers below 100) is on both sides.
"""

import random
import zlib
from collections.abc import Callable, Sequence

from models.recipe.words import listed

HELD_OUT_SHARE = 8  # one name in so many is held out

ONSETS = listed(
    """
    b br c d dr f g gl h j k l m n p pr r s st t th tr v w z b d l m n r s t v k p
    """
)
NUCLEI = listed("a e i o u a e i o u a e i o ae ia ei ou")
CODAS = ["", "", "", *listed("l n r s m t sk nd th rn x ck")]
ENDINGS = listed("a e o in en us ine ette ora ana ia is el or an ard eth wyn ot ilde")
ROOTS = listed(
    """
    ash thorn stone hollow birch marsh crow fern gold grey hazel iron kings lamb long mill
    moss north oak otter raven red salt shep silver south swan under wal west white wild
    winter wolf elder copper bram sedge lark heron harrow cold fair green apple barrow
    clover drift ember frost glen
    """
)
TAILS = listed(
    """
    ford wick bridge mere dale ham ton stead worth well by field gate haven holt hurst ley
    moor port shaw side water wood brook combe cliff croft den
    """
)


def is_held_out(word: str) -> bool:
    """Whether a single name or value belongs to the side that training never sees."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


class Names:
    """A seeded source of names; `held_out` chooses the side of the split it draws from."""

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def _draw(self, make: Callable[[], str]) -> str:
        while is_held_out(word := make()) is not self.held_out:
            pass
        return word

    def _syllables(self) -> str:
        pick = self.rng.choice
        count = self.rng.choices((1, 2, 3), (3, 6, 1))[0]
        body = "".join(
            pick(ONSETS) + pick(NUCLEI) + ("" if self.rng.random() < 0.6 else pick(CODAS))
            for _ in range(count - 1)
        )
        body += pick(ONSETS) + pick(NUCLEI) + pick(CODAS)
        if body[-1] not in "aeiou" and (count == 1 or self.rng.random() < 0.5):
            body += pick(ENDINGS)
        return body.capitalize()

    def _compound(self) -> str:
        return (self.rng.choice(ROOTS) + self.rng.choice(TAILS)).capitalize()

    def word(self) -> str:
        """One capitalised made-up word, e.g. `Velmora` or `Thornwick`."""
        return self._draw(self._compound if self.rng.random() < 0.3 else self._syllables)

    def lower_word(self) -> str:
        """One made-up word in lower case."""
        return self.word().lower()

    def person(self) -> str:
        """A first and a last name, at times one of the two alone or with a title."""
        first, last = self._draw(self._syllables), self.word()
        roll = self.rng.random()
        if roll < 0.05:
            return f"{self.rng.choice(('Dr', 'Captain', 'Professor', 'Old'))} {last}"
        return first if roll < 0.1 else f"{first} {last}"

    def place(self) -> str:
        """A town, island or river: `Velmora`, `Port Velmora`, `Ashford Bay`."""
        word, roll = self.word(), self.rng.random()
        if roll < 0.1:
            return f"{self.rng.choice(('Port', 'Lake', 'Cape', 'North', 'Upper', 'Mount'))} {word}"
        if roll < 0.22:
            return (
                f"{word} {self.rng.choice(('Bay', 'Point', 'Hill', 'Street', 'Island', 'Valley'))}"
            )
        return word

    def number(self, low: int, high: int) -> str:
        """A whole number; those of three digits and more respect the split."""
        while True:
            number = str(self.rng.randint(low, high))
            if len(number) < 3 or is_held_out(number) is self.held_out:
                return number

    def year(self) -> str:
        """A year between 1700 and 2029."""
        return self.number(1700, 2029)

    def code(self) -> str:
        """A short code of digits or of letters and digits, e.g. `4821` or `QX-731`."""
        if self.rng.random() < 0.5:
            return self.number(1000, 99999)
        letters = "".join(self.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=2))
        return f"{letters}-{self.number(100, 999)}"

    def clock(self) -> str:
        """A time of day, e.g. `7:45`."""
        minutes = ("00", "10", "15", "20", "30", "40", "45", "50")
        return f"{self.rng.randint(5, 22)}:{self.rng.choice(minutes)}"

    def pick(self, options: Sequence[str]) -> str:
        """One of a fixed list, seen on both sides of the split."""
        return self.rng.choice(options)

    def phrase(self, firsts: Sequence[str], seconds: Sequence[str]) -> str:
        """Two words from fixed lists whose combination respects the split."""
        return self._draw(lambda: f"{self.rng.choice(firsts)} {self.rng.choice(seconds)}")
