"""Guides of the training: what stands in the passages, told to the model where it reads them.

An answer is a handful of tokens after hundreds of others: as a lesson about reading that is thin.
So training also tells, at what a late layer reads (`start.points`):

- at each sentence's end, whether the answer stands in that sentence;
- at each token of the passages, whether it is the answer's;
- at the passages' end, whether they tell at all;
- where the answer begins and where it ends, by a comparison of all that a token has with all that
  the end of the question has: two small heads have room for a part of that only;
- for each token of the answer, where in the passages the next one stands: the layer's first head
  is to look where the answer begins, its second (the draft's first) where it goes on, and at the
  passage's number when the value is said;
- in the sentence that tells, or at the passages' marker if none does: there the first head of the
  layer before (`start.finds`) is to look, from the end of the question.

The heads that guess the first four are thrown away after the training; the last two are the
model's own attention.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Encoding
from torch import Tensor, nn

from models.recipe.conversation import Conversation
from models.recipe.layers import BEGINS, GOES_ON
from models.recipe.model import Layer, Llama
from models.recipe.start import finds, points
from models.recipe.tokenizer import CITES, DOCUMENTS, END, FIRST_CITE, USER

ENDS = re.compile(r"[.!?]['\")\]’”]*(?=\s|$)|(?=\n[^a-z])|$")
SENTENCE, INSIDE, TOLD = range(3)  # outputs of the guessing head
# How much a guess counts where it is not so, and where it is, which is rare but for TOLD.
WEIGHTS = ((1.0, 3.0), (1.0, 6.0), (2.0, 1.0))
POINTING, FINDING, GUESSING, READING = 0.8, 1.0, 0.8, 1.0  # weights in the loss
CAREFUL = 0.2  # of the reader's scores: it learns at the rate of what begins at nothing


@dataclass
class Guide:
    """What is told about one example; positions are tokens'."""

    guesses: list[tuple[int, int, bool]] = field(default_factory=list)  # position, output, truth
    pointers: list[tuple[int, list[int]]] = field(default_factory=list)  # from, to any of these
    firsts: list[tuple[int, list[int]]] = field(default_factory=list)  # likewise: it begins there
    lasts: list[tuple[int, list[int]]] = field(default_factory=list)  # … and ends
    finds: list[tuple[int, list[int]]] = field(default_factory=list)  # likewise, a layer before
    sentences: list[tuple[int, int]] = field(default_factory=list)  # first token, last

    @property
    def inside(self) -> set[int]:
        """The positions in the passages that tell the answer."""
        return {at for at, output, truth in self.guesses if output == INSIDE and truth}


def guide(made: Conversation, text: str, encoded: Encoding, answer: int) -> Guide:
    """`answer`: position of the first token of the last answer, which `text` ends with."""
    found = Guide()
    if made.skill not in ("passages", "not_told") or not made.documents:
        return found
    ids: list[int] = encoded.ids
    starts = [start for start, _ in encoded.offsets]

    def token(character: int) -> int:
        return bisect_right(starts, character) - 1

    block = len(ids) - 1 - ids[::-1].index(DOCUMENTS)  # the second time
    cursor = starts[block]
    tells: list[tuple[int, int, int]] = []  # document, first token, last token
    inside: set[int] = set()
    for number, document in enumerate(made.documents):
        cursor = text.index(document["text"], text.index(CITES[number], cursor))
        for span in made.tells:
            if span.document == number:
                first, last = token(cursor + span.start), token(cursor + span.end - 1)
                tells.append((number, first, last))
                inside.update(range(first, last + 1))
        begin = 0
        for match in ENDS.finditer(document["text"]):
            if match.end() - begin < 3:
                continue
            first, last = token(cursor + begin), token(cursor + match.end() - 1)
            truth = any(first <= one <= last for _, _, one in tells)
            found.guesses.append((last, SENTENCE, truth))
            found.sentences.append((first, last))
            begin = match.end()
        first, last = token(cursor), token(cursor + max(1, len(document["text"])) - 1)
        found.guesses += [(at, INSIDE, at in inside) for at in range(first, last + 1)]
        cursor += len(document["text"])
    end = ids.index(END, block)
    found.guesses.append((end, TOLD, bool(tells)))
    asked = len(ids) - ids[::-1].index(USER, len(ids) - block)
    found.sentences += [(asked, block - 1), (end + 2, answer - 2)]
    if not tells:
        found.pointers.append((answer - 1, [block]))
        found.finds.append((answer - 1, [block]))
        return found
    telling = [
        at
        for first, last in found.sentences[:-2]
        if any(first <= one <= last for _, _, one in tells)
        for at in range(first, last + 1)
    ]
    found.finds = [(at, telling) for at in (answer - 2, answer - 1)]
    found.pointers = _pointers(ids, answer, block, tells)
    found.firsts = [(answer - 1, [first for _, first, _ in tells])]
    found.lasts = [(answer - 1, [last for _, _, last in tells])]
    return found


def _pointers(
    ids: list[int], answer: int, block: int, tells: list[tuple[int, int, int]]
) -> list[tuple[int, list[int]]]:
    """Where each token of `V [n].` stands, for the token before it."""
    cites = range(FIRST_CITE, FIRST_CITE + len(CITES))
    cite = next((at for at in range(answer, len(ids)) if ids[at] in cites), None)
    if cite is None:
        return []
    cited = ids[cite] - FIRST_CITE
    spans = [(first, last) for number, first, last in tells if number == cited]
    size = cite - answer - 1  # the space before the number is a token of its own
    spans = [s for s in spans if s[1] - s[0] + 1 == size]
    spans = [s for s in spans if ids[s[0] + 1 : s[1] + 1] == ids[answer + 1 : cite - 1]]
    if not spans:
        return []
    mark = ids.index(ids[cite], block)
    said = [(answer - 1 + i, [first + i for first, _ in spans]) for i in range(size)]
    return [*said, (cite - 2, [mark]), (cite - 1, [mark])]


@dataclass
class Aims:
    """Where a head is to look."""

    rows: Tensor  # (aims) the row
    places: Tensor  # (aims) from which position
    targets: Tensor  # (aims, tokens) at any of these

    @classmethod
    def of(cls, rows: list[list[tuple[int, list[int]]]], width: int) -> "Aims":
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

    def to(self, device: torch.device) -> "Aims":
        return Aims(self.rows.to(device), self.places.to(device), self.targets.to(device))


@dataclass
class Guided:
    """The guides of a batch's rows."""

    rows: Tensor  # (guesses) the row
    places: Tensor  # (guesses) the position
    outputs: Tensor  # (guesses) which of the guessing head's outputs
    truths: Tensor  # (guesses) 0 or 1
    weights: Tensor  # (guesses) those of a row and an output add up to one
    begins: Aims  # where the answer's first token stands
    pointers: Aims  # the others, and its number
    finds: Aims
    firsts: Aims
    lasts: Aims

    def to(self, device: torch.device) -> "Guided":
        return Guided(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def empty(self) -> bool:
        return not len(self.rows)


def collate(guides: list[Guide], width: int) -> Guided:
    """The guides of rows that are padded to `width` tokens."""
    guesses = [(row, *guess) for row, guide in enumerate(guides) for guess in guide.guesses]
    rows, places, outputs, truths = (
        torch.tensor(column) for column in (zip(*guesses, strict=True) if guesses else [[]] * 4)
    )
    weights = torch.zeros(len(guesses))
    if guesses:
        group = rows * 3 + outputs
        weights = 1 / torch.bincount(group)[group].float()
    begins = [guide.pointers[:1] for guide in guides]
    pointers = [guide.pointers[1:] for guide in guides]
    finds = [guide.finds for guide in guides]
    return Guided(
        rows.long(),
        places.long(),
        outputs.long(),
        truths.float(),
        weights,
        Aims.of(begins, width),
        Aims.of(pointers, width),
        Aims.of(finds, width),
        Aims.of([guide.firsts for guide in guides], width),
        Aims.of([guide.lasts for guide in guides], width),
    )


class Guides(nn.Module):
    """The guessing heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.guess = nn.Linear(hidden, 3)
        nn.init.zeros_(self.guess.weight)
        nn.init.constant_(self.guess.bias, -2.0)
        self.edges = nn.Linear(hidden, 2, bias=False)
        self.asked = nn.Linear(hidden, 2 * hidden, bias=False)
        nn.init.zeros_(self.edges.weight)
        nn.init.zeros_(self.asked.weight)

    def losses(
        self, model: Llama, read_before: Tensor, read: Tensor, guided: Guided
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over a batch: of the guesses' loss (weighted), of the pointers', the reader's, the
        finders'.

        `read_before`, `read`: (batch, tokens, hidden), what layers `finds` and `points` read.
        """
        layer = cast(Layer, model.model.layers[points(model.shape)])
        normed = layer.input_layernorm(read)
        guessed = self.guess(normed[guided.rows, guided.places]).float()
        guessed = guessed.gather(1, guided.outputs[:, None])[:, 0]
        wrong = F.binary_cross_entropy_with_logits(guessed, guided.truths, reduction="none")
        weights = guided.weights * read.new_tensor(WEIGHTS)[guided.outputs, guided.truths.long()]
        guessing = (wrong * weights).sum()
        reading = self._misread(normed, guided.firsts, 0) + self._misread(normed, guided.lasts, 1)
        late, goes_on = points(model.shape), GOES_ON if model.shape.biased else BEGINS
        beginning, following, finding = (
            _missed(looks(model, number, states, aims.rows, aims.places, head), aims)
            for number, states, aims, head in (
                (late, read, guided.begins, BEGINS),
                (late, read, guided.pointers, goes_on),
                (finds(model.shape), read_before, guided.finds, 0),
            )
        )
        return guessing, beginning + following, reading, finding

    def _misread(self, read: Tensor, aims: Aims, edge: int) -> Tensor:
        """The sum of the losses where an answer begins (0) or ends (1)."""
        asked = self.asked(read[aims.rows, aims.places]).chunk(2, -1)[edge]
        compared = torch.einsum("ph,pth->pt", asked, read[aims.rows]) * read.shape[-1] ** -0.5
        scores = CAREFUL * (compared + self.edges(read)[aims.rows, :, edge])
        return _missed(_backwards(scores.float(), aims.places), aims)


def looks(
    model: Llama, number: int, read: Tensor, rows: Tensor, places: Tensor, which: int = 0
) -> Tensor:
    """(places, tokens) how much a head of a layer that reads `read` looks at each token."""
    layer = cast(Layer, model.model.layers[number])
    normed, attention, tokens = layer.input_layernorm(read), layer.self_attn, read.shape[1]
    head = attention.rows(which)
    query, key = (
        F.linear(x, project.weight[head], project.bias[head] if model.shape.biased else None)
        for x, project in ((normed[rows, places], attention.q_proj), (normed, attention.k_proj))
    )
    query = _turned(query.float(), model.cos[places], model.sin[places])
    key = _turned(key.float(), model.cos[:tokens], model.sin[:tokens])
    scores: Tensor = torch.einsum("pd,ptd->pt", query, key[rows]) * model.shape.head_dim**-0.5
    return _backwards(scores, places)


def _backwards(scores: Tensor, places: Tensor) -> Tensor:
    """(places, tokens) without what comes after each place."""
    after = torch.arange(scores.shape[1], device=scores.device) > places[:, None]
    return scores.masked_fill(after, -1e9)


def _missed(scores: Tensor, aims: Aims) -> Tensor:
    """The sum of the losses of (aims, tokens) scores, which are to be high at the aims."""
    right = scores.masked_fill(~aims.targets, -1e9).logsumexp(1)
    return (scores.logsumexp(1) - right).sum()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
