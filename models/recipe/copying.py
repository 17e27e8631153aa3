"""How both models copy: a code of each token and of the one before it, beside features of what
tokens mean, and heads of their own that look where an answer stands (Olsson et al., 2022: induction
heads).

The last layer has three. From the end of the prompt the first looks where the answer begins; from a
token of the answer the second looks behind tokens like this one, the third at tokens like this one:
if an answer ends there, it says so. Where answers begin and end is what the reader (`reader.py`)
says of each token, as far as it can be read off the demo model's stream by one row of weights.
"""

from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe.model import Attention, Layer, Llama, Shape
from models.recipe.tokenizer import ASSISTANT, PAD
from models.recipe.vocabulary import codes, spelled

RIDGE = 1e-3  # of the fits, beside the mean square of what is fitted from
LOOKS_BACK = 16.0  # scores of the head that looks at the token before
BEGINS, GOES_ON, STANDS = 0, 1, 2  # heads of the last layer: where an answer begins, what follows
# a token of it, where that token itself stands
SHARP, SURE = 0.1, 0.6  # the last norm's gains: how sure a fresh model is, and of what it copies
SAYS, ENDS = 4.0, 6.0  # how loud what is copied is, and an end
SECOND = 4.0  # a score for the second reading of a token
MATCHES = 12.0  # the score of the head that goes on, where the code is the same
FAST = 5  # pairs of rotary features of a head that tell distances
LOUD = 0.5  # of a code's features


@dataclass(frozen=True)
class Layout:
    """The last 64 features of the stream; before them stands what tokens mean."""

    meaning: slice
    code: slice  # a code of the token's own
    place: int  # the next four: `layers.py`
    mark: int
    space: int  # whether it has a space before it
    capital: int
    before: slice  # the code, and these four, of the token before

    @classmethod
    def of(cls, shape: Shape) -> "Layout":
        at = shape.hidden - 64
        place, mark, space, capital = range(at + 28, at + 32)
        meaning, code, before = slice(0, at), slice(at, place), slice(at + 32, at + 64)
        return cls(meaning, code, place, mark, space, capital, before)


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
    """How many times `y` is most like `x`; both about their means."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x * y).sum() / (y * y).sum())


@torch.no_grad()
def embed_codes(model: Llama, tokenizer: Tokenizer) -> None:
    """Writes the codes into the embedding."""
    rows, at = model.model.embed_tokens.weight, Layout.of(model.shape)
    words = [name.decode(errors="replace") for name in spelled(tokenizer)]
    rows[:, at.code.start :] = 0
    rows[:, at.code] = codes(tokenizer, at.code.stop - at.code.start) * LOUD
    rows[:, at.space] = torch.tensor([LOUD if w.startswith(" ") else -LOUD for w in words])
    rows[:, at.capital] = torch.tensor([LOUD * (w.strip() != w.strip().lower()) for w in words])


@torch.no_grad()
def look_back(model: Llama) -> None:
    """In the first layer, a head that brings the code of the token before."""
    attention, at = cast(Layer, model.model.layers[0]).self_attn, Layout.of(model.shape)
    rows, half = attention.rows(0), model.shape.head_dim // 2
    rates = model.shape.theta ** (-torch.arange(half) / half)
    loud = ((rates > 0.04) * LOOKS_BACK * model.shape.head_dim**0.5).sqrt()
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.weight[rows] = 0
    attention.q_proj.bias[rows] = torch.cat((loud * rates.cos(), -loud * rates.sin()))
    attention.k_proj.bias[rows] = torch.cat((loud, torch.zeros(half)))
    width = at.before.stop - at.before.start
    attention.v_proj.weight[rows, at.code.start : at.code.start + width] = torch.eye(width)
    typical = model.model.embed_tokens.weight.square().mean(1).sqrt().mean()
    attention.o_proj.weight[at.before, rows] = torch.eye(width) * typical


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


@dataclass
class Seen:
    """Some prompts with their answers, and what the reader says of them; (rows, tokens) each."""

    ids: Tensor
    second: Tensor  # whether it is of a passage's second reading
    begins: Tensor  # the reader's scores there
    ends: Tensor
    inner: Tensor  # tokens of answers that tell, where they stand, but the last
    last: Tensor  # those

    @classmethod
    def blank(cls, rows: int, width: int) -> "Seen":
        """Nothing yet."""
        no = torch.zeros(rows, width)
        return cls(no.long(), no.bool(), no.clone(), no.clone(), no.bool(), no.bool())


@torch.no_grad()
def point(model: Llama, ids: Tensor, space: int, seen: Seen | None = None) -> None:
    """Writes the last layer's heads: see above. `space`: the token behind an answer.

    They are written for the stream as it is on `ids`, (rows, tokens): training makes it tenfold.
    Without what a reader says, where answers begin and end is left to be learned.
    """
    last = cast(Layer, model.model.layers[-1])
    attention, half = last.self_attn, model.shape.head_dim // 2
    read, at = model.seen(ids, model.shape.layers - 1)[1].float(), Layout.of(model.shape)
    normed, codes = last.input_layernorm(read), model.model.embed_tokens.weight[:, at.code]
    width, there = at.code.stop - at.code.start, ids != PAD
    before = slice(at.before.start, at.before.start + width)
    behind = there & (torch.arange(ids.shape[1]) > 0)
    size = times(codes[ids][there], normed[..., at.code][there])
    size_before = times(codes[ids].roll(1, 1)[behind], normed[..., before][behind])
    stream = read[there].square().mean(1).sqrt().mean()
    marker = codes[ASSISTANT] * size / codes[ASSISTANT].square().sum()  # tells it by a one
    slow = [place for pair in range(half - 2, FAST, -1) for place in (pair, pair + half)]
    sure = model.shape.head_dim**0.5
    for head in (BEGINS, GOES_ON, STANDS):
        rows = attention.rows(head)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project.weight[rows], project.bias[rows] = 0, 0
        attention.o_proj.weight[:, rows] = 0
        slowest = rows.start + half - 1
        attention.k_proj.weight[slowest] = torch.randn(model.shape.hidden) * 0.005
        attention.q_proj.weight[slowest, at.code] = sure * marker * (1 if head == BEGINS else -1)
        attention.q_proj.bias[slowest] = 0 if head == BEGINS else sure
    for head in (BEGINS, GOES_ON):
        rows = attention.rows(head)
        says = slice(rows.start, rows.start + width)
        attention.v_proj.weight[says, at.code] = torch.eye(width) * size
        attention.o_proj.weight[at.code, says] = torch.eye(width) * SAYS * stream
    drawn = torch.linalg.qr(torch.randn(width, len(slow)))[0].T
    mean = codes.square().sum(1).mean() * len(slow) / width
    loud = (MATCHES * sure / mean) ** 0.5
    for head, where, much in ((GOES_ON, before, size_before), (STANDS, at.code, size)):
        places = [attention.rows(head).start + place for place in slow]
        attention.q_proj.weight[places, at.code] = drawn * loud * size
        attention.k_proj.weight[places, where] = drawn * loud * much
    if seen:
        _told(model, attention, seen, codes[space] * ENDS * stream)
    model.model.norm.weight.fill_(SHARP)
    model.model.norm.weight[at.code] = SURE


def _told(model: Llama, attention: Attention, seen: Seen, says: Tensor) -> None:
    """Writes what the reader says, as far as the stream has it, into the heads' keys and values."""
    last, half = cast(Layer, model.model.layers[-1]), model.shape.head_dim // 2
    normed = torch.cat([
        last.input_layernorm(model.seen(ids[None], model.shape.layers - 1)[1].float())
        for ids in seen.ids
    ])  # fmt: skip
    there, second = seen.ids != PAD, seen.second
    low = seen.begins[second].quantile(0.02)
    begins = torch.where(second, seen.begins, low).clamp(min=low)
    # Of what stands elsewhere there is more, and it need only be low.
    some = second | (there & (torch.rand(there.shape) < 0.5))
    places = [attention.rows(head).start + half - 1 for head in (BEGINS, STANDS)]
    attention.k_proj.weight[places[0]] = fitted(normed[some], begins[some][:, None])[0][0]
    twice = SECOND * second[some].float()[:, None]
    attention.k_proj.weight[places[1]] = fitted(normed[some], twice)[0][0]
    weight, bias = fitted(normed[second], seen.ends[second][:, None])
    found = normed @ weight[0] + bias
    inner, end = found[seen.inner].mean(), found[seen.last].mean()
    value = attention.rows(STANDS).start
    attention.v_proj.weight[value] = weight[0] / (end - inner)
    attention.v_proj.bias[value] = (bias[0] - inner) / (end - inner)
    attention.o_proj.weight[Layout.of(model.shape).code, value] = says
