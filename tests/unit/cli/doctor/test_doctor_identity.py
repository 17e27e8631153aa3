"""The OIDC issuer and the admin listener, with a fault each."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands.doctor import identity
from services.cli.commands.doctor.findings import Finding
from services.cli.commands.doctor.installation import Installation
from services.common.config import IdentitySettings, Settings
from services.common.discovery import Replica
from services.common.locks.certificates import CertificateFiles
from services.gateway.api.admin.routes import admin_application, admin_settings
from services.gateway.connections.http_server import HttpServer
from tests.support.authority import DAY, Authority
from tests.support.gateway_parts import gateway_parts
from tests.support.issuer import Issuer, issuing


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


async def examined(admin: str = "", **own: Any) -> dict[str, Finding]:
    facts = {"admin": admin} if admin else {}
    gateway = Replica("gateway", "gateway-1", "h:1", "h", 1, facts=facts)
    settings = Settings(identity=IdentitySettings(**own))
    found = await identity.check(Installation(settings, replicas=[gateway, gateway]))
    return {finding.about: finding for finding in found}


@asynccontextmanager
async def listening(folder: Path | None = None) -> AsyncIterator[str]:
    certificates = None
    if folder is not None:
        certificates = CertificateFiles("admin", folder / "tls.crt", folder / "tls.key", None)
    with gateway_parts() as parts:
        bounds = admin_settings(parts.settings)
        server = HttpServer(admin_application(parts), bounds, "127.0.0.1", 0, certificates)
        await server.start()
        try:
            yield f"{'https' if folder else 'http'}://127.0.0.1:{server.port}"
        finally:
            await server.stop()


async def test_what_is_not_set_is_not_looked_at() -> None:
    assert await examined() == {}


async def test_an_issuer_as_it_should_be_and_one_that_is_away(issuer: Issuer) -> None:
    own = {"oidc_issuer": issuer.url, "oidc_audience": "penstock"}
    well = await examined(**own, oidc_roles={"ml": "member"})
    assert {name: f.state for name, f in well.items()} == {"OIDC issuer": "ok"}
    assert (await examined(**own))["OIDC roles"].state == "warning"
    issuer.away = True
    away = (await examined(**own))["OIDC issuer"]
    issuer.away = False
    assert (away.state, "503" in away.told) == ("failed", True)
    wrong = await examined(**{**own, "oidc_ca": Path("/nowhere.pem")})
    assert "/nowhere.pem" in wrong["OIDC issuer"].told


async def test_a_listener_as_it_should_be_and_one_that_is_none(tmp_path: Path) -> None:
    async with listening() as url:
        assert {n: f.state for n, f in (await examined(url)).items()} == {"admin listener": "ok"}
    assert (await examined(url))["admin listener"].state == "failed"
    folder = Authority().issue(tmp_path, address="127.0.0.1", valid=-DAY)
    async with listening(folder) as url:
        found = await examined(url)
    assert found["admin listener"].state == "ok"
    [ended] = [f for name, f in found.items() if name.startswith("admin TLS")]
    assert ended.state == "failed"
