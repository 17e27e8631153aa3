"""PENSTOCK_TOKENIZER__…, and the rules of the policy."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.config.base import Replicated, Section


class PolicyRule(Section):
    """Text of one of `roles` that matches `pattern` anywhere is refused (docs/policy.md)."""

    name: str = Field(min_length=1, description="told to the client, and a metrics label")
    pattern: str = Field(description="regular expression in RE2's syntax, case-insensitive")
    roles: list[Literal["system", "developer", "user", "assistant", "tool", "document"]] = Field(
        default=["system", "developer", "user", "assistant", "tool"],
        min_length=1,
        description="`document` is retrieved passages; a completion's prompt is `user`",
    )


class TokenizerSettings(Replicated):
    policy_rules: list[PolicyRule] = Field(default_factory=list)
    policy_file: Path | None = Field(None, description="JSON list of further rules")
    threads: int = Field(2, gt=0, description="threads for assembly, tokenization and policy")
    max_requests: int = Field(2048, gt=0, description="requests under way; more are refused")
    pooled_at_once: int = Field(
        16, gt=0, description="inputs of one request that are computed at once, for its embeddings"
    )
    router_patience_s: float = Field(
        20.0, ge=0, description="how long a request waits for a router while none is ready"
    )
