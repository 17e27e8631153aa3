"""The keys of the OIDC issuer: fetched when the gateway starts, and again before they are old.

Only what the issuer itself serves at the address that is set counts: nothing in a token says where
its key is (`jku`, `x5u`, `jwk`), and a token with a key that is not known has it looked for once in
`_LOOK_EVERY_S` at most, however many such tokens come.
"""

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Iterator
from typing import Any

import jwt
from jwt import PyJWK

from services.common.config import IdentitySettings
from services.gateway import metrics
from services.gateway.identity.principal import IssuerAway

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_TIMEOUT_S = 5.0  # of one request to the issuer
_FRESH_S = (60.0, 3600.0)  # bounds for what the issuer says; unsaid: the first times five
_KEPT_S = 86_400.0  # while the issuer cannot be reached
_MAX_BYTES = 256 * 1024
_MAX_KEYS = 100
_MIN_RSA_BITS = 2048
_KINDS = {  # of a key: the algorithms that it may be for
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_PLAIN = {"accept": "application/json", "accept-encoding": "identity"}
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=(\d{1,9})")


class IssuerKeys:
    """`find` one; the rest happens in the background, from `start` on."""

    def __init__(self, settings: IdentitySettings) -> None:
        self._settings = settings
        self._tls = ssl.create_default_context(cafile=settings.oidc_ca)
        self._keys: dict[tuple[str | None, str], PyJWK] = {}  # by id and algorithm
        self._seen = float("-inf")
        self._fresh_s = 0.0
        self._began = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the last look failed; empty: it did not."""

    async def find(self, id: str | None, algorithm: str) -> PyJWK | None:
        """The key with this id, or where a token names none, the only one there is. Raises
        IssuerAway."""
        found = self._known(id, algorithm)
        if found is None and time.monotonic() - self._began >= _LOOK_EVERY_S:
            await self.look()
            found = self._known(id, algorithm)
        elif found is None and self._look is not None:
            await asyncio.shield(self._look)
            found = self._known(id, algorithm)
        if not self._keys or time.monotonic() - self._seen > _KEPT_S:
            raise IssuerAway("the issuer's keys cannot be read")
        return found

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="issuer keys")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, self._look) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self, id: str | None, algorithm: str) -> PyJWK | None:
        if id is not None:
            return self._keys.get((id, algorithm))
        fitting = [key for (_, its), key in self._keys.items() if its == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    async def _run(self) -> None:
        wait_s = 0.0
        while True:
            await asyncio.sleep(wait_s)
            await self.look()
            if self.failure:
                wait_s = min(max(2 * wait_s, _LOOK_EVERY_S), _FRESH_S[0])
            else:
                wait_s = 0.8 * self._fresh_s

    async def look(self) -> None:
        """All who call it meanwhile share one look. Raises nothing."""
        if self._look is None:
            self._began = time.monotonic()
            self._look = asyncio.create_task(self._fetch(), name="look for issuer keys")
            self._look.add_done_callback(self._looked)
        await asyncio.shield(self._look)

    def _looked(self, _: "asyncio.Task[None]") -> None:
        self._look = None

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(2 * _TIMEOUT_S):
                keys, fresh_s = await self._ask()
        except Exception as error:
            metrics.issuer_looks.labels("failed").inc()
            why = f"{type(error).__name__}: {error}"[:300]
            if why != self.failure:
                log.warning("the keys of %s: %s", self._settings.oidc_issuer, why)
            self.failure = why
            return
        metrics.issuer_looks.labels("ok").inc()
        self.failure = ""
        self._keys, self._fresh_s, self._seen = keys, fresh_s, time.monotonic()

    async def _ask(self) -> tuple[dict[tuple[str | None, str], PyJWK], float]:
        """The keys, and how long they are fresh. Raises whatever goes wrong."""
        import httpx  # 10 MB that only those need who have an issuer

        own = self._settings
        async with httpx.AsyncClient(verify=self._tls, timeout=_TIMEOUT_S) as http:
            url = own.oidc_jwks_url
            if not url:
                about = f"{own.oidc_issuer.rstrip('/')}/.well-known/openid-configuration"
                document, _ = await _json(http, about)
                if document.get("issuer") != own.oidc_issuer:
                    raise ValueError(f"it calls itself {document.get('issuer')!r}")
                url = str(document.get("jwks_uri"))
                own.checked_url(url, "jwks_uri")
            document, headers = await _json(http, url)
        keys = dict(_usable(document, own.oidc_algorithms))
        if not keys:
            raise ValueError("none of them is for one of our algorithms")
        said = _MAX_AGE.search(headers.get("cache-control", ""))
        least, most = _FRESH_S
        return keys, min(max(float(said[1]) if said else 5 * least, least), most)


async def _json(http: Any, url: str) -> tuple[dict[str, Any], Any]:
    """An object and the headers. Redirects are not followed: whoever answers for the issuer says so
    in its own name."""
    async with http.stream("GET", url, headers=_PLAIN) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url} answers {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise ValueError(f"{url} answers compressed: a little may be very much")
        body = b""
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > _MAX_BYTES:
                raise ValueError(f"{url} answers more than {_MAX_BYTES} bytes")
    document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError(f"{url} answers no object")
    return document, answer.headers


def _usable(
    document: dict[str, Any], algorithms: list[Any]
) -> Iterator[tuple[tuple[str | None, str], PyJWK]]:
    """The keys for signatures that are of our algorithms; what else is there is left out."""
    listed = document.get("keys")
    if not isinstance(listed, list) or len(listed) > _MAX_KEYS:
        raise ValueError("its keys are no list, or too many")
    for key in listed:
        if not isinstance(key, dict) or key.get("use", "sig") != "sig" or "d" in key:
            continue  # one with its private part belongs to everybody
        kind = (str(key.get("kty")), str(key.get("crv", "")))
        fitting = [one for one in _KINDS.get(kind, ()) if key.get("alg", one) == one]
        for algorithm in fitting:
            if algorithm not in algorithms:
                continue
            try:
                made = PyJWK(key, algorithm)
            except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
                log.warning("a key of the issuer cannot be used: %s", type(error).__name__)
                continue
            if getattr(made.key, "key_size", _MIN_RSA_BITS) < _MIN_RSA_BITS and kind[0] == "RSA":
                log.warning("a key of the issuer is too short")
                continue
            id = key.get("kid")
            yield (id if isinstance(id, str) else None, algorithm), made
