"""The names of a prompt's blocks, as far as anybody may hold them."""

import asyncio
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.common.block_hash import block_hashes, tenant_salt
from services.router.block_index import BlockIndex

_LONG_PROMPT = 1024  # tokens; hashing more than that would hold up the event loop


async def chains_of(
    index: BlockIndex, token_ids: NDArray[np.uint32], tenant: str, sizes: Iterable[int]
) -> list[list[bytes]]:
    """The hashes of the tokens' blocks, for each block size; of a long prompt, whose hashes take
    2 ms for 67,000 tokens, only those of its beginning where nobody holds that."""
    salt, first = tenant_salt(tenant), token_ids[:_LONG_PROMPT]
    chains = []
    for size in sizes:
        chain = block_hashes(first, size, salt)
        if len(first) < len(token_ids) and (not chain or index.holds(chain[-1])):
            chain = await asyncio.to_thread(block_hashes, token_ids, size, salt)
        chains.append(chain)
    return chains
