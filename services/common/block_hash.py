"""Names of KV blocks: the one definition that the engine and the router share.

A block of a prompt is named by all the tokens up to its end and by a salt, never by its own tokens
alone: two blocks bear one name exactly when their KV content is the same for the same model. The
salt keeps tenants apart (the same prompt under two salts has nothing in common), and the adapter
that a prompt is computed with keeps those of others and of none apart.

    root    = H(salt), or with an adapter H(salt, a byte of 0, the adapter's id)
    hash[i] = H(hash[i - 1] + tokens of block i as little-endian uint32),   hash[-1] = root

H is BLAKE2b with a 16-byte digest, keyless, personalised with "penstock-kv".
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_SIZE = 16
"""Bytes of one hash."""
_TOKEN_BYTES = 4
_begun = blake2b(digest_size=DIGEST_SIZE, person=b"penstock-kv")


def _digest(data: bytes) -> bytes:
    hashing = _begun.copy()  # half the time of a new one
    hashing.update(data)
    return hashing.digest()


def root_hash(salt: bytes, adapter: str = "") -> bytes:
    """The parent of a prompt's first block. No salt has a byte of 0."""
    return _digest(salt + b"\0" + adapter.encode() if adapter else salt)


def extend_hash(parent: bytes, block_token_ids: Sequence[int]) -> bytes:
    """The hash of the block of these tokens (each in [0, 2**32)) that follows block `parent`."""
    return _digest(parent + struct.pack(f"<{len(block_token_ids)}I", *block_token_ids))


def block_hashes(
    token_ids: Sequence[int] | NDArray[np.uint32], block_size: int, salt: bytes, adapter: str = ""
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, first to last; a partial last block has none."""
    parent = root_hash(salt, adapter)
    data, step = np.array(token_ids, "<u4").tobytes(), _TOKEN_BYTES * block_size
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        parent = _digest(parent + data[start : start + step])
        hashes.append(parent)
    return hashes


def tenant_salt(tenant: str) -> bytes:
    """The salt of all of a tenant's prompts; the tenant as authenticated by the gateway."""
    return tenant.encode()
