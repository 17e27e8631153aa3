"""PENSTOCK_IDENTITY__…"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from services.common.config.base import Section, is_loopback

# Symmetric ones are none of these: who checks a token could make one.
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
RoleName = Literal["admin", "operator", "member", "read-only"]
ClaimName = Annotated[str, Field(min_length=1, max_length=200)]


class IdentitySettings(Section):
    oidc_issuer: str = Field(
        "", description="of tokens, exactly as it calls itself; empty: API keys alone are taken"
    )
    oidc_audience: str = Field("", description="what a token must be for, at the public API")
    oidc_admin_audience: str = Field(
        "", description="the same at the admin listener; empty: that takes no tokens"
    )
    oidc_algorithms: list[Algorithm] = Field(
        ["RS256", "ES256"], min_length=1, description="that a token may be signed with"
    )
    oidc_skew_s: float = Field(
        30.0, ge=0, le=300, description="by which the issuer's clock may differ"
    )
    oidc_longest_s: float = Field(
        30 * 86_400,
        gt=0,
        le=10 * 365 * 86_400,
        description="of a token's time; one that ends later is refused, as revocations are kept so "
        "long",
    )
    oidc_jwks_url: str = Field(
        "", description="the issuer's keys; empty: where its discovery document says"
    )
    oidc_ca: Path | None = Field(
        None, description="PEM file of who signs the issuer's certificate; unset: the system's"
    )
    oidc_tenant_claim: ClaimName = Field(
        "tenant", description="claim with the tenant's name; there must be a record of it"
    )
    oidc_roles_claim: ClaimName = Field(
        "roles", description="claim with a list of roles; a.b: b within a, if there is no a.b"
    )
    oidc_roles: dict[str, RoleName] = Field(
        default_factory=dict,
        description='which of those are ours, as {"ml-team": "member"}; others grant nothing',
    )
    oidc_models_claim: str = Field(
        "", description="claim with the models that may be used; empty: all of the tenant's"
    )
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP; 0 takes a free one; unset: no admin listener"
    )
    admin_host: str = Field(
        "127.0.0.1", description="where it listens; elsewhere than on the loopback with TLS alone"
    )
    admin_tls_cert: Path | None = Field(None, description="PEM file, read anew when it changes")
    admin_tls_key: Path | None = Field(None, description="of `admin_tls_cert`")
    admin_max_connections: int = Field(
        64, gt=0, description="to the admin listener; a peer address has its share"
    )
    admin_failures_per_minute: int = Field(
        10,
        gt=0,
        description="wrong keys and tokens of one peer address, and refusals of one administrator, "
        "that are answered and logged as such; further ones are told to wait, right ones never",
    )
    audit_kept_days: int = Field(
        400, gt=0, description="lines of the audit log; older ones go with the next change"
    )

    max_keys: int = Field(
        1000,
        gt=0,
        description="API keys of one tenant, and of administrators; revoked and expired ones make "
        "room for new ones, those that hold do not",
    )

    @model_validator(mode="after")
    def _tokens_are_for_us(self) -> "IdentitySettings":
        if not self.oidc_issuer:
            return self
        self.checked_url(self.oidc_issuer, "oidc_issuer")
        if self.oidc_jwks_url:
            self.checked_url(self.oidc_jwks_url, "oidc_jwks_url")
        if not self.oidc_audience:
            raise ValueError("oidc_issuer needs oidc_audience: else any of its tokens would do")
        if self.oidc_audience == self.oidc_admin_audience:
            raise ValueError("oidc_admin_audience and oidc_audience must differ")
        return self

    @staticmethod
    def checked_url(url: str, name: str) -> None:
        """Raises ValueError where somebody on the way could change what is read there."""
        parts = urlsplit(url)
        near = parts.scheme == "http" and is_loopback(parts.hostname or "")
        if not parts.hostname or parts.username or not (parts.scheme == "https" or near):
            raise ValueError(f"{name}: {url[:200]!r} is no https:// address")

    @model_validator(mode="after")
    def _the_admin_listener_is_locked(self) -> "IdentitySettings":
        if (self.admin_tls_cert is None) != (self.admin_tls_key is None):
            raise ValueError("admin_tls_cert and admin_tls_key: one needs the other")
        away = self.admin_port is not None and not is_loopback(self.admin_host)
        if away and self.admin_tls_cert is None:
            raise ValueError(f"admin_host {self.admin_host!r} needs admin_tls_cert")
        return self
