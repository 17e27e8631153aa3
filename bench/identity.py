"""What identity adds to a request: who asks, and whether he may. On a real Redis, with keys and
tokens of an issuer made up here, `--requests` of each kind, one after the other.

Figures are processor time of the gateway's thread, which holds on a busy machine, and the wall's
99th percentile, which wants a quiet one; the bound is 1 ms (issue: identity and limits together).

    python -m bench.identity
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from services.common.config import GatewaySettings, IdentitySettings
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import connect
from services.gateway.identity.api_keys import KeyVerifier
from services.gateway.identity.auth import Authenticator, Verifier
from services.gateway.identity.issuer_keys import IssuerKeys
from services.gateway.identity.keys import KeyStore
from services.gateway.identity.limits import Limit
from services.gateway.identity.permissions import admit
from services.gateway.identity.revoked_tokens import TokenRevocations
from services.gateway.identity.tenants import TenantStore
from services.gateway.identity.tokens import TokenVerifier

ISSUER, AUDIENCE = "https://id.example", "penstock"
ENDPOINT = "POST /v1/chat/completions"
LIMITS = tuple(Limit(name=f"l{n}", of="requests", per="minute", most=n) for n in range(4))


class Shown(IssuerKeys):
    """As if they had been fetched."""

    def __init__(self, settings: IdentitySettings, keys: dict[tuple[str | None, str], Any]) -> None:
        super().__init__(settings)
        self._keys, self._seen = keys, time.monotonic()


def signing() -> dict[str, Any]:
    """Private keys by algorithm."""
    return {
        "RS256": rsa.generate_private_key(65537, 2048),
        "ES256": ec.generate_private_key(ec.SECP256R1()),
    }


def shown(keys: dict[str, Any]) -> dict[tuple[str | None, str], Any]:
    made: dict[str, Any] = {
        "RS256": jwt.algorithms.RSAAlgorithm,
        "ES256": jwt.algorithms.ECAlgorithm,
    }
    public = {name: json.loads(made[name].to_jwk(key.public_key())) for name, key in keys.items()}
    return {(name, name): jwt.PyJWK(jwk, name) for name, jwk in public.items()}


def tokens(keys: dict[str, Any], algorithm: str, count: int) -> list[str]:
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 3600, "iat": now, "tenant": "acme"}
    claims |= {"roles": ["ml"], "email": "someone@example.com", "groups": ["a", "b", "c"]}
    return [
        jwt.encode({**claims, "sub": f"u{n}"}, keys[algorithm], algorithm, {"kid": algorithm})
        for n in range(count)
    ]


async def measured(ask: Callable[[int], Awaitable[object]], count: int) -> tuple[float, float]:
    """Processor time of one, in µs; the wall's 99th percentile, in µs."""
    walls = []
    began = time.thread_time()
    for number in range(count):
        since = time.perf_counter()
        await ask(number)
        walls.append(time.perf_counter() - since)
    spent = time.thread_time() - began
    return spent / count * 1e6, statistics.quantiles(walls, n=100)[98] * 1e6


async def run(count: int) -> None:
    with EmbeddedRedis() as server:
        redis = connect(server.url)
        keys, tenants = KeyStore(redis, "bench"), TenantStore(redis, "bench")
        await tenants.add("acme", {"limits": LIMITS, "user_limits": LIMITS[:2]})
        key, _ = await keys.create("acme", models=["tiny"], limits=LIMITS[:1])
        own = signing()
        settings = IdentitySettings(
            oidc_issuer=ISSUER, oidc_audience=AUDIENCE, oidc_roles={"ml": "member"}
        )
        verifiers: list[Verifier] = [
            KeyVerifier(keys, tenants),
            TokenVerifier(
                settings,
                Shown(settings, shown(own)),
                TokenRevocations(redis, "bench", settings),
                tenants,
            ),
        ]
        trusting = Authenticator(verifiers, keys, GatewaySettings())
        asking = Authenticator(verifiers, keys, GatewaySettings(key_cache_s=0))
        of_rsa, of_curve = tokens(own, "RS256", count), tokens(own, "ES256", count)

        async def ask(auth: Authenticator, header: str) -> None:
            principal = admit(await auth.identify(header), ENDPOINT)
            principal.authorize("tiny")
            principal.caller("req_1")

        kinds: dict[str, Callable[[int], Awaitable[object]]] = {
            "a key that is known": lambda _: ask(trusting, f"Bearer {key}"),
            "a token that is known": lambda _: ask(trusting, f"Bearer {of_rsa[0]}"),
            "a key, looked up in Redis": lambda _: ask(asking, f"Bearer {key}"),
            "a new token, RS256": lambda n: ask(trusting, f"Bearer {of_rsa[n]}"),
            "a new token, ES256": lambda n: ask(trusting, f"Bearer {of_curve[n]}"),
        }
        print("| what is shown | CPU, µs | wall p99, µs |\n| --- | --- | --- |")
        for name, one in kinds.items():
            await measured(one, min(count, 50))
            spent, wall = await measured(one, count)
            print(f"| {name} | {spent:.0f} | {wall:.0f} |")
        await redis.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    asyncio.run(run(parser.parse_args().requests))


if __name__ == "__main__":
    main()
