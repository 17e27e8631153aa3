"""Guides of the training: where in the passages an answer stands, told to the heads that copy.

An answer is a handful of tokens after hundreds of others: as a lesson about reading that is thin.
So training also tells where the last layer's own heads (`pointing.py`) are to look, in the second
readings of the passages:

- from the end of the prompt, where the answer begins; at the passages' markers if none tells it;
- from each token of the answer, where the next one stands: at the passage's number when all is
  said;
- behind a pair of tokens like the last two, if the next one stands there; at the assistants'
  markers where there is no such pair.

Answers of other kinds, as calls of tools, repeat names and values, too: there the heads are told
where these begin, and go on; from an answer's start, the user's marker if it begins with none.

A head of its own looks from each answer's start at what tells it, and from places in JSON at what
tells how it goes on (`sources.py`); at the markers if nothing does.
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Encoding
from torch import Tensor

from models.recipe.conversation import Conversation
from models.recipe.model import Layer, Llama
from models.recipe.repeated import Aim, Repeated, repeated
from models.recipe.sources import asked, of_answers, of_values
from models.recipe.tokenizer import ASSISTANT, CITES, DOCUMENTS, END, FIRST_CITE, USER

MOST = 24  # aims of a head in an answer that is not of passages; of more, some


@dataclass(frozen=True)
class Twice:
    """Where a passage stands in a prompt: the question, the passage, the passage again."""

    question: int  # the user's marker
    first: int  # the documents' marker
    second: int
    stop: int  # behind the end of the second

    @property
    def pair(self) -> slice:
        """The question and the passage once."""
        return slice(self.question, self.second)


def readings(ids: list[int]) -> list[Twice]:
    """The passages of a prompt, in order."""
    marks = [at for at, token in enumerate(ids) if token == DOCUMENTS]
    found = []
    for first, second in zip(marks[::2], marks[1::2], strict=True):
        question = first - 1 - ids[first - 1 :: -1].index(USER)
        found.append(Twice(question, first, second, ids.index(END, second) + 1))
    return found


@dataclass
class Guide:
    """What is told about one example; positions are tokens', in second readings."""

    answer: int = 0  # what says the answer's first token: the assistant's marker
    readings: list[Twice] = field(default_factory=list)  # none: nothing is told
    tells: list[tuple[int, int, int]] = field(default_factory=list)  # passage, first token, last
    texts: list[tuple[int, int]] = field(default_factory=list)  # of each passage: first, last
    follows: list[Aim] = field(default_factory=list)  # where what comes next stands
    begins: list[Aim] = field(default_factory=list)  # where the answer begins
    pairs: list[Aim] = field(default_factory=list)  # where the next token stands, behind a pair
    sources: list[Aim] = field(default_factory=list)  # what tells the answer

    @property
    def inside(self) -> set[int]:
        """The positions that tell the answer."""
        return {at for _, first, last in self.tells for at in range(first, last + 1)}


def guide(made: Conversation, text: str, encoded: Encoding, answer: int) -> Guide:
    """`answer`: position of the first token of the last answer, which `text` ends with."""
    if made.skill not in ("passages", "not_told") or not made.documents:
        return _of_what_is_repeated(made, text, encoded)
    ids: list[int] = encoded.ids
    starts = [start for start, _ in encoded.offsets]

    def token(character: int) -> int:
        return bisect_right(starts, character) - 1

    found = Guide(answer - 1, readings(ids))
    for number, (document, shown) in enumerate(zip(made.documents, found.readings, strict=True)):
        cited = text.index(CITES[number], starts[shown.second])
        cursor = text.index(document["text"], cited)
        for span in made.tells:
            if span.document == number:
                first, last = token(cursor + span.start), token(cursor + span.end - 1)
                found.tells.append((number, first, last))
        end = cursor + max(1, len(document["text"])) - 1
        found.texts.append((token(cursor), token(end)))
    nowhere = [one.second for one in found.readings]
    found.begins = [(found.answer, [first for _, first, _ in found.tells] or nowhere)]
    found.sources = [(found.answer, sorted(found.inside) or nowhere)]
    words = [text[a:b].strip(" ") for a, b in encoded.offsets]
    _copied(ids, words, answer, found)
    found.pairs = _paired(ids, words, [range(answer, ids.index(END, answer))])
    return found


def _of_what_is_repeated(made: Conversation, text: str, encoded: Encoding) -> Guide:
    """For answers of which each may repeat something of all that stands before it."""
    ids: list[int] = encoded.ids
    starts = [start for start, _ in encoded.offsets]
    shown = [at for one in readings(ids) for at in range(one.second, one.stop)]
    marks = [at for at, token in enumerate(ids) if token == ASSISTANT]
    answers = [range(at + 1, ids.index(END, at)) for at in marks if not shown or at > shown[-1]]
    found, free, second = Guide(), {one.start for one in answers}, set(shown)
    telling = [
        one for one in answers if text[starts[one.start] : starts[one.stop]] not in made.rote
    ]

    def chosen(one: Repeated) -> Repeated:
        """A key is asked for by the question, a value told by a passage's second reading."""
        where: Container[int] = second
        if one.key and made.skill == "json":
            where = range(asked(ids, one.first), one.first)
        return replace(one, places=[at for at in one.places if at in where] or one.places)

    stretches = [chosen(one) for one in repeated(text, encoded, telling)]
    found.sources = of_answers(text, encoded, answers, stretches)
    values = of_values(text, encoded, answers, stretches)
    for stretch in stretches:
        aims = [
            (stretch.first - 1 + i, [at + i for at in stretch.places]) for i in range(stretch.size)
        ]
        found.begins.append(aims[0])
        found.follows += aims[1:]
        free.discard(stretch.first)
    for start in free:
        found.begins.append((start - 1, [asked(ids, start)]))
    found.pairs = _paired(ids, [text[a:b].strip(" ") for a, b in encoded.offsets], answers)
    some = random.Random(len(ids))
    for aims in (found.begins, found.follows, found.pairs, values):
        aims[:] = some.sample(aims, min(MOST, len(aims)))
    found.sources += values
    return found


def _copied(ids: list[int], words: list[str], answer: int, found: Guide) -> None:
    """Where what comes next in `V [n].` stands, if a passage has it to the letter.
    `words`: what each token says, without a space.
    """
    cites = range(FIRST_CITE, FIRST_CITE + len(CITES))
    cite = next((at for at in range(answer, len(ids)) if ids[at] in cites), None)
    if cite is None:
        return
    cited = ids[cite] - FIRST_CITE
    size = cite - answer - 1  # the space before the number is a token of its own
    firsts = [
        first
        for number, first, last in found.tells
        if number == cited and last - first + 1 == size and words[first] == words[answer]
        and ids[first + 1 : last + 1] == ids[answer + 1 : cite - 1]
    ]  # fmt: skip
    if not firsts:
        return
    mark = ids.index(ids[cite], found.readings[cited].second)
    found.follows = [(answer - 1 + i, [first + i for first in firsts]) for i in range(1, size)]
    found.follows += [(cite - 2, [mark]), (cite - 1, [mark])]


def _paired(ids: list[int], words: list[str], answers: list[range]) -> list[Aim]:
    """Where the next token stands behind a pair like the last two, from each token of the answers;
    at the assistants' markers if no such pair is before. `words`: as above.
    """
    said = {at for answer in answers for at in answer}
    behind: dict[tuple[str, str], list[int]] = defaultdict(list)
    found, markers = list[Aim](), list[int]()
    for at, token in enumerate(ids[:-1]):
        if token == ASSISTANT:
            markers.append(at)
        if at < 2:
            continue
        behind[words[at - 2], words[at - 1]].append(at)
        if at in said:
            places = behind[words[at - 1], words[at]]
            right = [place for place in places if words[place] == words[at + 1]]
            if right or not places:
                found.append((at, right or list(markers)))
    return found


@dataclass
class Aims:
    """Where a head is to look, from some positions of a batch's rows."""

    rows: Tensor  # (aims) the row
    places: Tensor  # (aims) from which position
    targets: Tensor  # (aims, tokens) at any of these

    @classmethod
    def of(cls, rows: list[list[Aim]], width: int) -> "Aims":
        """Those of each row, which is padded to `width` tokens."""
        found = [(row, *aim) for row, aims in enumerate(rows) for aim in aims]
        targets = torch.zeros(len(found), width, dtype=torch.bool)
        for i, (_, _, aim) in enumerate(found):
            targets[i, aim] = True
        return cls(
            torch.tensor([row for row, _, _ in found]).long(),
            torch.tensor([place for _, place, _ in found]).long(),
            targets,
        )

    def missed(self, scores: Tensor) -> Tensor:
        """(aims) the losses of (aims, tokens) scores, which are to be high at the aims."""
        right = scores.masked_fill(~self.targets, -1e9).logsumexp(1)
        return scores.logsumexp(1) - right


def looks(model: Llama, number: int, read: Tensor, aims: Aims, head: int) -> Tensor:
    """(aims, tokens) how much a head of a layer that reads `read` looks at each token, before the
    softmax; from the aims' positions.

    In float32 whatever the rest is in: scores of codes are sums of large products that cancel, and
    in bfloat16 they made gradients wrong enough to lose trainings (decision 0029).
    """
    layer = cast(Layer, model.model.layers[number])
    with torch.autocast(read.device.type, enabled=False):
        normed = layer.input_layernorm(read.float())
        attention, tokens = layer.self_attn, read.shape[1]
        rows = attention.rows(head)
        query, key = (
            F.linear(x, project.weight[rows], project.bias[rows])
            for x, project in (
                (normed[aims.rows, aims.places], attention.q_proj),
                (normed, attention.k_proj),
            )
        )
        query = _turned(query, model.cos[aims.places], model.sin[aims.places])
        key = _turned(key, model.cos[:tokens], model.sin[:tokens])
        scores: Tensor = torch.einsum("pd,ptd->pt", query, key[aims.rows])
        scores = scores * model.shape.head_dim**-0.5
    after = torch.arange(tokens, device=scores.device) > aims.places[:, None]
    return scores.masked_fill(after, -1e9)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
