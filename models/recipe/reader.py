"""What finds answers first: MiniLM's layers, which look both ways, over each passage alone with the
question.

It is no part of what is served. A model that reads from left to right learns to read from answers
slowly; this one reads ordinary texts after an hour of two cores, and tells the demo model what it
sees at each token of each passage (`lessons.Told`). Two rows of weights on top say where an answer
begins and ends, one softmax over all passages of a question; at the passages' markers if it is not
told. Which place a passage has in the retrieval service's order counts beside.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe.batches import Row
from models.recipe.minilm import WIDTH
from models.recipe.teacher import Teacher, unit

LONGEST = 512  # tokens of a question and a passage: MiniLM's places
RANKS = 20  # passages of a question
EDGES = 2  # an answer's beginning, its end
NO = -1e4  # a score, also in bfloat16, that leaves nothing


@dataclass
class Pair:
    """A question with one passage, as the reader has it."""

    ids: list[int]
    mark: int  # the passage's marker
    rank: int  # of the passage, from 0
    apart: int  # how far behind these tokens those of the second reading are in the prompt
    inside: list[int]  # the passage's text
    firsts: list[int]  # where an answer begins
    lasts: list[int]

    @property
    def second(self) -> slice:
        """The passage's second reading in the prompt: as many tokens as behind `mark`."""
        return slice(self.mark + self.apart, len(self.ids) + self.apart)


def pairs(row: Row) -> list[Pair]:
    """Of an example's passages, in order."""
    found, guide = [], row.guide
    for rank, (one, (begin, end)) in enumerate(zip(guide.readings, guide.texts, strict=True)):
        apart = one.question + one.second - one.first
        told = [(a - apart, b - apart) for number, a, b in guide.tells if number == rank]
        found.append(
            Pair(
                row.ids[one.pair],
                one.first - one.question,
                rank,
                apart,
                list(range(begin - apart, end + 1 - apart)),
                [first for first, _ in told],
                [last for _, last in told],
            )
        )
    return found


def readable(row: Row) -> bool:
    """Whether it is a question over passages that are not too long for the reader."""
    shown = row.guide.readings
    fits = all(one.pair.stop - one.pair.start <= LONGEST for one in shown)
    return 0 < len(shown) <= RANKS and fits


@dataclass
class Pairs:
    """Pairs as tensors."""

    some: list[Pair]
    owners: Tensor  # (pairs) the question
    ids: Tensor  # (pairs, tokens)
    real: Tensor  # … no padding
    ranks: Tensor  # (pairs)
    open: Tensor  # (pairs, EDGES, tokens) where an answer may begin and end, or the marker
    aims: Tensor  # … and where it does: at the markers if no passage tells it

    @classmethod
    def of(cls, rows: list[list[Pair]]) -> "Pairs":
        """Those of some questions."""
        some = [pair for row in rows for pair in row]
        width = -(-max(len(one.ids) for one in some) // 16) * 16
        shape = len(some), EDGES, width
        made = cls(
            some,
            torch.tensor([n for n, row in enumerate(rows) for _ in row]),
            torch.zeros(len(some), width).long(),
            torch.zeros(len(some), width).bool(),
            torch.tensor([one.rank for one in some]),
            torch.zeros(shape).bool(),
            torch.zeros(shape).bool(),
        )
        told = [any(one.firsts for one in row) for row in rows]
        for i, one in enumerate(some):
            n = len(one.ids)
            made.ids[i, :n], made.real[i, :n] = torch.tensor(one.ids), True
            made.open[i, :, [*one.inside, one.mark]] = True
            for edge, aims in enumerate((one.firsts, one.lasts)):
                made.aims[i, edge, aims if told[made.owners[i]] else [one.mark]] = True
        return made


class Reader(nn.Module):
    """MiniLM's layers over our tokens: norms behind each sum, a row for each place, GELU."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        teacher = Teacher()
        self.words = nn.Embedding.from_pretrained(teacher.rows_of(tokenizer))  # stays
        net = copy.deepcopy(teacher.net)
        self.before = net.embeddings
        self.before.word_embeddings = None  # ours are in its place
        self.layers = net.encoder.layer
        self.edges = nn.Linear(WIDTH, EDGES)
        self.rank = nn.Parameter(torch.zeros(RANKS))
        nn.init.normal_(self.edges.weight, std=0.02)

    def said(self, some: Pairs) -> list[Tensor]:
        """What each layer makes: (pairs, tokens, WIDTH), of unit variance, before the gain."""
        e, tokens = self.before, some.ids.shape[1]
        places = e.position_embeddings.weight[:tokens]
        x = e.LayerNorm(self.words(some.ids) + places + e.token_type_embeddings.weight[0])
        nowhere = torch.zeros(some.real.shape).masked_fill(~some.real, NO)[:, None, None]
        found = []
        for layer in self.layers:
            a, out = layer.attention.self, layer.attention.output
            q, k, v = (
                project(x).unflatten(-1, (12, 32)).transpose(1, 2)
                for project in (a.query, a.key, a.value)
            )
            scores = q @ k.mT * 32**-0.5
            looks = (scores + nowhere.to(scores.dtype)).softmax(-1).to(v.dtype)
            brought = (looks @ v).transpose(1, 2).flatten(2)
            x = out.LayerNorm((x + out.dense(brought)).float())
            found.append(
                unit((x + layer.output.dense(F.gelu(layer.intermediate.dense(x)))).float())
            )
            x = self._gained(found[-1], layer)
        return found

    def _gained(self, x: Tensor, layer: Any) -> Tensor:
        norm = layer.output.LayerNorm
        out: Tensor = x * norm.weight + norm.bias
        return out

    def scores(self, last: Tensor, some: Pairs) -> Tensor:
        """(pairs, EDGES, tokens) how like a beginning and an end each token is, from what the last
        layer makes; comparable within a question.
        """
        scores: Tensor = self.edges(unit(self._gained(last.float(), self.layers[-1])))
        return scores.transpose(1, 2).float() + self.rank[some.ranks][:, None, None]

    def raw(self, some: Pairs) -> Tensor:
        """The scores of all tokens."""
        return self.scores(self.said(some)[-1], some)

    def forward(self, some: Pairs) -> Tensor:
        """The same, where an answer may begin and end alone."""
        return self.raw(some).masked_fill(~some.open, -1e9)


def missed(scores: Tensor, some: Pairs) -> Tensor:
    """(questions) both edges' losses, one softmax over all passages of a question."""
    lost = []
    for owner in range(int(some.owners.max()) + 1):
        mine = some.owners == owner
        all_, aims = (x[mine].transpose(0, 1).flatten(1) for x in (scores, some.aims))
        right = all_.masked_fill(~aims, -1e9).logsumexp(-1)
        lost.append((all_.logsumexp(-1) - right).sum())
    return torch.stack(lost)
