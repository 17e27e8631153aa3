"""What retrieval is made of for each of its embedding models, and where the points of all are."""

from collections.abc import Sequence

from services.common.config import RetrievalSettings, Settings
from services.retrieval.cache.revisions import Revisions
from services.retrieval.documents.chunkers import Chunkers
from services.retrieval.documents.chunks import Limits, ProcessOptions
from services.retrieval.embedder import Embedder
from services.retrieval.embedding_model import EmbeddingModel
from services.retrieval.index.calls import Calls
from services.retrieval.index.edge import EdgePoints
from services.retrieval.index.layout import Layout
from services.retrieval.index.points import Points
from services.retrieval.index.server import ServerPoints
from services.retrieval.index.store import Store
from services.retrieval.pipeline import Parts
from services.retrieval.pipeline.parts import OfModel
from services.retrieval.prototypes import Prototypes
from services.retrieval.served_model import ServedModel

SHARE_OF_TIMEOUT = 0.8  # so that a search with a slow store can still say so in its own time

Model = EmbeddingModel | ServedModel


def of_model(
    own: RetrievalSettings, model: EmbeddingModel, calls: Calls, revisions: Revisions
) -> OfModel:
    refuse_large_chunks(own.chunk_tokens, model)
    embedder = Embedder(model.read, lambda: model.steps)
    chunkers = Chunkers(
        ProcessOptions(
            folder=str(model.folder),
            max_chunks=own.max_document_chunks,
            cpu_s=own.chunking_cpu_s,
            memory_bytes=own.chunking_memory_bytes,
            limits=Limits(
                chars=own.max_document_chars,
                pages=own.max_document_pages,
                unpacked_bytes=own.max_unpacked_bytes,
            ),
        )
    )
    store = Store(calls, revisions, model.fingerprint)
    return OfModel(model, chunkers, embedder, store, Prototypes(model, embedder))


def points_of(settings: Settings, models: Sequence[Model]) -> Points:
    place = str(settings.data_dir), settings.namespace
    layouts = [Layout(*place, one.name, one.fingerprint, one.dimension) for one in models]
    if not settings.qdrant_url:
        return EdgePoints(*layouts)
    return ServerPoints(
        layouts,
        settings.qdrant_url,
        settings.qdrant_api_key.get_secret_value() or None,
        settings.qdrant_ca,
        settings.retrieval.timeout_s * SHARE_OF_TIMEOUT,
    )


def told(one: Parts | OfModel) -> dict[str, str | int]:
    """As it is registered."""
    return {"fingerprint": one.model.fingerprint, "max_chunk_tokens": room(one.model)}


def room(model: Model) -> int:
    """Tokens of a chunk."""
    return model.reader.max_tokens - model.reader.special_tokens


def refuse_large_chunks(size: int, model: EmbeddingModel) -> None:
    if size > (most := room(model)):
        raise ValueError(
            f"chunks of {size} tokens do not fit the window of {model.name}: at most {most} "
            "(PENSTOCK_RETRIEVAL__CHUNK_TOKENS)"
        )


def refuse_same_names(models: Sequence[Model]) -> None:
    first, *others = [model.name for model in models]
    if first in others:
        raise ValueError(
            f"{first} is the name of PENSTOCK_RETRIEVAL__EMBEDDING_MODEL: another in "
            "PENSTOCK_RETRIEVAL__EMBEDDERS or …__SERVED_EMBEDDERS needs another name"
        )
    if doubled := sorted({name for name in others if others.count(name) > 1}):
        raise ValueError(
            f"{doubled[0]} is in PENSTOCK_RETRIEVAL__EMBEDDERS and in "
            "PENSTOCK_RETRIEVAL__SERVED_EMBEDDERS: one of them needs another name"
        )
