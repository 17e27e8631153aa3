"""PENSTOCK_TOKENIZER__…"""

from typing import Literal

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
    tool_parsers: dict[str, Literal["demo", "hermes", "mistral", "pythonic", "llama3"]] = Field(
        {}, description="how models write calls, by their names; others: as their templates say"
    )
    reasoning_parsers: dict[str, Literal["think", "mistral", "none"]] = Field(
        {},
        description="between which marks models reason, by their names: <think>, [THINK] or none; "
        "others: as their tokens say",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: what a request does not say of sampling is as the checkpoint's "
        "generation_config.json says; none: as OpenAI's defaults are",
    )
    router_patience_s: float = Field(
        20.0, ge=0, description="how long a request waits for a router while none is ready"
    )
    warm_tokens_per_minute: int = Field(
        0,
        ge=0,
        description="of each tenant: tokens of its chats' next prompts, as far as those are known, "
        "that are computed ahead on workers with nothing else to do; 0: none (decision 0059)",
    )
    warm_least_hits: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of the prompts computed ahead whose next turns must come, or a tenant's "
        "of that model are left alone, but for one of sixteen",
    )
