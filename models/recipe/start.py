"""A start that can already copy.

A transformer learns late, and all at once, to continue `A B ... A` with `B`: it needs a head that
tells each token what came before it, and in a later layer one that looks for what the present
token came before. Nearly all of this model's skills wait for that. So these heads are written
into the first weights by hand, for one token of context and for two (Olsson et al.,
2022, call them induction heads). Citing waits for two more: one tells each token the number of the
passage it is in, the other brings that number along with what is copied. Two of those that copy
prefer the passage that the token is in. In an answer, that is the one last cited: after
`the Velmora Lighthouse[3]` they look in passage 3, and a match elsewhere counts for less.
Training then bends and multiplies all of them as it likes. Everything else starts at random.

The residual stream of a fresh model is used like this (features, D for the width of a head):

    0               the same constant in every token, for the positional heads
    1 .. D          part of the token's own embedding
    D+1 .. 2D       zero in the embedding; layer 0 writes the features 1 .. D of the token before
    2D+1 .. 3D      zero too; layer 0 writes those of the token before that
    3D+1 ..         the rest of the embedding; layer 0 adds some of the passage's number's (or of
                    the user's turn's), and layer 1 those of the passage that the token was
                    copied from
"""

from typing import cast

import torch

from models.recipe.model import Attention, Layer, Llama

SPREAD = 0.06  # standard deviation of the embedding
CONSTANT = 4.0  # of feature 0, in units of SPREAD
SHARPNESS = 5.0  # of the positional heads
MATCH = 2.5  # of the matching heads
GAIN = 7.0  # with which each matched token's successor is added
NEAR = 8.0  # how much a mark outweighs other tokens, close by


@torch.no_grad()
def prepare(model: Llama, marks: list[int]) -> None:
    """Writes the heads into layers 0 and 1 of a freshly drawn model.

    `marks` are the tokens that begin a part of the text: the numbers of passages, a user's turn.
    Raises ValueError if the model has fewer than four heads.
    """
    if model.shape.heads < 4:
        raise ValueError("the first weights need four heads")
    dim = model.shape.head_dim
    own, once, twice = (slice(i * dim + 1, (i + 1) * dim + 1) for i in range(3))
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=SPREAD)
    embedding[:, 0] = CONSTANT * SPREAD
    embedding[:, dim + 1 : 3 * dim + 1] = 0
    alike = torch.randn(dim)  # by which the marks are found
    alike /= alike.norm()
    apart = embedding[marks, own]
    apart -= (apart @ alike)[:, None] * alike
    apart /= apart.norm(dim=1, keepdim=True)
    embedding[marks, own] = (0.6 * apart + 0.8 * alike) * SPREAD * dim**0.5
    first, second = (cast(Layer, model.model.layers[i]).self_attn for i in (0, 1))
    rest = slice(3 * dim + 1, model.shape.hidden)
    for head, (back, target) in enumerate(((1, once), (2, twice))):
        _look_back(model, first, head, back)
        _carry(model, first, head, own, target, 2 * SPREAD)
    _look_for(model, first, 2, own, alike)
    _carry(model, first, 2, own, rest, 2 * SPREAD)
    one, two, here = (own, once), (once, twice), (rest, rest)  # what matches; here: one passage
    _match(model, second, 0, [one])
    _match(model, second, 1, [one, two, one, two, here])
    _match(model, second, 2, [one, two])
    _match(model, second, 3, [one, one, here])
    for head, brought in enumerate((own, own, rest, own)):
        _carry(model, second, head, brought, brought, GAIN * SPREAD)


def _rates(model: Llama) -> torch.Tensor:
    """(dim / 2) angle per token at which each pair of features turns."""
    half = model.shape.head_dim // 2
    return model.shape.theta ** (-torch.arange(half) / half)


def _rows(model: Llama, head: int) -> slice:
    """The features of a head."""
    dim = model.shape.head_dim
    return slice(head * dim, (head + 1) * dim)


def _look_back(model: Llama, attention: Attention, head: int, distance: int) -> None:
    """Query and key depend on feature 0 alone; their product is greatest `distance` tokens back."""
    rows = _rows(model, head)
    query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    rates = _rates(model)
    half = len(rates)
    loud = (rates > 0.04).float() * SHARPNESS**0.5 / CONSTANT * 2
    query.zero_()
    key.zero_()
    query[:half, 0] = loud * (rates * distance).cos()
    query[half:, 0] = -loud * (rates * distance).sin()
    key[:half, 0] = loud


def _look_for(
    model: Llama, attention: Attention, head: int, where: slice, what: torch.Tensor
) -> None:
    """The nearest token whose features `where` have much of the unit vector `what`."""
    rows = _rows(model, head)
    query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    rates = _rates(model)
    slow = torch.nonzero((rates > 1.5e-3) & (rates < 1.5e-2)).flatten()
    query.zero_()
    key.zero_()
    # Turned by an eighth, the product falls with each token of distance, from the first on.
    query[slow, 0] = NEAR**0.5
    query[slow + len(rates), 0] = NEAR**0.5
    key[slow, where] = NEAR**0.5 * what / len(slow)


def _match(model: Llama, attention: Attention, head: int, pairs: list[tuple[slice, slice]]) -> None:
    """Each query feature of a pair against its key feature, shared out over slowly turning ones."""
    rows = _rows(model, head)
    query, key = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    slow = torch.nonzero(_rates(model) < 0.01).flatten()
    places = torch.cat((slow, slow + len(_rates(model)))).tolist()
    query.zero_()
    key.zero_()
    for i, place in enumerate(places):
        mine, theirs = pairs[i % len(pairs)]
        query[place, mine.start + i] = MATCH
        key[place, theirs.start + i] = MATCH


def _carry(
    model: Llama, attention: Attention, head: int, source: slice, target: slice, gain: float
) -> None:
    """What the head attends to: its features `source` are added to `target`."""
    rows = _rows(model, head)
    unit = torch.eye(model.shape.head_dim)
    attention.v_proj.weight[rows] = 0
    attention.v_proj.weight[rows, source] = unit[:, : source.stop - source.start]
    attention.o_proj.weight[target, rows] = gain * unit[: target.stop - target.start]
