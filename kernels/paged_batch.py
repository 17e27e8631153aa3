"""Where the tokens of a step lie: the part of a kernel's input that is equal for all layers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """S sequences with new tokens each, T in all, laid one after the other. The first `num_decodes`
    have exactly one. All on the device, int32:

    positions:     [T]; of the new tokens in their sequences
    slots:         [T]; where their keys and values go, distinct
    starts:        [S + 1]; where each sequence's new tokens begin, and the end
    lengths:       [S]; tokens in the cache, the new ones included
    block_tables:  [S, max blocks]; rows are padded with valid block numbers
    tiles:         [n, 2]; of the sequences after the decodes, as `tiles_of` cuts them
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    tiles: Tensor
    num_decodes: int


def tiles_of(starts: Ints, num_decodes: int, queries: int) -> Ints:
    """What programs of prefill attention take, [n, 2]: a sequence, and the first of `queries` of
    its new tokens. Late ones first, which look at most."""
    counts = np.diff(starts)[num_decodes:]
    numbers = -(-counts // queries)
    sequences = np.repeat(np.arange(len(counts)) + num_decodes, numbers)
    ends = np.cumsum(numbers)
    firsts = np.arange(len(sequences)) - np.repeat(ends - numbers, numbers)
    tiles = np.stack((sequences, firsts * queries), axis=1).astype(np.int32)
    return tiles[np.argsort(-tiles[:, 1], kind="stable")]
