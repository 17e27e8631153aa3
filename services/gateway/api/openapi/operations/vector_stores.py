"""Vector stores and their files."""

from services.gateway.api.openapi.answers.common import PageOf
from services.gateway.api.openapi.answers.stores import (
    DeletedStore,
    DetachedFile,
    FileBatch,
    FileText,
    SearchResults,
    StoreFile,
    VectorStore,
)
from services.gateway.api.openapi.operation import Operation
from services.gateway.api.resources.file_batches import CreateFileBatch
from services.gateway.api.resources.pages import StorePage
from services.gateway.api.resources.store_search import SearchStore
from services.gateway.api.resources.vector_stores import (
    AboutStore,
    AttachedList,
    AttachFile,
    CreateStore,
    UpdateFile,
)

_TAG = "Vector stores"

OPERATIONS: dict[str, Operation] = {
    "GET /v1/vector_stores": Operation(
        _TAG, "All vector stores", PageOf[VectorStore], query=StorePage
    ),
    "POST /v1/vector_stores": Operation(
        _TAG, "Makes a vector store", VectorStore, CreateStore, {"name": "manuals"}
    ),
    "GET /v1/vector_stores/{store}": Operation(_TAG, "A vector store", VectorStore),
    "POST /v1/vector_stores/{store}": Operation(
        _TAG, "Says something else of a vector store", VectorStore, AboutStore, {"name": "old"}
    ),
    "DELETE /v1/vector_stores/{store}": Operation(
        _TAG, "Deletes a vector store; its files stay", DeletedStore
    ),
    "POST /v1/vector_stores/{store}/search": Operation(
        _TAG, "Passages for a question", SearchResults, SearchStore, {"query": "water pressure"}
    ),
    "GET /v1/vector_stores/{store}/files": Operation(
        _TAG, "The store's files", PageOf[StoreFile], query=AttachedList
    ),
    "POST /v1/vector_stores/{store}/files": Operation(
        _TAG,
        "Puts a file into the store, which indexes it",
        StoreFile,
        AttachFile,
        {"file_id": "file-…"},
    ),
    "GET /v1/vector_stores/{store}/files/{file}": Operation(
        _TAG, "How far the file's indexing is", StoreFile
    ),
    "POST /v1/vector_stores/{store}/files/{file}": Operation(
        _TAG,
        "Gives the file other attributes",
        StoreFile,
        UpdateFile,
        {"attributes": {"year": 2026}},
    ),
    "GET /v1/vector_stores/{store}/files/{file}/content": Operation(
        _TAG, "What the file says", FileText
    ),
    "POST /v1/vector_stores/{store}/reindexing": Operation(
        _TAG,
        "Indexes what another embedding model did anew (extension)",
        VectorStore,
    ),
    "POST /v1/vector_stores/{store}/reindexing/cancel": Operation(
        _TAG, "Ends that, behind the file under way (extension)", VectorStore
    ),
    "POST /v1/vector_stores/{store}/file_batches": Operation(
        _TAG,
        "Puts several files into the store",
        FileBatch,
        CreateFileBatch,
        {"file_ids": ["file-…"]},
    ),
    "GET /v1/vector_stores/{store}/file_batches/{file_batch}": Operation(
        _TAG, "How far a batch of files is", FileBatch
    ),
    "POST /v1/vector_stores/{store}/file_batches/{file_batch}/cancel": Operation(
        _TAG, "Ends it; files that have arrived stay", FileBatch
    ),
    "GET /v1/vector_stores/{store}/file_batches/{file_batch}/files": Operation(
        _TAG, "The batch's files", PageOf[StoreFile], query=AttachedList
    ),
    "DELETE /v1/vector_stores/{store}/files/{file}": Operation(
        _TAG, "Takes the file out of the store", DetachedFile
    ),
}
