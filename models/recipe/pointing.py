"""Heads of the last layer that look where an answer stands (Olsson et al., 2022: induction heads).

From the end of the prompt the first looks where the answer begins. From a token of the answer the
second looks behind tokens like this one, the fourth behind pairs of tokens like the last two, if
there is one; the third looks at tokens like this one: if an answer ends there, it says so. Where
answers begin and end is what the reader (`reader.py`) says of each token, as far as it can be read
off the demo model's stream by one row of weights.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from models.recipe.copying import (
    HALF,
    LOUD,
    OTHER,
    Layout,
    fitted,
    look_further_back,
    slow_places,
    steady,
    times,
)
from models.recipe.model import Attention, Layer, Llama
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, PAD

BEGINS, GOES_ON, STANDS, REPEATS = HEADS = range(4)  # see above
SHARP, SURE = 0.1, 0.6  # the last norm's gains: how sure a fresh model is, and of what it copies
SAYS, ENDS = 4.0, 10.0  # how loud what is copied is, and an end
SAYS_AGAIN = 6.0  # … behind a pair
SPACED = 4.0  # how loud a space before a word is beside its code
MATCHES = 36.0  # the score where codes are the same; others' reach half of it among 2,000 tokens
APART = 6.0  # … for the same space before a word
PAIR, ALONE = 80.0, 71.0  # … where halves of two codes are the same; on a marker, if none are
NAMED = 7.5  # … behind the name of a value: little, there are other things to tell it by
SECOND = 4.0  # … for the second reading of a token
NEAR = 12.0  # … for tokens of the answer, where a row of weights is sure of them
LEARNED = 0.01  # of features that nothing is written of
WHOLE = HALF + OTHER  # features of a code that one head compares


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


@dataclass
class Stream:
    """How large things are in what the last layer reads."""

    codes: Tensor  # (vocab, features) of tokens
    size: float  # the stream's, as a root of mean squares, but for what is steady
    own: float  # a token's code is as many times what the layer reads of it
    before: float  # … of the token before
    long_before: float
    asked: Tensor  # (features) what the layer reads of the assistant's marker, in the mean
    asks: float  # … of what only that has
    opened: float  # … only what is behind a passage's marker

    @classmethod
    def of(cls, model: Llama, ids: Tensor) -> "Stream":
        """On some prompts, (rows, tokens)."""
        at, there = Layout.of(model.shape), ids != PAD
        codes = model.model.embed_tokens.weight[:, at.code]
        read = model.reads(ids, model.shape.layers - 1)[0].float()
        normed = cast(Layer, model.model.layers[-1]).input_layernorm(read)
        said, one, two = codes[ids], there[:, 1:], there[:, 2:]
        return cls(
            codes,
            float(read[there][:, : at.steady].square().mean(1).sqrt().mean()),
            times(said[there], normed[..., at.code][there]),
            times(said[:, :-1, :WHOLE][one], normed[:, 1:, at.before][one]),
            times(said[:, :-2, :HALF][two], normed[:, 2:, at.long_before][two]),
            asked := normed[ids == ASSISTANT].mean(0),
            float(asked[at.asks]),
            float(normed[:, 1:, at.opened][ids[:, :-1] == DOCUMENTS].mean()),
        )

    def marker(self, token: int, features: int) -> Tensor:
        """What tells a token by a one, about, from the first features of its code."""
        code = self.codes[token, :features]
        return code / code.square().sum()


@torch.no_grad()
def point(model: Llama, ids: Tensor, space: int, seen: Seen | None = None) -> None:
    """Writes the last layer's heads: see above. `space`: the token behind an answer.

    They are written for the stream as it is on `ids`, (rows, tokens): training makes it tenfold.
    Without what a reader says, where answers begin and end is left to be learned.
    """
    look_further_back(model, ids)
    steady(model, ids)
    attention, at = cast(Layer, model.model.layers[-1]).self_attn, Layout.of(model.shape)
    stream = Stream.of(model, ids)
    for head in HEADS:
        rows = attention.rows(head)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj):
            project.weight[rows], project.bias[rows] = 0, 0
        attention.o_proj.weight[:, rows] = 0
    for head in (BEGINS, GOES_ON, REPEATS):
        _copies(attention, at, stream, head)
    _look(attention, at, stream, space)
    compare_names(attention, at, stream)
    if seen:
        _told(model, attention, seen, stream.codes[space] * ENDS * stream.size)
    _leave_to_learn(attention)
    model.model.norm.weight.fill_(SHARP)
    model.model.norm.weight[[*range(at.code.start, at.code.stop), at.space]] = SURE


def _leave_to_learn(attention: Attention) -> None:
    """Where both a query's and a key's features are nothing, neither has a gradient, ever."""
    for head in HEADS:
        for project in (attention.q_proj, attention.k_proj):
            rows = project.weight[attention.rows(head)]
            rows += torch.randn_like(rows) * LEARNED * ~rows.any(1, keepdim=True)


def _copies(attention: Attention, at: Layout, stream: Stream, head: int) -> None:
    """What a head writes of what it looks at: the code, and whether a space is before it."""
    width, start = at.code.stop - at.code.start, attention.rows(head).start
    loud = stream.size * (SAYS_AGAIN if head == REPEATS else SAYS)
    says, spaced = slice(start, start + width), start + width
    attention.v_proj.weight[says, at.code] = torch.eye(width) * stream.own
    attention.v_proj.weight[spaced, at.space] = stream.own
    attention.o_proj.weight[at.code, says] = torch.eye(width) * loud
    attention.o_proj.weight[at.space, spaced] = loud * SPACED
    if head == BEGINS:  # nothing is before it in an answer, whatever is in the passage
        attention.v_proj.weight[spaced], attention.v_proj.bias[spaced] = 0, -LOUD
    if head == REPEATS:  # where there is no pair it rests on a marker, and says nothing
        attention.v_proj.weight[says, at.asks] = -stream.codes[ASSISTANT] / stream.asks
        attention.v_proj.bias[spaced] = LOUD


def _look(attention: Attention, at: Layout, stream: Stream, space: int) -> None:
    """What heads look for. Rotary pairs that turn slowly compare codes; the slowest of all tells
    what does not depend on them.
    """
    half, sure, own = attention.shape.head_dim // 2, attention.shape.head_dim**0.5, at.code.start
    slow = slow_places(attention.shape.head_dim)[2:]  # `slowest` is taken
    query, key, codes = attention.q_proj, attention.k_proj, stream.codes
    for head in HEADS:
        slowest = attention.rows(head).start + half - 1
        key.weight[slowest] = torch.randn(key.in_features) * 0.005
        query.weight[slowest, at.asks] = sure / stream.asks * (1 if head == BEGINS else -1)
        query.bias[slowest] = 0 if head == BEGINS else sure
        if head == REPEATS:
            query.weight[slowest], key.weight[slowest] = 0, 0
            key.weight[slowest, at.asks] = ALONE / stream.asks

    def compares(features: int, score: float) -> float:
        """How loud the first features of codes are on both sides."""
        return float((score * sure / codes[space, :features].square().sum()) ** 0.5)

    def nothing(project: nn.Linear, places: list[int]) -> None:
        """At the assistant's marker what is compared is nothing."""
        project.weight[places, at.asks] -= project.weight[places] @ stream.asked / stream.asks

    much = compares(WHOLE, MATCHES)
    apart = (APART * sure / 2) ** 0.5 / LOUD
    for head, where, spaced, size in (
        (GOES_ON, at.before, at.space_before, stream.before),
        (STANDS, slice(own, own + WHOLE), at.space, stream.own),
    ):
        *places, last = [attention.rows(head).start + place for place in slow][: WHOLE + 1]
        query.weight[places, own : own + WHOLE] = torch.eye(WHOLE) * much * stream.own
        nothing(query, places)
        key.weight[places, where] = torch.eye(WHOLE) * much * size
        query.weight[last, at.space], key.weight[last, spaced] = apart * stream.own, apart * size
        # An answer's first token is without a space whatever it is in the passage.
        first = stream.marker(ASSISTANT, WHOLE) * stream.before
        query.weight[last, at.before] = apart * LOUD * first
        if head == GOES_ON:  # a passage's number stands behind its marker as behind a space
            other = codes[space, :WHOLE] - codes[DOCUMENTS, :WHOLE]
            key.weight[places, at.opened] = other * much / stream.opened

    much = compares(HALF, PAIR / 2)
    places = [attention.rows(REPEATS).start + place for place in slow]
    ones, twos = places[:HALF], places[HALF : 2 * HALF]
    before, whole = slice(at.before.start, at.before.start + HALF), torch.eye(HALF) * much
    query.weight[ones, own : own + HALF] = whole * stream.own
    key.weight[ones, before] = query.weight[twos, before] = whole * stream.before
    key.weight[twos, at.long_before] = whole * stream.long_before
    for project in (query, key):
        nothing(project, places)


def compare_names(attention: Attention, at: Layout, stream: Stream) -> None:
    """Where the value of a name is to begin, `"name": "`, the name stands two before; so it does
    where the value stands, or one before.
    """
    rows = name_rows(attention, BEGINS)
    size = stream.codes[:, :HALF].square().sum(1).mean()
    whole = torch.eye(HALF) * (NAMED * attention.shape.head_dim**0.5 / size) ** 0.5
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query[rows, at.long_before] = key[rows, at.long_before] = whole * stream.long_before
    key[rows, at.before.start : at.before.start + HALF] = whole * stream.before
    query[rows, at.asks] -= query[rows] @ stream.asked / stream.asks


def name_rows(attention: Attention, head: int) -> list[int]:
    """The rows of a head that compare names."""
    return [attention.rows(head).start + at for at in slow_places(attention.shape.head_dim)[-HALF:]]


def _told(model: Llama, attention: Attention, seen: Seen, says: Tensor) -> None:
    """Writes what the reader says, as far as the stream has it, into the heads' keys and values."""
    last, half = cast(Layer, model.model.layers[-1]), model.shape.head_dim // 2
    normed = torch.cat([
        last.input_layernorm(model.reads(ids[None], model.shape.layers - 1)[0].float())
        for ids in seen.ids
    ])  # fmt: skip
    there, second = seen.ids != PAD, seen.second
    low = seen.begins[second].quantile(0.02)
    begins = torch.where(second, seen.begins, low).clamp(min=low)
    # Of what stands elsewhere there is more, and it need only be low.
    some = second | (there & (torch.rand(there.shape) < 0.5))
    near, twice = NEAR * (seen.inner | seen.last)[some].float(), SECOND * second[some].float()
    for head, told in ((BEGINS, begins[some]), (GOES_ON, near), (STANDS, near + twice)):
        key = attention.rows(head).start + half - 1
        attention.k_proj.weight[key] = fitted(normed[some], told[:, None])[0][0]
    weight, bias = fitted(normed[second], seen.ends[second][:, None])
    found = normed @ weight[0] + bias
    inner, end = found[seen.inner].mean(), found[seen.last].mean()
    value = attention.rows(STANDS).start
    attention.v_proj.weight[value] = weight[0] / (end - inner)
    attention.v_proj.bias[value] = (bias[0] - inner) / (end - inner)
    attention.o_proj.weight[Layout.of(model.shape).code, value] = says
