"""The first stage of the demo model's training: its layers are told what MiniLM's say.

After the fits (`layers.py`) the states are like MiniLM's where a token is a word of both; where a
word is cut otherwise, as names are, its parts have to be put together. That takes gradients, and is
a dense lesson: at the last token of each word, at each layer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import corpus, minilm
from models.recipe.layers import Texts, prepare
from models.recipe.model import Llama
from models.recipe.teacher import Teacher, spelled, unit
from models.recipe.template import render
from models.recipe.tokenizer import PAD

READ = 3000  # conversations from which the rows of parts of words are
FITTED = 300  # … on which the layers are fitted
LONGEST = 400  # tokens of each


def _conversations(seed: int) -> Iterator[str]:
    number = 0
    while True:
        yield render(corpus.looked_up(random.Random(f"{seed}/first/{number}"), 0.5))
        number += 1


@dataclass
class Distiller:
    """What tells our layers."""

    teacher: Teacher
    spelling: list[bytes]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Distiller":
        return cls(Teacher(), spelled(tokenizer))

    def begin(self, model: Llama, tokenizer: Tokenizer, seed: int) -> None:
        """Writes the first weights. Takes two minutes."""
        rows = []
        for text in _conversations(seed):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= LONGEST:
                rows.append(ids)
            if len(rows) == READ:
                break
        prepare(model, tokenizer, self.teacher, rows, FITTED)

    def missed(self, model: Llama, inputs: Tensor) -> Tensor:
        """(layers of MiniLM) how unlike its states ours are: one less the cosine, the mean over
        words. `inputs`: (rows, tokens) ids.
        """
        rows = [[*row[: int((row != PAD).sum())].tolist()] for row in inputs.cpu()]
        texts = Texts(self.teacher, self.spelling, rows)
        said = self.teacher.layers(texts.theirs)
        ours = model.seen(inputs, *range(1, len(said) + 1))[1:]
        return torch.stack([
            1 - F.cosine_similarity(
                unit(mine[..., : minilm.WIDTH])[texts.at], theirs.out[texts.there], dim=-1
            ).mean()
            for mine, theirs in zip(ours, said, strict=True)
        ])  # fmt: skip
