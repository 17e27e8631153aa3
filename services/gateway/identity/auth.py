"""Who asks: from the bearer key alone. No other header or field names a tenant or a priority."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

import grpc

from protos import common_pb2
from services.common.config import GatewaySettings
from services.common.errors import PenstockError, unavailable
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.identity.keys import KEY_PATTERN, KeyRecord, KeyStore, key_hash

T = TypeVar("T")

_CACHED_KEYS = 10_000
_RETRY_REDIS_S = 1.0  # while it is away, requests do not each wait for its timeout

_PRIORITIES = {
    "high": common_pb2.PRIORITY_HIGH,
    "normal": common_pb2.PRIORITY_NORMAL,
    "low": common_pb2.PRIORITY_LOW,
}


@dataclass(frozen=True)
class Identity:
    """An authenticated caller."""

    key_id: str
    tenant: str
    priority: str
    weight: float
    models: frozenset[str] | None  # None: all
    expires: int | None = None  # Unix seconds; None: never

    def caller(self, request_id: str) -> common_pb2.Caller:
        return common_pb2.Caller(
            request_id=request_id,
            tenant=self.tenant,
            priority=_PRIORITIES[self.priority],
            weight=self.weight,
        )

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    def authorize(self, model: str) -> None:
        """Raises PERMISSION_DENIED when the key does not cover `model`."""
        if self.models is not None and model not in self.models:
            raise PenstockError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"this API key may not use the model '{model}'",
                stage="gateway",
                param="model",
                reason="model_not_allowed",
            )


class Authenticator:
    """Turns an Authorization header into an Identity.

    A looked-up key is trusted for `key_cache_s`. A revoked one is dead as soon as that is told
    (revocations.py), and stays so: it is remembered as revoked, whether Redis answers or not. While
    Redis is away, a key known before holds for `key_stale_s` since its last look-up; an unknown one
    cannot be told from a wrong one: 503.
    """

    def __init__(self, keys: KeyStore, settings: GatewaySettings) -> None:
        self._keys = keys
        self._settings = settings
        # Both by key hash, the latest last; no key is in both.
        self._known: OrderedDict[str, tuple[float, Identity]] = OrderedDict()
        self._revoked: OrderedDict[str, None] = OrderedDict()
        self._rechecks = 0
        self._redis_away_until = 0.0

    @property
    def knows_keys(self) -> bool:
        """Whether anybody could be let in while Redis is away."""
        now, stale_s = time.monotonic(), self._settings.key_stale_s
        known = self._known.values()
        return any(now - at < stale_s and not identity.expired for at, identity in known)

    def revoked(self, hashed: str) -> None:
        """The key with this hash is worthless from now on."""
        self._known.pop(hashed, None)
        _keep(self._revoked, hashed, None)

    async def recheck(self) -> None:
        """Looks which keys in use were revoked, after news of it may have been missed."""
        self._rechecks += 1
        for hashed in await self._keys.revoked_of(list(self._known)):
            self.revoked(hashed)

    async def identify(self, authorization: str | None) -> Identity:
        """Raises UNAUTHENTICATED ("invalid_api_key") or UNAVAILABLE ("keys_unavailable")."""
        identity = await self._identity_of(key_hash(_bearer(authorization)))
        if identity.expired:
            raise _refused("expired", "This API key has expired.")
        return identity

    async def _identity_of(self, hashed: str) -> Identity:
        """Whoever the key with this hash stands for, expired or not."""
        self._refuse_revoked(hashed)
        now = time.monotonic()
        looked_up, identity = self._known.get(hashed, (0.0, None))
        if identity is not None and now - looked_up < self._settings.key_cache_s:
            return identity
        try:
            record = await self._look_up(hashed, now)
        except RedisAway:
            self._refuse_revoked(hashed)  # told while it was looked up
            if identity is not None and now - looked_up < self._settings.key_stale_s:
                return identity
            metrics.auth_failures.labels("keys_unavailable").inc()
            raise unavailable(
                "API keys cannot be checked now: Redis is away",
                stage="gateway",
                reason="keys_unavailable",
            ) from None
        if record is None:
            self._known.pop(hashed, None)
            raise _refused("wrong", "Incorrect API key provided.")
        if record.revoked is not None:
            self.revoked(hashed)
        self._refuse_revoked(hashed)
        identity = _identity(record)
        _keep(self._known, hashed, (now, identity))
        return identity

    def _refuse_revoked(self, hashed: str) -> None:
        if hashed in self._revoked:
            raise _refused("revoked", "Incorrect API key provided.")

    async def _look_up(self, hashed: str, now: float) -> KeyRecord | None:
        if now < self._redis_away_until:
            raise ConnectionError("Redis did not answer a moment ago")
        try:
            while True:
                rechecks = self._rechecks
                record = await self._keys.find(hashed)
                if rechecks == self._rechecks:  # else it may be older than what was checked
                    return record
        except RedisAway:
            self._redis_away_until = time.monotonic() + _RETRY_REDIS_S
            raise


def _keep(entries: OrderedDict[str, T], hashed: str, value: T) -> None:
    """As the latest; the oldest goes when there are too many."""
    entries[hashed] = value
    entries.move_to_end(hashed)
    if len(entries) > _CACHED_KEYS:
        entries.popitem(last=False)


def _identity(record: KeyRecord) -> Identity:
    return Identity(
        key_id=record.id,
        tenant=record.tenant,
        priority=record.priority,
        weight=record.weight,
        models=None if record.models is None else frozenset(record.models),
        expires=record.expires,
    )


def _bearer(authorization: str | None) -> str:
    """The key in an Authorization header; nothing malformed ever reaches Redis."""
    if not authorization:
        raise _refused(
            "missing",
            "You didn't provide an API key. Send it as `Authorization: Bearer psk-...`.",
        )
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not KEY_PATTERN.fullmatch(key.strip()):
        raise _refused("malformed", "Incorrect API key provided.")
    return key.strip()


def _refused(why: str, message: str) -> PenstockError:
    metrics.auth_failures.labels(why).inc()
    return PenstockError(
        grpc.StatusCode.UNAUTHENTICATED, message, stage="gateway", reason="invalid_api_key"
    )
