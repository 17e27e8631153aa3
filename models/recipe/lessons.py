"""What is learned, one after the other, and from what: each lesson has parameters to move, examples
to draw, and losses.

1. `Reading`: MiniLM's layers, which look both ways, learn to find answers (`reader.py`).
2. `Told`: the demo model's layers are told what the reader sees (`told.py`).
3. `Saying`: its last layer learns to say them, beside layers that stay.
4. `Answers`: all of it learns that, and all else that it is asked for (`corpus.py`); `Saying` ends
   it, beside layers that stand still.
5. `Draft`: a small model learns the same, to guess ahead of it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.recipe import corpus, told
from models.recipe.batches import Batch, Row, collate, row
from models.recipe.copying import keep_codes
from models.recipe.guides import Aims, looks
from models.recipe.model import Layer, Llama
from models.recipe.own_heads import ASKED, BETWEEN, FOLLOWED, TELLS
from models.recipe.pointing import BEGINS, GOES_ON, REPEATS
from models.recipe.reader import Pairs, Reader, missed, pairs, readable
from models.recipe.swaps import Swaps
from models.recipe.tokenizer import PAD

Figures = dict[str, tuple[float, float]]  # sums, and of how many
GUIDED = ((BEGINS, "begins"), (GOES_ON, "follows"), (REPEATS, "pairs"), (TELLS, "sources"))
COMPARE = (GOES_ON, REPEATS)  # heads of large weights, for codes, which no layer before moves
KNOWN = 0.25  # of a step's length, in layers that read ordinary English already
POINTING = 0.8  # weight of where heads look, beside the answers' tokens


@dataclass
class Source:
    """Examples of the corpus as rows of tokens; each depends on its number and the progress."""

    tokenizer: Tokenizer
    swaps: Swaps
    seed: str
    context: int

    def row(self, number: int, progress: float, looked_up: bool) -> Row:
        """`looked_up`: a question over passages, whatever the mixture is."""
        rng = random.Random(f"{self.seed}/{number}")
        made = (corpus.looked_up if looked_up else corpus.example)(rng, progress)
        return row(self.tokenizer, made, self.context, self.swaps)


class Lesson(nn.Module, ABC):
    """A lesson; its modules are what it moves and what it needs for that."""

    looked_up = True  # whether it is about passages alone
    micro = 2000  # tokens that go through a model at once, about

    @abstractmethod
    def groups(self) -> list[list[nn.Parameter]]:
        """What is moved: what knows something, and what is new and moves faster."""

    @abstractmethod
    def lose(self, part: list[Row], half: bool) -> tuple[Tensor, Figures]:
        """The sum of the losses of rows of like length, and figures to print. `half`: in bfloat16
        where that is exact enough.
        """

    def takes(self, one: Row) -> bool:
        """Whether an example is fit for the lesson."""
        return True

    def hold(self) -> None:
        """Takes gradients of what is not to be moved."""

    @contextmanager
    def easing(self) -> Iterator[None]:
        """Around an optimizer's step, which moves all of a group as far."""
        yield

    def cost(self, one: Row) -> int:
        """Tokens of an example."""
        return len(one.ids)

    def parts(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Rows of like length, of about `micro` tokens together."""
        current: list[Row] = []
        for one in sorted(rows, key=self.cost):
            if current and (len(current) + 1) * self.cost(one) > self.micro:
                yield current
                current = []
            current.append(one)
        yield current


class Reading(Lesson):
    """Finding where answers begin and end."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader = reader

    def groups(self) -> list[list[nn.Parameter]]:
        new = [*self.reader.edges.parameters(), self.reader.rank]
        old = [*self.reader.before.parameters(), *self.reader.layers.parameters()]
        return [old, new]

    def takes(self, one: Row) -> bool:
        return readable(one)

    def cost(self, one: Row) -> int:
        return len(one.guide.readings) * max(len(pair.ids) for pair in pairs(one))

    def lose(self, part: list[Row], half: bool) -> tuple[Tensor, Figures]:
        some = Pairs.of([pairs(one) for one in part])
        with torch.autocast(some.ids.device.type, torch.bfloat16, enabled=half):
            lost = missed(self.reader(some), some).sum()
        return lost, {"reads": (lost.item(), len(part))}


class Told(Lesson):
    """Seeing what the reader sees."""

    def __init__(self, llama: Llama, reader: Reader) -> None:
        super().__init__()
        self.llama, self.reader = llama, reader

    def groups(self) -> list[list[nn.Parameter]]:
        layers = self.llama.model.layers[: told.TOLD]
        return [[p for layer in layers for p in layer.parameters()], []]

    def takes(self, one: Row) -> bool:
        return readable(one)

    def hold(self) -> None:
        keep_codes(self.llama)

    def lose(self, part: list[Row], half: bool) -> tuple[Tensor, Figures]:
        inputs = collate(part).inputs
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
            streams = told.streams(self.llama, inputs)
            unlike = told.unlike(streams, [pairs(one) for one in part], self.reader)
        uneven = told.uneven(streams, inputs != PAD)
        figures: Figures = {
            "like": ((1 - unlike.mean()).item() * len(part), len(part)),
            "uneven": (uneven.mean().item() * len(part), len(part)),
        }
        return (unlike.sum() + told.EVEN * uneven.sum()) * len(part), figures


class Answers(Lesson):
    """Saying what is asked for."""

    looked_up = False

    def __init__(self, llama: Llama, movable: Tensor) -> None:
        """`movable`: (vocab) whether a token's row of the embedding may move."""
        super().__init__()
        self.llama = llama
        self.movable = movable.float()[:, None]

    def groups(self) -> list[list[nn.Parameter]]:
        layers = self.llama.model.layers
        old = [p for layer in layers[: told.TOLD] for p in layer.parameters()]
        known = {id(p) for p in old}
        return [old, [p for p in self.llama.parameters() if id(p) not in known]]

    def hold(self) -> None:
        keep_codes(self.llama)
        grad = self.llama.model.embed_tokens.weight.grad
        if grad is not None:  # words keep what they mean
            grad.mul_(self.movable)

    @contextmanager
    @torch.no_grad()
    def easing(self) -> Iterator[None]:
        """What MiniLM knows, and the reader has told, moves by a part of the step alone."""
        eased = [(p, p.clone(), share) for p, share in self._shares()]
        yield
        for p, before, share in eased:
            p.copy_(before.lerp_(p, share.expand_as(p)))

    def _shares(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of what knows something: how much of a step it takes; heads of our own take all."""
        shape, known = self.llama.shape, {id(p) for p in self.groups()[0]}
        of_heads = torch.full((shape.heads, shape.head_dim), KNOWN)
        of_heads[[ASKED, FOLLOWED]] = 1
        rows = of_heads.flatten()
        for number, layer in enumerate(self.llama.model.layers[: told.TOLD]):
            attention = cast(Layer, layer).self_attn
            own = {id(p): rows.view(-1, *[1] * (p.ndim - 1))
                   for project in (attention.q_proj, attention.k_proj, attention.v_proj)
                   for p in project.parameters()}  # fmt: skip
            own[id(attention.o_proj.weight)] = rows
            for p in (p for p in layer.parameters() if id(p) in known):
                yield p, own.get(id(p), rows[-1]) if number in BETWEEN else rows[-1]

    def lose(self, part: list[Row], half: bool) -> tuple[Tensor, Figures]:
        batch = collate(part)
        picked, late = batch.weights > 0, self.late
        with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=half):
            said, read = self.llama.seen(batch.inputs, late)
            scores = self.llama.logits(said[picked]).float()
            pointing, figures = self._pointing(part, read, batch.inputs.shape[1])
        targets = batch.targets[picked]
        losses = F.cross_entropy(scores, targets, reduction="none")
        saying = (losses * batch.weights[picked]).sum()
        figures |= _exact(batch, scores.detach().argmax(-1) == targets)
        figures["loss"] = saying.item(), len(part)
        return saying + POINTING * pointing, figures

    @property
    def late(self) -> int:
        """The layer whose heads point."""
        return self.llama.shape.layers - 1

    def _pointing(self, part: list[Row], read: Tensor, width: int) -> tuple[Tensor, Figures]:
        """The sum of the heads' losses; `read`: what the last layer reads."""
        total, figures = read.new_zeros((), dtype=torch.float32), Figures()
        for head, name in GUIDED:
            if head >= self.llama.shape.heads:
                continue
            aims = Aims.of([getattr(one.guide, name) for one in part], width)
            if len(aims.rows):
                seen = read.detach() if head in COMPARE else read
                lost = aims.missed(looks(self.llama, self.late, seen, aims, head))
                total = total + lost.sum()
                figures[name] = lost.sum().item(), len(lost)
        return total, figures


class Saying(Answers):
    """Saying what is asked for by the last layer alone: what is new learns first, three times as
    fast as with all layers, or its noise spoils what they know.
    """

    def groups(self) -> list[list[nn.Parameter]]:
        body = self.llama.model
        return [[], [*body.layers[-1].parameters(), *body.norm.parameters()]]


class Draft(Answers):
    """Guessing ahead of the demo model, from the same examples."""

    def groups(self) -> list[list[nn.Parameter]]:
        return [[], list(self.llama.parameters())]


def _exact(batch: Batch, right: Tensor) -> Figures:
    """By skill, how many answers are right to the last token; `right`: of the weighted tokens."""
    rows = torch.arange(len(batch.rows))[:, None].expand_as(batch.weights)[batch.weights > 0]
    found = Figures()
    for i, one in enumerate(batch.rows):
        sums = found.get(one.skill, (0.0, 0.0))
        found[one.skill] = sums[0] + bool(right[rows == i].all()), sums[1] + 1
    return found
