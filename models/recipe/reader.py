"""What finds answers first: MiniLM's layers, which look both ways, over each passage alone with the
question.

It is no part of what is served. A model that reads from left to right learns to read from answers
slowly; this one reads ordinary texts after an hour of two cores, and tells the demo model what it
sees at each token of each passage (`lessons.Told`). Two rows of weights on top say where an answer
begins and ends, one softmax over all passages of a question; at the passages' markers if it is not
told. Which place a passage has in the retrieval service's order counts beside.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe.batches import Row
from models.recipe.minilm import WIDTH
from models.recipe.teacher import UNKNOWN, Teacher, marker, unit
from models.recipe.vocabulary import spelled

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
    sentences: list[tuple[int, int]]  # first token, last

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
                [(a - apart, b - apart) for a, b in guide.sentences if one.second <= a < one.stop],
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
        self.words = nn.Embedding.from_pretrained(rows_of(tokenizer, teacher))  # stays
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

    def found(self, last: Tensor, some: Pairs) -> Tensor:
        """The same, where an answer may begin and end alone."""
        return self.scores(last, some).masked_fill(~some.open, -1e9)

    def raw(self, some: Pairs) -> Tensor:
        """The scores of all tokens."""
        return self.scores(self.said(some)[-1], some)

    def forward(self, some: Pairs) -> Tensor:
        return self.found(self.said(some)[-1], some)


def missed(scores: Tensor, some: Pairs) -> Tensor:
    """(questions) both edges' losses, one softmax over all passages of a question."""
    lost = []
    for owner in range(int(some.owners.max()) + 1):
        mine = some.owners == owner
        all_, aims = (x[mine].transpose(0, 1).flatten(1) for x in (scores, some.aims))
        right = all_.masked_fill(~aims, -1e9).logsumexp(-1)
        lost.append((all_.logsumexp(-1) - right).sum())
    return torch.stack(lost)


@dataclass
class Found:
    """Of told questions, how many a reader finds; in others, how many it knows not to be told."""

    told: int = 0
    sentence: int = 0  # the likeliest beginning is in a sentence that tells
    first: int = 0  # … is the answer's
    both: int = 0  # … and the likeliest end of that passage is, too
    denied: int = 0  # the markers together are likelier than any beginning
    untold: int = 0
    silent: int = 0

    def __str__(self) -> str:
        told, untold = max(1, self.told), max(1, self.untold)
        shares = (100 * n / told for n in (self.sentence, self.first, self.both, self.denied))
        return "sentence {:.0f} first {:.0f} both {:.0f} denied {:.0f}".format(*shares) + (
            f" of {self.told}, not told {100 * self.silent / untold:.0f} of {self.untold}"
        )

    def add(self, scores: Tensor, some: Pairs) -> None:
        """Questions and the reader's scores of their pairs."""
        for owner in range(int(some.owners.max()) + 1):
            mine = (some.owners == owner).nonzero().flatten().tolist()
            marks = torch.stack([scores[i, 0, some.some[i].mark] for i in mine]).logsumexp(0)
            best, where = max(
                (max((scores[i, 0, at].item(), at) for at in some.some[i].inside), i) for i in mine
            )
            one = some.some[where]
            denied = bool(marks > best[0])
            if not any(some.some[i].firsts for i in mine):
                self.untold += 1
                self.silent += denied
                continue
            ends = {at: scores[where, 1, at].item() for at in one.inside}
            self.told += 1
            self.denied += denied
            self.sentence += any(
                a <= best[1] <= b and any(a <= at <= b for at in one.firsts)
                for a, b in one.sentences
            )
            self.first += best[1] in one.firsts
            self.both += best[1] in one.firsts and max(ends, key=lambda at: ends[at]) in one.lasts


def micro(rows: list[list[Pair]], tokens: int) -> Iterator[Pairs]:
    """Questions in parts of up to about `tokens` tokens, of like length."""
    part: list[list[Pair]] = []
    width = count = 0
    for row in sorted(rows, key=lambda row: max(len(one.ids) for one in row)):
        longest = max(len(one.ids) for one in row)
        if part and (count + len(row)) * max(width, longest) > tokens:
            yield Pairs.of(part)
            part, width, count = [], 0, 0
        part.append(row)
        width, count = max(width, longest), count + len(row)
    yield Pairs.of(part)


def rows_of(tokenizer: Tokenizer, teacher: Teacher) -> Tensor:
    """(vocab, WIDTH) the mean of MiniLM's rows for the text of each of our tokens."""
    known, table = teacher.wordpiece.get_vocab(), teacher.net.embeddings.word_embeddings.weight
    made = []
    for token, name in enumerate(spelled(tokenizer)):
        word, mark = name.decode(errors="replace"), marker(token)
        ids = teacher.wordpiece.encode(word, add_special_tokens=False).ids
        blank = known["." if "\n" in word else ","]
        ids = [i for i in ids if i != UNKNOWN] or [blank if mark is None else mark]
        if mark is None and word.isalpha() and word.islower() and "##" + word in known:
            ids = [known["##" + word]]
        made.append(table[ids].mean(0))
    return torch.stack(made).detach()
