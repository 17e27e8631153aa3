"""First weights from MiniLM's layers: a causal model that reads as MiniLM does from the start.

What a training of some million tokens cannot teach is English; MiniLM's six layers have it. They
become six layers of ours, which differ in this:

- MiniLM adds, then normalises and multiplies by a gain; ours normalises a copy of a stream that is
  only added to. So the stream carries what MiniLM's norm has before its gain, times a number that
  grows from layer to layer; gains are nearly the same for all features, and what is left of them
  is fitted.
- MiniLM adds a row for each place to that of the word. Ours cannot, but a head can: one that looks
  at all before alike, and more at the text's first mark, brings what falls with the place, and
  neurons of the first layer make the rest of it. What of MiniLM's scores depends on the distance
  beyond that is a sum of cosines, which biases make of the pairs of rotary features that turn fast.
  What is compared fills the pairs that turn slowly: its weakest tenth finds no room.
- GELU(x) is silu(1.702 x) / 1.702 but for a hundredth; there is room for half of its neurons.
- Tokens are ours: the row of one is the mean of the rows that MiniLM cuts its text into.

All that is linear is fitted, layer by layer, to what MiniLM makes of some texts: what a layer reads
from what the layers before it make, and what it writes so that it is most like MiniLM. Gradients
then do the rest (`told.py`).

Beside MiniLM's features, heads and layers are some of our own, for copying: a code of each token
and of the one before it, and in the last layer a head that points at what is to follow.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe.copying import FAST, LOUD, embed_codes, fitted, look_back, slow_places, times
from models.recipe.minilm import WIDTH
from models.recipe.model import Layer, Llama, rotate
from models.recipe.teacher import CLS, Said, Teacher, marker, read, unit
from models.recipe.vocabulary import spelled

OWN = 2  # heads of our own in each layer, the first
# Features beside MiniLM's: one at the text's first mark, half at the thirtieth token, nothing far
# behind; and whether MiniLM reads its mark of a beginning, which heads rest on at any distance.
PLACE, MARK = WIDTH + 28, WIDTH + 29
MARKS = 4 * LOUD  # how much of it
PLACES = 48  # neurons of the first layer that tell where in the text a token is
FAR = 192  # tokens: what is farther back is as far as this
DOUBT = 3.0  # a row as it is counts as so many places where MiniLM reads it
SILU = 1.702


class Texts:
    """Some texts as both read them, and which of the tokens end together."""

    def __init__(self, teacher: Teacher, spelling: list[bytes], rows: list[list[int]]) -> None:
        found = [read(teacher.wordpiece, spelling, ids) for ids in rows]
        self.ours, self.theirs = padded(rows), padded([r.ids for r in found])
        row = torch.tensor([row for row, r in enumerate(found) for _ in r.ours])
        self.at = row, torch.tensor([at for r in found for at in r.ours])
        self.there = row, torch.tensor([at for r in found for at in r.theirs])


def padded(rows: list[list[int]]) -> Tensor:
    """(rows, tokens), zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


class Fit:
    """Both models on some texts, from layer to layer."""

    def __init__(self, model: Llama, teacher: Teacher, parts: list[Texts]) -> None:
        self.model, self.teacher, self.parts = model, teacher, parts
        self.streams = [model.model.embed_tokens(part.ours) for part in parts]
        self.reads = [teacher.words(part.theirs) for part in parts]  # by MiniLM's next layer
        self.said: list[Said] = []
        self.held = unit(self.theirs(self.reads))  # of the stream, before a norm's gain

    def ours(self, some: list[Tensor]) -> Tensor:
        """(tokens, width) where both end together."""
        return torch.cat([x[part.at] for x, part in zip(some, self.parts, strict=True)])

    def theirs(self, some: list[Tensor]) -> Tensor:
        """(tokens, width) likewise, of MiniLM's."""
        return torch.cat([x[part.there] for x, part in zip(some, self.parts, strict=True)])

    def layer(self, number: int) -> None:
        """Writes a layer, and goes on behind it."""
        layer = cast(Layer, self.model.model.layers[number])
        told = [self.teacher.layer(number, read) for read in self.reads]
        self.said = [said for said, _ in told]
        self._attention(number, layer)
        self._inner(number, layer)
        self.reads = [out for _, out in told]
        self.held = self.theirs([said.out for said in self.said])

    def _attention(self, number: int, layer: Layer) -> None:
        theirs = self.teacher.net.encoder.layer[number].attention
        attention, heads = layer.self_attn, slice(OWN * 32, None)
        normed = [layer.input_layernorm(x) for x in self.streams]
        read = self.theirs([said.read for said in self.said])
        near, shift = fitted(self.ours(normed), read)
        sides = []
        for project in (theirs.self.query, theirs.self.key, theirs.self.value):
            sides.append((project.weight @ near, project.weight @ shift + project.bias))
        attention.v_proj.weight[heads], attention.v_proj.bias[heads] = sides[2]
        (query, query_bias), (key, _) = sides[:2]  # a key's bias is the same for all keys
        inputs = self.ours(normed)
        mark = inputs[:, MARK].max()
        for head in range(12):
            rows = slice(head * 32, (head + 1) * 32)
            asked = torch.cat((query[rows], query_bias[rows, None]), 1)
            mine, theirs_ = compared(asked, key[rows], inputs)
            to = attention.rows(OWN + head)
            attention.q_proj.weight[to], attention.q_proj.bias[to] = mine[:, :-1], mine[:, -1]
            attention.k_proj.weight[to], attention.k_proj.bias[to] = theirs_, 0
        distances, rests = self._apart(number, layer, normed)
        for head in range(12):
            far = _distances(self.model, attention, OWN + head, distances[head])
            _rest(attention, attention.rows(OWN + head), rests[head] - far, mark)
        brought = [self._heads(layer, x) for x in normed]
        gain = 1 / times(read, self.held) * times(self.ours(self.streams)[:, :WIDTH], self.held)
        self._write(
            attention.o_proj, [b[..., heads] for b in brought], heads,
            theirs.output.dense.weight, gain, self.theirs([said.attended for said in self.said]),
        )  # fmt: skip
        self.streams = [x + attention.o_proj(b) for x, b in zip(self.streams, brought, strict=True)]

    def _apart(self, number: int, layer: Layer, normed: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(heads, FAR) and (heads): how much more MiniLM's scores are than ours, by how far back
        a head looks, and where it looks at a mark; beside the mean of each query.
        """
        sums, counts = torch.zeros(12, FAR), torch.zeros(FAR)
        marks, times_ = torch.zeros(12), 0
        attention = layer.self_attn
        for x, theirs, part in list(zip(normed, self.reads, self.parts, strict=True))[::4]:
            tokens = x.shape[1]
            tables = self.model.cos[:tokens], self.model.sin[:tokens]
            q, k = (
                rotate(y, *tables, torch.empty_like(y))[:, OWN:]
                for project in (attention.q_proj, attention.k_proj)
                for y in [project(x).unflatten(-1, (-1, 32)).transpose(1, 2).contiguous()]
            )
            ours, wanted = q @ k.mT * 32**-0.5, self.teacher.scores(number, theirs)
            for row in range(len(x)):
                a, b = (at[1][at[0] == row] for at in (part.at, part.there))
                apart = wanted[row][:, b][:, :, b] - ours[row][:, a][:, :, a]
                back = a[:, None] - a
                is_mark = part.theirs[row, b] == CLS
                words = (back >= 0) & ~is_mark
                mean = (apart * words).sum(-1, True) / words.sum(-1, keepdim=True).clamp(min=1)
                apart = apart - mean
                at = back[words].clamp(max=FAR - 1)
                sums.index_add_(1, at, apart[:, words])
                counts.index_add_(0, at, torch.ones(len(at)))
                marked = (back >= 16) & is_mark
                marks += apart[:, marked].sum(-1)
                times_ += int(marked.sum())
        return sums / counts.clamp(min=1), marks / max(1, times_)

    def _heads(self, layer: Layer, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return layer.self_attn.heads_of(x, self.model.cos[:tokens], self.model.sin[:tokens])

    def _write(
        self, project: Any, made: list[Tensor], columns: slice, theirs: Tensor, gain: float,
        like: Tensor,
    ) -> None:  # fmt: skip
        """Fits what a projection adds to the stream, which becomes most like `like`."""
        centred = (theirs - theirs.mean(0)) * gain
        stream, made_ = self.ours(self.streams)[:, :WIDTH], self.ours(made)
        size = times(stream + made_ @ centred.T, like)
        weight, bias = fitted(made_, size * like - stream, centred)
        project.weight[:WIDTH, columns], project.bias[:WIDTH] = weight, bias

    def _inner(self, number: int, layer: Layer) -> None:
        theirs, mlp = self.teacher.net.encoder.layer[number], layer.mlp
        normed = [layer.post_attention_layernorm(x) for x in self.streams]
        read = self.theirs([said.normed for said in self.said])
        before = self.theirs([said.attended for said in self.said])
        near, shift = fitted(self.ours(normed), read)
        dense, output = theirs.intermediate.dense, theirs.output.dense.weight
        weight, bias = dense.weight @ near, dense.weight @ shift + dense.bias
        found = F.gelu(self.ours(normed) @ weight.T + bias)
        kept = (found.var(0) * output.square().sum(0)).topk(len(mlp.gate_proj.weight)).indices
        mlp.gate_proj.weight.copy_(SILU * weight[kept])
        mlp.gate_proj.bias.copy_(SILU * bias[kept])
        output = output[:, kept]
        if number == 0:
            _places(mlp, self.ours(normed)[:, PLACE])
            output[:, -PLACES:] = 0
        mlp.up_proj.weight.zero_()
        mlp.up_proj.bias.fill_(1 / SILU)
        made = [mlp.inner(x) for x in normed]
        gain = 1 / times(read, before) * times(self.ours(self.streams)[:, :WIDTH], before)
        like = self.theirs([said.out for said in self.said])
        self._write(mlp.down_proj, made, slice(None), output, gain, like)
        self.streams = [x + mlp.down_proj(m) for x, m in zip(self.streams, made, strict=True)]


def _places(mlp: Any, place: Tensor) -> None:
    """Makes the last neurons functions of the place, of which any other is a sum."""
    some = torch.quantile(place[torch.randperm(len(place))[:10_000]], torch.linspace(0, 1, PLACES))
    steep = SILU / (some[8:] - some[:-8]).clamp(min=1e-3).mean()
    mlp.gate_proj.weight[-PLACES:] = 0
    mlp.gate_proj.weight[-PLACES:, PLACE] = steep
    mlp.gate_proj.bias[-PLACES:] = -steep * some


def compared(query: Tensor, key: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A head's query (with its bias, the last column) and key, turned: what tells most stands in
    the pairs of features that turn slowest; what tells least is left out.
    """
    ones = torch.ones(len(inputs), 1)
    spread = [
        torch.linalg.cholesky((x.T @ x / len(x)).double() + 1e-6 * torch.eye(x.shape[1]))
        for x in (torch.cat((inputs, ones), 1) @ query.T, (inputs - inputs.mean(0)) @ key.T)
    ]
    left, values, right = torch.linalg.svd(spread[0].T @ spread[1])
    places = slow_places(len(query))
    made = []
    for turn, low, weight in ((left.T, spread[0], query), (right, spread[1], key)):
        whole = values.sqrt()[:, None] * (turn @ torch.linalg.solve(low, weight.double()))
        out = torch.zeros_like(weight)
        out[places] = whole[: len(places)].float()
        made.append(out)
    return made[0], made[1]


def _rest(attention: Any, rows: slice, score: Tensor, mark: Tensor) -> None:
    """Adds so much to a head's scores of marks; `mark`: what its key reads there."""
    place = rows.start + FAST
    much = (score.abs() * attention.shape.head_dim**0.5).sqrt()
    attention.q_proj.bias[place] = much
    attention.k_proj.weight[place, MARK] = much * score.sign() / mark


def _distances(model: Llama, attention: Any, head: int, scores: Tensor) -> Tensor:
    """Biases that give a head these scores by distance, about. Returns the
    score of what is far, of which the biases leave out what is the same at any distance.
    """
    half = model.shape.head_dim // 2
    rates = model.shape.theta ** (-torch.arange(half) / half)
    back = torch.arange(len(scores))
    angles = back[:, None] * rates[:FAST]
    waves = torch.cat((angles.cos(), angles.sin(), torch.ones(len(back), 1)), 1)
    near = (1 / (1 + back / 8)).sqrt()[:, None]
    gram = (near * waves).T @ (near * waves) + 1e-3 * torch.eye(waves.shape[1])
    found = torch.linalg.solve(gram, (near * waves).T @ (near * scores[:, None]))[:, 0]
    cos, sin = found[:FAST], found[FAST : 2 * FAST]
    much = ((cos.square() + sin.square()).sqrt() * model.shape.head_dim**0.5).sqrt()
    angle = torch.atan2(sin, cos)
    pairs = torch.arange(FAST) + attention.rows(head).start
    attention.q_proj.bias[pairs] = much * angle.cos()
    attention.q_proj.bias[pairs + half] = -much * angle.sin()
    attention.k_proj.bias[pairs] = much
    far: Tensor = found[-1] + (waves[FAR // 8 :, :-1] @ found[:-1]).mean()
    return far


@torch.no_grad()
def prepare(
    model: Llama, tokenizer: Tokenizer, teacher: Teacher, rows: list[list[int]], few: int
) -> None:
    """Writes the first weights: the embedding by all `rows` of ids, layers by the first `few`."""
    shape = model.shape
    if shape.heads != 12 + OWN or shape.layers != 7:
        raise ValueError("MiniLM's layers need seven, and fourteen heads")
    _embed(model, tokenizer, teacher)
    look_back(model)
    _know_places(model)
    spelling = spelled(tokenizer)
    _settle(model, teacher, _parts(teacher, spelling, rows))
    fit = Fit(model, teacher, _parts(teacher, spelling, rows[:few]))
    for number in range(6):
        fit.layer(number)


def _parts(teacher: Teacher, spelling: list[bytes], rows: list[list[int]]) -> list[Texts]:
    rows = sorted(rows, key=len)
    return [Texts(teacher, spelling, rows[i : i + 8]) for i in range(0, len(rows), 8)]


def _embed(model: Llama, tokenizer: Tokenizer, teacher: Teacher) -> None:
    """A token's row: MiniLM's of its text, and the code of the token in any case."""
    embedding = model.model.embed_tokens.weight
    embedding[:, :WIDTH] = unit(teacher.placed(teacher.rows_of(tokenizer)))
    starts = [token for token in range(len(embedding)) if marker(token) == CLS]
    embedding[starts, :WIDTH] = unit(teacher.words(torch.tensor([[CLS]])))[0]
    embed_codes(model, tokenizer)
    embedding[starts, MARK] = MARKS


def _know_places(model: Llama) -> None:
    """In the first layer, a head that looks at all alike, but at marks thirty times as much: their
    share tells the place.
    """
    attention, half = cast(Layer, model.model.layers[0]).self_attn, model.shape.head_dim // 2
    rows = attention.rows(1)
    typical = model.model.embed_tokens.weight.square().mean(1).sqrt().mean()
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.weight[rows] = 0
    slowest = rows.start + half - 1
    attention.q_proj.bias[slowest] = model.shape.head_dim**0.5
    attention.k_proj.weight[slowest, MARK] = math.log(30) * typical / MARKS
    attention.v_proj.weight[rows.start, MARK] = typical / MARKS
    attention.o_proj.weight[PLACE, rows.start] = MARKS


def _settle(model: Llama, teacher: Teacher, parts: list[Texts]) -> None:
    """Gives tokens that are parts of words to MiniLM the mean of what it reads where they end."""
    rows = model.model.embed_tokens.weight[:, :WIDTH]
    tokens = torch.cat([part.ours[part.at] for part in parts])
    told = torch.cat([unit(teacher.words(part.theirs))[part.there] for part in parts])
    often = torch.bincount(tokens, minlength=len(rows))[:, None]
    rows.mul_(DOUBT).index_add_(0, tokens, told).div_(DOUBT + often)
    rows.copy_(unit(rows))
