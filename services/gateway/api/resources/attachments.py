"""Files on their way into a vector store: which, what is said of them, how they are cut."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.gateway.api.generation_schema import Name
from services.gateway.api.resources.attributes import Attributes
from services.gateway.api.schema import Body, bad_value, missing, refuse
from services.gateway.parts import Gateway
from services.gateway.stores.vector_stores.store_files import NO_ATTRIBUTES, Chunking
from services.gateway.stores.vector_stores.vector_stores import Attach

MAX_FILES = 2000  # in one call


class StaticChunking(Body):
    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _overlap(self) -> "StaticChunking":
        if self.chunk_overlap_tokens > self.max_chunk_size_tokens // 2:
            raise refuse("chunk_overlap_tokens", "at most half of 'max_chunk_size_tokens'")
        return self


class ChunkingStrategy(Body):
    type: Literal["auto", "static"]
    static: StaticChunking | None = None

    @model_validator(mode="after")
    def _of_its_type(self) -> "ChunkingStrategy":
        if self.type == "static" and self.static is None:
            raise missing("static")
        if self.type == "auto" and self.static is not None:
            raise refuse("static", "goes with the type 'static'")
        return self


class FileAbout(Body):
    """A file, as it is to be in a store."""

    file_id: Name
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


def attach(gateway: Gateway, one: FileAbout, at: str = "", model: str = "") -> Attach:
    """`at`: where the request has it, with a dot. Raises INVALID_ARGUMENT."""
    chunking = chunking_of(gateway, one.chunking_strategy, at, model)
    return Attach(one.file_id, f"{at}file_id", one.attributes or NO_ATTRIBUTES, chunking)


def each_once(
    ids: Iterable[str],
    attributes: Attributes | None = None,
    chunking: Chunking | None = None,
) -> list[Attach]:
    """Of files that are told by their ids alone."""
    told: dict[str, Attach] = {}
    for index, id in enumerate(ids):
        one = Attach(id, f"file_ids[{index}]", attributes or NO_ATTRIBUTES, chunking)
        told.setdefault(id, one)
    return list(told.values())


def chunking_of(
    gateway: Gateway, strategy: ChunkingStrategy | None, at: str = "", model: str = ""
) -> Chunking | None:
    """None: retrieval's own. `model`: the store's, by its name; empty: the installation's. Raises
    INVALID_ARGUMENT for chunks that the embedding model could not read whole."""
    if strategy is None or strategy.static is None:
        return None
    size, overlap = strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens
    most = gateway.retrieval.max_chunk_tokens(model)
    if most and size > most:
        model = model or gateway.retrieval.embedding_model
        field = f"{at}chunking_strategy.static.max_chunk_size_tokens"
        raise bad_value(field, f"at most {most}: the embedding model {model!r} reads no more")
    return Chunking(max_tokens=size, overlap_tokens=overlap)
