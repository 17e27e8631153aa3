"""Words swapped for others, so that no text of the bank is read twice.

The bank holds some thousands of sentences, and a training reads each many times: enough to know
them by heart, and the question with the place of its answer. So a word that question and passages
share becomes, everywhere, another one of a like kind; now and then a word of one side becomes one
that means nearly the same. What the answer is, and where, stays true.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from models.recipe import minilm, start
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, END

COMMON = 250  # words of the language that stay: they carry the grammar
KEPT = 0.3  # share of the examples that stay as they are
SHARED, ALONE = 0.35, 0.05  # share of the words that are swapped
LIKE, NEAR = 60, 4  # how many nearest words may stand for a shared one, and for one alone


@dataclass
class Swaps:
    """Which words may stand for which, by token."""

    near: dict[int, list[int]]  # stems: those of like meaning, the nearest first
    stems: dict[int, int]  # of a word with a space, the one without
    spaced: dict[int, int]  # the other way round

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Swaps":
        """Takes half a minute."""
        names = start.texts(tokenizer)
        ids = {name: i for i, name in enumerate(names)}
        common = set(minilm.words()[:COMMON])
        words = [
            name
            for name in names
            if name.isascii() and name.isalpha() and name.islower() and len(name) > 2
            and name not in common and "Ġ" + name in ids
        ]  # fmt: skip
        known = set(minilm.words())
        words = [word for word in words if word in known]  # no parts of words
        at = torch.tensor([ids[word] for word in words])
        meaning = torch.nn.functional.normalize(start.meanings(tokenizer, 256)[at], dim=1)
        nearest = (meaning @ meaning.T).topk(LIKE + 1).indices[:, 1:]
        near = {int(at[i]): at[row].tolist() for i, row in enumerate(nearest)}
        stems = {ids["Ġ" + word]: ids[word] for word in words}
        return cls(near, stems, {stem: i for i, stem in stems.items()})

    def swapped(self, ids: list[int], answers: set[int], rng: random.Random) -> list[int]:
        """The ids of a question over passages with some words swapped, as many as before.

        `answers` are the positions in the passages that tell the answer.
        """
        if rng.random() < KEPT or DOCUMENTS not in ids:
            return ids
        block = ids.index(DOCUMENTS)
        end = ids.index(END, block)
        asked = {self.stem(i) for i in ids[end + 1 : ids.index(ASSISTANT, end)]} - {None}
        told = {self.stem(i) for i in ids[block:end]} - {None}
        kept = {self.stem(ids[at]) for at in answers}
        everywhere = {
            stem: rng.choice(self.near[stem])
            for stem in sorted(x for x in asked & told if x is not None)
            if rng.random() < SHARED
        }
        made = [self._put(i, everywhere) for i in ids]
        inside = {
            stem: rng.choice(self.near[stem][:NEAR])
            for stem in sorted(x for x in told - asked - kept if x is not None)
            if rng.random() < ALONE
        }
        made[block:end] = [self._put(i, inside) for i in made[block:end]]
        outside = {
            stem: rng.choice(self.near[stem][:NEAR])
            for stem in sorted(x for x in asked - told if x is not None)
            if rng.random() < ALONE
        }
        before = [self._put(i, outside) for i in made[:block]]
        return [*before, *made[block:end], *(self._put(i, outside) for i in made[end:])]

    def stem(self, token: int) -> int | None:
        """The word without a space, if it is one that may be swapped."""
        stem = self.stems.get(token, token)
        return stem if stem in self.near else None

    def _put(self, token: int, others: dict[int, int]) -> int:
        stem = self.stems.get(token, token)
        if stem not in others:
            return token
        return others[stem] if stem == token else self.spaced[others[stem]]
