"""Where the tokens of a step lie: the part of a kernel's input that is equal for all layers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """S sequences with `query_lens[s]` new tokens each, T in all, laid one after the other.

    The first `num_decodes` sequences have exactly one new token each.

    positions:     int64 [T]; of the new tokens in their sequences
    slots:         int64 [T]; where their keys and values go
    block_tables:  int32 [S, max blocks]; rows are padded with valid block numbers
    seq_lens:      int32 [S]; tokens in the cache, the new ones included
    The host lists repeat what a kernel's launch needs to know without waiting for the device.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    num_decodes: int
    host_query_lens: list[int]
    host_seq_lens: list[int]
