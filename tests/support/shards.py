"""The embedded store in the test's own process, without the one that it has for itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from protos.common_pb2 import AttributeValue
from services.retrieval.documents.chunks import Chunk
from services.retrieval.index.layout import Layout
from services.retrieval.index.shards import Shards
from services.retrieval.index.store import Store

DIMENSION = 8


def layout(folder: Path, fingerprint: str = "f1", dimension: int = DIMENSION) -> Layout:
    return Layout(str(folder), "test", f"model-{fingerprint}", fingerprint, dimension)


class Here(Shards):
    """A `Points`."""

    kind = "embedded"
    threads = 1

    def __init__(self, *layouts: Layout) -> None:
        self._layouts = layouts

    def open(self) -> None:
        super().__init__(*self._layouts)


async def stored(
    store: Store,
    tenant: str,
    collection: str,
    source_id: str,
    chunks: Sequence[Chunk],
    vectors: np.ndarray,
    revision: int = 0,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """A document whole, instead of its earlier revisions."""
    draft = await store.draft(
        tenant, collection, source_id, revision=revision, attributes=attributes or {}
    )
    await store.put(draft, range(len(chunks)), chunks, vectors, len(chunks))
    await store.publish(draft, len(chunks))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that waits for no disk, where the machine has such."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
