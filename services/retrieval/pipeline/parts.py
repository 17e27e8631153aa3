"""What retrieval's calls work with."""

from dataclasses import dataclass, field

from services.common.blobs import Blobs
from services.common.config import RetrievalSettings
from services.common.fair_threads import FairThreads
from services.common.policy import PolicyFile
from services.common.telemetry import Telemetry
from services.retrieval.cache.searches import Searches
from services.retrieval.documents.chunkers import Chunkers
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.index.calls import Calls
from services.retrieval.index.store import Store
from services.retrieval.prototypes import Prototypes


@dataclass(frozen=True)
class Parts:
    settings: RetrievalSettings
    blobs: Blobs
    telemetry: Telemetry
    model: EmbeddingModel
    chunkers: Chunkers
    embedder: Embedder
    calls: Calls
    store: Store
    policy: PolicyFile
    prototypes: Prototypes
    searches: Searches
    # A search's question is tokenized in a millisecond, thousands of texts to embed in seconds.
    questions: FairThreads = field(default_factory=lambda: FairThreads(1, "question"))
    texts: FairThreads = field(default_factory=lambda: FairThreads(1, "texts"))
