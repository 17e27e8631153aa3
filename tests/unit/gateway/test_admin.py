"""The admin listener on a real Redis: what it does, for whom, and what strangers get of it."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.common.config import IdentitySettings
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.gateway.api.admin.failures import Failures
from services.gateway.api.admin.routes import admin_application
from services.gateway.identity.identity import Identity
from services.gateway.identity.key_record import key_hash
from services.gateway.identity.permissions import NEEDS
from services.gateway.identity.principal import ADMIN_GRANTS, Permission, Role
from services.gateway.jobs.queue import Queue, Queues
from tests.support.gateway_parts import EMBEDDING_MODEL, MODEL, gateway_parts

ADMIN = {endpoint: needed for endpoint, needed in NEEDS.items() if " /admin/v1/" in endpoint}
LIMIT = {"name": "rpm", "of": "requests", "per": "minute", "most": 60}


class Admin:
    """The listener, asked by whoever has a key of that role."""

    def __init__(self, parts: Any, app: Any) -> None:
        self.parts, self.app = parts, app
        self.identity: Identity = parts.identity
        self.keys: dict[Any, str] = {}

    async def key(self, role: Role, scopes: Any = None) -> str:
        made, _ = await self.identity.keys.create(None, role=role, scopes=scopes)
        return made

    async def ask(
        self, method: str, path: str, key: str | None = None, peer: str = "10.0.0.9", **more: Any
    ) -> httpx.Response:
        """As an administrator by default."""
        if key is None:
            key = self.keys["admin"] = self.keys.get("admin") or await self.key(Role.ADMIN)
        transport = httpx.ASGITransport(self.app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await http.request(method, f"/admin{path}", headers=headers, **more)

    async def told(self, method: str, path: str, **more: Any) -> Any:
        answer = await self.ask(method, path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, str, str | None]:
        answer = await self.ask(method, path, **more)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]


@pytest.fixture
async def admin(redis: Redis, namespace: str) -> AsyncIterator[Admin]:
    with gateway_parts() as parts:
        parts.settings = parts.settings.model_copy(
            update={
                "namespace": namespace,
                "identity": IdentitySettings(admin_failures_per_minute=5),
            }
        )
        parts.identity = Identity(parts.settings, redis)
        yield Admin(parts, admin_application(parts))


# ---- what it does -------------------------------------------------------------------------------


async def test_a_tenant_from_its_making_to_its_end(admin):
    made = await admin.told("POST", "/v1/tenants", json={"name": "acme", "models": [MODEL]})
    assert (made["name"], made["models"], made["priority"]) == ("acme", [MODEL], "normal")
    again = await admin.error("POST", "/v1/tenants", json={"name": "acme"})
    assert again == (409, "already_exists", "name")
    change = {"weight": 2, "models": None, "note": "Ltd", "suspended": True}
    changed = await admin.told("PATCH", "/v1/tenants/acme", json=change)
    assert (changed["weight"], changed["models"], changed["note"]) == (2, None, "Ltd")
    assert changed["suspended"] > 1e9
    assert (await admin.told("GET", "/v1/tenants/acme")) == changed
    assert (await admin.told("GET", "/v1/tenants"))["data"] == [changed]
    resumed = await admin.told("PATCH", "/v1/tenants/acme", json={"suspended": False})
    assert resumed == {**changed, "suspended": None}
    limits = {"limits": [LIMIT], "user_limits": [{"name": "n", "of": "concurrent", "most": 2}]}
    limited = await admin.told("PUT", "/v1/tenants/acme/limits", json=limits)
    assert [one["name"] for one in (*limited["limits"], *limited["user_limits"])] == ["rpm", "n"]
    kept = await admin.told("PUT", "/v1/tenants/acme/limits", json={"limits": []})
    assert (kept["limits"], len(kept["user_limits"])) == ([], 1)


async def test_a_key_from_its_making_to_its_end(admin):
    await admin.told("POST", "/v1/tenants", json={"name": "acme"})
    asked = {"tenant": "acme", "name": "web", "scopes": ["inference"], "expires_in_s": 1000}
    answer = await admin.ask("POST", "/v1/keys", json=asked)
    assert answer.headers["cache-control"] == "no-store"
    made = answer.json()
    key, id = made.pop("key"), made["id"]
    principal = await admin.identity.auth.identify(f"Bearer {key}")
    assert (principal.user, principal.permissions) == (id, {Permission.INFERENCE})
    assert made["expires"] - made["created"] == 1000
    limited = await admin.told("PUT", f"/v1/keys/{id}/limits", json={"limits": [LIMIT]})
    assert limited["limits"][0]["name"] == "rpm"
    change = {"role": "read-only", "scopes": None, "priority": "high"}
    changed = await admin.told("PATCH", f"/v1/keys/{id}", json=change)
    assert (changed["role"], changed["scopes"], changed["priority"]) == ("read-only", None, "high")
    assert (changed["name"], changed["limits"]) == ("web", limited["limits"])
    rotated = await admin.told("POST", f"/v1/keys/{id}/rotate", json={"overlap_s": 60})
    new = rotated.pop("key")
    assert new != key
    for shown in (key, new):
        admin.identity.auth.told(f"key {shown}")
        assert (await admin.identity.auth.identify(f"Bearer {new}")).user == id
    listed = (await admin.told("GET", "/v1/keys?tenant=acme"))["data"]
    assert [one["id"] for one in listed] == [id]
    assert listed[0]["old_until"] is not None
    assert (await admin.told("GET", "/v1/keys?tenant=rival"))["data"] == []
    revoked = await admin.told("DELETE", f"/v1/keys/{id}")
    assert revoked["revoked"] is not None
    assert await admin.error("POST", f"/v1/keys/{id}/rotate", json={}) == (
        400,
        "invalid_value",
        "key",
    )
    everything = (await admin.ask("GET", "/v1/keys")).text + (
        await admin.ask("GET", "/v1/audit")
    ).text
    assert key[4:] not in everything
    assert new[4:] not in everything


async def test_limits_are_there_from_the_beginning(admin):
    """A tenant or key is made whole, in one write with one line, or not at all."""
    both = {"limits": [LIMIT], "user_limits": [{"name": "n", "of": "concurrent", "most": 2}]}
    made = await admin.told("POST", "/v1/tenants", json={"name": "acme", "weight": 2, **both})
    assert [one["name"] for one in made["limits"] + made["user_limits"]] == ["rpm", "n"]
    assert made == await admin.told("GET", "/v1/tenants/acme")
    asked = {"tenant": "acme", "limits": [LIMIT]}
    key = await admin.told("POST", "/v1/keys", json=asked)
    assert [one["name"] for one in key["limits"]] == ["rpm"]
    lines = [line for line in await admin.identity.audit.read(9) if line.after]
    assert [line.action for line in lines[:2]] == ["key.create", "tenant.create"]
    assert (lines[1].after["weight"], len(lines[1].after["user_limits"])) == (2, 1)
    maker = await admin.key(Role.ADMIN, [Permission.TENANTS_WRITE, Permission.KEYS_WRITE])
    for path, body in (("/v1/tenants", {"name": "b", **both}), ("/v1/keys", asked)):
        assert (await admin.error("POST", path, key=maker, json=body))[1] == "permission_missing"
    assert (await admin.ask("POST", "/v1/tenants", maker, json={"name": "b"})).status_code == 200


async def test_null_gives_back_the_default(admin):
    await admin.told("POST", "/v1/tenants", json={"name": "acme"})
    for whose, role in (({"tenant": "acme"}, "member"), ({"admin": True}, "read-only")):
        made = await admin.told("POST", "/v1/keys", json={**whose, "role": None, "name": "n"})
        assert made["role"] == role
        path = f"/v1/keys/{made['id']}"
        other = "read-only" if role == "member" else "operator"
        changed = await admin.told("PATCH", path, json={"role": other})
        assert (changed["role"], changed["name"]) == (other, "n")
        changed = await admin.told("PATCH", path, json={"role": None, "name": None})
        assert (changed["role"], changed["name"]) == (role, "")


async def test_tokens_are_revoked_and_listed(admin):
    await admin.told("POST", "/v1/tenants", json={"name": "acme"})
    operator = await admin.key(Role.OPERATOR)
    asked = ("POST", "/v1/revoked-tokens", operator)
    made = (await admin.ask(*asked, json={"tenant": "acme", "user": "oidc:u1"})).json()
    assert (made["tenant"], made["admin"], made["user"]) == ("acme", False, "oidc:u1")
    own = await admin.told("POST", "/v1/revoked-tokens", json={"admin": True, "token": "t"})
    listed = await admin.told("GET", "/v1/revoked-tokens?order=asc")
    assert listed["data"] == [own, made]
    assert [line.what for line in await admin.identity.audit.read(2)] == ["token:t", "oidc:u1"]


async def test_lists_come_in_pages(admin):
    made = [(await admin.identity.keys.create("acme"))[1].id for _ in range(5)]
    await admin.identity.keys.create("rival")
    query = "/v1/keys?tenant=acme&order=asc&limit=3"
    first = await admin.told("GET", query)
    rest = await admin.told("GET", f"{query}&after={first['last_id']}")
    assert [one["id"] for one in first["data"] + rest["data"]] == sorted(made)
    assert (first["has_more"], rest["has_more"]) == (True, False)
    for name in ("a", "b", "c"):
        await admin.identity.tenants.add(name)
    told = await admin.told("GET", "/v1/tenants?limit=1&after=a&order=asc")
    assert [one["name"] for one in told["data"]] == ["b"]
    for odd in ("limit=0", "limit=101", "x=1"):
        assert (await admin.error("GET", f"/v1/keys?{odd}"))[0] == 400


async def test_models_say_who_may_use_them(admin):
    await admin.told("POST", "/v1/tenants", json={"name": "acme", "models": [MODEL]})
    await admin.told("POST", "/v1/tenants", json={"name": "rival"})
    told = {one["id"]: one["tenants"] for one in (await admin.told("GET", "/v1/models"))["data"]}
    assert told == {MODEL: ["acme", "rival"], "other": ["rival"], EMBEDDING_MODEL: ["rival"]}


async def test_the_log_says_who_from_where_and_of_refusals(admin):
    await admin.told("POST", "/v1/tenants", json={"name": "acme"})
    await admin.told("PATCH", "/v1/tenants/acme", json={"priority": "low"})
    watcher = await admin.key(Role.READ_ONLY)
    await admin.ask("PATCH", "/v1/tenants/acme", watcher, "10.0.0.7", json={"priority": "high"})
    lines = (await admin.told("GET", "/v1/audit?limit=2"))["data"]
    assert [line["action"] for line in lines] == ["denied", "key.create"]
    assert (lines[0]["source"], lines[0]["what"]) == (
        "10.0.0.7",
        "PATCH /admin/v1/tenants/{tenant}",
    )
    assert lines[0]["who"].startswith("key_")
    older = (await admin.told("GET", f"/v1/audit?before={lines[-1]['id']}"))["data"]
    assert [line["action"] for line in older] == ["tenant.change", "tenant.create", "key.create"]
    assert (older[0]["before"], older[0]["after"]) == ({"priority": "normal"}, {"priority": "low"})
    assert older[0]["source"] == "10.0.0.9"
    about = (await admin.told("GET", "/v1/audit?about=tenant:acme"))["data"]
    assert len(about) == 2
    for odd in (
        "limit=0",
        "limit=x",
        "limit=9999",
        "before=x",
        "before=1-1%20+",
        "after=1",
        f"before={2**64}-0",
        "before=١-١",
    ):
        status, _, named = await admin.error("GET", f"/v1/audit?{odd}")
        assert (status, named) == (400, odd.partition("=")[0])


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/v1/tenants", {"name": "a b"}, "name"),
        ("POST", "/v1/tenants", {"name": 7}, "name"),
        ("POST", "/v1/tenants", {}, "name"),
        ("POST", "/v1/tenants", {"name": "b", "weight": 0}, "weight"),
        ("POST", "/v1/tenants", {"name": "b", "weight": "2"}, "weight"),
        ("POST", "/v1/tenants", {"name": "b", "limits": [{**LIMIT, "of": 1}]}, "limits[0].of"),
        ("POST", "/v1/tenants", {"name": "b", "user_limits": [LIMIT, LIMIT]}, "user_limits"),
        ("POST", "/v1/tenants", {"name": "b", "user_limits": [LIMIT] * 33}, "user_limits"),
        ("POST", "/v1/tenants", {"name": "b", "models": "tiny"}, "models"),
        ("PATCH", "/v1/tenants/acme", {"name": "b"}, "name"),
        ("PATCH", "/v1/tenants/acme", {"created": 5}, "created"),
        ("PATCH", "/v1/tenants/acme", {"priority": "urgent"}, "priority"),
        ("PATCH", "/v1/tenants/acme", {"note": "n" * 201}, "note"),
        ("PUT", "/v1/tenants/acme/limits", {"limits": [LIMIT, LIMIT]}, "limits"),
        ("PUT", "/v1/tenants/acme/limits", {"limits": [{**LIMIT, "most": -1}]}, "limits[0].most"),
        ("PUT", "/v1/tenants/acme/limits", {"limits": [{**LIMIT, "x": 1}]}, "limits[0].x"),
        ("PUT", "/v1/tenants/acme/limits", {"limits": [LIMIT] * 33}, "limits"),
        ("POST", "/v1/revoked-tokens", {"token": "t"}, "tenant"),
        ("POST", "/v1/revoked-tokens", {"tenant": "acme"}, "user"),
        ("POST", "/v1/revoked-tokens", {"tenant": "acme", "user": "u1"}, "user"),
        ("POST", "/v1/revoked-tokens", {"tenant": "acme", "token": "\n"}, "token"),
        ("POST", "/v1/keys", {}, "tenant"),
        ("POST", "/v1/keys", {"tenant": "acme", "admin": True}, "tenant"),
        ("POST", "/v1/keys", {"tenant": "acme", "role": "admin"}, "role"),
        ("POST", "/v1/keys", {"admin": True, "role": "member"}, "role"),
        ("POST", "/v1/keys", {"tenant": "acme", "limits": [{**LIMIT, "per": None}]}, "limits[0]"),
        ("POST", "/v1/keys", {"admin": True, "limits": [LIMIT]}, "limits"),
        ("POST", "/v1/keys", {"tenant": "acme", "scopes": ["root"]}, "scopes[0]"),
        ("POST", "/v1/keys", {"tenant": "acme", "expires_in_s": 0}, "expires_in_s"),
        ("POST", "/v1/keys", {"tenant": "acme", "expires": 5}, "expires"),
        ("POST", "/v1/keys", {"tenant": "acme", "user_limits": [LIMIT]}, "user_limits"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_changed(admin, method, path, body, param):
    await admin.told("POST", "/v1/tenants", json={"name": "acme"})
    before = len(await admin.identity.audit.read(100))
    status, _, named = await admin.error(method, path, json=body)
    assert (status, named or "") == (400, param)
    assert len(await admin.identity.audit.read(100)) == before


async def test_what_nobody_has_is_not_found(admin):
    for method, path, body in (
        ("GET", "/v1/tenants/x", None),
        ("PATCH", "/v1/tenants/x", {"note": "n"}),
        ("PUT", "/v1/tenants/x/limits", {"limits": []}),
        ("GET", "/v1/keys/key_000000000000", None),
        ("GET", "/v1/keys/*", None),
        ("PATCH", "/v1/keys/key_000000000000", {"name": "n"}),
        ("DELETE", "/v1/keys/key_000000000000", None),
        ("POST", "/v1/keys/key_000000000000/rotate", {}),
        ("PUT", "/v1/keys/key_000000000000/limits", {"limits": []}),
        ("POST", "/v1/keys", {"tenant": "x"}),
        ("POST", "/v1/revoked-tokens", {"tenant": "x", "token": "t"}),
        ("POST", "/v1/keys", {"tenant": "a b"}),
        ("GET", "/v2", None),
    ):
        more = {} if body is None else {"json": body}
        assert (await admin.error(method, path, **more))[0] == 404, (method, path)
    assert (await admin.error("DELETE", "/v1/tenants/x"))[:2] == (405, "method_not_allowed")


async def test_while_redis_is_away_it_says_so(admin, monkeypatch):
    key = await admin.key(Role.ADMIN)
    assert (await admin.ask("GET", "/v1/tenants", key)).status_code == 200

    async def away(*_: Any) -> None:
        raise ConnectionError

    watcher = await admin.key(Role.READ_ONLY)
    await admin.ask("GET", "/v1/tenants", watcher)
    monkeypatch.setattr(admin.identity.tenants, "list", away)
    monkeypatch.setattr(admin.identity.audit, "_change", away)
    assert (await admin.error("GET", "/v1/tenants", key=key))[:2] == (503, "storage_unavailable")
    asked = ("POST", "/v1/tenants")
    assert (await admin.error(*asked, key=watcher, json={}))[:2] == (503, "storage_unavailable")


async def test_each_of_its_endpoints_is_in_the_table_and_nothing_else_is(admin):
    served = {
        f"{method} {route.path}"
        for route in admin.app.routes
        for method in route.endpoint._handlers
    }
    assert served == {endpoint for endpoint in NEEDS if "/admin/" in endpoint}


# ---- who may ------------------------------------------------------------------------------------


def filled(endpoint: str) -> tuple[str, str]:
    method, path = endpoint.split(" ")
    path = path.replace("{tenant}", "acme").replace("{key}", "key_000000000000")
    return method, path.removeprefix("/admin")


@pytest.mark.parametrize("role", [Role.READ_ONLY, Role.OPERATOR, Role.ADMIN])
async def test_a_role_may_what_the_table_says(admin, role):
    admin.parts.settings.identity.admin_failures_per_minute = 10_000
    admin.app = admin_application(admin.parts)
    key = await admin.key(role)
    for endpoint, needed in ADMIN.items():
        method, path = filled(endpoint)
        more = {"json": {}} if method in ("POST", "PUT", "PATCH") else {}
        status = (await admin.ask(method, path, key, **more)).status_code
        assert (status != 403) == (needed in ADMIN_GRANTS[role]), endpoint
        assert status != 401


async def test_each_endpoint_wants_an_administrators_key_and_a_tenants_is_none(admin):
    tenants_key, _ = await admin.identity.keys.create("acme")
    wrong = ("", "psa-" + "a" * 43, tenants_key, "psa-" + tenants_key[4:], "psa-x", "a.b.c")
    for number, (endpoint, _) in enumerate(ADMIN.items()):
        method, path = filled(endpoint)
        for index, shown in enumerate(wrong):
            peer = f"10.{number}.{index}.1"
            answer = await admin.ask(method, path, shown, peer, json={})
            assert answer.status_code == 401, (endpoint, shown)
    # Not even where a tenant's record lay under an administrator's text.
    posing = "psa-" + "b" * 43
    _, record = await admin.identity.keys.create("acme")
    stored = await admin.identity.keys._redis.hget(
        admin.identity.keys._records, (await admin.identity.keys._hashes(record.id))[0]
    )
    await admin.identity.keys._redis.hset(
        admin.identity.keys._records, key_hash(posing), str(stored)
    )
    assert (await admin.ask("GET", "/v1/tenants", posing, "10.99.0.1")).status_code == 401
    assert (await admin.ask("GET", "/healthz", "")).status_code == 200


async def test_an_operator_gets_no_more_than_he_has(admin):
    """By no way: a new key, a changed one, another's that is shown anew, or one that is gone."""
    operator = await admin.key(Role.OPERATOR)
    _, chief = await admin.identity.keys.create(None, role=Role.ADMIN)
    for method, path, body in (
        ("POST", "/v1/keys", {"admin": True, "role": "admin"}),
        ("POST", "/v1/keys", {"admin": True}),
        ("PATCH", f"/v1/keys/{chief.id}", {"name": "mine"}),
        ("POST", f"/v1/keys/{chief.id}/rotate", {"overlap_s": 0}),
        ("DELETE", f"/v1/keys/{chief.id}", None),
        ("POST", "/v1/revoked-tokens", {"admin": True, "user": "oidc:chief"}),
    ):
        more = {} if body is None else {"json": body}
        answer = await admin.ask(method, path, operator, f"10.0.1.{len(path) % 250}", **more)
        assert answer.status_code == 403, (method, path)
        assert "psa-" not in answer.text
    [kept] = [one for one in await admin.identity.keys.list() if one.id == chief.id]
    assert (kept.revoked, kept.name, kept.old_until) == (None, "", None)


async def test_scopes_are_no_way_round(admin):
    """Who may make administrators' keys, and little else, makes none that may more."""
    narrow = await admin.key(Role.ADMIN, [Permission.KEYS_WRITE, Permission.ADMIN_KEYS_WRITE])
    _, chief = await admin.identity.keys.create(None, role=Role.ADMIN)
    for number, (method, path, body, status) in enumerate(
        (
            ("POST", "/v1/keys", {"admin": True, "role": "admin"}, 403),
            ("POST", "/v1/keys", {"admin": True, "role": "read-only"}, 403),
            ("POST", "/v1/keys", {"admin": True, "role": "admin", "scopes": ["keys:write"]}, 200),
            ("POST", f"/v1/keys/{chief.id}/rotate", {}, 403),
        )
    ):
        answer = await admin.ask(method, path, narrow, f"10.0.2.{number}", json=body)
        assert answer.status_code == status, answer.text
        if status == 200:
            wider = f"/v1/keys/{answer.json()['id']}"
            for change in ({"scopes": None}, {"scopes": ["keys:write", "audit:read"]}):
                asked = await admin.ask("PATCH", wider, narrow, "10.0.3.1", json=change)
                assert asked.status_code == 403
    lower = await admin.ask(
        "PATCH", f"/v1/keys/{chief.id}", narrow, "10.0.3.3", json={"scopes": ["keys:write"]}
    )
    assert lower.status_code == 403, "nor does he take from who has more"
    own = admin.identity.admin_auth
    who = (await own.identify(f"Bearer {narrow}")).user
    widened = await admin.ask("PATCH", f"/v1/keys/{who}", narrow, "10.0.3.2", json={"scopes": None})
    assert widened.status_code == 403


async def test_a_revoked_or_narrowed_administrator_is_out_at_once(admin):
    key, record = await admin.identity.keys.create(None, role=Role.ADMIN)
    assert (await admin.ask("GET", "/v1/audit", key)).status_code == 200
    await admin.told("PATCH", f"/v1/keys/{record.id}", json={"role": "read-only"})
    for hashed in await admin.identity.keys._hashes(record.id):
        admin.identity._told(f"key {hashed}")
    assert (await admin.ask("GET", "/v1/audit", key)).status_code == 403
    await admin.told("DELETE", f"/v1/keys/{record.id}")
    for hashed in await admin.identity.keys._hashes(record.id):
        admin.identity._told(f"revoked {hashed}")
    assert (await admin.ask("GET", "/v1/tenants", key, "10.0.0.2")).status_code == 401


# ---- failures -----------------------------------------------------------------------------------


async def test_who_fails_too_often_is_told_to_wait_and_a_right_key_never(admin, caplog):
    """Behind a proxy or a forwarded port all have one address."""
    key = await admin.key(Role.ADMIN)
    for number in range(9):
        wrong = f"psa-{number}" + "a" * 42
        answer = await admin.ask("GET", "/v1/tenants", wrong, "127.0.0.1")
        assert answer.status_code == (401 if number < 5 else 429)
        assert (await admin.ask("GET", "/v1/tenants", key, "127.0.0.1")).status_code == 200
    assert answer.json()["error"]["code"] == "too_many_failures"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await admin.ask("GET", "/v1/tenants", wrong, "10.0.0.4")).status_code == 401
    assert sum("from 127.0.0.1" in line for line in caplog.messages) == 5


async def test_what_one_administrator_may_not_fills_no_log_and_is_not_held_against_another(admin):
    watcher = await admin.key(Role.READ_ONLY)
    before = len(await admin.identity.audit.read(100))
    body = {"name": "acme"}
    told = [await admin.ask("POST", "/v1/tenants", watcher, json=body) for _ in range(9)]
    assert [one.status_code for one in told] == [403] * 5 + [429] * 4
    assert len(await admin.identity.audit.read(100)) == before + 5
    assert (await admin.ask("GET", "/v1/tenants", watcher)).status_code == 200
    other = await admin.key(Role.READ_ONLY)
    assert (await admin.ask("POST", "/v1/tenants", other, json=body)).status_code == 403


def test_failures_are_forgotten_bounded_and_of_a_whole_network(monkeypatch):
    now = [1000.0]
    clock = type("clock", (), {"monotonic": staticmethod(lambda: now[0])})
    monkeypatch.setattr("services.gateway.api.admin.failures.time", clock)
    monkeypatch.setattr("services.gateway.api.admin.failures._KNOWN", 3)
    failures = Failures(2)

    def too_many(peer: str) -> bool:
        try:
            failures.note(peer)
        except PenstockError:
            return True
        return False

    assert not too_many("2001:db8::1")
    assert not too_many("2001:db8::2")
    assert too_many("2001:db8::ffff")
    assert not too_many("2001:db8:0:1::1")
    assert not too_many("10.0.0.1")
    assert not too_many("::ffff:10.0.0.1")
    assert all(too_many("10.0.0.1") for _ in range(50))
    now[0] += 60.1  # those that were told to wait count no more
    assert not too_many("10.0.0.1")
    for number in range(9):
        too_many(f"10.1.0.{number}")
    assert len(failures._of) == 3
    assert all(len(times) <= 2 for times in failures._of.values())


async def test_dead_jobs_are_told_the_latest_first(admin, redis, namespace):
    queues = Queues(redis, namespace, "g1", 60)
    admin.parts.jobs = SimpleNamespace(queues=queues)
    for body in ("one", "two"):
        await queues.add(Queue("line", "acme", "batch_1"), body)
        await queues.bury(await queues.claim("line"), "it broke")
    latest, first = (await admin.told("GET", "/v1/jobs/dead"))["data"]
    assert (first["job"], first["tenant"], first["queue"]) == ("one", "acme", "batch_1")
    assert (latest["job"], latest["why"], latest["kind"]) == ("two", "it broke", "line")
    page = await admin.told("GET", f"/v1/jobs/dead?limit=1&before={latest['id']}")
    assert page["data"] == [first]
    assert (await admin.error("GET", "/v1/jobs/dead?limit=0"))[2] == "limit"
