"""KV blocks of a model that ranks share: each has some of its heads in blocks of the same numbers.
Outside they are what one device would have: so pools of different widths hand them over."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.kv.cache import TOKEN_BYTES, Shape
from services.worker.engine.parallel.shard import Shard
from services.worker.engine.parallel.team import Team

Data = bytes | bytearray | memoryview
_Heads = NDArray[np.uint8]
"""[blocks, layers and sides, heads, bytes]"""


class RanksCache:
    """See `KvCache`."""

    def __init__(
        self,
        team: Team,
        shards: Sequence[Shard],
        shape: Shape,
        kv_format: str,
        in_panels: bool = False,
    ) -> None:
        """`shape`: of a whole block. `kv_format`: of TOKEN_BYTES. `in_panels`: as the C++ kernels
        lay a head's tokens, whose scales lie among them; else behind all numbers of a block."""
        layers, sides, self._heads, tokens, dim = shape
        self._team, self._shards, self._sides = team, shards, layers * sides
        element, scale = TOKEN_BYTES[kv_format]
        sizes = int(tokens * dim * element), tokens * scale
        self._sizes = [sum(sizes)] if in_panels else [size for size in sizes if size]
        """Of what lies together of a head in a layer: its numbers, and its scales."""

    def read(self, blocks: list[int]) -> memoryview:
        answers = self._team.ask_all("read", blocks)
        own = [
            self._cut(data, len(blocks), len(shard.kv_heads))
            for shard, data in zip(self._shards, answers, strict=True)
            if shard.rank % shard.copies == 0
        ]
        return _joined([np.concatenate(parts, axis=2) for parts in zip(*own, strict=True)]).data

    def write(self, blocks: list[int], data: Data) -> None:
        parts = self._cut(data, len(blocks), self._heads)
        for shard in self._shards:
            heads = slice(shard.kv_heads.start, shard.kv_heads.stop)
            own = _joined([part[:, :, heads] for part in parts])
            self._team.tell(shard.rank, "write", blocks, own)

    def _cut(self, data: Data, blocks: int, heads: int) -> list[_Heads]:
        """Each of what lies together."""
        whole = np.frombuffer(data, np.uint8).reshape(blocks, -1)
        found, first = [], 0
        for size in self._sizes:
            last = first + self._sides * heads * size
            found.append(whole[:, first:last].reshape(blocks, self._sides, heads, size))
            first = last
        return found


def _joined(parts: Sequence[_Heads]) -> NDArray[np.uint8]:
    """As blocks have them."""
    whole = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    return np.ascontiguousarray(whole).reshape(-1)
