"""KV blocks of one engine's prompts that another decodes: what leaves, and what comes."""

from collections.abc import Iterator

from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.kv.cache import KvCache
from services.worker.engine.messages import KvBlocks, KvData
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.sequence import Sequence, Status

PIECE_BYTES = 2**20
"""Of exported KV blocks at most, or one block: whoever takes them steps between two pieces."""


class KvTransferError(Exception):
    """KV data that does not fit the request it came for."""


class KvTransfer:
    """Of one engine's cache."""

    def __init__(self, cache: KvCache, info: ModelInfo) -> None:
        self._cache, self._info = cache, info
        self._bytes = info.kv_bytes_per_block * len(info.kv_groups)

    def exports(self, sequence: Sequence) -> Iterator[KvBlocks]:
        """What is complete and was not exported, in pieces: all of the prompt, once it is computed,
        but for leading blocks that no token behind it looks at. Raises OSError where there is no
        room for the data."""
        size = self._info.block_size
        begin = self._info.kv_groups[0].first_seen(sequence.num_prompt, size)
        sequence.export_next = max(sequence.export_next, begin)
        done = sequence.num_computed >= sequence.num_prompt
        end = -(-sequence.num_prompt // size) if done else sequence.num_computed // size
        while (first := sequence.export_next) < end:
            last = min(end, first + max(1, PIECE_BYTES // self._bytes))
            content = self._cache.read(self._places(sequence, first, last))
            shared = sequence.request.export_kv == "shared"
            data: KvData = kv_payload.share(content) if shared else content
            sequence.export_next = last
            yield KvBlocks(sequence.id, first, last - first, data)

    def write(self, sequence: Sequence, blocks: KvBlocks) -> None:
        """Into a reserved sequence's, in order and without gaps; those that it holds already are
        skipped. Takes the data: a `SharedRef` is removed in any case. Raises KvTransferError for
        what does not fit, and OSError or ValueError where the data cannot be had."""
        data = kv_payload.take(blocks.data)
        first, count, size = blocks.first_block, blocks.num_blocks, self._info.kv_bytes_per_block
        if sequence.status is not Status.AWAITING_KV or not sequence.remote:
            raise KvTransferError("write_kv out of place: the request is not reserved")
        end = first + count
        if not 0 <= first <= sequence.num_received or end > sequence.blocks_needed:
            raise KvTransferError(
                f"KV blocks [{first}, {end}) came, expected from {sequence.num_received} "
                f"and to {sequence.blocks_needed} at most"
            )
        places = self._places(sequence, first, end)
        if len(data) != len(places) * size:
            raise KvTransferError(
                f"{count} KV blocks of this model are {len(places) * size} bytes, {len(data)} "
                "came: do both workers have the same checkpoint, dtype and block size?"
            )
        # Blocks from the prefix cache may be other sequences' too, and are never written.
        if end > sequence.num_received:
            skip = len(self._places(sequence, first, sequence.num_received))
            self._cache.write(places[skip:], memoryview(data)[skip * size :])
            sequence.num_received = end

    def _places(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """Of blocks [first, end) of a prompt those of each KV group, in order; of a window only
        what the token behind the prompt looks at."""
        behind, size = sequence.num_prompt, self._info.block_size
        begins = [group.first_seen(behind, size) for group in self._info.kv_groups]
        return [
            table[index]
            for index in range(first, end)
            for table, begin in zip(sequence.tables, begins, strict=True)
            if index >= begin
        ]
