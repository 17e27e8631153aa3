"""Training examples as tensors: tokens, targets, and how much each target counts.

Examples of like length share a micro-batch, so that little is padding; the micro-batches of a
pool are shuffled, so that a step sees all lengths.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe import corpus
from models.recipe.template import render
from models.recipe.tokenizer import ASSISTANT, END, PAD

POOL = 256  # examples that are drawn, sorted by length and cut at once


@dataclass
class Batch:
    """Rows of like length."""

    inputs: Tensor  # (rows, tokens) ids
    targets: Tensor  # (rows, tokens) ids
    weights: Tensor  # (rows, tokens) 1 for answers, less for prompts, 0 for padding
    skills: list[str]  # (rows)

    @property
    def answers(self) -> Tensor:
        """(rows, tokens) whether the target belongs to an answer."""
        return self.weights == 1


def answer_mask(ids: list[int]) -> list[bool]:
    """Which tokens the assistant says: all after its marker, up to and with the end marker."""
    mask, inside = [], False
    for token in ids:
        mask.append(inside)
        if token == ASSISTANT:
            inside = True
        elif token == END:
            inside = False
    return mask


def collate(rows: list[tuple[list[int], str]], prompt_weight: float) -> Batch:
    """Pads rows of (ids, skill) on the right, to a multiple of 16."""
    longest = max(len(ids) for ids, _ in rows) - 1
    width = -(-longest // 16) * 16
    inputs = torch.full((len(rows), width), PAD)
    targets = torch.full((len(rows), width), PAD)
    weights = torch.zeros(len(rows), width)
    for i, (ids, _) in enumerate(rows):
        n = len(ids) - 1
        inputs[i, :n] = torch.tensor(ids[:-1])
        targets[i, :n] = torch.tensor(ids[1:])
        weights[i, :n] = torch.tensor(
            [1.0 if said else prompt_weight for said in answer_mask(ids)[1:]]
        )
    return Batch(inputs, targets, weights, [skill for _, skill in rows])


def pool(
    tokenizer: Tokenizer, seed: int, number: int, progress: float, micro: int, context: int
) -> list[Batch]:
    """The micro-batches, of about `micro` tokens each, that pool `number` of the corpus makes."""
    source = corpus.training(seed, number * POOL, progress)
    rows = []
    for _ in range(POOL):
        made = next(source)
        rows.append(
            (tokenizer.encode(render(made), add_special_tokens=False).ids[:context], made.skill)
        )
    rows.sort(key=lambda row: len(row[0]))
    prompt_weight = 0.3 if progress < corpus.EASY_UNTIL else 0.0
    batches: list[Batch] = []
    current: list[tuple[list[int], str]] = []
    for row in rows:
        if current and (len(current) + 1) * len(row[0]) > micro:
            batches.append(collate(current, prompt_weight))
            current = []
        current.append(row)
    batches.append(collate(current, prompt_weight))
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
