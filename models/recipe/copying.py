"""How both models copy: codes of each token, of the one before it and of the one before that,
beside features of what tokens mean. Heads of the last layer (`pointing.py`) compare them.
"""

from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe.model import Layer, Llama, Shape
from models.recipe.vocabulary import codes, spelled

RIDGE = 1e-3  # of the fits, beside the mean square of what is fitted from
LOOKS_BACK = 48.0  # scores of the heads that look at the token before: its neighbours have 8 less
FAST = 5  # pairs of rotary features of a head that tell distances
LOUD = 0.5  # of a code's features
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

    @classmethod
    def of(cls, shape: Shape) -> "Layout":
        at = shape.hidden - 64
        place, mark, space, capital = range(at + 28, at + 32)
        meaning, code, long = slice(0, at), slice(at, place), at + 32 + HALF + OTHER
        before, long_before = slice(at + 32, long), slice(long, long + HALF)
        return cls(meaning, code, place, mark, space, capital, before, long_before, at + 62)


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
    rows[:, at.capital] = torch.tensor([LOUD * (w.strip() != w.strip().lower()) for w in words])


@torch.no_grad()
def look_back(model: Llama) -> None:
    """In the first layer, a head that brings the code of the token before, and its space."""
    at = Layout.of(model.shape)
    typical = float(model.model.embed_tokens.weight.square().mean(1).sqrt().mean())
    read = [*range(at.code.start, at.code.start + HALF + OTHER), at.space]
    write = [*range(at.before.start, at.before.stop), at.space_before]
    _look_back(model, 0, read, write, typical)


@torch.no_grad()
def look_further_back(model: Llama, ids: Tensor) -> None:
    """In the second layer, one that brings what the token before has of the one before it. Written
    for the stream as it is on `ids`, (rows, tokens).
    """
    at = Layout.of(model.shape)
    read, stream = slice(at.before.start, at.before.start + HALF), model.seen(ids, 1)[1].float()
    normed = cast(Layer, model.model.layers[1]).input_layernorm(stream)[..., read]
    much = times(model.model.embed_tokens.weight[:, at.code][ids][:, :-1, :HALF], normed[:, 1:])
    write = list(range(at.long_before.start, at.long_before.stop))
    _look_back(model, 1, list(range(read.start, read.stop)), write, much)


def _look_back(model: Llama, number: int, read: list[int], write: list[int], much: float) -> None:
    """A layer's first head looks at the token before; `much`: times what it reads is written."""
    attention, dim = cast(Layer, model.model.layers[number]).self_attn, model.shape.head_dim
    rows, half = attention.rows(0), dim // 2
    rates = model.shape.theta ** (-torch.arange(half) / half)
    loud = ((rates > 0.04) * LOOKS_BACK * dim**0.5).sqrt()
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.weight[rows], project.bias[rows] = 0, 0
    attention.q_proj.bias[rows] = torch.cat((loud * rates.cos(), -loud * rates.sin()))
    attention.k_proj.bias[rows] = torch.cat((loud, torch.zeros(half)))
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
