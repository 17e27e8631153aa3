"""PENSTOCK_TOKENIZER__…"""

from pydantic import Field

from services.common.config.base import Replicated


class TokenizerSettings(Replicated):
    threads: int = Field(2, gt=0, description="threads for assembly, tokenization and policy")
    max_requests: int = Field(2048, gt=0, description="requests under way; more are refused")
    pooled_at_once: int = Field(
        16, gt=0, description="inputs of one request that are computed at once, for its embeddings"
    )
    max_pooled_tokens: int = Field(
        300_000, gt=0, description="tokens of all inputs of such a request together"
    )
    router_patience_s: float = Field(
        20.0, ge=0, description="how long a request waits for a router while none is ready"
    )
