"""A start that knows words, compares question and passages, and can already copy.

A model that sees some fifty million tokens can learn how answers are found, not English. So each
token's embedding says from the start what the word means, as MiniLM has it: words that training
never shows are near those that it does. These rows stay as they are, or training would move the
words that it shows away from their neighbours; it moves those of marks, digits and markers alone.

And a transformer learns late, and all at once, to compare and to copy: gradient finds no slope
until most of the parts are there. So the parts are written into the first weights by hand, each of
them a head:

- what came before a token, and the mark of the part that it is in (a passage's number, a user's
  turn); what words stand around it, as a code of the place;
- what followed the last token like this one (Olsson et al., 2022: induction heads), put aside in
  features of its own;
- how much of the question a token answers to: by the same word, by the same two words, by a word
  of like meaning. Attention always adds up to one, so it cannot tell by itself that nothing is
  alike; here it rests on the marker of the documents unless a word of the question outweighs it,
  and what it brings is that word's weight. Rare words weigh more than common ones;
- the mean of that over a few tokens, over a sentence, over the passage;
- halfway, in layer `finds`, a head that looks for the place where that is most, and brings the code
  of the place;
- in the next, `points`, one that copies what it looks at: what is to follow, near the place.

Training tells the last two where to look (`guides.py`). The others are left as they are for a
while, or training would use them for something else before it has found what they are good for;
then it bends and multiplies them as it likes. Everything else starts at random.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import minilm
from models.recipe.model import Attention, Layer, Llama, Shape
from models.recipe.tokenizer import (
    ASSISTANT,
    CITES,
    DOCUMENTS,
    FIRST_CITE,
    SPECIAL,
    USER,
    VISIBLE,
)

SPREAD = 0.5  # standard deviation of the embedding: what layers add must not drown it at once
SHARP = 0.06  # that with which the logits of a fresh model are as sharp as they should be
CONSTANT = 4.0  # of feature 0, in units of SPREAD
SHARPNESS = 5.0  # of the positional heads
MATCH = 2.5  # of the matching heads
GAIN = 7.0  # with which a copied token is added
BRINGS = 0.5  # of the codes of the place that is found
POINTING = 1.0  # as MATCH, of the head that points
NEAR = 8.0  # how much a mark outweighs other tokens, close by
SLOW = 0.003  # angle per token below which a pair of features tells little of distance
ASKED = 12.0  # how much a token of the question outweighs others, for the comparing heads
# Windows before a token: features that turn at rates between these, and how much they count.
PLACE, FEW, MANY = (0.02, 0.1, 40.0), (0.05, 0.25, 60.0), (0.015, 0.05, 50.0)


def finds(shape: Shape) -> int:
    """The layer whose first head finds the place that tells."""
    return shape.layers - 2


def points(shape: Shape) -> int:
    """The layer whose first head points at what is said."""
    return finds(shape) + 1


class Layout:
    """The features of the residual stream, by their use."""

    def __init__(self, shape: Shape) -> None:
        """Raises ValueError if the model is too narrow, or has too few layers."""
        dim = shape.head_dim
        sizes = {
            "constant": 1, "own": dim, "once": dim // 2, "twice": dim // 4, "part": dim // 2,
            "next": dim, "place": dim // 2, "traits": 6, "alike": 3, "few": 3, "many": 3, "all": 3,
        }  # fmt: skip
        at = 0
        for name, size in sizes.items():
            setattr(self, name, slice(at, at + size))
            at += size
        self.meaning = slice(at, shape.hidden)
        if shape.heads < 4 or shape.hidden - at < dim // 2:
            raise ValueError("the first weights need four heads, and a width of five of them")
        if finds(shape) < 3:
            raise ValueError("the first weights need six layers")

    constant: slice
    own: (
        slice  # a code of the token's own, and in its last feature whether it has a space before it
    )
    once: slice  # the code of the token before; from `finds` on that of the place found
    twice: slice  # that of the token before that; from `finds` on some of the passage's found
    part: slice  # a code of a mark, zero in others; layer 0 writes that of the part they are in
    next: slice  # the code of what is to follow
    place: slice  # what words stand before, as a code
    traits: slice  # see `traits`
    alike: slice  # how much it is like the question: the word, the words, the meaning
    few: slice  # the mean of that over some tokens
    many: slice  # … over a sentence
    all: slice  # … over the passage
    meaning: slice  # its strongest components first


def marks(tokenizer: Tokenizer) -> list[int]:
    """The tokens that begin a part of the text."""
    return [USER, ASSISTANT, *(FIRST_CITE + number for number in range(len(CITES)))]


def texts(tokenizer: Tokenizer) -> list[str]:
    """Of each token: the bytes that it stands for, `Ġ` for a space before it."""
    return [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]


def movable(tokenizer: Tokenizer) -> Tensor:
    """(vocab) whether training may move the token's row: of markers, marks and digits, not words"""
    shown = {*SPECIAL, *VISIBLE}
    return torch.tensor([t in shown or not t[-1].isascii() or not t[-1].isalpha() or len(t) == 1
                         for t in texts(tokenizer)])  # fmt: skip


def meanings(tokenizer: Tokenizer, size: int) -> Tensor:
    """(vocab, size) what MiniLM makes of each token: principal components, of unit variance over
    all features together. A word with and without a space or a capital means the same.
    """
    words = [text.removeprefix("Ġ").lower() for text in texts(tokenizer)]
    known = sorted({word for word in words if word.isascii() and word.isalpha()})
    said, read = minilm.encode(known), minilm.embedded(known)
    both = torch.cat([x / x.std() for x in (said - said.mean(0), read - read.mean(0))], 1)
    left, values, _ = torch.linalg.svd(both, full_matrices=False)
    found = left[:, :size] * values[:size].sqrt()  # the strongest would outshine the others
    found = found / found.norm(dim=1, keepdim=True) * size**0.5
    table = dict(zip(known, found, strict=True))
    return torch.stack([table.get(word, torch.zeros(size)) for word in words])


def weights(tokenizer: Tokenizer) -> Tensor:
    """(vocab) how much it tells that a word stands in two texts: from 0 for the commonest to 1."""
    ranks = {word: rank for rank, word in enumerate(minilm.words())}
    found = []
    for text in texts(tokenizer):
        word = text.removeprefix("Ġ").lower()
        if not word.isalnum() or not word.isascii():
            found.append(0.0)
        elif len(word) == 1:
            found.append(0.15)
        else:
            found.append(min(1.0, math.log(ranks.get(word, 10_000) / 50 + 1) / 5))
    return torch.tensor(found)


def traits(tokenizer: Tokenizer) -> Tensor:
    """(vocab, 6): whether it is the documents' marker, its weight, whether it has a capital, is a
    digit, ends a sentence, ends a line.
    """
    stems = [text.removeprefix("Ġ") for text in texts(tokenizer)]
    shown = {*SPECIAL, *VISIBLE}
    plain = [("" if stem in shown else stem) for stem in stems]
    return torch.stack([
        torch.tensor([float(i == DOCUMENTS) for i in range(len(stems))]),
        weights(tokenizer),
        torch.tensor([float(stem[:1].isupper()) for stem in plain]),
        torch.tensor([float(stem[:1].isdigit()) for stem in plain]),
        torch.tensor([float(stem[:1] in (".", "!", "?")) for stem in plain]),
        torch.tensor([float(stem[:1] == "Ċ") for stem in plain]),
    ], 1)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """One of the heads that are written into the first weights."""

    layer: int
    number: int

    def weights(self, model: Llama) -> list[Tensor]:
        """What makes it, as views of the model's weights."""
        attention = cast(Layer, model.model.layers[self.layer]).self_attn
        rows = attention.rows(self.number)
        inputs = attention.q_proj, attention.k_proj, attention.v_proj
        return [
            *(project.weight.data[rows] for project in inputs),
            *(project.bias.data[rows] for project in inputs if attention.shape.biased),
            attention.o_proj.weight.data[:, rows],
        ]


def written(shape: Shape) -> list[Head]:
    """The heads that training leaves alone at first, until the others have learned to use them."""
    if shape.biased:  # `layers.keep_codes`
        return []
    numbers = (range(4), range(min(6, shape.heads)), range(3))
    return [Head(layer, number) for layer, some in enumerate(numbers) for number in some]


@torch.no_grad()
def prepare(model: Llama, tokenizer: Tokenizer) -> None:
    """Writes embedding and heads into a freshly drawn model, which must be wide enough."""
    at = Layout(model.shape)
    _embed(model, tokenizer, at)
    model.model.norm.weight.fill_(SHARP / SPREAD)
    first, second, third = (cast(Layer, model.model.layers[i]).self_attn for i in range(3))
    _look_back(model, first, 0, 1)
    _carry(first, 0, at.own, at.once, 0.7 * SPREAD)
    _look_back(model, first, 1, 2)
    _carry(first, 1, at.own, at.twice, 0.7 * SPREAD)
    beginnings = marks(tokenizer)
    codes = model.model.embed_tokens.weight[beginnings, at.part]
    _look_for(model, first, 2, at.part, codes.mean(0) / codes.mean(0).norm())
    _carry(first, 2, at.part, at.part, 0.5 * SPREAD)
    _look_around(model, first, 3, *PLACE)
    _carry(first, 3, at.own, at.place, 2 * SPREAD)
    # What matches; here: in one passage.
    one, two, here = (at.own, at.once), (at.once, at.twice), (at.part, at.part)
    asked = codes[0] - codes[2:].mean(0)  # of a user's turn, not of a passage
    asked = asked / asked.norm()
    same, before, means = (at.own, at.own), (at.once, at.once), (at.meaning, at.meaning)
    for head, (pairs, sink) in enumerate((([same], 3.0), ([same, before], 3.5), ([means], 4.0))):
        _match(model, second, head, pairs)
        _prefer(model, second, head, 1, at.part, ASKED * asked)
        _prefer(model, second, head, 2, at.traits, sink * torch.eye(6)[0])
        weight = slice(at.traits.start + 1, at.traits.start + 2)
        target = slice(at.alike.start + head, at.alike.start + head + 1)
        _carry(second, head, weight, target, 1.5 * SPREAD)
    _match(model, second, 3, [one, two])
    _carry(second, 3, at.own, at.next, 0.8 * SPREAD)
    if model.shape.heads > 5:
        _match(model, second, 4, [one, two, here])
        _carry(second, 4, at.own, at.next, 0.8 * SPREAD)
        _match(model, second, 5, [one])
        _carry(second, 5, at.own, at.next, 0.8 * SPREAD)
    _look_around(model, third, 0, *FEW)
    _carry(third, 0, at.alike, at.few, 4 * SPREAD)
    _look_around(model, third, 1, *MANY)
    _carry(third, 1, at.alike, at.many, 6 * SPREAD)
    _match(model, third, 2, [here])
    _carry(third, 2, at.alike, at.all, 8 * SPREAD)
    finder = cast(Layer, model.model.layers[finds(model.shape)]).self_attn
    _find(model, finder, at)
    late = cast(Layer, model.model.layers[points(model.shape)]).self_attn
    _match(model, late, 0, [(at.next, at.own)] * 3 + [(at.once, at.place)], POINTING)
    _carry(late, 0, at.own, at.own, GAIN * SPREAD)


def _find(model: Llama, attention: Attention, at: Layout) -> None:
    """Looks for what is most like the question; brings the codes of the place."""
    query, key = _inputs(attention, 0)
    query.zero_()
    key.zero_()
    place = _slow(model)[-1]
    query[place, 0] = 8 / CONSTANT
    for where, much in ((at.few, 0.5), (at.many, 1.0), (at.all, 0.5)):
        key[place, where] = much
    rows = attention.rows(0)
    half = model.shape.head_dim // 2
    values, output = attention.v_proj.weight[rows], attention.o_proj.weight[:, rows]
    values.zero_()
    output.zero_()
    values[:half, at.place] = torch.eye(half)
    quarter = at.twice.stop - at.twice.start
    values[half : half + quarter, at.part.start : at.part.start + quarter] = torch.eye(quarter)
    output[at.once, :half] = BRINGS * SPREAD * torch.eye(half)
    output[at.twice, half : half + quarter] = BRINGS * SPREAD * torch.eye(quarter)


def _embed(model: Llama, tokenizer: Tokenizer, at: Layout) -> None:
    embedding = model.model.embed_tokens.weight
    names = texts(tokenizer)
    embedding.zero_()
    embedding[:, 0] = CONSTANT * SPREAD
    stems = {stem: i for i, stem in enumerate(dict.fromkeys(n.removeprefix("Ġ") for n in names))}
    codes = torch.randn(len(stems), at.own.stop - at.own.start) * SPREAD
    embedding[:, at.own] = codes[[stems[n.removeprefix("Ġ")] for n in names]]
    spaced = torch.tensor([n.startswith("Ġ") for n in names])
    embedding[:, at.own.stop - 1] = torch.where(spaced, 2.0, -2.0) * SPREAD
    embedding[DOCUMENTS, at.own] = 0  # it rests what finds no match
    embedding[:, at.traits] = traits(tokenizer) * torch.tensor([6.0, 2, 2, 2, 2, 2]) * SPREAD
    embedding[:, at.meaning] = meanings(tokenizer, at.meaning.stop - at.meaning.start) * SPREAD
    beginnings = marks(tokenizer)
    width = at.part.stop - at.part.start
    alike = torch.nn.functional.normalize(torch.randn(width), dim=0)
    apart = torch.randn(len(beginnings), width)
    apart -= (apart @ alike)[:, None] * alike
    apart = torch.nn.functional.normalize(apart, dim=1)
    embedding[beginnings, at.part] = (0.6 * apart + 0.8 * alike) * 2 * SPREAD * width**0.5


def _rates(model: Llama) -> Tensor:
    """(dim / 2) angle per token at which each pair of features turns."""
    half = model.shape.head_dim // 2
    return model.shape.theta ** (-torch.arange(half) / half)


def _inputs(attention: Attention, head: int) -> tuple[Tensor, Tensor]:
    """The rows of the query's and of the key's weight that are a head's."""
    rows = attention.rows(head)
    return attention.q_proj.weight[rows], attention.k_proj.weight[rows]


def _look_back(model: Llama, attention: Attention, head: int, distance: int) -> None:
    """Query and key depend on feature 0 alone; their product is greatest `distance` tokens back."""
    query, key = _inputs(attention, head)
    rates = _rates(model)
    half = len(rates)
    loud = (rates > 0.04).float() * SHARPNESS**0.5 / CONSTANT * 2
    query.zero_()
    key.zero_()
    query[:half, 0] = loud * (rates * distance).cos()
    query[half:, 0] = -loud * (rates * distance).sin()
    key[:half, 0] = loud


def _look_for(model: Llama, attention: Attention, head: int, where: slice, what: Tensor) -> None:
    """The nearest token whose features `where` have much of the unit vector `what`."""
    query, key = _inputs(attention, head)
    rates = _rates(model)
    slow = torch.nonzero((rates > 1.5e-3) & (rates < 1.5e-2)).flatten()
    query.zero_()
    key.zero_()
    # Turned by an eighth, the product falls with each token of distance, from the first on.
    query[slow, 0] = NEAR**0.5
    query[slow + len(rates), 0] = NEAR**0.5
    key[slow, where] = NEAR**0.5 * what / len(slow)


def _look_around(
    model: Llama, attention: Attention, head: int, low: float, high: float, much: float
) -> None:
    """The tokens before, the nearer the more; pairs of features that turn at these rates tell."""
    query, key = _inputs(attention, head)
    rates = _rates(model)
    loud = torch.nonzero((rates > low) & (rates < high)).flatten()
    query.zero_()
    key.zero_()
    query[loud, 0] = (much / len(loud)) ** 0.5 / CONSTANT
    key[loud, 0] = (much / len(loud)) ** 0.5 / CONSTANT


def _slow(model: Llama) -> list[int]:
    """The features of a head that hardly turn over the length of a passage."""
    slow = torch.nonzero(_rates(model) < SLOW).flatten()
    return torch.cat((slow, slow + model.shape.head_dim // 2)).tolist()


def _match(
    model: Llama,
    attention: Attention,
    head: int,
    pairs: list[tuple[slice, slice]],
    much: float = MATCH,
) -> None:
    """Each query feature of a pair against its key feature, shared out over slowly turning ones."""
    query, key = _inputs(attention, head)
    query.zero_()
    key.zero_()
    used: Counter[tuple[int, int]] = Counter()
    for i, place in enumerate(_slow(model)):
        mine, theirs = pairs[i % len(pairs)]
        feature = used[mine.start, theirs.start]
        used[mine.start, theirs.start] += 1
        if feature < min(mine.stop - mine.start, theirs.stop - theirs.start):
            query[place, mine.start + feature] = much
            key[place, theirs.start + feature] = much


def _prefer(
    model: Llama, attention: Attention, head: int, nth: int, where: slice, what: Tensor
) -> None:
    """Besides, tokens whose features `where` have much of `what`; in the `nth` last slow one."""
    place = _slow(model)[-nth]
    query, key = _inputs(attention, head)
    query[place] = 0
    key[place] = 0
    query[place, 0] = MATCH / CONSTANT
    key[place, where] = what


def _carry(attention: Attention, head: int, source: slice, target: slice, gain: float) -> None:
    """What the head attends to: its first features of `source` are added to those of `target`."""
    rows = attention.rows(head)
    size = min(attention.shape.head_dim, source.stop - source.start, target.stop - target.start)
    unit = torch.eye(size)
    values, output = attention.v_proj.weight[rows], attention.o_proj.weight[:, rows]
    values.zero_()
    values[:size, source.start : source.start + size] = unit
    output.zero_()
    output[target.start : target.start + size, :size] = gain * unit
