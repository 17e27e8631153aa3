"""What retrieval's calls work with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.common.blobs import Blobs
from services.common.config import RetrievalSettings
from services.common.errors import unavailable
from services.common.fairness.fair_threads import FairThreads
from services.common.policy import PolicyFile
from services.common.telemetry.telemetry import Telemetry
from services.retrieval.cache.searches import Searches
from services.retrieval.documents.chunkers import Chunkers
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.index.calls import Calls
from services.retrieval.index.store import Store
from services.retrieval.prototypes import Prototypes
from services.retrieval.served_model import ServedModel


@dataclass(frozen=True)
class OfModel:
    """What is another for each embedding model. A served one has the first's, but for its points:
    that cuts its documents, and compares their meaning with the policy's rules."""

    model: EmbeddingModel | ServedModel
    chunkers: Chunkers
    embedder: Embedder
    store: Store
    prototypes: Prototypes


@dataclass(frozen=True)
class Parts:
    settings: RetrievalSettings
    blobs: Blobs
    telemetry: Telemetry
    model: EmbeddingModel | ServedModel
    chunkers: Chunkers
    embedder: Embedder
    calls: Calls
    store: Store
    policy: PolicyFile
    prototypes: Prototypes
    searches: Searches
    others: Mapping[str, OfModel] = field(default_factory=dict)  # by the models' names
    # A search's question is tokenized in a millisecond, thousands of texts to embed in seconds.
    questions: FairThreads = field(default_factory=lambda: FairThreads(1, "question"))
    texts: FairThreads = field(default_factory=lambda: FairThreads(1, "texts"))

    def of_model(self, name: str) -> "Parts":
        """Empty: as they are. Raises UNAVAILABLE ("other_embedders") where it is not known here:
        another replica may know it."""
        if name in ("", self.model.name):
            return self
        if (its := self.others.get(name)) is None:
            why = f"retrieval has no embedding model {name!r}"
            raise unavailable(why, stage="retrieval", reason="other_embedders")
        return replace(
            self,
            model=its.model,
            chunkers=its.chunkers,
            embedder=its.embedder,
            store=its.store,
            prototypes=its.prototypes,
        )
