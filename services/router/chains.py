"""The names of a prompt's blocks, as far as anybody may hold them."""

import asyncio
from collections.abc import Sequence

from services.common.block_hash import block_hashes, tenant_salt
from services.common.packed_ids import head, unpack
from services.router.block_index import BlockIndex
from services.router.workers import Worker

_LONG_PROMPT = 1024  # tokens; hashing more than that would hold up the event loop


async def chains_of(
    index: BlockIndex,
    token_ids: bytes,
    tenant: str,
    checkpoint: str,
    workers: Sequence[Worker],
) -> list[list[bytes]]:
    """The hashes of the tokens' blocks, for each block size of the workers that serve the
    checkpoint, with their adapter if it is one with an adapter; of a long prompt, whose hashes take
    2 ms for 67,000 tokens, only those of its beginning where nobody holds that."""
    salt, first = tenant_salt(tenant), head(token_ids, _LONG_PROMPT)
    adapter = "" if any(w.checkpoint == checkpoint for w in workers) else checkpoint
    chains = []
    for size in {worker.block_size for worker in workers}:
        chain = block_hashes(unpack(first), size, salt, adapter)
        if len(first) < len(token_ids) and (not chain or index.holds(chain[-1])):
            chain = await asyncio.to_thread(_hashes, token_ids, size, salt, adapter)
        chains.append(chain)
    return chains


def _hashes(token_ids: bytes, size: int, salt: bytes, adapter: str) -> list[bytes]:
    return block_hashes(unpack(token_ids), size, salt, adapter)
