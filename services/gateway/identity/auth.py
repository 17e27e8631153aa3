"""Who asks: from the bearer key or token alone. No other header or field names a tenant or a
priority."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

import grpc
from pydantic import ValidationError

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, unavailable
from services.common.redis import RedisAway
from services.gateway import metrics
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.known import Known
from services.gateway.identity.news import Heard
from services.gateway.identity.principal import IssuerAway, Principal, Refused

_MOST_REVOKED = 10_000  # that are remembered; Redis knows all
_LOOKS = 2  # of one request; the last one began after the news that the one before it met
_RETRY_REDIS_S = 1.0  # while it is away, requests do not each wait for its timeout


class Verifier(Protocol):
    """Knows one kind of thing that callers show."""

    def takes(self, shown: str) -> bool:
        """Whether it has this kind's form. Costs nothing, asks nobody."""

    async def verify(self, shown: str) -> Principal:
        """Whoever it stands for, expired or not. Raises Refused, one of RedisAway, IssuerAway."""


class Authenticator:
    """Turns an Authorization header into a Principal: the first verifier that takes what is shown
    says whose it is.

    A verified one is trusted for `key_cache_s`. A revoked one is dead as soon as that is told
    (news.py), and stays so: it is remembered as revoked, whether Redis answers or not. While
    Redis is away, one known before holds for `key_stale_s` since it was verified; an unknown one
    cannot be told from a wrong one: 503.
    """

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        keys: KeyStore,
        settings: GatewaySettings,
        used: Callable[[str], None] = lambda user: None,
    ) -> None:
        """`used` is told of each user who is let in."""
        self._verifiers = verifiers
        self._keys = keys
        self._settings = settings
        self._used = used
        # By the hash of what is shown; nothing is in both.
        self._known = Known()
        self._revoked: OrderedDict[str, None] = OrderedDict()  # the latest last
        self._looks: dict[str, asyncio.Task[Principal]] = {}  # under way, begun since the last news
        self._heard = Heard()
        self._trusted_since = float("-inf")
        self._redis_away_until = 0.0

    @property
    def knows_keys(self) -> bool:
        """Whether anybody could be let in while Redis is away."""
        now, stale_s = time.monotonic(), self._settings.key_stale_s
        fresh = takewhile(lambda one: now - one[0] < stale_s, self._known.latest())
        return any(not principal.expired for _, principal in fresh)

    def told(self, message: str) -> None:
        """One of the news."""
        what, _, whose = message.partition(" ")
        self._looks.clear()  # who comes from now on is told by none that began before
        if what == "tenant":
            self._heard.note(_tenant(whose))
            self._known.forget_tenant(whose)
        elif what in ("key", "revoked"):
            self._heard.note(_key(whose))
            self._known.forget(whose)
        if what == "revoked":
            self._end(whose)

    async def recheck(self) -> None:
        """After news may have been missed: those known are verified anew when they come next, and
        keys among them that were revoked are dead at once."""
        self._looks.clear()
        self._heard.note_all()
        self._trusted_since = time.monotonic()
        for hashed in await self._keys.revoked_of(self._known.hashes()):
            self._end(hashed)

    async def identify(self, authorization: str | None) -> Principal:
        """Raises UNAUTHENTICATED ("invalid_api_key") or UNAVAILABLE ("keys_unavailable")."""
        try:
            principal = await self._principal_of(_bearer(authorization))
            if principal.expired:
                raise Refused("expired", "This API key or token has expired.")
        except Refused as refused:
            metrics.auth_failures.labels(refused.why).inc()
            raise PenstockError(
                grpc.StatusCode.UNAUTHENTICATED,
                str(refused),
                stage="gateway",
                reason="invalid_api_key",
            ) from None
        self._used(principal.user)
        return principal

    async def _principal_of(self, shown: str) -> Principal:
        """Whoever it stands for, expired or not."""
        verifier = next((one for one in self._verifiers if one.takes(shown)), None)
        if verifier is None:  # nothing malformed ever reaches Redis
            raise Refused("malformed", "Incorrect API key provided.")
        hashed = hashlib.sha256(shown.encode()).hexdigest()
        self._refuse_revoked(hashed)
        now = time.monotonic()
        verified, principal = self._known.get(hashed) or (0.0, None)
        trusted = verified >= self._trusted_since and now - verified < self._settings.key_cache_s
        if principal is not None and trusted:
            return principal
        try:
            principal = await self._look(verifier, shown, hashed)
        except (*RedisAway, IssuerAway) as away:
            self._refuse_revoked(hashed)  # told meanwhile
            still = hashed in self._known and now - verified < self._settings.key_stale_s
            if principal is not None and still:
                return principal
            metrics.auth_failures.labels("keys_unavailable").inc()
            raise unavailable(
                "Tokens cannot be checked now: their issuer is away"
                if isinstance(away, IssuerAway)
                else "API keys cannot be checked now: Redis is away",
                stage="gateway",
                reason="keys_unavailable",
            ) from None
        except Refused as refused:
            self._known.forget(hashed)
            if refused.why == "revoked":
                self._end(hashed)
            raise
        self._refuse_revoked(hashed)
        return principal

    def _end(self, hashed: str) -> None:
        """What has this hash is worthless from now on."""
        self._known.forget(hashed)
        self._revoked[hashed] = None
        self._revoked.move_to_end(hashed)
        if len(self._revoked) > _MOST_REVOKED:
            self._revoked.popitem(last=False)

    def _refuse_revoked(self, hashed: str) -> None:
        if hashed in self._revoked:
            raise Refused("revoked", "Incorrect API key provided.")

    async def _look(self, verifier: Verifier, shown: str, hashed: str) -> Principal:
        """As `_verify`: one look answers all who show the same meanwhile, however many come at once
        that are not known yet. Who leaves takes it from nobody."""
        look = self._looks.get(hashed)
        if look is None:
            look = asyncio.create_task(self._verify(verifier, shown, hashed))
            self._looks[hashed] = look
            look.add_done_callback(lambda look: self._looked(hashed, look))
        return await asyncio.shield(look)

    def _looked(self, hashed: str, look: asyncio.Task[Principal]) -> None:
        if self._looks.get(hashed) is look:
            del self._looks[hashed]
        if not look.cancelled():
            look.exception()  # all who waited may have left: nobody else reads it then

    async def _verify(self, verifier: Verifier, shown: str, hashed: str) -> Principal:
        """Whoever it is, who is known from now on; but where news of him come without end, it is
        for these requests alone, as if that had come before them."""
        now = time.monotonic()
        if now < self._redis_away_until:
            raise ConnectionError("Redis did not answer a moment ago")
        try:
            for _ in range(_LOOKS):
                began = self._heard.number
                try:
                    principal = await verifier.verify(shown)
                except ValidationError:
                    told = "What is granted here was written by another version of Penstock."
                    raise Refused("unreadable", told) from None
                if not self._heard.since(began, _key(hashed), _tenant(principal.tenant)):
                    self._refuse_revoked(hashed)
                    # Here: news that come before those who wait go on must find him known.
                    self._known.keep(hashed, now, principal)
                    break
            return principal
        except RedisAway:
            self._redis_away_until = time.monotonic() + _RETRY_REDIS_S
            raise


def _key(hashed: str) -> str:
    return f"key {hashed}"


def _tenant(name: str) -> str:
    return f"tenant {name}"


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise Refused(
            "missing",
            "You didn't provide an API key. Send it as `Authorization: Bearer psk-...`.",
        )
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Refused("malformed", "Incorrect API key provided.")
    return shown.strip()
