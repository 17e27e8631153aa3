"""The chart's Redis has a user for Penstock and one for Ray's state: each can do its work, and
neither sees what is the other's."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis
from pydantic import SecretStr
from redis.exceptions import AuthenticationError, NoPermissionError

from services.cli.commands.doctor import redis as doctor
from services.cli.commands.doctor.installation import Installation
from tests.deploy.environment import settings_of
from tests.deploy.manifests import Release, render, secret_value
from tests.support.chart_redis import ChartRedis
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.waiting import until

NAMESPACE = "penstock"  # which the chart does not change
RAYS_KEY = "RAY1f0c-uid@KV"


@pytest.fixture(scope="module")
def release() -> Release:
    return render("laptop")


@pytest.fixture(scope="module")
def passwords(release: Release) -> dict[str, str]:
    """By user, as the pods of a gateway and of Ray's head are told."""
    [gateway] = release.pods_of("gateway")
    told = {e["name"]: e for e in gateway.spec["containers"][0]["env"]}
    assert told["PENSTOCK_REDIS_URL"]["value"].startswith("rediss://penstock:$(REDIS_AUTH)@")
    options = release.ray["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisUsername"] == {"value": "ray"}
    entries = {"penstock": told["REDIS_AUTH"], "ray": options["redisPassword"]}
    return {user: secret_value(release, entry) or "" for user, entry in entries.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    release: Release, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ChartRedis]:
    server = ChartRedis(release, tmp_path_factory.mktemp("redis"))
    await server.start()
    yield server
    server.close()


@pytest.fixture
def penstock(server: ChartRedis, passwords: dict[str, str]) -> Iterator["redis.Redis"]:
    with server.as_user("penstock", passwords["penstock"]) as client:
        yield client


@pytest.fixture
def ray(server: ChartRedis, passwords: dict[str, str]) -> Iterator["redis.Redis"]:
    with server.as_user("ray", passwords["ray"]) as client:
        yield client


def test_each_works_with_its_own_keys_and_not_with_the_others(
    penstock: "redis.Redis", ray: "redis.Redis"
) -> None:
    ray.hset(RAYS_KEY, "function", "code that Ray runs")
    assert ray.hgetall(RAYS_KEY) == {"function": "code that Ray runs"}
    assert ray.delete("DUMMY") == 0, "how Ray finds out who leads"
    assert "loading" in ray.info()
    penstock.set("penstock:of-a-test", "x")
    assert penstock.eval("return redis.call('GET', KEYS[1])", 1, "penstock:of-a-test") == "x"
    for client, theirs in ((penstock, RAYS_KEY), (ray, "penstock:of-a-test")):
        for command in ("GET", "TYPE", "DEL", "HGETALL", "DUMP"):
            with pytest.raises(NoPermissionError):
                client.execute_command(command, theirs)
        with pytest.raises(redis.ResponseError, match="can't access at least one of the keys"):
            client.eval(f"return redis.call('DEL', '{theirs}')", 0)
    with pytest.raises(NoPermissionError):
        ray.publish("penstock:keys:news", "revoked: all")
    with pytest.raises(NoPermissionError):
        penstock.publish("RAY", "x")
    assert penstock.publish("penstock:keys:news", "x") == 0


@pytest.mark.parametrize("user", ["penstock", "ray"])
@pytest.mark.parametrize(
    "command",
    ["KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST", "MONITOR", "SHUTDOWN", "REPLICAOF a 1"],
)
def test_neither_rules_the_server(request: pytest.FixtureRequest, user: str, command: str) -> None:
    client = request.getfixturevalue(user)
    with pytest.raises(NoPermissionError):
        client.execute_command(*command.split())


def test_strangers_and_mixed_up_passwords_are_refused(
    server: ChartRedis, passwords: dict[str, str]
) -> None:
    with pytest.raises(AuthenticationError), server.as_user("", "") as nobody:
        nobody.ping()
    for user, password in (
        ("penstock", passwords["ray"]),
        ("ray", passwords["penstock"]),
        ("default", passwords["penstock"]),
        ("admin", passwords["penstock"]),
    ):
        with pytest.raises(AuthenticationError), server.as_user(user, password) as client:
            client.ping()


async def test_a_password_that_would_be_read_as_rules_is_refused(
    release: Release, tmp_path: Path
) -> None:
    server = ChartRedis(release, tmp_path)
    try:
        with pytest.raises(RuntimeError, match="user ray must consist of letters and digits"):
            await server.start(PASSWORD_OF_RAY="x ~* +@all")
    finally:
        server.close()


def url_of(server: ChartRedis, password: str) -> str:
    return f"redis://penstock:{password}@127.0.0.1:{server.port}/0"


async def test_a_gateway_does_all_that_it_does_as_its_user(
    server: ChartRedis, passwords: dict[str, str]
) -> None:
    """Keys, revocations, files, stores, records, registry: all names begin as they should."""
    with server.as_admin() as admin:
        admin.acl_log_reset()
    async with gateway_rig(url_of(server, passwords["penstock"]), NAMESPACE) as rig:
        http = await rig.http()
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "Is it so?"}]}
        answer = await http.post("/v1/chat/completions", json=ask)
        assert answer.status_code == 200, answer.text
        await rig.record(answer.headers["x-request-id"])
        await _files_and_stores(rig)
        other, record = await rig.keys.create("rival")
        second = await rig.http(other)
        assert (await second.get("/v1/models")).status_code == 200
        await rig.keys.revoke(record.id)

        async def told() -> bool:
            return (await second.get("/v1/models")).status_code == 401

        await until(told, 10, "the gateway has heard of it")
    assert server.refused() == []


async def _files_and_stores(rig: Rig) -> None:
    http = await rig.http()
    text = {"file": ("a.txt", b"A penstock leads water."), "purpose": (None, "assistants")}
    file = (await http.post("/v1/files", files=text)).raise_for_status().json()["id"]
    made = await http.post("/v1/vector_stores", json={"name": "s", "file_ids": [file]})
    store = made.raise_for_status().json()["id"]

    async def indexed() -> bool:
        counts = (await http.get(f"/v1/vector_stores/{store}")).json()["file_counts"]
        return bool(counts["completed"] == 1)

    await until(indexed, 20, "the file is indexed")
    (await http.delete(f"/v1/vector_stores/{store}")).raise_for_status()
    (await http.delete(f"/v1/files/{file}")).raise_for_status()


async def test_the_doctor_finds_nothing_wrong_with_it(
    server: ChartRedis, passwords: dict[str, str], release: Release
) -> None:
    """By the settings of the pod that it runs in; here without TLS."""
    [cli] = release.pods_of("cli")
    there = settings_of(release, cli)
    here = {"redis_url": SecretStr(url_of(server, passwords["penstock"])), "redis_ca": None}
    it = await Installation.find(there.model_copy(update=here))
    try:
        found = await doctor.check(it)
    finally:
        await it.close()
    assert [f for f in found if f.about.startswith("redis") and f.state != "ok"] == []
    assert server.ready()


def test_who_administers_it_needs_no_password_of_others(server: ChartRedis) -> None:
    """The certificate is read again, and a password changed, by a user of the pod's own."""
    with server.as_admin() as admin:
        assert admin.acl_setuser("ray", passwords=["+another"], enabled=True)
        with server.as_user("ray", "another") as ray:
            assert ray.ping()
        admin.acl_setuser("ray", passwords=["-another"], enabled=True)
