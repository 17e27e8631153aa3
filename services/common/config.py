"""Settings of all services, from the environment (`PENSTOCK_<NAME>`, `PENSTOCK_<SECTION>__<NAME>`).

One place, so that an operator reads every knob with its unit and default here. Unknown values of a
known name are refused at start. Lists and models are JSON.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Section(BaseModel):
    """A group of settings; a misspelt name in it is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid")


class ModelSpec(Section):
    """A served model: the name that requests use, and where its checkpoint lies."""

    name: str
    path: str = Field(description="folder of a Hugging Face checkpoint, or a hub id")


class GatewaySettings(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one")
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="0 takes a free one; unset: the port after `port`, if set"
    )
    body_limit_bytes: int = Field(
        8 * 2**20, gt=0, description="of an HTTP body, and of a gRPC message"
    )
    max_prompt_tokens: int = Field(
        131_072, gt=0, description="of a prompt sent as token ids; more are refused unseen"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="whole request, queueing included")
    key_cache_s: float = Field(
        30.0, ge=0, description="how long a looked-up API key is trusted without asking Redis"
    )
    key_stale_s: float = Field(
        600.0, ge=0, description="while Redis is away, a key known before and not revoked holds"
    )
    records_kept: int = Field(1000, gt=0, description="request records in memory")
    max_requests: int = Field(
        2048, gt=0, description="at once; a tenant has at most as many as it leaves free"
    )
    max_held_bytes: int = Field(
        256 * 2**20, gt=0, description="of bodies and large answers in memory, shared likewise"
    )
    max_connections: int = Field(
        4096, gt=0, description="HTTP, and as many gRPC; a peer address has its share likewise"
    )
    head_timeout_s: float = Field(10.0, gt=0, description="for a request's line and headers")
    body_grace_s: float = Field(10.0, gt=0, description="for a body, and longer at its rate:")
    body_min_bytes_per_s: int = Field(16 * 1024, gt=0, description="from a client that sends")
    write_timeout_s: float = Field(
        30.0, gt=0, description="a client that reads nothing for this long is cut off"
    )
    max_files: int = Field(1000, gt=0, description="files, and vector stores, of one tenant")
    max_file_bytes_per_tenant: int = Field(
        64 * 2**20, gt=0, description="of all its files together, which Redis holds"
    )


class RetrievalSettings(Section):
    embedding_model: str = Field(
        "", description="folder or hub id of a sentence-transformers model; empty: built-in MiniLM"
    )
    chunk_tokens: int = Field(96, gt=8, description="of the embedding model's tokenizer")
    chunk_overlap_tokens: int = Field(16, ge=0)
    timeout_s: float = Field(5.0, gt=0, description="a search; a call to the store has 4/5 of it")
    index_timeout_s: float = Field(
        300.0, gt=0, description="indexing one document, or embedding one request's texts"
    )
    max_document_chars: int = Field(1_000_000, gt=0)
    max_document_chunks: int = Field(8192, gt=0)
    top_k: int = Field(4, ge=1, le=50, description="passages fetched for a chat request")


class PolicyRule(Section):
    """Text of one of `roles` that matches `pattern` anywhere is refused (docs/policy.md)."""

    name: str = Field(min_length=1, description="told to the client, and a metrics label")
    pattern: str = Field(description="regular expression in RE2's syntax, case-insensitive")
    roles: list[Literal["system", "developer", "user", "assistant", "tool", "document"]] = Field(
        default=["system", "developer", "user", "assistant", "tool"],
        min_length=1,
        description="`document` is retrieved passages; a completion's prompt is `user`",
    )


class TokenizerSettings(Section):
    policy_rules: list[PolicyRule] = Field(default_factory=list)
    policy_file: Path | None = Field(None, description="JSON list of further rules")
    threads: int = Field(2, gt=0, description="threads for assembly, tokenization and policy")
    max_requests: int = Field(2048, gt=0, description="requests under way; more are refused")
    router_patience_s: float = Field(
        5.0, ge=0, description="how long a request waits for a router while none is ready"
    )


class RouterSettings(Section):
    queue_limit: int = Field(256, ge=0, description="waiting requests over all tenants")
    queue_timeout_s: float = Field(60.0, gt=0, description="longest wait for admission")
    slot_lease_s: float = Field(15.0, gt=1, description="a dead router's slots return after this")
    ageing_s: float = Field(10.0, gt=0, description="waiting this long lifts one priority lane")
    admission_without_redis: Literal["open", "closed"] = "open"
    split: Literal["auto", "always", "never"] = "auto"
    split_min_tokens: int = Field(
        128, ge=0, description="auto: uncached prompt tokens below which splitting is not weighed"
    )
    max_failovers: int = Field(3, ge=0, description="per request")
    stall_timeout_s: float = Field(30.0, gt=0, description="a worker with work must step within")
    worker_patience_s: float = Field(
        10.0, ge=0, description="how long a request waits while no worker of its model is ready"
    )


class WorkerSettings(Section):
    role: Literal["prefill", "decode", "both"] = "both"
    model: str = Field("", description="name of the served model; empty: the first")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    block_size: int = Field(16, gt=0, description="tokens per KV block")
    kv_cache_bytes: int = Field(256 * 2**20, gt=0)
    max_batched_tokens: int = Field(512, gt=0, description="token budget of one engine step")
    max_running: int = Field(32, gt=0, description="sequences in one engine step")
    max_model_len: int = Field(0, ge=0, description="tokens; 0: the checkpoint's own limit")
    threads: int = Field(1, gt=0, description="CPU threads of the engine process")
    transfer: Literal["auto", "grpc"] = Field(
        "auto", description="KV transport: shared memory when both workers share a host, or gRPC"
    )


class Settings(BaseSettings):
    """Everything that a Penstock process can be told."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="ignore", populate_by_name=True
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("PENSTOCK_REDIS_URL", "REDIS_URL"),
    )
    qdrant_url: str = Field("", validation_alias=AliasChoices("PENSTOCK_QDRANT_URL", "QDRANT_URL"))
    qdrant_api_key: SecretStr = Field(
        SecretStr(""), validation_alias=AliasChoices("PENSTOCK_QDRANT_API_KEY", "QDRANT_API_KEY")
    )
    namespace: str = Field("penstock", description="prefix of every Redis key")
    data_dir: Path = Field(
        Path(".penstock"), description="local state: embedded Redis and Qdrant, secrets"
    )
    internal_secret: SecretStr = Field(
        SecretStr(""),
        description="what services show each other, 16 characters or more, the same for all of an "
        "install; empty: one that data_dir keeps, which does for one host",
    )
    bind_host: str = Field("127.0.0.1", description="where the services' gRPC servers listen")
    advertise_host: str = Field("", description="how peers reach this host; empty: bind_host")
    lease_s: float = Field(3.0, gt=0.2, description="a silent replica leaves the registry after")
    drain_grace_s: float = Field(20.0, ge=0, description="running requests may finish this long")
    log_level: str = "INFO"
    log_prompts: bool = Field(False, description="put prompt text into logs and spans")
    models: list[ModelSpec] = Field(default_factory=list)

    gateway: GatewaySettings = GatewaySettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    router: RouterSettings = RouterSettings()
    worker: WorkerSettings = WorkerSettings()

    @field_validator("internal_secret")
    @classmethod
    def _not_to_be_guessed(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < 16:
            raise ValueError("must have at least 16 characters")
        return secret

    @property
    def peer_host(self) -> str:
        """The host name that this process registers under."""
        if self.advertise_host:
            return self.advertise_host
        if self.bind_host in ("0.0.0.0", "::"):
            return socket.gethostbyname(socket.gethostname())
        return self.bind_host


_OF_COMMANDS = {"API_KEY"}  # read by the command line's clients


def unknown_names(environment: Mapping[str, str]) -> list[str]:
    """`PENSTOCK_…` variables that no setting has, most likely misspelt. For a warning, not an
    error: Kubernetes sets variables of its own that are named after services.
    """
    known = {name.upper() for name in Settings.model_fields} | _OF_COMMANDS
    names = (name for name in environment if name.startswith("PENSTOCK_"))
    return sorted(n for n in names if n.removeprefix("PENSTOCK_").split("__")[0] not in known)
