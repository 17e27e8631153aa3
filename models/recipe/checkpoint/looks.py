"""Where the last layer's heads look, against the guides:
`python -m models.recipe.checkpoint.looks STATE [sets…]`. Of each head's aims: the likeliest
place is right / what all right places have / of how many; then likewise of those at the marker.
"""

import sys
from pathlib import Path

import torch

from models.recipe.batches import Row
from models.recipe.checkpoint.common import llama, say
from models.recipe.checkpoint.figures import rows_of
from models.recipe.guides import Aims, looks
from models.recipe.lessons import GUIDED
from models.recipe.model import Llama
from models.recipe.tokenizer import ASSISTANT


@torch.no_grad()
def report(model: Llama, rows: list[Row]) -> str:
    last, said = model.shape.layers - 1, []
    reads = [(model.seen(torch.tensor([one.ids]), last)[1], one) for one in rows]
    for head, name in GUIDED:
        found: dict[bool, list[tuple[bool, float]]] = {False: [], True: []}
        for read, one in reads:
            told = getattr(one.guide, name)
            aims = Aims.of([told], len(one.ids))
            if not told:
                continue
            scores = looks(model, last, read, aims, head)
            mass = (scores.softmax(-1) * aims.targets).sum(-1)
            hit = aims.targets[torch.arange(len(scores)), scores.argmax(-1)]
            for (_, places), right, share in zip(told, hit.tolist(), mass.tolist(), strict=True):
                found[one.ids[places[0]] == ASSISTANT].append((right, share))
        for rests, some in found.items():
            if some:
                right, share = (100 * sum(x) / len(some) for x in zip(*some, strict=True))
                said.append(f"{name}{' at rest' * rests} {right:.0f} / {share:.0f} / {len(some)}")
    return "; ".join(said)


if __name__ == "__main__":
    model = llama(Path(sys.argv[1])).eval()
    for name in sys.argv[2:] or ["bank", "easy", "recall"]:
        say(name, report(model, rows_of(name)[:30]))
