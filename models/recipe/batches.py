"""Training examples as tensors: tokens, targets, how much each target counts, and the guides.

Examples of like length share a micro-batch, so that little is padding; the micro-batches of a
pool are shuffled, so that a step sees all lengths.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import corpus, guides
from models.recipe.conversation import Conversation
from models.recipe.guides import Guide, Guided
from models.recipe.swaps import Swaps
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, END, PAD

POOL = 256  # examples that are drawn, sorted by length and cut at once
LONG = 16  # tokens: answers together longer than this count as one of this length


@dataclass
class Row:
    """One example."""

    ids: list[int]
    skill: str
    guide: Guide


@dataclass
class Batch:
    """Rows of like length."""

    inputs: Tensor  # (rows, tokens) ids
    targets: Tensor  # (rows, tokens) ids
    weights: Tensor  # (rows, tokens) of the answers' tokens; 0 for what is read only
    skills: list[str]  # (rows)
    guided: Guided

    def to(self, device: torch.device) -> "Batch":
        inputs, targets, weights = (x.to(device) for x in (self.inputs, self.targets, self.weights))
        return Batch(inputs, targets, weights, self.skills, self.guided.to(device))


def answer_mask(ids: list[int]) -> list[bool]:
    """Which tokens the assistant says: all after its marker, up to and with the end marker.

    Where there are passages, only what follows them: what was said before had others.
    """
    mask, inside = [], False
    for token in ids:
        mask.append(inside)
        if token == DOCUMENTS:
            mask = [False] * len(mask)
        if token == ASSISTANT:
            inside = True
        elif token == END:
            inside = False
    return mask


def answer_start(ids: list[int]) -> int:
    """Index of the first token of the last answer."""
    return len(ids) - ids[::-1].index(ASSISTANT)


def row(tokenizer: Tokenizer, made: Conversation, context: int, swaps: Swaps | None = None) -> Row:
    """An example, cut to `context` tokens, with some words swapped for others."""
    text = render(made)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = encoded.ids
    if len(ids) > context:
        return Row(ids[:context], made.skill, Guide())
    guide = guides.guide(made, text, encoded, answer_start(ids))
    if swaps and guide.pointers:
        ids = swaps.swapped(ids, guide.inside, random.Random(zlib.crc32(text.encode())))
    return Row(ids, made.skill, guide)


def collate(rows: list[Row]) -> Batch:
    """Pads rows on the right, to a multiple of 16."""
    longest = max(len(row.ids) for row in rows) - 1
    width = -(-longest // 16) * 16
    inputs = torch.full((len(rows), width), PAD)
    targets = torch.full((len(rows), width), PAD)
    weights = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        n = len(row.ids) - 1
        inputs[i, :n] = torch.tensor(row.ids[:-1])
        targets[i, :n] = torch.tensor(row.ids[1:])
        said = torch.tensor(answer_mask(row.ids)[1:]).float()
        weights[i, :n] = said * min(1.0, LONG / max(1.0, said.sum().item()))
    skills = [row.skill for row in rows]
    return Batch(inputs, targets, weights, skills, guides.collate([r.guide for r in rows], width))


def pool(
    tokenizer: Tokenizer,
    swaps: Swaps,
    seed: int,
    number: int,
    progress: float,
    micro: int,
    context: int,
) -> list[Batch]:
    """The micro-batches, of about `micro` tokens each, that pool `number` of the corpus makes."""
    source = corpus.training(seed, number * POOL, progress)
    rows = [row(tokenizer, next(source), context, swaps) for _ in range(POOL)]
    rows.sort(key=lambda row: len(row.ids))
    batches: list[Batch] = []
    current: list[Row] = []
    for one in rows:
        if current and (len(current) + 1) * len(one.ids) > micro:
            batches.append(collate(current))
            current = []
        current.append(one)
    batches.append(collate(current))
    random.Random(f"{seed}/{number}").shuffle(batches)
    return batches


def steps(batches: list[Batch], tokens: int) -> Iterator[list[Batch]]:
    """Groups micro-batches into optimizer steps of like size, about `tokens` tokens each."""
    total = sum(batch.inputs.numel() for batch in batches)
    share = total / max(1, round(total / tokens))
    group: list[Batch] = []
    seen, wanted = 0, share
    for batch in batches:
        group.append(batch)
        seen += batch.inputs.numel()
        if seen >= wanted - batch.inputs.numel() / 2 or batch is batches[-1]:
            yield group
            group, wanted = [], wanted + share
