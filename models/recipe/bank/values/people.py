"""First and family names of many languages in Latin letters."""

import importlib
import random
import re
from dataclasses import dataclass
from functools import cache

from models.recipe.bank.values.lexicon import words
from models.recipe.bank.values.split import is_held_out

LATIN = re.compile(r"[A-ZÀ-ÖØ-ÞĀ-Ž][A-Za-zÀ-ÖØ-öø-ÿĀ-ž'’-]{1,12}")
# Faker's locales and how often each is drawn from; most readers write of people near them.
LOCALES = {
    "en_GB": 10, "en_US": 10, "en": 3, "en_IE": 3, "en_NZ": 1, "en_IN": 5, "en_PK": 2, "en_KE": 2,
    "en_NG": 1, "cs_CZ": 1, "da_DK": 1, "de_AT": 1, "de_CH": 1, "de_DE": 3, "es_ES": 2,
    "es_CO": 1, "es_MX": 1, "et_EE": 1, "fi_FI": 1, "fr_BE": 1, "fr_FR": 3, "fr_DZ": 1, "hr_HR": 1,
    "hu_HU": 1, "id_ID": 1, "it_IT": 2, "lv_LV": 1, "nl_NL": 1, "no_NO": 1, "pt_BR": 1,
    "pt_PT": 1, "ro_RO": 1, "sk_SK": 1, "sl_SI": 1, "sv_SE": 2, "sw": 1, "tr_TR": 1, "tw_GH": 1,
    "uz_UZ": 1, "yo_NG": 1, "zu_ZA": 1,
}  # fmt: skip
# Lists of words.txt, for languages that Faker has in their own scripts alone.
TRANSCRIBED = (
    "chinese", "japanese", "korean", "arabic", "russian", "greek", "polish", "vietnamese",
)  # fmt: skip


@dataclass(frozen=True)
class Person:
    """A person's name, and the pronoun that stands for it."""

    first: str
    last: str
    female: bool
    title: str = ""

    def __str__(self) -> str:
        return f"{self.title} {self.first} {self.last}".strip()

    @property
    def parts(self) -> dict[str, str]:
        """What a slot may name after its full stop."""
        he, him, his = ("she", "her", "her") if self.female else ("he", "him", "his")
        own = "hers" if self.female else "his"
        return {"first": self.first, "last": self.last, "full": f"{self.first} {self.last}",
                "he": he, "she": he, "him": him, "his": his, "her": his, "hers": own,
                "himself": f"{him}self", "herself": f"{him}self",
                "mr": ("Ms " if self.female else "Mr ") + self.last}  # fmt: skip


@dataclass(frozen=True)
class Lists:
    """The names of one language on one side of the split."""

    women: list[str]
    men: list[str]
    families: list[str]


def person(rng: random.Random, held_out: bool, gender: str = "") -> Person:
    """A person; `gender` is `f`, `m`, or empty for either."""
    weights, lists = _languages(held_out)
    own = rng.choices(lists, cum_weights=weights)[0]
    female = gender == "f" or (not gender and rng.random() < 0.5)
    other = rng.choices(lists, cum_weights=weights)[0] if rng.random() < 0.1 else own
    return Person(rng.choice(own.women if female else own.men), rng.choice(other.families), female)


@cache
def _languages(held_out: bool) -> tuple[list[int], list[Lists]]:
    """Cumulative weights, and the lists of each language that has enough names."""
    found = [
        (4, [list(words(f"{name} {part}")) for part in ("women", "men", "families")])
        for name in TRANSCRIBED
    ]
    for locale, weight in LOCALES.items():
        source = importlib.import_module(f"faker.providers.person.{locale}").Provider
        women = source.__dict__.get("first_names_female") or source.first_names
        men = source.__dict__.get("first_names_male") or source.first_names
        found.append((weight, [list(women), list(men), list(source.last_names)]))
    weights, lists, total = [], [], 0
    for weight, names in found:
        kept = [
            sorted({n for n in part if LATIN.fullmatch(n) and is_held_out(n) is held_out})
            for part in names
        ]
        if all(kept):
            total += weight
            weights.append(total)
            lists.append(Lists(*kept))
    return weights, lists
