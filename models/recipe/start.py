"""A start that can already copy.

A transformer learns late, and all at once, to continue `A B ... A` with `B`: it needs one head
that tells each token what came before it, and in a later layer one that looks for what the
present token came before. Nearly all of this model's skills wait for that. So one such pair is
written into the first weights by hand; training then bends and multiplies it as it likes.
Everything else starts at random.

The residual stream of a fresh model is used like this (features):

    0               the same constant in every token, for the positional head
    1 .. D          part of the token's own embedding
    D+1 .. 2D       zero in the embedding; layer 0 writes the features 1 .. D of the previous
    token here
"""

from typing import cast

import torch

from models.recipe.model import Attention, Layer, Llama

SPREAD = 0.06  # standard deviation of the embedding
CONSTANT = 4.0  # of feature 0, in units of SPREAD
SHARPNESS = 5.0  # of the positional head
MATCH = 2.5  # of the matching head
GAIN = 10.0  # with which the matched token's successor is added


@torch.no_grad()
def prepare(model: Llama) -> None:
    """Writes the two heads into layers 0 and 1 of a freshly drawn model."""
    shape = model.shape
    dim, half = shape.head_dim, shape.head_dim // 2
    own, before = slice(1, dim + 1), slice(dim + 1, 2 * dim + 1)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=SPREAD)
    embedding[:, 0] = CONSTANT * SPREAD
    embedding[:, before] = 0
    rates = shape.theta ** (-torch.arange(half) / half)

    # Layer 0: query and key depend on feature 0 alone; their product is greatest one token back.
    attention = cast(Layer, model.model.layers[0]).self_attn
    loud = (rates > 0.04).float() * SHARPNESS**0.5 / CONSTANT * 2
    _clear(attention, dim)
    attention.q_proj.weight[:half, 0] = loud * rates.cos()
    attention.q_proj.weight[half:dim, 0] = -loud * rates.sin()
    attention.k_proj.weight[:half, 0] = loud
    attention.v_proj.weight[:dim, own] = torch.eye(dim)
    attention.o_proj.weight[before, :dim] = 2 * SPREAD * torch.eye(dim)

    # Layer 1: the query is the token itself, the key the token before, on slow features only.
    attention = cast(Layer, model.model.layers[1]).self_attn
    slow = torch.nonzero(rates < 0.01).flatten()
    places = torch.cat((slow, slow + half))
    _clear(attention, dim)
    for feature, place in enumerate(places.tolist(), 1):
        attention.q_proj.weight[place, feature] = MATCH
        attention.k_proj.weight[place, dim + feature] = MATCH
    attention.v_proj.weight[:dim, own] = torch.eye(dim)
    attention.o_proj.weight[own, :dim] = GAIN * SPREAD * torch.eye(dim)


def _clear(attention: Attention, dim: int) -> None:
    for part in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, part).weight[:dim] = 0
