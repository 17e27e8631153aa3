"""Who is let in besides keys: whether the OIDC issuer's keys can be read, and whether the admin
listener answers, and with which certificate."""

import asyncio
from urllib.parse import urlsplit

import httpx
from cryptography import x509

from services.cli.commands.doctor.certificates import age, names_of
from services.cli.commands.doctor.door import shown_by
from services.cli.commands.doctor.findings import Finding, aside, failed, ok, warning
from services.cli.commands.doctor.installation import Installation
from services.common.config import IdentitySettings, is_loopback

_ANSWER_S = 3.0


async def check(it: Installation) -> list[Finding]:
    listeners = {g.facts["admin"] for g in it.of_service("gateway") if "admin" in g.facts}
    found = await asyncio.gather(*(_listener(url) for url in sorted(listeners)))
    issuer = await _issuer(it.settings.identity) if it.settings.identity.oidc_issuer else []
    return [*issuer, *(finding for some in found for finding in some)]


async def _issuer(own: IdentitySettings) -> list[Finding]:
    from services.gateway.identity.issuer_keys import IssuerKeys

    try:
        keys = IssuerKeys(own)
    except OSError as error:
        told = f"{own.oidc_ca}: {error.strerror or error}"
        return [failed("OIDC issuer", told, "set PENSTOCK_IDENTITY__OIDC_CA to a PEM file")]
    await keys.look()
    findings = [
        failed(
            "OIDC issuer", f"{own.oidc_issuer}: {keys.failure}", "see the way to it, and its log"
        )
        if keys.failure
        else ok("OIDC issuer", f"{own.oidc_issuer} shows its keys")
    ]
    if not own.oidc_roles:
        advice = "set PENSTOCK_IDENTITY__OIDC_ROLES"
        findings.append(warning("OIDC roles", "none is ours: its tokens grant nothing", advice))
    return findings


async def _listener(url: str) -> list[Finding]:
    about = "admin listener"
    try:
        async with httpx.AsyncClient(timeout=_ANSWER_S, verify=False, trust_env=False) as http:
            answer = await http.get(f"{url}/admin/healthz")
    except httpx.HTTPError as error:
        told = f"{url} does not answer: {error or type(error).__name__}"
        return [failed(about, told, "see the gateway's log, and the way to it")]
    if answer.status_code != 200:
        return [failed(about, f"{url} says {answer.status_code}", "see the gateway's log")]
    found = [ok(about, f"{url} answers")]
    if url.startswith("https:"):
        certificate = x509.load_pem_x509_certificate(await aside(shown_by, url))
        found.append(age(f"admin TLS ({', '.join(names_of(certificate))})", certificate))
    elif not is_loopback(urlsplit(url).hostname or ""):
        found.append(failed("admin TLS", f"{url} is in the clear", "set ADMIN_TLS_CERT"))
    return found
