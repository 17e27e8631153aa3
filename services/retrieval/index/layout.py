"""Where the points of a model are: a folder of the embedded store, a collection of a server."""

from pathlib import Path
from typing import NamedTuple


class Layout(NamedTuple):
    """As it travels to the store's process: plain values."""

    data_dir: str
    namespace: str
    model: str
    fingerprint: str  # of the model
    dimension: int  # 0: not known, of an earlier model

    @property
    def root(self) -> Path:
        """Of the stores of all models; one process has it."""
        return Path(self.data_dir) / "index" / self.namespace

    @property
    def folder(self) -> Path:
        return self.root / self.fingerprint

    @property
    def collection(self) -> str:
        """Its name on a server."""
        return f"{self.earlier}-{self.fingerprint}"

    @property
    def earlier(self) -> str:
        """The name before there was one for each model, and before BM25."""
        return f"{self.namespace}-chunks"

    @property
    def earlier_folder(self) -> Path:
        return Path(self.data_dir) / "qdrant"
