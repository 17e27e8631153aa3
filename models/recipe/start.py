"""A start that knows words and can already copy.

A model that sees some fifty million tokens can learn how answers are found, not English. So each
token's embedding says from the start what the word means, as MiniLM has it: words that training
never shows are near those that it does. These rows stay as they are, or training would move the
words that it shows away from their neighbours; it moves those of marks, digits and markers alone.

And a transformer learns late, and all at once, to continue `A B ... A` with `B`: it needs a head
that tells each token what came before it, and in a later layer one that looks for what the present
token came before. So these heads are written into the first weights by hand, for one token of
context and for two (Olsson et al., 2022, call them induction heads); further ones that tell each
token the mark of the part that it is in (a passage's number, a user's turn), that bring a copied
token's mark along, that look in the question for a word of like meaning, and in the passages, and
that gather what was found so over a sentence. In `POINTS`, a late layer, one head copies what it
looks at: training tells it where (`guides.py`). These heads are left as they are for a while, or
training would use them for something else before it has found what they are good for; then it bends
and multiplies them as it likes. Everything else starts at random.

The residual stream of a fresh model is used like this (here for heads of 64):

    0           the same constant in every token, for the positional heads
    1 .. 63     a code of the token's own, but for the space before it
    64          whether it has a space before it
    65 .. 128   zero in the embedding; layer 0 writes features 1 .. 64 of the token before
    129 .. 192  zero too; layer 0 writes those of the token before that
    193 .. 224  a code of a mark, zero in others; layer 0 writes that of the part they are in
    225 ..      the meaning, its strongest components first
"""

from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import minilm
from models.recipe.model import Attention, Layer, Llama, Shape
from models.recipe.tokenizer import ASSISTANT, CITES, SPECIAL, USER, VISIBLE

SPREAD = 0.5  # standard deviation of the embedding: what layers add must not drown it at once
SHARP = 0.06  # that with which the logits of a fresh model are as sharp as they should be
CONSTANT = 4.0  # of feature 0, in units of SPREAD
SHARPNESS = 5.0  # of the positional heads
MATCH = 2.5  # of the matching heads
GAIN = 7.0  # with which each matched token's successor is added
NEAR = 8.0  # how much a mark outweighs other tokens, close by
AROUND = 30.0  # how much near tokens outweigh others, for the head that looks around
POINTS = -3  # the layer whose first head points at what is said next


class Layout:
    """The features of the residual stream, by their use."""

    def __init__(self, shape: Shape) -> None:
        """Raises ValueError if the model is too narrow."""
        dim = shape.head_dim
        self.own, self.once, self.twice = (slice(i * dim + 1, (i + 1) * dim + 1) for i in range(3))
        self.spaced = self.own.stop - 1
        self.part = slice(self.twice.stop, self.twice.stop + dim // 2)
        self.meaning = slice(self.part.stop, shape.hidden)
        if shape.heads < 4 or shape.hidden <= self.part.stop:
            raise ValueError("the first weights need four heads, and a width of four of them")


def marks(tokenizer: Tokenizer) -> list[int]:
    """The tokens that begin a part of the text."""
    return [USER, ASSISTANT, *(tokenizer.token_to_id(cite) for cite in CITES)]


def texts(tokenizer: Tokenizer) -> list[str]:
    """Of each token: the bytes that it stands for, `Ġ` for a space before it."""
    return [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]


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
            attention.o_proj.weight.data[:, rows],
        ]


def written(shape: Shape) -> list[Head]:
    """The heads that training leaves alone at first, until the others have learned to use them."""
    heads = [Head(0, 0), Head(0, 1), Head(0, 2), *(Head(1, number) for number in range(4))]
    return heads + ([Head(1, 4), Head(1, 5), Head(2, 0)] if shape.heads > 5 else [])


@torch.no_grad()
def prepare(model: Llama, tokenizer: Tokenizer) -> None:
    """Writes embedding and heads into a freshly drawn model, which must be wide enough."""
    at = Layout(model.shape)
    _embed(model, tokenizer, at)
    model.model.norm.weight.fill_(SHARP / SPREAD)
    first, second, third = (cast(Layer, model.model.layers[i]).self_attn for i in range(3))
    for head, (back, target) in enumerate(((1, at.once), (2, at.twice))):
        _look_back(model, first, head, back)
        _carry(first, head, at.own, target, 2 * SPREAD)
    beginnings = marks(tokenizer)
    codes = model.model.embed_tokens.weight[beginnings, at.part]
    alike = codes.mean(0) / codes.mean(0).norm()
    _look_for(model, first, 2, at.part, alike)
    _carry(first, 2, at.part, at.part, 2 * SPREAD)
    # What matches; here: one passage.
    one, two, here = (at.own, at.once), (at.once, at.twice), (at.part, at.part)
    _match(model, second, 0, [one])
    _match(model, second, 1, [one, two, one, two, here])
    _match(model, second, 2, [one, two])
    _match(model, second, 3, [one, one, here])
    for head, brought in enumerate((at.own, at.own, at.part, at.own)):
        _carry(second, head, brought, brought, GAIN * SPREAD)
    if model.shape.heads > 5:
        asked = codes[0] - codes[2:].mean(0)  # of a user's turn, not of a passage
        for head, (where, brought, target) in enumerate(
            ((asked, at.meaning, at.once), (-asked, at.part, at.part)), 4
        ):
            _match(model, second, head, [(at.meaning, at.meaning)])
            _prefer(model, second, head, at.part, where / where.norm())
            _carry(second, head, brought, target, GAIN * SPREAD / 2)
        _look_around(model, third, 0)
        _carry(third, 0, at.once, at.twice, GAIN * SPREAD)
    late = cast(Layer, model.model.layers[POINTS]).self_attn
    _match(model, late, 0, [(at.own, at.own)])
    _carry(late, 0, at.own, at.own, GAIN * SPREAD)


def _embed(model: Llama, tokenizer: Tokenizer, at: Layout) -> None:
    embedding = model.model.embed_tokens.weight
    names = texts(tokenizer)
    embedding.zero_()
    embedding[:, 0] = CONSTANT * SPREAD
    stems = {stem: i for i, stem in enumerate(dict.fromkeys(n.removeprefix("Ġ") for n in names))}
    codes = torch.randn(len(stems), at.spaced - at.own.start) * SPREAD
    embedding[:, at.own.start : at.spaced] = codes[[stems[n.removeprefix("Ġ")] for n in names]]
    spaced = torch.tensor([n.startswith("Ġ") for n in names])
    embedding[:, at.spaced] = torch.where(spaced, 2.0, -2.0) * SPREAD
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


def _look_around(model: Llama, attention: Attention, head: int) -> None:
    """The tokens before, the nearer the more: about a sentence of them."""
    query, key = _inputs(attention, head)
    rates = _rates(model)
    slow = torch.nonzero((rates > 3e-2) & (rates < 3e-1)).flatten()
    query.zero_()
    key.zero_()
    query[slow, 0] = AROUND**0.5 / CONSTANT
    key[slow, 0] = AROUND**0.5 / CONSTANT


def _slow(model: Llama) -> list[int]:
    """The features of a head that hardly turn over the length of a passage."""
    slow = torch.nonzero(_rates(model) < 0.01).flatten()
    return torch.cat((slow, slow + model.shape.head_dim // 2)).tolist()


def _match(model: Llama, attention: Attention, head: int, pairs: list[tuple[slice, slice]]) -> None:
    """Each query feature of a pair against its key feature, shared out over slowly turning ones."""
    query, key = _inputs(attention, head)
    query.zero_()
    key.zero_()
    for i, place in enumerate(_slow(model)):
        mine, theirs = pairs[i % len(pairs)]
        feature = i % (mine.stop - mine.start)
        query[place, mine.start + feature] = MATCH
        key[place, theirs.start + feature] = MATCH


def _prefer(model: Llama, attention: Attention, head: int, where: slice, what: Tensor) -> None:
    """Besides, tokens whose features `where` have much of the unit vector `what`."""
    place = _slow(model)[-1]
    query, key = _inputs(attention, head)
    query[place] = 0
    key[place] = 0
    query[place, 0] = MATCH
    key[place, where] = MATCH * what


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
