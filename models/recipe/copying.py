"""How both models copy: codes of each token, of the one before it and of the one before that,
beside features of what tokens mean. Heads of the last layer (`pointing.py`) compare them.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe.model import Layer, Llama, Shape
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, PAD
from models.recipe.vocabulary import codes, spelled

RIDGE = 1e-3  # of the fits, beside the mean square of what is fitted from
LOOKS_BACK = 48.0  # scores of the heads that look at the token before: its neighbours have 8 less
FAST = 5  # pairs of rotary features of a head that tell distances
LOUD = 0.5  # of a code's features
SHOWN = 2.0  # of what only a marker has
STEADY = 5.0  # times all else that the last layer reads
HALF, OTHER, REST = 9, 8, 11  # a code's features: its halves are compared; the rest tells it apart


@dataclass(frozen=True)
class Layout:
    """The last 64 features of the stream; before them stands what tokens mean."""

    meaning: slice
    code: slice  # a code of the token's own
    place: int  # the next four: `layers.py`
    mark: int
    space: int  # whether it has a space before it
    capital: int
    before: slice  # both halves of the code of the token before, …
    long_before: slice  # … the first of the one before that
    space_before: int  # … whether the token before has a space before it
    asks: int  # what only the assistant's marker has
    opens: int  # … only that of passages
    opened: int  # … only the token behind that
    steady: int  # the same at all tokens that the last layer reads, and large: `steady`

    @classmethod
    def of(cls, shape: Shape) -> "Layout":
        at = shape.hidden - 64
        place, mark, space, capital = range(at + 28, at + 32)
        meaning, code, long = slice(0, at), slice(at, place), at + 32 + HALF + OTHER
        before, long_before = slice(at + 32, long), slice(long, long + HALF)
        flags = at + 62, at + 58, at + 59, at + 60, at + 63
        return cls(meaning, code, place, mark, space, capital, before, long_before, *flags)


def fitted(inputs: Tensor, targets: Tensor, prior: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weight (out, in) and bias of the linear map that is nearest, drawn to `prior` a little."""
    if prior is not None:
        weight, bias = fitted(inputs, targets - inputs @ prior.T)
        return weight + prior, bias
    middle, mean = inputs.mean(0), targets.mean(0)
    x = (inputs - middle).double()
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    weight = torch.linalg.solve(gram, x.T @ (targets - mean).double()).T.float()
    return weight, mean - weight @ middle


def times(x: Tensor, y: Tensor) -> float:
    """How many times `y` is most like `x`, (..., features) both, about their means."""
    x, y = (z.flatten(0, -2) for z in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x * y).sum() / (y * y).sum())


@torch.no_grad()
def embed_codes(model: Llama, tokenizer: Tokenizer) -> None:
    """Writes the codes into the embedding."""
    rows, at = model.model.embed_tokens.weight, Layout.of(model.shape)
    words = [name.decode(errors="replace") for name in spelled(tokenizer)]
    rows[:, at.code.start :] = 0
    rows[:, at.code] = codes(tokenizer, HALF, OTHER, REST) * LOUD
    rows[:, at.space] = torch.tensor([LOUD if w.startswith(" ") else -LOUD for w in words])
    rows[ASSISTANT, at.asks] = rows[DOCUMENTS, at.opens] = SHOWN
    rows[:, at.capital] = torch.tensor([LOUD * (w.strip() != w.strip().lower()) for w in words])


@torch.no_grad()
def look_back(model: Llama) -> None:
    """In the first layer, a head that brings the code of the token before, its space, and whether
    it is a passage's marker.
    """
    at = Layout.of(model.shape)
    typical = float(model.model.embed_tokens.weight.square().mean(1).sqrt().mean())
    read = [*range(at.code.start, at.code.start + HALF + OTHER), at.space, at.opens]
    write = [*range(at.before.start, at.before.stop), at.space_before, at.opened]
    _look_back(model, 0, read, write, typical)


@torch.no_grad()
def look_further_back(model: Llama, ids: Tensor) -> None:
    """In the second layer, one that brings what the token before has of the one before it; but
    nothing to the assistant's marker, which looks at itself and has nothing to bring. Written for
    the stream as it is on `ids`, (rows, tokens).
    """
    at = Layout.of(model.shape)
    read, stream = slice(at.before.start, at.before.start + HALF), model.reads(ids, 1)[0].float()
    normed = cast(Layer, model.model.layers[1]).input_layernorm(stream)
    said = model.model.embed_tokens.weight[:, at.code][ids][:, :-1, :HALF]
    much = times(said, normed[:, 1:, read])
    write = list(range(at.long_before.start, at.long_before.stop))
    _look_back(model, 1, list(range(read.start, read.stop)), write, much)
    attention = cast(Layer, model.model.layers[1]).self_attn
    rows, asked = attention.rows(0), normed[ids == ASSISTANT].mean(0)
    stays = _behind(model.shape, 0) - _behind(model.shape, 1)
    attention.q_proj.weight[rows, at.asks] = stays / asked[at.asks]
    brings = attention.v_proj.weight[rows]
    brings[:, at.asks] = -brings @ asked / asked[at.asks]


@torch.no_grad()
def steady(model: Llama, ids: Tensor) -> None:
    """Makes the norm before the last layer's heads the same at all tokens, nearly: it reads a large
    feature that is the same everywhere, and that nothing reads behind it.

    Streams differ in size by a quarter, and with them all that heads compare: of two places that
    match the louder one won, and a pair of tokens that does not against one that does. What the
    heads read is as large as before on `ids`, (rows, tokens), in the mean.
    """
    at, (earlier, last) = Layout.of(model.shape).steady, model.model.layers[-2:]
    read = model.reads(ids, model.shape.layers - 1)[0][ids != PAD].float()
    sizes = read.square().mean(1).sqrt()
    large = STEADY * sizes.mean()
    cast(Layer, earlier).mlp.down_proj.bias[at] = large * model.shape.hidden**0.5
    cast(Layer, last).self_attn.o_proj.bias[at] = -large * model.shape.hidden**0.5
    gain = cast(Layer, last).input_layernorm.weight
    gain.mul_((large.square() + sizes.square().mean()).sqrt() * (1 / sizes).mean())
    gain[at] = 0


def slow_places(head_dim: int) -> list[int]:
    """A head's features that turn too slowly to tell distances, pair by pair, the slowest first."""
    half = head_dim // 2
    return [place for pair in range(half - 1, FAST, -1) for place in (pair, pair + half)]


def _behind(shape: Shape, distance: int) -> Tensor:
    """(features of a head) the query that finds the key of `_look_back` at that distance."""
    loud, turns = _loud(shape), _rates(shape) * distance
    return torch.cat((loud * turns.cos(), -loud * turns.sin()))


def _loud(shape: Shape) -> Tensor:
    """(half of a head's features) how large both are: pairs that turn slowly tell no distance."""
    return torch.sqrt((_rates(shape) > 0.04) * LOOKS_BACK * shape.head_dim**0.5)


def _rates(shape: Shape) -> Tensor:
    """(half of a head's features) how far rotary pairs turn from a token to the next."""
    half = shape.head_dim // 2
    return torch.exp(-torch.arange(half) / half * math.log(shape.theta))


def _look_back(model: Llama, number: int, read: list[int], write: list[int], much: float) -> None:
    """A layer's first head looks at the token before; `much`: times what it reads is written."""
    attention = cast(Layer, model.model.layers[number]).self_attn
    rows, loud = attention.rows(0), _loud(model.shape)
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.weight[rows], project.bias[rows] = 0, 0
    attention.q_proj.bias[rows] = _behind(model.shape, 1)
    attention.k_proj.bias[rows] = torch.cat((loud, torch.zeros_like(loud)))
    attention.o_proj.weight[:, rows] = 0
    for n, (source, target) in enumerate(zip(read, write, strict=True)):
        attention.v_proj.weight[rows.start + n, source] = 1
        attention.o_proj.weight[target, rows.start + n] = much


def keep_codes(model: Llama) -> None:
    """Takes the gradients of all that makes the codes of tokens, the own and the one before, up to
    the last layer.

    The lesson that tells layers what MiniLM's say is blind for these features, so their gradients
    are tiny; but Adam moves a weight of tiny gradients as far as any other. After half a million
    tokens the codes were like themselves to 0.3 only, and nothing could be copied by them.
    """
    own = Layout.of(model.shape).code.start
    gain = cast(Layer, model.model.layers[-1]).input_layernorm.weight
    if gain.grad is not None:
        gain.grad[Layout.of(model.shape).steady] = 0
    for each in model.model.layers[:-1]:
        attention, mlp = cast(Layer, each).self_attn, cast(Layer, each).mlp
        for project in (attention.o_proj, mlp.down_proj):
            _still(project, slice(own, None))
        dim = model.shape.head_dim
        heads = attention.o_proj.weight[own:].any(0).view(-1, dim).any(1)  # which write there
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            _still(project, heads.repeat_interleave(dim))
    embedding = model.model.embed_tokens.weight
    if embedding.grad is not None:
        embedding.grad[:, own:] = 0


def _still(project: nn.Linear, rows: slice | Tensor) -> None:
    for parameter in (project.weight, project.bias):
        if parameter.grad is not None:
            parameter.grad[rows] = 0
