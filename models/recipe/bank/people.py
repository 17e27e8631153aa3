"""First and family names of many languages in Latin letters: Faker's lists and some transcribed ones."""

import importlib
import random
import re
from dataclasses import dataclass
from functools import cache

from models.recipe.bank.split import is_held_out

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
# Women's names, men's names, family names.
TRANSCRIBED = [
    ("Mei Xin Lan Yan Jing Hui Ling Qing Xiu Ying Na Fang Min Juan Li Rong Yun Shu",
     "Wei Jun Hao Bo Lei Ming Feng Jian Qiang Tao Gang Peng Bin Chao Long Yong Zhen Kai",
     "Wang Li Zhang Liu Chen Yang Huang Zhao Wu Zhou Xu Sun Ma Zhu Hu Guo He Lin Gao Luo Zheng Liang Xie Song Tang Han Feng Deng Cao Peng Zeng Xiao Tian Dong Yuan Pan Cai Jiang Yu Du Ye Cheng Wei Su Lu Ding Ren Shen Yao Qin Qian Qiu Xia"),
    ("Aiko Akemi Chiyo Emi Fumiko Hana Haruka Keiko Kumiko Mariko Michiko Naomi Reiko Sachiko Sakura Yoko Yumi Yui",
     "Akira Daichi Daisuke Haruto Hiroshi Isamu Kaito Kenji Makoto Naoki Osamu Ren Riku Satoshi Shinji Takeshi Yuki Yuto",
     "Sato Suzuki Takahashi Tanaka Watanabe Ito Yamamoto Nakamura Kobayashi Kato Yoshida Yamada Sasaki Matsumoto Inoue Kimura Hayashi Shimizu Saito Mori Ikeda Hashimoto Ishikawa Ogawa Okada Goto Fujita Ueda Endo Aoki Nishimura Fukuda Ota Miura"),
    ("Ji-woo Seo-yeon Min-ji Ha-eun Soo-jin Yuna Hye-jin Eun-ji Da-hye Su-bin",
     "Min-jun Seo-jun Ji-ho Dong-hyun Sung-min Jae-won Hyun-woo Tae-yang Joon-ho Young-ho",
     "Kim Lee Park Choi Jung Kang Cho Yoon Jang Lim Han Oh Seo Shin Kwon Hwang Ahn Song Ryu Hong"),
    ("Fatima Aisha Layla Mariam Noor Salma Yasmin Zainab Huda Rania Samira Amal Dina Hanan Iman Khadija Nadia Rasha",
     "Ahmed Omar Ali Hassan Khalid Yusuf Ibrahim Tariq Samir Karim Bilal Faisal Hamza Jamal Mahmoud Nabil Rashid Ziad",
     "Haddad Khoury Mansour Nasser Saleh Hamdan Abbas Aziz Darwish Farouk Habib Hussein Jaber Kanaan Najjar Qasim Qureshi Rahman Saad Sayegh Shaheen Tahan Yassin Zaher Ismail Odeh Issa"),
    ("Anna Olga Irina Natalia Elena Svetlana Tatiana Oksana Daria Polina Yulia Galina Ksenia Larisa Vera Zoya",
     "Ivan Dmitri Sergei Alexei Andrei Boris Igor Maxim Mikhail Nikolai Oleg Pavel Viktor Vladimir Yuri Taras Bohdan",
     "Petrov Ivanov Smirnov Volkov Sokolov Popov Lebedev Kozlov Novikov Morozov Orlov Makarov Zaitsev Romanov Shevchenko Kovalenko Bondarenko Tkachenko Kravchenko Melnyk Boyko Marchenko Lysenko Moroz Klymenko"),
    ("Eleni Maria Katerina Sofia Ioanna Dimitra Vasiliki Georgia Despina Zoe",
     "Giorgos Nikos Kostas Yannis Dimitris Petros Stavros Andreas Thanos Elias",
     "Papadopoulos Georgiou Nikolaidis Pappas Vlachos Angelopoulos Karagiannis Makris Economou Ioannou Alexiou Kostopoulos"),
    ("Agnieszka Barbara Ewa Joanna Magdalena Zofia Urszula Wanda Iwona Halina",
     "Andrzej Jakub Krzysztof Marek Piotr Tomasz Wojciech Stanisław Zbigniew Łukasz",
     "Nowak Kowalski Wiśniewski Wójcik Kamiński Lewandowski Zieliński Szymański Woźniak Kozłowski Mazur Krawczyk Kaczmarek Grabowski Zając Król Wieczorek Wróbel Stępień Malinowski"),
    ("Linh Huong Lan Mai Thuy Trang Ngoc Hoa Phuong Yen",
     "Minh Tuan Hung Duc Long Nam Quang Thanh Viet Khoa",
     "Nguyen Tran Le Pham Huynh Phan Vu Vo Dang Bui Do Ho Ngo Duong Ly Dinh Truong Quach"),
]  # fmt: skip


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


def first_name(rng: random.Random, held_out: bool) -> str:
    """A first name of a woman or a man."""
    return person(rng, held_out).first


def family_name(rng: random.Random, held_out: bool) -> str:
    """A family name."""
    return person(rng, held_out).last


@cache
def _languages(held_out: bool) -> tuple[list[int], list[Lists]]:
    """Cumulative weights, and the lists of each language that has enough names."""
    found = [(4, tuple(words.split() for words in names)) for names in TRANSCRIBED]
    for locale, weight in LOCALES.items():
        source = importlib.import_module(f"faker.providers.person.{locale}").Provider
        women = source.__dict__.get("first_names_female") or source.first_names
        men = source.__dict__.get("first_names_male") or source.first_names
        found.append((weight, (list(women), list(men), list(source.last_names))))
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
