"""Training examples as tensors: tokens, targets, how much each target counts, and the guides."""

import random
import zlib
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import guides
from models.recipe.conversation import Conversation
from models.recipe.guides import Guide
from models.recipe.swaps import Swaps
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, DOCUMENTS, END, PAD

LONG = 48  # tokens: answers together longer than this count as one of this length


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
    rows: list[Row]


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
    if swaps and guide.readings:
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
    return Batch(inputs, targets, weights, rows)
