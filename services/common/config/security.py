"""What the parts of an install show each other."""

from pathlib import Path

from pydantic import BaseModel, Field, SecretStr, field_validator


class SecuritySettings(BaseModel):
    """The general settings of secrets and certificates."""

    ray_token: SecretStr = Field(
        SecretStr(""),
        description="of the cluster that `penstock up --address` joins; without it and "
        "`ray_token_file`: where Ray looks (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, "
        "~/.ray/auth_token)",
    )
    ray_token_file: Path | None = Field(None, description="file with it, instead of `ray_token`")
    reflection: bool | None = Field(
        None,
        description="whether gRPC servers list their methods; unset: only where they are bound to "
        "the loopback",
    )
    internal_secret: SecretStr = Field(
        SecretStr(""),
        description="what services show each other, 16 characters or more, the same for all of an "
        "install; empty: one that data_dir keeps, which does for one host",
    )
    internal_secret_also: SecretStr = Field(
        SecretStr(""),
        description="taken from callers as well, and never sent: the next secret, or the last one, "
        "while it is changed (docs/operations.md)",
    )
    tls_dir: Path | None = Field(
        None,
        description="mutual TLS between services: a folder for each identity (gateway, retrieval, "
        "tokenizer, router, worker, cli) with tls.crt, tls.key, ca.crt; unset: none",
    )

    @field_validator("internal_secret", "internal_secret_also")
    @classmethod
    def _not_to_be_guessed(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < 16:
            raise ValueError("must have at least 16 characters")
        return secret
