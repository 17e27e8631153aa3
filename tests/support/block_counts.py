"""How many blocks a router's index knows: it keeps no count itself, which nobody else asks for."""

from services.router.block_index import BlockIndex


def known(index: BlockIndex) -> int:
    """On any worker's device or disk."""
    return len(index._masks.keys() | index._below.keys())
