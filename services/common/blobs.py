"""Files' bytes, in a folder or in a bucket: whatever PENSTOCK_BLOBS_URL names.

    <namespace>/<tenant>/<file id>
    <namespace>/store               who it is, so that no two parts of an installation have two

A tenant whose name is no good as a folder's, or is taken, has "=" and the name's SHA-256.
Encryption at rest is the backend's.
"""

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.common.redis import Redis, RedisAway

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
_PLAIN = re.compile(r"(?!store$)[A-Za-z0-9_-]{1,128}")
# A file may take as long as who reads it; what stands still may not. Without a bound of its own a
# request has 30 s. Plain HTTP is used where the endpoint's own URL says so, and nowhere else.
_CLIENT: Any = {
    "connect_timeout": "5s",
    "read_timeout": "30s",
    "timeout": "1day",
    "allow_http": True,
}
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(minutes=1)}


class NoBlobError(Exception):
    """A key has nothing."""


class Blob(NamedTuple):
    key: str
    bytes: int
    written: datetime


class Blobs:
    """Methods raise PenstockError UNAVAILABLE ("blobs_unavailable") while the backend is away, and
    NoBlobError for a key that has nothing.
    """

    def __init__(self, store: ObjectStore, namespace: str, where: str) -> None:
        self._store = store
        self._namespace = namespace
        self.where = where

    @classmethod
    def of(cls, settings: Settings) -> "Blobs":
        """Makes the folder, where it is one. Raises OSError, or ValueError for a URL that cannot
        be used."""
        url = settings.blobs_url
        if not url or urlsplit(url).scheme == "file":
            own = settings.data_dir.resolve() / "blobs"
            path = Path(unquote(urlsplit(url).path)) if url else own
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return cls(LocalStore(path), settings.namespace, str(path))
        try:
            store = from_url(url, client_options=_CLIENT, retry_config=_RETRIES)
        except BaseError as error:
            raise ValueError(f"PENSTOCK_BLOBS_URL: {_first_line(error)}") from None
        return cls(store, settings.namespace, url)

    def key(self, tenant: str, file: str) -> str:
        safe = _PLAIN.fullmatch(tenant)
        owner = tenant if safe else "=" + hashlib.sha256(tenant.encode()).hexdigest()
        return f"{self._namespace}/{owner}/{file}"

    async def put(self, key: str, pieces: AsyncIterable[bytes]) -> None:
        """Nothing is there before all is. Raises what `pieces` raises."""
        failed: list[Exception] = []

        async def noted() -> AsyncIterator[bytes]:
            try:
                async for piece in pieces:
                    yield piece
            except Exception as error:
                failed.append(error)
                raise

        try:
            with _told(of_key=False):
                await obstore.put_async(self._store, key, noted(), max_concurrency=2)
        except Exception as error:
            raise (failed or [error])[0] from None

    async def size(self, key: str) -> int:
        with _told():
            return int((await obstore.head_async(self._store, key))["size"])

    async def read(self, key: str) -> AsyncIterator[bytes]:
        with _told():
            found = await obstore.get_async(self._store, key)
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    async def piece(self, key: str, at: int, size: int) -> bytes:
        with _told():
            return bytes(await obstore.get_range_async(self._store, key, start=at, length=size))

    async def delete(self, key: str) -> None:
        """Does nothing where nothing is."""
        with suppress(NoBlobError), _told():
            await obstore.delete_async(self._store, key)

    async def all(self) -> AsyncIterator[Blob]:
        """The files of this namespace."""
        with _told(of_key=False):
            async for some in obstore.list(self._store, prefix=self._namespace + "/"):
                for one in some:
                    if one["path"].count("/") == 2:
                        yield Blob(one["path"], one["size"], one["last_modified"])

    async def sweep(self, before: datetime) -> None:
        """Takes away what uploads left in a folder whose processes were killed before that: parts
        that are no key's. Of a bucket its lifecycle does (incomplete multipart uploads)."""
        if isinstance(self._store, LocalStore):
            with _told():
                await asyncio.to_thread(self._sweep, before.timestamp())

    def _sweep(self, before_s: float) -> None:
        for part in Path(self.where).glob(f"{self._namespace}/*/*#*"):
            with suppress(FileNotFoundError):  # its upload has ended meanwhile
                if part.stat().st_mtime < before_s:
                    part.unlink()

    async def claim(self, redis: Redis) -> None:
        """Raises ValueError where this is another store than the rest of the installation has:
        what one writes the other would not find."""
        key = f"{self._namespace}:blobs"
        own = await self._own_id()
        try:
            if await redis.set(key, own, nx=True) or str(await redis.get(key)) == own:
                return
        except RedisAway:
            log.warning("whether %s is every part's blob store is not known: no Redis", self.where)
            return
        raise ValueError(
            f"{self.where} is not where the other parts of this installation keep files. On "
            "several hosts set PENSTOCK_BLOBS_URL to a bucket (s3://NAME/PREFIX) or to a folder "
            "that all of them share (file:///PATH); if the files are lost for good, delete the key "
            f"{key} in Redis"
        )

    async def _own_id(self) -> str:
        key, new = f"{self._namespace}/store", secrets.token_hex(16)
        with _told(of_key=False):
            with suppress(AlreadyExistsError):
                await obstore.put_async(self._store, key, new.encode(), mode="create")
                return new
            found = await obstore.get_async(self._store, key)
            return bytes(await found.bytes_async()).decode()


@contextmanager
def _told(*, of_key: bool = True) -> Iterator[None]:
    """Where it is not `of_key` that nothing is found, it is the bucket."""
    try:
        yield
    except FileNotFoundError as error:
        raise (NoBlobError() if of_key else _away(error)) from None
    except OSError as error:  # of a folder
        raise _away(error) from None
    except BaseError as error:
        raise _away(error) from None


def _away(error: Exception) -> PenstockError:
    log.error("the blob store failed: %s", _first_line(error))
    return unavailable(
        "files cannot be reached now: where they are kept does not answer",
        stage="gateway",
        reason="blobs_unavailable",
        retry_after_s=5.0,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
