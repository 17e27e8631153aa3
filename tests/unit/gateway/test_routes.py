"""Paths, what each asks of its caller, and what operators are told: over ASGI, without a server."""

from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from services.gateway.api.rest.routes import application
from services.gateway.ids import REQUEST
from services.gateway.runs.records import Journal
from tests.support.gateway_parts import EMBEDDING_MODEL, MODEL, gateway_parts, principal


@pytest.fixture
async def parts() -> AsyncIterator[Any]:
    with gateway_parts(max_requests=2) as parts:
        yield parts


@pytest.fixture
async def http(parts: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(parts))
    headers = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=headers
    ) as client:
        yield client


# ---- models -------------------------------------------------------------------------------------


async def test_models_and_what_is_told_of_each(parts, http):
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    own = {"object": "model", "created": 7, "owned_by": "penstock", "context_window": 512}
    own["sampling"] = {}
    assert listed["data"] == [
        {"id": "other", **own},
        {"id": MODEL, **own},
        {"id": EMBEDDING_MODEL, "object": "model", "created": 0, "owned_by": "penstock"},
    ]
    assert (await http.get(f"/v1/models/{MODEL}")).json() == {"id": MODEL, **own}
    parts.retrieval.embedding_model = ""
    assert len((await http.get("/v1/models")).json()["data"]) == 2


@pytest.mark.parametrize("model", ["other", EMBEDDING_MODEL])
async def test_a_key_for_one_model_is_shown_that_one(parts, http, model):
    parts.auth.keys["Bearer k"] = principal(models=frozenset({model}))
    assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == [model]
    assert (await http.get(f"/v1/models/{model}")).status_code == 200
    hidden = await http.get(f"/v1/models/{MODEL}")
    unknown = await http.get("/v1/models/a/b")
    assert (hidden.status_code, unknown.status_code) == (404, 404)
    assert hidden.json()["error"]["code"] == unknown.json()["error"]["code"] == "model_not_found"


# ---- places -------------------------------------------------------------------------------------


async def test_looking_at_things_takes_no_place_and_changing_them_does(parts, http):
    with parts.intake.slot("acme"):
        assert (await http.get("/v1/models")).status_code == 200
        for method, path in (("POST", "/v1/embeddings"), ("DELETE", "/v1/files/file-0")):
            refused = await http.request(method, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "too_many_requests",
            )
    await parts.intake.drain(0)
    assert (await http.get("/v1/models")).status_code == 200
    for path in ("/v1/embeddings", "/v1/chat/completions", "/v1/completions"):
        refused = await http.post(path, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


async def test_every_path_of_the_api_wants_a_key(parts, http):
    paths = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("GET", "/v1/requests/x"),
        *((method, "/v1/files") for method in ("GET", "POST")),
        *((method, "/v1/files/x") for method in ("GET", "DELETE")),
        ("GET", "/v1/files/x/content"),
        *((method, "/v1/vector_stores") for method in ("GET", "POST")),
        *((method, "/v1/vector_stores/x") for method in ("GET", "DELETE")),
        ("POST", "/v1/vector_stores/x/search"),
        *((method, "/v1/vector_stores/x/files") for method in ("GET", "POST")),
        *((method, "/v1/vector_stores/x/files/y") for method in ("GET", "DELETE")),
    ]
    for method, path in paths:
        answer = await http.request(method, path, headers={"authorization": "Bearer other"})
        assert answer.status_code == 401, path
    assert (parts.intake.running, parts.intake.bytes_held) == (0, 0)


async def test_a_request_is_shown_to_its_own_tenant(parts, http):
    id = REQUEST.new()
    journal = Journal(id, "Test")
    journal.tenant = "acme"
    parts.records.keep(journal)
    answer = await http.get(f"/v1/requests/{id}")
    assert (answer.status_code, answer.json()["id"]) == (200, id)
    parts.auth.keys["Bearer k"] = principal("rival")
    hidden = await http.get(f"/v1/requests/{id}")
    assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "not_found")


async def test_while_redis_is_away_stores_say_so(parts, http):
    class Away:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError

    parts.files = Away()
    answer = await http.get("/v1/files")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "storage_unavailable"
    assert answer.headers["retry-after"] == "1"


# ---- for operators ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("linked", "redis", "known", "draining", "status", "told"),
    [
        (True, True, True, False, "ok", []),
        (True, True, False, False, "ok", []),
        (False, True, True, False, "unavailable", ["no tokenizer"]),
        (True, False, True, False, "degraded", ["only known keys"]),
        (True, False, False, False, "unavailable", ["no API key is known"]),
        (False, False, True, False, "unavailable", ["no tokenizer", "only known keys"]),
        (True, True, True, True, "unavailable", ["shutting down"]),
    ],
)
async def test_readiness_is_whether_a_request_has_a_way(
    parts, http, linked, redis, known, draining, status, told
):
    parts.tokenizers.linked = linked
    parts.tokenizers.redis_reachable = redis
    parts.auth.knows_keys = known
    parts.intake.leaving = draining
    for path in ("/readyz", "/health"):
        answer = await http.get(path, headers={"authorization": ""})
        assert answer.status_code == (503 if status == "unavailable" else 200)
        assert answer.json()["status"] == status
        missing = answer.json()["missing"]
        assert len(missing) == len(told)
        assert all(word in one for word, one in zip(told, missing, strict=True))
    assert (await http.get("/healthz")).json() == {"status": "ok"}


async def test_what_anybody_may_see(http):
    nobody = {"authorization": ""}
    assert (await http.get("/version", headers=nobody)).json() == {"version": version("penstock")}
    for inside in ("/metrics", "/targets"):
        assert (await http.get(inside, headers=nobody)).status_code == 404


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1/files/", "/v1/nothing", "/", "/v1/files/a/b/c"]
)
async def test_other_paths_are_unknown_and_lead_nowhere(http, path):
    answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("unknown_url", "model_not_found")


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/messages/batches/msgbatch_1/results"]
)
async def test_unknown_paths_of_anthropics_are_told_as_it_tells_them(http, path):
    for answer in (await http.get(path), await http.post(path, json={})):
        told = answer.json()
        assert (answer.status_code, told["type"]) == (404, "error")
        assert told["error"]["type"] == "not_found_error"
        assert path in told["error"]["message"]
    told = (await http.get("/v1/messagesbatches")).json()
    assert told["error"]["code"] == "unknown_url", "another path's words are OpenAI's"
    long = await http.get("/" + "x" * 5000)
    assert len(long.json()["error"]["message"]) < 300


async def test_a_page_may_call_with_every_method_of_the_api(parts):
    page = "https://app.example"
    parts.settings.gateway.cors_origins = [page]
    transport = httpx.ASGITransport(application(parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for method, status in (("GET", 200), ("POST", 200), ("DELETE", 200), ("PATCH", 400)):
            asked = {"origin": page, "access-control-request-method": method}
            assert (await http.options("/v1/files/x", headers=asked)).status_code == status
