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

from models.recipe import minilm
from models.recipe.guides import readings
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, FIRST_CITE
from models.recipe.vocabulary import meanings, texts

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
    letters: set[int]  # tokens that end with a letter
    rests: set[int]  # tokens that begin with a letter, without a space

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Swaps":
        """Takes half a minute."""
        names = texts(tokenizer)
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
        meaning = torch.nn.functional.normalize(meanings(tokenizer, 256)[at], dim=1)
        nearest = (meaning @ meaning.T).topk(LIKE + 1).indices[:, 1:]
        near = {int(at[i]): at[row].tolist() for i, row in enumerate(nearest)}
        stems = {ids["Ġ" + word]: ids[word] for word in words}
        letters = {i for i, name in enumerate(names) if name[-1].isalpha() and i > FIRST_CITE}
        rests = {i for i in letters if names[i][0].isalpha() and names[i][0] != "Ġ"}
        return cls(near, stems, {stem: i for i, stem in stems.items()}, letters, rests)

    def swapped(self, ids: list[int], answers: set[int], rng: random.Random) -> list[int]:
        """The ids of a question over passages with some words swapped, as many as before.

        `answers` are the positions in the passages that tell the answer.
        """
        if rng.random() < KEPT or DOCUMENTS not in ids:
            return ids
        words = self._words(ids)
        shown = readings(ids)
        begin, end = shown[0].question, len(ids) - ids[::-1].index(ASSISTANT)
        passages = {at for one in shown for at in range(one.first, one.stop)}
        outer = set(range(begin, end)) - passages
        asked = {words[at] for at in outer if words[at] is not None}
        told = {words[at] for at in passages if words[at] is not None}
        kept = {words[at] for at in answers}
        shared = self._drawn(rng, asked & told, SHARED, LIKE)
        inside = self._drawn(rng, told - asked - kept, ALONE, NEAR)
        outside = self._drawn(rng, asked - told, ALONE, NEAR)
        made = list(ids)
        for at, word in enumerate(words):
            other = shared.get(word) or (inside if at in passages else outside).get(word)
            if at >= end:  # what is said is what a passage has now; a denial stays one
                other = shared.get(word) if answers else None
            if word is not None and other is not None and at > begin:
                made[at] = other if ids[at] == word else self.spaced[other]
        return made

    def _drawn(
        self, rng: random.Random, words: set[int | None], share: float, nearest: int
    ) -> dict[int | None, int]:
        """What some of the words become."""
        return {
            word: rng.choice(self.near[word][:nearest])
            for word in sorted(word for word in words if word is not None)
            if rng.random() < share
        }

    def _words(self, ids: list[int]) -> list[int | None]:
        """At each position, the word without a space, if it is one that may be swapped."""
        found: list[int | None] = []
        for at, token in enumerate(ids):
            stem = self.stems.get(token, token)
            within = stem == token and at > 0 and ids[at - 1] in self.letters
            goes_on = at + 1 < len(ids) and ids[at + 1] in self.rests
            found.append(None if within or goes_on or stem not in self.near else stem)
        return found
