"""The same model, in which steps of all layers move what all tokens share less: what the last
layer reads is centred again, and the inner neurons of late layers are as loud as those of others:
`python -m models.recipe.checkpoint.calm STATE OUT.pt`.
"""

import sys
from pathlib import Path
from typing import cast

import torch

from models.recipe.checkpoint.common import llama, source
from models.recipe.copying import Layout
from models.recipe.model import Layer, Llama

LOUD = 10.0  # the norm of the mean of inner neurons, about, in the first layers
LATE = (4, 5)


@torch.no_grad()
def inner(model: Llama, rows: list[list[int]]) -> None:
    for number in LATE:
        mlp, read = cast(Layer, model.model.layers[number]).mlp, list[torch.Tensor]()
        hook = mlp.down_proj.register_forward_hook(
            lambda _, x, __, r=read: r.append(x[0].flatten(0, -2))
        )
        for ids in rows:
            model.reads(torch.tensor([ids]), number + 1)
        hook.remove()
        much = float(torch.cat(read).mean(0).norm()) / LOUD
        print(f"layer {number}: inner neurons {much:.1f} times")
        mlp.up_proj.weight /= much
        mlp.up_proj.bias /= much
        mlp.down_proj.weight *= much


@torch.no_grad()
def centre(model: Llama, rows: list[list[int]]) -> None:
    meaning, last = Layout.of(model.shape).meaning, cast(Layer, model.model.layers[-1])
    read = torch.cat(
        [model.reads(torch.tensor([ids]), model.shape.layers - 1)[0][0] for ids in rows]
    )
    mean, size = read[:, meaning].mean(0), float(read.square().mean(1).sqrt().mean())
    print(
        f"mean {float(mean.norm()):.0f}, spread {float((read[:, meaning] - mean).norm(dim=1).mean()):.0f}"
    )
    cast(Layer, model.model.layers[-2]).mlp.down_proj.bias[meaning] -= mean
    seen = last.input_layernorm.weight[meaning] * mean / size
    attention = last.self_attn
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.bias += project.weight[:, meaning] @ seen
    attention.o_proj.bias[meaning] += mean


if __name__ == "__main__":
    model = llama(Path(sys.argv[1])).eval()
    drawn = (source("calm").row(n, 0.9, False).ids for n in range(60))
    rows = [ids for ids in drawn if len(ids) < 1600]
    with torch.no_grad():
        before = [model(torch.tensor([ids])) for ids in rows[:4]]
        inner(model, rows)
        centre(model, rows)
        for ids, was in zip(rows, before, strict=False):
            now = model(torch.tensor([ids]))
            same = (now.argmax(-1) == was.argmax(-1)).float().mean()
            print(f"the likeliest are the same for {100 * same:.1f} %")
    torch.save({"model": model.state_dict()}, sys.argv[2])
