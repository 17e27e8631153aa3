"""What each endpoint of the REST API takes and answers. A gateway serves what is here and in
permissions.py, and nothing else (decision 0048)."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from services.gateway.api.anthropic_schema import CountTokensRequest, MessagesRequest
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from services.gateway.api.moderation_schema import ModerationRequest
from services.gateway.api.openapi.answers.batches import Batch
from services.gateway.api.openapi.answers.common import (
    Error,
    Health,
    ListOf,
    Model,
    PageOf,
    Readiness,
    RequestRecord,
    Version,
)
from services.gateway.api.openapi.answers.generation import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from services.gateway.api.openapi.answers.messages import AnthropicError, AnthropicMessage
from services.gateway.api.openapi.answers.moderations import Moderations
from services.gateway.api.openapi.answers.pooled import Classes, Embeddings, Ranking, Scores
from services.gateway.api.openapi.answers.responses import (
    DeletedConversation,
    DeletedResponse,
    InputItem,
    Response,
    StoredConversation,
)
from services.gateway.api.openapi.answers.stores import (
    DeletedFile,
    DeletedStore,
    DetachedFile,
    File,
    FileBatch,
    FileText,
    SearchResults,
    StoreFile,
    Upload,
    UploadPart,
    VectorStore,
)
from services.gateway.api.openapi.answers.tokens import (
    Detokenized,
    InputTokens,
    TokenCount,
    Tokenized,
)
from services.gateway.api.pooled_schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.api.resources.batches import CreateBatch
from services.gateway.api.resources.conversations import (
    AddItems,
    CreateConversation,
    ItemQuery,
    UpdateConversation,
)
from services.gateway.api.resources.file_batches import CreateFileBatch
from services.gateway.api.resources.files import Anchor, FileList, Seconds
from services.gateway.api.resources.pages import PageQuery, StorePage
from services.gateway.api.resources.store_search import SearchStore
from services.gateway.api.resources.uploads import CompleteUpload, CreateUpload
from services.gateway.api.resources.vector_stores import (
    AboutStore,
    AttachedList,
    AttachFile,
    CreateStore,
    UpdateFile,
)
from services.gateway.api.responses_schema import InputTokensRequest, ResponsesRequest
from services.gateway.api.rest.lasting import Resume
from services.gateway.api.rest.messages import MessagesQuery
from services.gateway.api.rest.responses import ItemsQuery, RetrieveQuery
from services.gateway.api.schema import Body
from services.gateway.api.tokens_schema import DetokenizeRequest, TokenizeRequest
from services.gateway.stores.file_record import PURPOSES


class Form(Body):
    """A multipart form, which is read as it arrives."""


class FileForm(Form):
    file: bytes = Field(
        description="PDF, HTML, .docx, .pptx, CSV, JSON, Markdown, text; for batches .jsonl"
    )
    purpose: Literal[PURPOSES]  # type: ignore[valid-type]
    anchor: Anchor | None = Field(None, alias="expires_after[anchor]")
    seconds: Seconds | None = Field(None, alias="expires_after[seconds]")


class PartForm(Form):
    data: bytes


class Raw(NamedTuple):
    """An answer that is no JSON."""

    media: str


class Operation(NamedTuple):
    tag: str
    summary: str
    answer: Any  # a type of openapi/answers, or Raw
    body: type[Body] | None = None
    example: Mapping[str, Any] = {}  # of the body
    query: type[Body] | None = None
    events: Any = None  # what a stream's events are, where `stream` may ask for one
    lasting: bool = False  # takes an Idempotency-Key (lasting.py)
    resumes: bool = False  # takes a Last-Event-ID
    error: Any = Error
    others: Mapping[int, Any] = {}  # answers of other statuses that are no errors


_GENERATION = "Generation"
_RESPONSES = "Responses"
_NUMBERS = "Embeddings, scores, classes, moderations"
_FILES = "Files"
_STORES = "Vector stores"
_BATCHES = "Batches"
_ABOUT = "Models, records, health"

_ASKED = {"messages": [{"role": "user", "content": "What is the pressure of the water?"}]}
_MODEL = {"model": "demo"}

OPERATIONS: dict[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        _GENERATION,
        "Answers a chat",
        ChatCompletion,
        ChatCompletionRequest,
        {**_MODEL, **_ASKED, "max_tokens": 64},
        events=ChatCompletionChunk,
        lasting=True,
        resumes=True,
    ),
    "GET /v1/chat/completions/{completion}": Operation(
        _GENERATION,
        "A chat's answer once more, if it was asked for with an Idempotency-Key",
        ChatCompletion,
        query=Resume,
        events=ChatCompletionChunk,
        resumes=True,
    ),
    "POST /v1/completions": Operation(
        _GENERATION,
        "Goes on with a text, or several",
        Completion,
        CompletionRequest,
        {**_MODEL, "prompt": ["The water", "The oil"]},
        events=CompletionChunk,
        lasting=True,
        resumes=True,
    ),
    "POST /v1/messages": Operation(
        _GENERATION,
        "Answers a conversation, as Anthropic has it",
        AnthropicMessage,
        MessagesRequest,
        {**_MODEL, **_ASKED, "max_tokens": 64},
        query=MessagesQuery,
        events=dict[str, Any],
        error=AnthropicError,
    ),
    "POST /v1/messages/count_tokens": Operation(
        _GENERATION,
        "How many tokens a conversation has, as Anthropic has it",
        TokenCount,
        CountTokensRequest,
        {**_MODEL, **_ASKED},
        query=MessagesQuery,
        error=AnthropicError,
    ),
    "POST /tokenize": Operation(
        _GENERATION,
        "A prompt's tokens, as vLLM has it",
        Tokenized,
        TokenizeRequest,
        {**_MODEL, "prompt": "The water"},
    ),
    "POST /detokenize": Operation(
        _GENERATION,
        "The text of tokens, as vLLM has it",
        Detokenized,
        DetokenizeRequest,
        {**_MODEL, "tokens": [17, 4]},
    ),
    "POST /v1/responses": Operation(
        _RESPONSES,
        "Answers, and stores the answer unless told not to",
        Response,
        ResponsesRequest,
        {**_MODEL, "input": "What is the pressure of the water?"},
        events=dict[str, Any],
        lasting=True,
        resumes=True,
    ),
    "POST /v1/responses/input_tokens": Operation(
        _RESPONSES,
        "How many tokens a response's input has",
        InputTokens,
        InputTokensRequest,
        {**_MODEL, "input": "What is the pressure of the water?"},
    ),
    "GET /v1/responses/{response}": Operation(
        _RESPONSES,
        "A stored response, as far as it is",
        Response,
        query=RetrieveQuery,
        events=dict[str, Any],
        resumes=True,
    ),
    "DELETE /v1/responses/{response}": Operation(
        _RESPONSES, "Deletes a stored response", DeletedResponse
    ),
    "POST /v1/responses/{response}/cancel": Operation(
        _RESPONSES, "Ends a response in the background", Response
    ),
    "GET /v1/responses/{response}/input_items": Operation(
        _RESPONSES, "What a stored response answers", PageOf[InputItem], query=ItemsQuery
    ),
    "POST /v1/conversations": Operation(
        _RESPONSES,
        "Makes a conversation",
        StoredConversation,
        CreateConversation,
        {"items": [{"role": "user", "content": "Hello"}]},
    ),
    "GET /v1/conversations/{conversation}": Operation(
        _RESPONSES, "A conversation", StoredConversation
    ),
    "POST /v1/conversations/{conversation}": Operation(
        _RESPONSES,
        "Changes what is said of it",
        StoredConversation,
        UpdateConversation,
        {"metadata": None},
    ),
    "DELETE /v1/conversations/{conversation}": Operation(
        _RESPONSES, "Deletes a conversation; responses of it stay", DeletedConversation
    ),
    "GET /v1/conversations/{conversation}/items": Operation(
        _RESPONSES, "What was said in it", PageOf[InputItem], query=ItemsQuery
    ),
    "POST /v1/conversations/{conversation}/items": Operation(
        _RESPONSES,
        "Adds to it",
        PageOf[InputItem],
        AddItems,
        {"items": [{"role": "user", "content": "Hello"}]},
        query=ItemQuery,
    ),
    "GET /v1/conversations/{conversation}/items/{item}": Operation(
        _RESPONSES, "One item of it", InputItem, query=ItemQuery
    ),
    "DELETE /v1/conversations/{conversation}/items/{item}": Operation(
        _RESPONSES, "Takes an item out of it", StoredConversation
    ),
    "POST /v1/embeddings": Operation(
        _NUMBERS,
        "Vectors of texts",
        Embeddings,
        EmbeddingsRequest,
        {**_MODEL, "input": ["water", "oil"]},
    ),
    "POST /v1/score": Operation(
        _NUMBERS,
        "How well texts fit each other",
        Scores,
        ScoreRequest,
        {**_MODEL, "text_1": "water", "text_2": ["a pump", "a lamp"]},
    ),
    "POST /v1/rerank": Operation(
        _NUMBERS,
        "Documents by how well they fit a query",
        Ranking,
        RerankRequest,
        {**_MODEL, "query": "water", "documents": ["a pump", "a lamp"]},
    ),
    "POST /v2/rerank": Operation(
        _NUMBERS,
        "The same, by Cohere's newer path",
        Ranking,
        RerankRequest,
        {**_MODEL, "query": "water", "documents": ["a pump", "a lamp"]},
    ),
    "POST /v1/classify": Operation(
        _NUMBERS, "Classes of texts", Classes, ClassifyRequest, {**_MODEL, "input": "water"}
    ),
    "POST /v1/moderations": Operation(
        _NUMBERS,
        "What the operator's rules find in texts",
        Moderations,
        ModerationRequest,
        {"input": ["How do I descale a kettle?"]},
    ),
    "GET /v1/files": Operation(_FILES, "All files", PageOf[File], query=FileList),
    "POST /v1/files": Operation(_FILES, "Uploads a file", File, FileForm),
    "GET /v1/files/{file}": Operation(_FILES, "A file", File),
    "DELETE /v1/files/{file}": Operation(
        _FILES, "Deletes a file, and takes it out of all stores", DeletedFile
    ),
    "POST /v1/uploads": Operation(
        _FILES,
        "Begins a file that comes in parts",
        Upload,
        CreateUpload,
        {"filename": "a.md", "purpose": "assistants", "bytes": 5, "mime_type": "text/markdown"},
    ),
    "POST /v1/uploads/{upload}/parts": Operation(
        _FILES, "Uploads a part of it", UploadPart, PartForm
    ),
    "POST /v1/uploads/{upload}/complete": Operation(
        _FILES,
        "Makes the file of its parts, in this order",
        Upload,
        CompleteUpload,
        {"part_ids": ["part_000645c8a1b2c30f1e2d3c4b5a6978"]},
    ),
    "POST /v1/uploads/{upload}/cancel": Operation(_FILES, "Ends it; its parts are gone", Upload),
    "GET /v1/files/{file}/content": Operation(
        _FILES, "A file's content", Raw("application/octet-stream")
    ),
    "GET /v1/vector_stores": Operation(
        _STORES, "All vector stores", PageOf[VectorStore], query=StorePage
    ),
    "POST /v1/vector_stores": Operation(
        _STORES, "Makes a vector store", VectorStore, CreateStore, {"name": "manuals"}
    ),
    "GET /v1/vector_stores/{store}": Operation(_STORES, "A vector store", VectorStore),
    "POST /v1/vector_stores/{store}": Operation(
        _STORES, "Says something else of a vector store", VectorStore, AboutStore, {"name": "old"}
    ),
    "DELETE /v1/vector_stores/{store}": Operation(
        _STORES, "Deletes a vector store; its files stay", DeletedStore
    ),
    "POST /v1/vector_stores/{store}/search": Operation(
        _STORES, "Passages for a question", SearchResults, SearchStore, {"query": "water pressure"}
    ),
    "GET /v1/vector_stores/{store}/files": Operation(
        _STORES, "The store's files", PageOf[StoreFile], query=AttachedList
    ),
    "POST /v1/vector_stores/{store}/files": Operation(
        _STORES,
        "Puts a file into the store, which indexes it",
        StoreFile,
        AttachFile,
        {"file_id": "file-…"},
    ),
    "GET /v1/vector_stores/{store}/files/{file}": Operation(
        _STORES, "How far the file's indexing is", StoreFile
    ),
    "POST /v1/vector_stores/{store}/files/{file}": Operation(
        _STORES,
        "Gives the file other attributes",
        StoreFile,
        UpdateFile,
        {"attributes": {"year": 2026}},
    ),
    "GET /v1/vector_stores/{store}/files/{file}/content": Operation(
        _STORES, "What the file says", FileText
    ),
    "POST /v1/vector_stores/{store}/reindexing": Operation(
        _STORES,
        "Indexes what another embedding model did anew (extension)",
        VectorStore,
    ),
    "POST /v1/vector_stores/{store}/reindexing/cancel": Operation(
        _STORES, "Ends that, behind the file under way (extension)", VectorStore
    ),
    "POST /v1/vector_stores/{store}/file_batches": Operation(
        _STORES,
        "Puts several files into the store",
        FileBatch,
        CreateFileBatch,
        {"file_ids": ["file-…"]},
    ),
    "GET /v1/vector_stores/{store}/file_batches/{file_batch}": Operation(
        _STORES, "How far a batch of files is", FileBatch
    ),
    "POST /v1/vector_stores/{store}/file_batches/{file_batch}/cancel": Operation(
        _STORES, "Ends it; files that have arrived stay", FileBatch
    ),
    "GET /v1/vector_stores/{store}/file_batches/{file_batch}/files": Operation(
        _STORES, "The batch's files", PageOf[StoreFile], query=AttachedList
    ),
    "DELETE /v1/vector_stores/{store}/files/{file}": Operation(
        _STORES, "Takes the file out of the store", DetachedFile
    ),
    "GET /v1/batches": Operation(_BATCHES, "All batches", PageOf[Batch], query=PageQuery),
    "POST /v1/batches": Operation(
        _BATCHES,
        "Answers a file of requests, line by line",
        Batch,
        CreateBatch,
        {
            "input_file_id": "file-…",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ),
    "GET /v1/batches/{batch}": Operation(_BATCHES, "How far a batch is", Batch),
    "POST /v1/batches/{batch}/cancel": Operation(
        _BATCHES, "Ends a batch; what of it is under way ends as usual", Batch
    ),
    "GET /v1/models": Operation(_ABOUT, "The models that the key may use", ListOf[Model]),
    "GET /v1/models/{model:path}": Operation(_ABOUT, "A model", Model),
    "GET /v1/requests/{request}": Operation(
        _ABOUT, "A request's record: what took how long, and why it went as it did", RequestRecord
    ),
    "GET /healthz": Operation(_ABOUT, "The process lives", Health),
    "GET /readyz": Operation(
        _ABOUT, "Whether a request has a way", Readiness, others={503: Readiness}
    ),
    "GET /health": Operation(
        _ABOUT, "The same, as other servers call it", Readiness, others={503: Readiness}
    ),
    "GET /version": Operation(_ABOUT, "Which version this is", Version),
    "GET /openapi.json": Operation(_ABOUT, "This document", dict[str, Any]),
    "GET /docs": Operation(_ABOUT, "This document as a page", Raw("text/html")),
    "GET /docs/{asset}": Operation(_ABOUT, "What the page is made of", Raw("*/*")),
}
