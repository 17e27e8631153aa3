"""Where the gateways of this process keep files while it lives, and a small upload."""

import atexit
import tempfile
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from obstore.store import MemoryStore

from services.common.blobs import Blobs


@cache
def blob_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="penstock-blobs-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


def memory_blobs(namespace: str = "ns") -> Blobs:
    return Blobs(MemoryStore(), namespace, "memory")
