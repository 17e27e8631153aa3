"""Redis, Qdrant and the blob store: where they are, and how they are asked."""

from pathlib import Path
from urllib.parse import urlencode, urlsplit

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)


class StoreSettings(BaseModel):
    """The general settings of the stores that several hosts share."""

    model_config = ConfigDict(hide_input_in_errors=True)  # it may be a password

    redis_url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"),
        validation_alias=AliasChoices("PENSTOCK_REDIS_URL", "REDIS_URL"),
        description="redis://, rediss:// or unix:///PATH?db=0; unset, `penstock up` starts a Redis "
        "of its own",
    )
    qdrant_url: str = Field("", validation_alias=AliasChoices("PENSTOCK_QDRANT_URL", "QDRANT_URL"))
    qdrant_api_key: SecretStr = Field(
        SecretStr(""), validation_alias=AliasChoices("PENSTOCK_QDRANT_API_KEY", "QDRANT_API_KEY")
    )
    redis_ca: Path | None = Field(
        None, description="PEM file of who signs the server's certificate, for rediss://"
    )
    redis_cert: Path | None = Field(None, description="shown to a server that asks for one")
    redis_key: Path | None = Field(None, description="of `redis_cert`")
    qdrant_ca: Path | None = Field(None, description="as `redis_ca`, for https://")
    blobs_url: str = Field(
        "",
        description="where uploaded files are kept: s3://BUCKET/PREFIX (its region, endpoint and "
        "credentials as AWS_… variables), gs://, az://, or file:///PATH; empty: a folder in "
        "`data_dir`, which does for one host",
    )
    namespace: str = Field(
        "penstock",
        pattern=r"^[\w.-]+$",  # with {1,100} it would take 10 MB of each process
        max_length=100,
        description="what one Penstock's things are called by: all Redis keys, Qdrant collections "
        "and applications of Ray Serve begin with it",
    )

    @model_validator(mode="after")
    def _tls_of_redis(self) -> "StoreSettings":
        if (self.redis_cert is None) != (self.redis_key is None):
            raise ValueError("redis_cert and redis_key: one needs the other")
        files = (self.redis_ca, self.redis_cert)
        if any(files) and urlsplit(self.redis_url.get_secret_value()).scheme != "rediss":
            raise ValueError("redis_ca, redis_cert: redis_url must be rediss:// to use them")
        if self.qdrant_ca and urlsplit(self.qdrant_url).scheme != "https":
            raise ValueError("qdrant_ca: qdrant_url must be https:// to use it")
        return self

    @field_validator("blobs_url")
    @classmethod
    def _of_blobs(cls, url: str) -> str:
        if url and not _is_blob_url(url):
            raise ValueError("must be s3://BUCKET/PREFIX, gs://, az:// or file:///PATH")
        return url

    @field_validator("redis_url")
    @classmethod
    def _of_redis(cls, secret: SecretStr) -> SecretStr:
        url = secret.get_secret_value()
        if not _is_url(url, "redis", "rediss") and not _is_socket(url):
            # Not what it is: its password is not shown.
            raise ValueError("must be redis://HOST:PORT/0, rediss://, or unix:///PATH?db=0")
        return secret

    @field_validator("qdrant_url")
    @classmethod
    def _of_qdrant(cls, url: str) -> str:
        if url and not _is_url(url, "http", "https"):
            raise ValueError("must be http://HOST:PORT, or https://")
        return url

    @property
    def redis_dsn(self) -> str:
        """`redis_url` with the files of its TLS, as redis-py reads them. Holds the password."""
        files = {
            "ssl_ca_certs": self.redis_ca,
            "ssl_certfile": self.redis_cert,
            "ssl_keyfile": self.redis_key,
        }
        given = urlencode({name: path for name, path in files.items() if path is not None})
        url = self.redis_url.get_secret_value()
        return f"{url}{'&' if '?' in url else '?'}{given}" if given else url


def _is_url(text: str, *schemes: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in schemes and bool(url.hostname) and url.port != 0
    except ValueError:  # of its port
        return False


def _is_blob_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        if url.scheme == "file":
            return not url.netloc and len(url.path) > 1
        return url.scheme in ("s3", "gs", "az") and bool(url.hostname) and url.username is None
    except ValueError:
        return False


def _is_socket(text: str) -> bool:
    try:
        url = urlsplit(text)
        # A path only: each of the processes has its own working directory.
        return url.scheme == "unix" and not url.hostname and len(url.path) > 1
    except ValueError:
        return False
