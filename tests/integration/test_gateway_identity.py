"""A whole gateway with a real OIDC issuer and an admin listener behind TLS: one rule for REST, gRPC
and administrators, and what strangers try."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos.common_pb2 import PRIORITY_LOW
from protos.gateway_pb2 import CompleteRequest, PublicListModelsRequest
from protos.gateway_pb2_grpc import InferenceStub
from services.common.config import IdentitySettings
from services.gateway.identity.principal import Role
from tests.support.authority import Authority
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.issuer import AUDIENCE, Issuer, issuing
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        issuer.register("app", tenant="acme", roles=["ml"])
        yield issuer


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def rig(
    redis_url: str, namespace: str, issuer: Issuer, authority: Authority, tmp_path: Path
) -> AsyncIterator[Rig]:
    folder = authority.issue(tmp_path, address="127.0.0.1")
    identity = IdentitySettings(
        oidc_issuer=issuer.url,
        oidc_audience=AUDIENCE,
        oidc_admin_audience="penstock-admin",
        oidc_roles={"ml": "member", "boss": "admin"},
        admin_port=0,
        admin_tls_cert=folder / "tls.crt",
        admin_tls_key=folder / "tls.key",
        admin_failures_per_minute=20,
    )
    async with gateway_rig(redis_url, namespace, identity=identity) as rig:
        yield rig


def facts(rig: Rig) -> dict[str, str]:
    assert rig.host.replica is not None
    return rig.host.replica.facts


async def admin(rig: Rig, authority: Authority, key: str) -> httpx.AsyncClient:
    trust = ssl.create_default_context(cadata=authority.pem.decode())
    client = httpx.AsyncClient(
        base_url=facts(rig)["admin"],
        verify=trust,
        headers={"authorization": f"Bearer {key}"},
        timeout=20,
    )
    return await rig.stack.enter_async_context(client)


async def grpc_code(call: Any) -> grpc.StatusCode:
    try:
        async with asyncio.timeout(20):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_an_administrator_makes_a_tenant_and_its_users_are_let_in_and_put_out(
    rig, issuer, authority
):
    chief, _ = await rig.keys.create(None, role=Role.ADMIN)
    console = await admin(rig, authority, chief)
    token = issuer.token("app")
    http, service = await rig.http(token), InferenceStub(await rig.channel())
    signed = (("authorization", f"Bearer {token}"),)
    body = {"model": MODEL, "messages": HI}
    assert (await http.post(CHAT, json=body)).status_code == 401, "nobody knows its tenant"

    made = {"name": "acme", "priority": "low", "weight": 3, "models": [MODEL]}
    assert (await console.post("/admin/v1/tenants", json=made)).status_code == 200
    assert (await http.post(CHAT, json=body)).status_code == 200
    complete = CompleteRequest(model=MODEL, text="Hi")
    assert await grpc_code(service.Complete(complete, metadata=signed)) == grpc.StatusCode.OK
    for request in rig.tokenizer.requests:
        assert (request.caller.tenant, request.caller.weight) == ("acme", 3)
        assert request.caller.priority == PRIORITY_LOW
    forbidden = {**body, "model": "other"}
    assert (await http.post(CHAT, json=forbidden)).status_code == 403
    other = CompleteRequest(model="other", text="Hi")
    code = await grpc_code(service.Complete(other, metadata=signed))
    assert code == grpc.StatusCode.PERMISSION_DENIED

    changed = await console.patch("/admin/v1/tenants/acme", json={"suspended": True})
    assert changed.status_code == 200

    async def out() -> bool:
        return (await http.get("/v1/models")).status_code == 401

    await until(out, 5, "a suspended tenant's token is refused, though it was trusted")
    models = service.ListModels(PublicListModelsRequest(), metadata=signed)
    assert await grpc_code(models) == grpc.StatusCode.UNAUTHENTICATED
    assert (await (await rig.http()).get("/v1/models")).status_code == 401, "its keys too"
    lines = (await console.get("/admin/v1/audit?about=tenant:acme")).json()["data"]
    assert [line["source"] for line in lines] == ["127.0.0.1"] * 2


async def test_neither_headers_nor_fields_claim_anything(rig, issuer):
    await rig.gateway.identity.tenants.add("acme")
    await rig.gateway.identity.tenants.add("rival")
    token = issuer.token("app")
    claims = {
        **{f"x-{name}": "rival" for name in ("tenant", "tenant-id", "user", "forwarded-user")},
        **{"openai-organization": "rival", "openai-project": "rival", "x-api-key": rig.key},
        **{"x-priority": "high", "x-cache-salt": "s", "x-roles": "admin", "x-weight": "99"},
    }
    http, service = await rig.http(token), InferenceStub(await rig.channel())
    body = {"model": MODEL, "messages": HI, "user": "rival"}
    assert (await http.post(CHAT, json=body, headers=claims)).status_code == 200
    signed = (("authorization", f"Bearer {token}"), *claims.items())
    complete = CompleteRequest(model=MODEL, text="Hi")
    assert await grpc_code(service.Complete(complete, metadata=signed)) == grpc.StatusCode.OK
    for request in rig.tokenizer.requests:
        caller = request.caller
        assert (caller.tenant, caller.priority, caller.weight) == ("acme", 2, 1.0)
    sent = len(rig.tokenizer.requests)
    for field in ("tenant", "priority", "cache_salt", "weight", "roles", "caller"):
        answer = await http.post(CHAT, json={**body, field: "rival"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert len(rig.tokenizer.requests) == sent
    mine, theirs = (("authorization", f"Bearer {one}") for one in (token, rig.key))
    for two in ([mine, theirs], [theirs, mine]):  # of two keys neither counts, whoever reads them
        answer = await (await rig.http()).request("GET", "/v1/models", headers=httpx.Headers(two))
        listed = service.ListModels(PublicListModelsRequest(), metadata=tuple(two))
        assert await grpc_code(listed) == grpc.StatusCode.UNAUTHENTICATED
        told = service.Complete(complete, metadata=tuple(two))
        assert await grpc_code(told) == grpc.StatusCode.UNAUTHENTICATED
        assert answer.status_code == 401
    async with httpx.AsyncClient(base_url=rig.url) as client:
        query = await client.get(f"/v1/models?api_key={rig.key}&access_token={token}")
        assert query.status_code == 401


async def test_one_doors_key_is_none_for_the_other(rig, issuer, authority):
    chief, _ = await rig.keys.create(None, role=Role.ADMIN)
    await rig.gateway.identity.tenants.add("acme")
    mine, theirs = issuer.signed(), issuer.signed(aud="penstock-admin", roles=["boss"])
    both = issuer.signed(aud=[AUDIENCE, "penstock-admin"], roles=["ml"])
    for shown, public, inside in (
        (chief, 401, 200),
        (rig.key, 200, 401),
        (mine, 200, 401),
        (theirs, 401, 200),
        (both, 200, 403),
    ):
        assert (await (await rig.http(shown)).get("/v1/models")).status_code == public
        console = await admin(rig, authority, shown)
        assert (await console.get("/admin/v1/tenants")).status_code == inside
        assert (await (await rig.http(shown)).get("/admin/v1/tenants")).status_code == 404
        assert (await console.get("/v1/models")).status_code == 404


async def test_strangers_get_nothing_of_the_admin_listener(rig, authority):
    port = int(facts(rig)["admin"].rpartition(":")[2])
    assert facts(rig)["admin"].startswith("https://127.0.0.1:")

    async def raw(sent: bytes, tls: ssl.SSLContext | None) -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname="127.0.0.1" if tls else None
        )
        try:
            writer.write(sent)
            async with asyncio.timeout(20):
                return await reader.read(4096)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    ask = b"GET /admin/v1/tenants HTTP/1.1\r\nhost: x\r\n"
    assert b"HTTP" not in await raw(ask + b"\r\n", None), "nothing in the clear"
    trust = ssl.create_default_context(cadata=authority.pem.decode())
    key = b"authorization: Bearer " + rig.key.encode()
    for more, status in (
        (b"", b"401"),
        (key, b"401"),
        (b"authorization: Bearer psa-" + b"a" * 43, b"401"),
        (b"authorization: " + b"x" * 40_000, b"431"),
        (b"x-forwarded-for: 10.9.9.9\r\ncontent-length: 999999999", b"401"),
        (b"\r\n".join(b"h%d: x" % n for n in range(200)), b"431"),
    ):
        answer = await raw(ask + (more + b"\r\n" if more else b"") + b"\r\n", trust)
        assert answer.split(b" ", 2)[1] == status, answer[:200]
    chief, _ = await rig.keys.create(None, role=Role.ADMIN)
    console = await admin(rig, authority, chief)
    large = await console.post("/admin/v1/tenants", content=b"x" * 300_000)
    assert large.status_code in (413, 415)
    for path in ("/admin/v1/tenants/..%2f..%2fkeys", "/admin/v1/keys/%00", "/admin/v1/keys/*"):
        assert (await console.get(path)).status_code == 404
    deep = {"name": "a", "note": [[[[[]]]]]}
    assert (await console.post("/admin/v1/tenants", json=deep)).status_code == 400
    # Whoever pretends to be somebody else behind a proxy is counted as who he is.
    forged = {"x-forwarded-for": "10.0.0.1", "forwarded": "for=10.0.0.1"}
    stranger = await admin(rig, authority, "psa-" + "b" * 43)
    statuses = [
        (await stranger.get("/admin/v1/keys", headers=forged)).status_code for _ in range(20)
    ]
    assert 429 in statuses
    assert statuses[-1] == 429


async def test_a_revoked_administrator_is_out_at_every_gateway_at_once(rig, authority):
    chief, record = await rig.keys.create(None, role=Role.ADMIN)
    console = await admin(rig, authority, chief)
    assert (await console.get("/admin/v1/tenants")).status_code == 200
    await rig.keys.revoke(record.id)

    async def out() -> bool:
        return (await console.get("/admin/v1/tenants")).status_code == 401

    await until(out, 5, "the revoked key is refused")


async def test_a_revoked_token_is_out_at_both_listeners_at_once(rig, issuer, authority):
    chief, _ = await rig.keys.create(None, role=Role.ADMIN)
    console = await admin(rig, authority, chief)
    await rig.gateway.identity.tenants.add("acme")
    http = await rig.http(issuer.signed(jti="t1", roles=["ml"]))
    boss = await admin(rig, authority, issuer.signed(aud="penstock-admin", roles=["boss"]))
    models, tenants = "/v1/models", "/admin/v1/tenants"
    assert (await http.get(models)).status_code == 200
    assert (await boss.get(tenants)).status_code == 200
    for client, path, which in (
        (http, models, {"tenant": "acme", "token": "t1"}),
        (boss, tenants, {"admin": True, "user": "oidc:u1"}),
    ):
        answer = await console.post("/admin/v1/revoked-tokens", json=which)
        assert answer.status_code == 200, answer.text

        async def out(client: httpx.AsyncClient = client, path: str = path) -> bool:
            return (await client.get(path)).status_code == 401

        await until(out, 5, "a revoked token is refused, though it was trusted")
    fresh = issuer.signed(jti="t2", roles=["ml"])
    assert (await (await rig.http(fresh)).get(models)).status_code == 200
