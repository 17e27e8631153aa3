"""PENSTOCK_RETRIEVAL__…"""

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section, ServiceSettings


class ServedEmbedder(Section):
    """A model that this installation serves for /v1/embeddings, as stores are embedded by it."""

    dimension: int = Field(ge=1, le=65_536, description="numbers of its vectors")
    query: str = Field("", max_length=1000, description="what it is to read before a question")
    document: str = Field("", max_length=1000, description="and before a passage")
    version: str = Field(
        "",
        max_length=100,
        description="of its weights: say another where others take their place, and stores are "
        "indexed anew",
    )


class RetrievalSettings(ServiceSettings):
    embedding_model: str = Field(
        "", description="folder or hub id of a sentence-transformers model; empty: built-in MiniLM"
    )
    embedders: dict[str, str] = Field(
        {},
        description="further ones, by the name that a vector store chooses one by; JSON, each as "
        "above. Each has a thread, and its memory",
    )
    served_embedders: dict[str, ServedEmbedder] = Field(
        default_factory=dict,
        description="served models that a vector store may choose, too, by their names; JSON. They "
        "embed at the caller's cost",
    )
    query_embedding_timeout_s: float = Field(
        1.0,
        gt=0,
        description="for a question's vector by a served model; without it stores are searched by "
        "the question's words alone",
    )
    replicas: int = Field(
        1, ge=1, description="of the Serve graph; two need a Qdrant server, for both to share"
    )
    chunk_tokens: int = Field(96, gt=8, description="of the embedding model's tokenizer")
    chunk_overlap_tokens: int = Field(16, ge=0)
    timeout_s: float = Field(5.0, gt=0, description="a search; a call to the store has 4/5 of it")
    index_timeout_s: float = Field(
        1800.0, gt=0, description="indexing one document, or embedding one request's texts"
    )
    max_document_chars: int = Field(8_000_000, gt=0, description="of its text")
    max_document_chunks: int = Field(32_768, gt=0)
    max_document_pages: int = Field(5000, gt=0, description="or slides")
    max_unpacked_bytes: int = Field(
        256 * 2**20, gt=0, description="of what is in an archive such as a .docx"
    )
    chunking_cpu_s: int = Field(
        60,
        gt=0,
        description="CPU time for reading one document, and again for cutting it; its process is "
        "killed after",
    )
    chunking_memory_bytes: int = Field(
        2**30, ge=2**28, description="address space of a process that reads and cuts documents"
    )
    cache_bytes: int = Field(
        64 * 2**20, ge=0, description="of kept results of searches in one replica; 0: none is kept"
    )
    cache_max_age_s: float = Field(
        300.0,
        ge=0,
        description="a search is told again for so long, where its store does not say; a write to "
        "the store ends that at once. 0: never",
    )
    cache_similar_at_least: float = Field(
        0.0,
        ge=0,
        le=1,
        description="also for queries whose vectors have this cosine, where the store does not "
        "say; 0: never",
    )
    cache_stale_s: float = Field(
        3600.0,
        ge=0,
        description="while the vector store is away, what a search found before is told for so "
        "long, marked as stale",
    )
    rewriting: Literal["rule", "off"] = Field(
        "rule", description="of a chat's question that leans on the turns before it"
    )
    rewriting_model: str = Field(
        "",
        description="a served model that rewrites them instead, at the caller's cost; the rule is "
        "for what it does not answer in time",
    )
    rewriting_timeout_s: float = Field(1.0, gt=0, description="for that model")
    reranking_model: str = Field(
        "",
        description="a served model that scores texts (/v1/rerank), by which what a search found "
        "is ranked anew, at the caller's cost; what it does not score in time stays as it was",
    )
    reranking_timeout_s: float = Field(1.0, gt=0, description="for that model")
    reranking_passages: int = Field(
        24,
        ge=1,
        le=50,
        description="chunks that it is given of a search, or as many as are asked for",
    )
    top_k: int = Field(
        3,
        ge=1,
        le=50,
        description="chunks fetched for a chat request; more for a model that reads more",
    )

    @model_validator(mode="after")
    def _chunks_go_on(self) -> "RetrievalSettings":
        if self.chunk_overlap_tokens >= self.chunk_tokens:
            raise ValueError(
                f"chunk_overlap_tokens {self.chunk_overlap_tokens} must be below chunk_tokens "
                f"{self.chunk_tokens}"
            )
        return self
