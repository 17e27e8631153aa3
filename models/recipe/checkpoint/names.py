"""Writes into a state that began without it what `pointing.py` (NAMED) writes into a fresh model:
the head that begins answers compares names. Of what its slow features tell the least makes room:
`python -m models.recipe.checkpoint.names STATE OUT.pt`.
"""

import random
import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.recipe import corpus
from models.recipe.batches import row
from models.recipe.checkpoint.common import llama, tokenizer
from models.recipe.copying import HALF, Layout, slow_places
from models.recipe.model import Layer, Llama
from models.recipe.pointing import BEGINS, Stream, compare_names
from models.recipe.tokenizer import PAD


def asked(count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and from where the head looks in each."""
    made = (
        row(tokenizer, corpus.example(random.Random(f"names/{i}"), 0.9), 4096) for i in range(count)
    )
    return [(one.ids, [at for at, _ in one.guide.begins]) for one in made if len(one.ids) < 1400]


@torch.no_grad()
def make_room(model: Llama, some: list[tuple[list[int], list[int]]]) -> None:
    """Puts what the head compares into the first of its slow features, what tells most first."""
    layer = cast(Layer, model.model.layers[-1])
    attention, number = layer.self_attn, model.shape.layers - 1
    slow = [attention.rows(BEGINS).start + at for at in slow_places(model.shape.head_dim)[2:]]
    sides: list[list[Tensor]] = [[], []]
    projects = attention.q_proj, attention.k_proj
    for ids, places in some:
        read = layer.input_layernorm(model.seen(torch.tensor([ids]), number)[1].float())[0]
        for side, project, where in zip(
            sides,
            projects,
            (torch.tensor(places).long(), torch.randperm(len(ids))[:150]),
            strict=True,
        ):
            side.append(project(read[where])[:, slow].double())
    query, key = (torch.cat(side) for side in sides)
    low = [
        torch.linalg.cholesky(x.T @ x / len(x) + 1e-6 * torch.eye(len(slow)).double())
        for x in (query, key - key.mean(0))
    ]
    left, values, right = torch.linalg.svd(low[0].T @ low[1])
    for project, turn, lower in zip(projects, (left.T, right), low, strict=True):
        whole = (values.sqrt()[:, None] * torch.linalg.solve(lower.T, turn.T).T).float()
        project.weight[slow] = whole @ project.weight[slow]
        project.bias[slow] = whole @ project.bias[slow]
        project.weight[slow[-HALF:]], project.bias[slow[-HALF:]] = 0, 0


if __name__ == "__main__":
    model = llama(Path(sys.argv[1])).eval()
    some = asked(150)
    make_room(model, some)
    ids = [torch.tensor(ids) for ids, _ in some[:8]]
    with torch.no_grad():
        stream = Stream.of(model, pad_sequence(ids, batch_first=True, padding_value=PAD))
        attention = cast(Layer, model.model.layers[-1]).self_attn
        compare_names(attention, Layout.of(model.shape), stream)
    torch.save({"model": model.state_dict()}, sys.argv[2])
