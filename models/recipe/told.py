"""The demo model's second reading of a passage, told by the reader what it sees there.

At each token of the second reading, and behind each of MiniLM's six layers, the stream's first
features are to be like what the reader's layer says at that token, compared by their cosine: about
their means over tokens, each feature as large as the reader has it spread. (Of what the reader's
last layer says three features that are nearly the same at all tokens are 90 % of the square: a
cosine of all of that is 0.97 where the rest has 0.72.) A passage's first reading is told nothing:
what it shall say is what the second needs. But of all tokens the stream is to be as large, as it is
behind MiniLM's norms: without that second readings grew to eight times what markers were, and
whatever compares codes behind a norm saw little but markers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.recipe.minilm import WIDTH
from models.recipe.model import Llama
from models.recipe.reader import Pair, Pairs, Reader
from models.recipe.teacher import unit

TOLD = 6  # layers
LEAST = 0.02  # spread of a feature; states are of unit variance
EVEN = 0.3  # weight of the streams' being as large


def streams(model: Llama, inputs: Tensor) -> list[Tensor]:
    """What the demo model's layers say where MiniLM's do: (rows, tokens, hidden) each."""
    return model.reads(inputs, *range(1, TOLD + 1))


def uneven(streams: list[Tensor], there: Tensor) -> Tensor:
    """(layers) the variance of how large streams are, as logarithms, over tokens. `there`: (rows,
    tokens) no padding.
    """
    sizes = torch.stack([x[there].float().square().mean(-1) for x in streams])
    return (0.5 * sizes.clamp(min=1e-6).log()).var(1)


def unlike(streams: list[Tensor], some: list[list[Pair]], reader: Reader) -> Tensor:
    """(layers) one less the cosine of the second readings' states and the reader's, the mean over
    tokens. `streams`: (rows, tokens, hidden); `some`: of each row.
    """
    flat = [(row, pair) for row, pairs in enumerate(some) for pair in pairs]
    with torch.no_grad():
        made = Pairs.of([[pair] for _, pair in flat])
        said = reader.said(made)
    places = [  # of each token: the row and where in it, the pair and where in that
        (row, one.second.start + at, number, one.mark + at)
        for number, (row, one) in enumerate(flat)
        for at in range(len(one.ids) - one.mark)
    ]
    row, ours, pair, theirs = torch.tensor(places).T
    likes = [
        _like(unit(mine[row, ours, :WIDTH].float()), told[pair, theirs])
        for mine, told in zip(streams, said, strict=True)
    ]
    return torch.stack([1 - like.mean() for like in likes])


def _like(mine: Tensor, told: Tensor) -> Tensor:
    """(tokens) the cosines of (tokens, features) about their means, as `told` is spread."""
    spread = told.std(0).clamp(min=LEAST)
    return F.cosine_similarity(
        (mine - mine.mean(0)) / spread, (told - told.mean(0)) / spread, dim=-1
    )
