"""The embedded store in the test's own process, without the one that it has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from services.retrieval.index.layout import Layout
from services.retrieval.index.shards import Shards

DIMENSION = 8


def layout(folder: Path, fingerprint: str = "f1", dimension: int = DIMENSION) -> Layout:
    return Layout(str(folder), "test", f"model-{fingerprint}", fingerprint, dimension)


class Here(Shards):
    """A `Points`."""

    kind = "embedded"
    threads = 1

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def open(self) -> None:
        super().__init__(self._layout)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that waits for no disk, where the machine has such."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
