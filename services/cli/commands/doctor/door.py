"""The door: whether REST and gRPC answer where the gateways say, and with which certificate."""

import asyncio
import ssl
from urllib.parse import urlsplit

import grpc
import httpx
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.commands.doctor.certificates import age, names_of
from services.cli.commands.doctor.findings import Finding, aside, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.common.config import is_loopback
from services.common.discovery import Replica
from services.common.transport import dial_door

_ANSWER_S = 3.0


async def check(it: Installation) -> list[Finding]:
    found = await asyncio.gather(*(_of(gateway) for gateway in it.of_service("gateway")))
    findings = [finding for some in found for finding in some]
    told = any(finding.about.startswith("door TLS") for finding in findings)
    own = it.settings.gateway
    if not told and own.tls_cert is None and not is_loopback(own.host):
        findings.append(_in_the_clear(f"PENSTOCK_GATEWAY__HOST={own.host}"))
    return findings


async def _of(gateway: Replica) -> list[Finding]:
    url, address = gateway.facts["url"], gateway.facts["grpc"]
    shown: bytes | None = None
    found = [await _rest(url)]
    if url.startswith("https:"):
        try:
            shown = await aside(shown_by, url)
        except OSError as error:
            return [*found, failed("door TLS", f"{url}: {error}", "see the gateway's log")]
        certificate = x509.load_pem_x509_certificate(shown)
        found.append(age(f"door TLS ({', '.join(names_of(certificate))})", certificate))
    elif not is_loopback(urlsplit(url).hostname or ""):
        found.append(_in_the_clear(url))
    return [*found, await _grpc(address, shown)]


def _in_the_clear(door: str) -> Finding:
    advice = "set PENSTOCK_GATEWAY__TLS_CERT and __TLS_KEY, unless something ends TLS before it"
    return warning("door TLS", f"{door} takes API keys in the clear", advice)


async def _rest(url: str) -> Finding:
    about = "door REST"
    try:
        async with httpx.AsyncClient(timeout=_ANSWER_S, verify=False, trust_env=False) as http:
            answer = await http.get(f"{url}/readyz")
    except httpx.HTTPError as error:
        told = f"{url} does not answer: {error or type(error).__name__}"
        return failed(about, told, "see the gateway's log, and the way to it")
    said = answer.text.strip()[:200]
    if answer.status_code != 200:
        return failed(about, f"{url}/readyz says {answer.status_code}: {said}", "see what it names")
    if "degraded" in said:
        return warning(about, f"{url} is ready but degraded: {said}", "see redis")
    return ok(about, f"{url} is ready")


def shown_by(url: str) -> bytes:
    """The certificate that it shows, PEM, whatever it is. Raises OSError."""
    split = urlsplit(url)
    at = (split.hostname or "", split.port or 443)
    return ssl.get_server_certificate(at, timeout=_ANSWER_S).encode()


async def _grpc(address: str, shown: bytes | None) -> Finding:
    about = "door gRPC"
    names = names_of(x509.load_pem_x509_certificate(shown)) if shown else []
    # What REST shows is trusted here: its age and names are looked at above.
    name = names[0].replace("*", "any") if names else ""
    try:
        async with dial_door(address, shown, name) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        told = f"{address} does not answer: {error.code().name}: {error.details()}"
        return failed(about, told, "see the gateway's log, and the way to it")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return failed(about, f"{address} is not ready", "see door REST")
    return ok(about, f"{address} serves")
