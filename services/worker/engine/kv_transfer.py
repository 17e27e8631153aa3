"""KV blocks of one engine's prompts that another decodes: what leaves, and what comes."""

from collections.abc import Iterator

from services.worker.engine import kv_payload
from services.worker.engine.kv_cache import KvCache
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

    def exports(self, sequence: Sequence) -> Iterator[KvBlocks]:
        """What is complete and was not exported, in pieces: all of the prompt, once it is computed.
        Raises OSError where there is no room for the data."""
        size = self._info.block_size
        done = sequence.num_computed >= sequence.num_prompt
        end = -(-sequence.num_prompt // size) if done else sequence.num_computed // size
        while (first := sequence.export_next) < end:
            last = min(end, first + max(1, PIECE_BYTES // self._info.kv_bytes_per_block))
            content = self._cache.read(sequence.blocks[first:last].tolist())
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
        if sequence.status is not Status.RESERVED:
            raise KvTransferError("write_kv out of place: the request is not reserved")
        end = first + count
        if not 0 <= first <= sequence.num_received or end > sequence.blocks_needed:
            raise KvTransferError(
                f"KV blocks [{first}, {end}) came, expected from {sequence.num_received} "
                f"and to {sequence.blocks_needed} at most"
            )
        if len(data) != count * size:
            raise KvTransferError(
                f"{count} KV blocks of this model are {count * size} bytes, {len(data)} came: do "
                "both workers have the same checkpoint, dtype and block size?"
            )
        # Blocks from the prefix cache may be other sequences' too, and are never written.
        skip = sequence.num_received - first
        if skip < count:
            rest = memoryview(data)[skip * size :]
            self._cache.write(sequence.blocks[first + skip : end].tolist(), rest)
            sequence.num_received = end
