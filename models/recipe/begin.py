"""The demo model's first weights: its layers from MiniLM's (`layers.py`), and, once these have been
told, what its copying heads read of where answers stand (`pointing.py`).
"""

from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import own_heads
from models.recipe.batches import Row, collate
from models.recipe.copying import LOUD, Layout, embed_codes, look_back
from models.recipe.layers import prepare
from models.recipe.lessons import Source
from models.recipe.model import Layer, Llama
from models.recipe.pointing import Seen, point
from models.recipe.reader import Pairs, Reader, pairs, readable
from models.recipe.teacher import Teacher
from models.recipe.tokenizer import PAD
from models.recipe.vocabulary import meanings

READ = 3000  # passages from which the rows of parts of words are
FITTED = 300  # … on which the layers are fitted
SHORT = 300  # tokens of each
POINTED = 160  # prompts on which the heads are fitted
LONGEST = 1300  # tokens of each
PROGRESS = 0.4  # of the corpus
ALL_ASKED = 0.9  # … where all skills are in it
FIRST = 10**8  # number of the first example: not those of the lessons


def layers(model: Llama, source: Source) -> None:
    """Writes the layers, the embedding, and the codes of tokens. Takes two minutes."""
    rows = []
    for one in _looked_up(source, READ):
        pair = pairs(one)[0].ids
        if len(pair) <= SHORT:
            rows.append(pair)
    prepare(model, source.tokenizer, Teacher(), rows, FITTED)


def heads(model: Llama, reader: Reader, source: Source) -> None:
    """Writes the last layer's copying heads, and those between. Takes a minute."""
    asked = (source.row(FIRST + n, ALL_ASKED, False) for n in range(POINTED))
    some = sorted((one for one in asked if len(one.ids) <= LONGEST), key=lambda one: len(one.ids))
    parts = [collate(some[i : i + 8]).inputs for i in range(0, len(some), 8)]
    own_heads.write(model, parts)
    rows = [one for one in _looked_up(source, POINTED) if len(one.ids) <= LONGEST]
    few = collate(rows[:8]).inputs
    centre(model, few)
    point(model, few, _space(source.tokenizer), seen(reader, rows))
    own_heads.look_at_what_tells(model, parts)


@torch.no_grad()
def centre(model: Llama, ids: Tensor) -> None:
    """Takes its mean over tokens from the meaning that the last layer reads: nine tenths of its
    square, behind which a norm leaves little of all that differs. `ids`: (rows, tokens).
    """
    layer, meaning = cast(Layer, model.model.layers[-2]), Layout.of(model.shape).meaning
    read = model.reads(ids, model.shape.layers - 1)[0][ids != PAD].float()
    layer.mlp.down_proj.bias[meaning] -= read.mean(0)[meaning]


@torch.no_grad()
def draft(model: Llama, source: Source) -> None:
    """Writes the draft's embedding, the codes of tokens, and its copying heads; what layers say
    besides begins at nothing.
    """
    at, rows = Layout.of(model.shape), model.model.embed_tokens.weight
    rows[:, at.meaning] = meanings(source.tokenizer, at.meaning.stop - at.meaning.start) * LOUD
    embed_codes(model, source.tokenizer)
    look_back(model)
    few = [one for one in _looked_up(source, 40) if len(one.ids) <= LONGEST][:8]
    point(model, collate(few).inputs, _space(source.tokenizer))


def _space(tokenizer: Tokenizer) -> int:
    """The token of a space alone."""
    (space,) = tokenizer.encode(" ").ids
    return space


def _looked_up(source: Source, count: int) -> list[Row]:
    drawn = (source.row(FIRST + n, PROGRESS, True) for n in range(count))
    return [one for one in drawn if readable(one)]


@torch.no_grad()
def seen(reader: Reader, rows: list[Row]) -> Seen:
    """What the reader says of some prompts' second readings."""
    found = Seen.blank(len(rows), max(len(one.ids) for one in rows))
    for i, one in enumerate(rows):
        found.ids[i, : len(one.ids)] = torch.tensor(one.ids)
        shown = pairs(one)
        scores = reader.raw(Pairs.of([shown]))
        for pair, (begins, ends) in zip(shown, scores, strict=True):
            found.second[i, pair.second] = True
            found.begins[i, pair.second] = begins[pair.mark : len(pair.ids)]
            found.ends[i, pair.second] = ends[pair.mark : len(pair.ids)]
        for _, first, last in one.guide.tells:
            found.inner[i, first:last] = True
            found.last[i, last] = True
    return found
