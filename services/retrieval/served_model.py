"""A model that others serve, as an embedder of stores (decision 0064).

Retrieval asks nobody: whoever calls it tells this model's vectors. Documents for it are cut by the
tokenizer of the installation's model, whose tokens chunks are counted in.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from protos.retrieval_pb2 import Vector
from services.common.config.retrieval import ServedEmbedder
from services.common.errors import PenstockError, invalid
from services.retrieval.documents.chunks import Chunk
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.text_reader import TextReader


class ServedModel:
    def __init__(self, name: str, told: ServedEmbedder, cutter: EmbeddingModel) -> None:
        self.name = name
        self.dimension = told.dimension
        self.fingerprint = _digest("served", name, told.dimension, told.document, told.version)
        self.made_by = _digest(self.fingerprint, cutter.fingerprint)
        self._cutter = cutter
        self._before = told.document

    @property
    def reader(self) -> TextReader:
        return self._cutter.reader

    def reads(self, chunk: Chunk) -> str:
        """What it is to embed of a document's chunk."""
        titled = f"{chunk.title}\n{chunk.text}" if chunk.title else chunk.text
        return self._before + titled

    def vectors(self, told: Sequence[Vector], wanted: int) -> np.ndarray:
        """float32 [wanted, dimension], of unit length. Raises INVALID_ARGUMENT for other numbers
        than its own."""
        lengths = {len(one.values) for one in told}
        if len(told) != wanted or lengths - {self.dimension}:
            shape = " or ".join(map(str, sorted(lengths))) or "no"
            raise _refusal(
                f"the embedding model {self.name!r} has vectors of {self.dimension} numbers: told "
                f"are {len(told)} of {shape} numbers for {wanted} texts"
            )
        made = np.array([one.values for one in told], np.float32)
        length = np.linalg.norm(made, axis=1, keepdims=True)
        if not (np.isfinite(length) & (length > 0)).all():
            raise _refusal(f"a vector of the embedding model {self.name!r} has no direction")
        unit: np.ndarray = made / length
        return unit


def _digest(*told: str | int) -> str:
    return blake2b(json.dumps(told).encode(), digest_size=8).hexdigest()


def _refusal(words: str) -> PenstockError:
    return invalid(words, "vector", stage="retrieval", reason="embedder_mismatch")
