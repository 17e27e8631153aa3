"""Heads of our own in the layers between: what was asked, and what followed a token like this one.

Of a layer's fourteen heads MiniLM's fill twelve. A call of a tool or a JSON answer takes, at each
name, key and value, what MiniLM has no use for and a small training does not find from random
weights: what the question was, far before, and where else the same token stands (Olsson et al.,
2022: induction heads). So the first of the other two looks from everywhere at the nearest
assistant's marker, which has read the question; the second behind earlier tokens like this one.
What they bring is what is most spread there; what of it is said begins at nothing, and is learned.

In the last layer one more looks, from the start of each answer, at what tells it, or at the user's
marker: whether anything does is said by an answer's first token, before it repeats any of that.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.recipe.copying import HALF, Layout, slow_places, times
from models.recipe.model import Attention, Layer, Llama
from models.recipe.pointing import BEGINS, HEADS, LEARNED, WHOLE, name_rows
from models.recipe.tokenizer import ASSISTANT, PAD

BETWEEN = range(2, 6)  # layers: in those before, heads of our own look back by one token
ASKED, FOLLOWED = range(2)  # heads: see above
TELLS = len(HEADS)  # the last layer's: see above
NEAREST = [3, 4]  # rotary pairs that turn once in 300 and 1,100 tokens: near is more than far
LOOKS = 30.0  # the score of each at a marker that is here
SAME = 16.0  # the score behind the same token
SPREAD = 4.0  # the spread of what a head brings: what is loud moves the stream sooner


@torch.no_grad()
def write(model: Llama, parts: list[Tensor]) -> None:
    """Writes them for the stream as it is on `parts`, (rows, tokens) of ids each. The model says
    what it would without these heads.
    """
    at, codes = Layout.of(model.shape), model.model.embed_tokens.weight
    ids = torch.cat([part[part != PAD] for part in parts])
    there = [part[:, 1:] != PAD for part in parts]
    behind = torch.cat([part[:, :-1][one] for part, one in zip(parts, there, strict=True)])
    streams = [model.reads(part, *BETWEEN) for part in parts]
    for number, *read in zip(BETWEEN, *streams, strict=True):
        layer = cast(Layer, model.model.layers[number])
        normed = [layer.input_layernorm(x.float()) for x in read]
        all_ = torch.cat([x[part != PAD] for x, part in zip(normed, parts, strict=True)])
        after = torch.cat([x[:, 1:][one] for x, one in zip(normed, there, strict=True)])
        asked = all_[ids == ASSISTANT]
        attention = layer.self_attn
        _nothing(attention)
        _nearest_marker(attention, at, float(asked[:, at.asks].mean()))
        own = times(codes[ids][:, at.code], all_[:, at.code])
        before = times(codes[behind][:, at.code][:, :WHOLE], after[:, at.before])
        size = float(codes[:, at.code][:, :WHOLE].square().sum(1).mean())
        _behind_the_same(attention, at, own, before, size)
        for head, some in ((ASKED, asked), (FOLLOWED, all_)):
            _brings(attention.v_proj, attention.rows(head), some[:, at.meaning], at.meaning)


@torch.no_grad()
def look_at_what_tells(model: Llama, parts: list[Tensor]) -> None:
    """Writes the last layer's, for the stream as it is on `parts`: it begins as the head that
    begins answers, but for where names stand, and says nothing.
    """
    layer, last = cast(Layer, model.model.layers[-1]), model.shape.layers - 1
    attention, at = layer.self_attn, Layout.of(model.shape)
    rows = attention.rows(TELLS)
    for project in (attention.q_proj, attention.k_proj):
        project.weight[rows] = project.weight[attention.rows(BEGINS)]
        project.bias[rows] = project.bias[attention.rows(BEGINS)]
    attention.o_proj.weight[:, rows] = 0
    ids = torch.cat([part[part != PAD] for part in parts])
    read = torch.cat([model.reads(part, last)[0][part != PAD].float() for part in parts])
    normed = layer.input_layernorm(read)
    _names_are_nearer(attention, at, normed[ids == ASSISTANT].mean(0))
    _brings(attention.v_proj, rows, normed[:, at.meaning], at.meaning)


def _names_are_nearer(attention: Attention, at: Layout, asked: Tensor) -> None:
    """From before a value, `"name":`, its name stands one before; for the head that begins it,
    `"name": "`, two. `asked`: what the layer reads of the assistant's marker.
    """
    rows, query = name_rows(attention, TELLS), attention.q_proj.weight
    query[rows, at.before.start : at.before.start + HALF] = query[rows, at.long_before]
    query[rows, at.long_before] = query[rows, at.asks] = 0
    query[rows, at.asks] = -query[rows] @ asked / asked[at.asks]


def _nothing(attention: Attention) -> None:
    """All begins at nothing but a little noise, or nothing is learned where all is nothing."""
    for head in (ASKED, FOLLOWED):
        rows = attention.rows(head)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project.weight[rows] = torch.randn_like(project.weight[rows]) * LEARNED
            project.bias[rows] = 0
        attention.o_proj.weight[:, rows] = 0


def _nearest_marker(attention: Attention, at: Layout, asks: float) -> None:
    """`asks`: what the layer reads of what only an assistant's marker has."""
    much = (LOOKS * attention.shape.head_dim**0.5) ** 0.5
    pairs = [attention.rows(ASKED).start + pair for pair in NEAREST]
    attention.q_proj.weight[pairs], attention.k_proj.weight[pairs] = 0, 0
    attention.q_proj.bias[pairs] = much
    attention.k_proj.weight[pairs, at.asks] = much / asks


def _behind_the_same(
    attention: Attention, at: Layout, own: float, before: float, size: float
) -> None:
    """`own`, `before`: codes are as many times what the layer reads of them; `size`: the square of
    one.
    """
    dim = attention.shape.head_dim
    much = (SAME * dim**0.5 / size) ** 0.5
    rows = [attention.rows(FOLLOWED).start + place for place in slow_places(dim)[:WHOLE]]
    code, eye = slice(at.code.start, at.code.start + WHOLE), torch.eye(WHOLE)
    for project, where, loud in (
        (attention.q_proj, code, own),
        (attention.k_proj, at.before, before),
    ):
        project.weight[rows] = 0
        project.weight[rows, where] = eye * much * loud


def _brings(value: nn.Linear, rows: slice, some: Tensor, meaning: slice) -> None:
    """A head's values: what of (tokens, features) is spread most, all as loud but for little."""
    mean = some.mean(0)
    centred = (some - mean).double()
    spread, along = torch.linalg.eigh(centred.T @ centred / len(centred))
    sizes, size = spread.clamp(min=0).sqrt(), rows.stop - rows.start
    weight = (along / sizes.clamp(min=0.15 * float(sizes[-1])))[:, -size:].T.float() * SPREAD
    value.weight[rows] = 0
    value.weight[rows, meaning] = weight
    value.bias[rows] = -weight @ mean
