"""The way to Qdrant, a server or inside this process: threads, deadlines, and the one collection.

The client blocks, so it is called from threads: one for the local store, which is not made for
more, eight for a server. Tenants have them in turn. Writes may hold half of them (of one: one write
at a time), so a search waits behind no more than one batch of a document. Each call has a deadline;
a store that is away or slow is UNAVAILABLE, and found again by a later call.
"""

import asyncio
import logging
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import httpx
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from services.common.config import Settings
from services.common.errors import PenstockError, unavailable
from services.common.fair_threads import FairThreads
from services.common.secrets import private_folder
from services.common.shares import Shares
from services.retrieval import metrics
from services.retrieval.local_filters import use_plain_comparisons

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 256  # one tenant alone has half of them
_SERVER_THREADS = 8
_SHARE_OF_TIMEOUT = 0.8  # so that a search with a slow store can still say so in its own time

T = TypeVar("T")


class StoreUnusableError(Exception):
    """As this service is set up, it cannot use the store. The text is the operator's, and says what
    to change; `reason` is a word for programs.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class Qdrant:
    """Runs functions of a client whose collection `name` exists and was made by this `model`."""

    def __init__(self, settings: Settings, model: str, fingerprint: str, dimension: int) -> None:
        self.name = f"{settings.namespace}-chunks"
        self._url = settings.qdrant_url
        self._api_key = settings.qdrant_api_key.get_secret_value() or None
        self._ca = settings.qdrant_ca
        self._folder = settings.data_dir / "qdrant"
        self._timeout_s = settings.retrieval.timeout_s * _SHARE_OF_TIMEOUT
        self._made_by = {"embedding_model": model, "fingerprint": fingerprint}
        self._dimension = dimension
        threads = _SERVER_THREADS if self._url else 1
        self._threads = FairThreads(threads, "qdrant")
        self._write_places = asyncio.Semaphore(max(1, threads // 2))
        self._client: QdrantClient | None = None
        self._opened = False
        self._opening = threading.Lock()
        self._waiting = Shares(MAX_WAITING_CALLS)  # and running, shared between the tenants

    @property
    def kind(self) -> str:
        return "server" if self._url else "local"

    async def open(self) -> None:
        """Makes the collection, or checks that the one there was made by the same model.

        A server that is away is not an error yet: each call tries again. Raises StoreUnusableError
        (another model's vectors, a local store in use by another process).
        """
        try:
            await self._run("open", "", lambda client: None, lambda: None)
        except PenstockError as error:
            log.warning("the vector store is away, the service starts without it: %s", error)

    async def close(self) -> None:
        def close() -> None:
            if self._client is not None:
                self._client.close()

        await self._threads.run("", close)
        self._threads.stop()

    async def run(
        self,
        operation: str,
        tenant: str,
        work: Callable[[QdrantClient], T],
        ended: Callable[[], None] = lambda: None,
    ) -> T:
        """Runs `work` in a store thread, within the deadline. Raises PenstockError.

        `ended` is called once `work` has really ended: a thread goes on past its deadline.
        """
        try:
            return await self._run(operation, tenant, work, ended)
        except StoreUnusableError as unusable:
            log.error("%s", unusable)
            metrics.STORE_FAILURES.labels(operation, unusable.reason).inc()
            raise unavailable(
                "the vector store cannot be used now", stage="retrieval", reason=unusable.reason
            ) from None

    async def write(self, operation: str, tenant: str, work: Callable[[QdrantClient], T]) -> T:
        """As `run`, in its turn among the writes; `work` should be one batch."""
        await self._write_places.acquire()
        return await self.run(operation, tenant, work, self._write_places.release)

    async def _run(
        self,
        operation: str,
        tenant: str,
        work: Callable[[QdrantClient], T],
        ended: Callable[[], None],
    ) -> T:
        if not self._waiting.take(tenant):
            ended()
            raise PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the vector store has too much waiting",
                stage="retrieval",
                reason="queue_full",
                retry_after_s=1.0,
            )
        began = time.monotonic()

        def over() -> None:
            self._waiting.give_back(tenant)
            ended()

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._threads.run(tenant, lambda: self._attempt(work), over)
        except TimeoutError:
            metrics.STORE_FAILURES.labels(operation, "store_slow").inc()
            raise unavailable(
                f"the vector store did not answer within {self._timeout_s:g} s",
                stage="retrieval",
                reason="store_slow",
            ) from None
        except PenstockError as error:
            metrics.STORE_FAILURES.labels(operation, error.reason).inc()
            raise
        finally:
            metrics.STORE_SECONDS.labels(operation).observe(time.monotonic() - began)

    def _attempt(self, work: Callable[[QdrantClient], T]) -> T:
        """In a store thread."""
        try:
            return work(self._ready())
        except (ResponseHandlingException, httpx.HTTPError, sqlite3.Error, OSError) as error:
            log.warning("the vector store failed: %s", type(error).__name__)
            raise unavailable(
                "the vector store cannot be reached", stage="retrieval", reason="store_away"
            ) from error
        except UnexpectedResponse as error:
            self._opened = False  # the collection may be gone: look again at the next call
            log.warning("the vector store answered %s", error.status_code)
            raise unavailable(
                f"the vector store answered with status {error.status_code}",
                stage="retrieval",
                reason="store_failed",
            ) from error

    def _ready(self) -> QdrantClient:
        """The client, with the collection made and checked."""
        with self._opening:
            if self._client is None:
                self._client = self._connect()
            if not self._opened:
                if not self._client.collection_exists(self.name):
                    self._create(self._client)
                self._refuse_another_model(self._client)
                if not self._url:
                    _commit_without_waiting(self._client, self.name)
                self._opened = True
            return self._client

    def _connect(self) -> QdrantClient:
        if self._url:
            timeout = max(1, round(self._timeout_s))
            return QdrantClient(
                url=self._url,
                api_key=self._api_key,
                timeout=timeout,
                check_compatibility=False,
                verify=ssl.create_default_context(cafile=self._ca) if self._ca else True,
            )
        use_plain_comparisons()
        private_folder(self._folder.parent)
        private_folder(self._folder)
        try:
            return QdrantClient(path=str(self._folder))
        except RuntimeError as error:
            raise StoreUnusableError(
                f"the local vector store in {self._folder} is in use by another process: stop it, "
                "set another PENSTOCK_DATA_DIR, or run a Qdrant server and set QDRANT_URL",
                "store_locked",
            ) from error

    def _create(self, client: QdrantClient) -> None:
        vectors = models.VectorParams(size=self._dimension, distance=models.Distance.COSINE)
        # One graph per tenant instead of a global one: every search names its tenant.
        graph = models.HnswConfigDiff(m=0, payload_m=16)
        try:
            client.create_collection(
                self.name, vectors_config=vectors, hnsw_config=graph, metadata=self._made_by
            )
        except UnexpectedResponse as error:
            if error.status_code != 409:  # another replica was first
                raise
        if not self._url:
            return  # payload indexes are a server's
        tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
        client.create_payload_index(self.name, "tenant", tenant)
        client.create_payload_index(self.name, "collection", models.PayloadSchemaType.KEYWORD)
        client.create_payload_index(self.name, "source_id", models.PayloadSchemaType.KEYWORD)
        client.create_payload_index(self.name, "revision", models.PayloadSchemaType.INTEGER)

    def _refuse_another_model(self, client: QdrantClient) -> None:
        config = client.get_collection(self.name).config
        found = config.metadata or {}
        if found.get("fingerprint") == self._made_by["fingerprint"]:
            return
        theirs = found.get("embedding_model", "an unknown model (Qdrant 1.16 or newer is needed)")
        raise StoreUnusableError(
            f"the vectors in {self.name} were made by {theirs}, this service runs "
            f"{self._made_by['embedding_model']}: their scores would mean nothing. Set "
            "PENSTOCK_RETRIEVAL__EMBEDDING_MODEL back, or choose another PENSTOCK_NAMESPACE and "
            "index the documents again",
            "embedding_model_changed",
        )


def _commit_without_waiting(client: QdrantClient, name: str) -> None:
    """The local store commits each point by itself, and waits for the disk each time: 9 ms a point.
    With a write-ahead log it does not have to, at 0.3 ms. What a killed process wrote is there; of
    a machine that lost its power the last moments may be missing.
    """
    local: Any = client._client
    database = local.collections[name].storage.storage
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
