"""Answers of files and vector stores."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from services.gateway.api.openapi.answers.common import Place, Priced
from services.gateway.stores.files.file_record import Purpose

Status = Literal["in_progress", "completed", "failed", "cancelled"]


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    expires_at: int | None


class Upload(TypedDict):
    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["pending", "completed", "cancelled"]
    expires_at: int
    file: File | None


class UploadPart(TypedDict):
    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileCounts(TypedDict):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class ExpiresAfter(TypedDict):
    anchor: Literal["last_active_at"]
    days: int


class StoreCache(TypedDict):
    """Extension: which earlier searches do, where it is not as the operator has set."""

    max_age_s: NotRequired[float]
    similar_at_least: NotRequired[float]


class Reindexing(TypedDict):
    """Extension: files that another embedding model indexed, on their way to the present one."""

    status: Literal["pending", "in_progress", "completed", "cancelled", "failed"]
    reason: str | None  # what it waits for, or why it failed
    file_counts: FileCounts


class VectorStore(TypedDict):
    id: str
    object: Literal["vector_store"]
    created_at: int
    last_active_at: int
    name: str
    description: str | None
    metadata: dict[str, str]
    status: Literal["in_progress", "completed", "expired"]
    file_counts: FileCounts
    usage_bytes: int
    expires_after: ExpiresAfter | None
    expires_at: int | None
    cache: StoreCache | None
    embedding_model: str | None  # extension: that files are indexed with now
    reindexing: Reindexing | None


class DeletedStore(TypedDict):
    id: str
    object: Literal["vector_store.deleted"]
    deleted: Literal[True]


class IndexFailure(TypedDict):
    code: str
    message: str


class StaticChunking(TypedDict):
    max_chunk_size_tokens: int
    chunk_overlap_tokens: int


class ChunkingStrategy(TypedDict):
    type: Literal["static", "other"]
    static: NotRequired[StaticChunking]


class IndexingProgress(TypedDict):
    done: int
    chunks: int


class StoreFileExtras(TypedDict, total=False):
    progress: IndexingProgress  # while it is indexed
    note: str  # of what its owner should know


class StoreFile(TypedDict):
    id: str
    object: Literal["vector_store.file"]
    created_at: int
    vector_store_id: str
    status: Status
    usage_bytes: int
    last_error: IndexFailure | None
    attributes: dict[str, bool | float | str]
    chunking_strategy: ChunkingStrategy
    penstock: StoreFileExtras


class FileBatch(TypedDict):
    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: Status
    file_counts: FileCounts


class DetachedFile(TypedDict):
    id: str
    object: Literal["vector_store.file.deleted"]
    deleted: Literal[True]


class FoundText(TypedDict):
    type: Literal["text"]
    text: str


class Found(Place):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, bool | float | str]
    content: list[FoundText]
    title: str


class FileText(TypedDict):
    object: Literal["vector_store.file_content.page"]
    data: list[FoundText]
    has_more: Literal[False]
    next_page: None


class SearchExtension(Priced):
    """`age_s`: since the search was made, where that was for an earlier request; `reranked`: the
    model that ranked the passages anew, `not_reranked`: why the one that is named for it did not.
    """

    warning: NotRequired[str]
    age_s: NotRequired[float]
    reranked: NotRequired[str]
    not_reranked: NotRequired[str]


class SearchResults(TypedDict):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[Found]
    has_more: Literal[False]
    next_page: None
    penstock: SearchExtension
