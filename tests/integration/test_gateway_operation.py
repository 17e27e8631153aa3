"""What an operator meets at the gateway: records, health, metrics, origins, ports."""

import json
import socket
from collections.abc import AsyncIterator
from importlib.metadata import version

import httpx
import pytest
from prometheus_client import generate_latest

from services.common.service import Host
from services.gateway.server import GatewayService
from tests.support.gateway_rig import (
    Rig,
    gateway_rig,
)
from tests.support.http_chats import CHAT, ask, store_of
from tests.support.waiting import until


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace) as rig:
        yield rig


async def test_the_record_joins_all_stages_on_the_clients_trace(rig):
    http = await rig.http()
    store = await store_of(rig, http)
    tools = [{"type": "file_search", "vector_store_ids": [store]}]
    trace, parent = "ab" * 16, "cd" * 8
    answer = await http.post(
        CHAT,
        json=ask(tools=tools, user="u1", metadata={"run": "7"}),
        headers={"traceparent": f"00-{trace}-{parent}-00"},
    )
    record = await rig.record(answer.headers["x-request-id"])
    spans = {span["name"]: span for span in record["spans"]}
    root = spans["request"]
    assert root["start_ms"] == 0
    assert root["parent"] == parent
    for name in ("authenticate", "validate", "retrieve", "generate"):
        assert spans[name]["parent"] == root["id"]
        assert spans[name]["service"] == "gateway"
    assert spans["search"]["parent"] == spans["retrieve"]["id"]
    assert spans["search"]["service"] == "retrieval"
    assert spans["prompt"]["parent"] == spans["generate"]["id"]
    assert {d["stage"] for d in record["decisions"]} == {"gateway", "tokenizer"}
    assert record["metadata"] == {"run": "7", "user": "u1"}
    assert record["status"] == "ok"
    assert "Hi" not in json.dumps(record)


async def test_health_readiness_and_metrics(rig):
    """A busy machine may hold up what tells that the tokenizer lives, or what is counted after an
    answer: what is told is waited for."""
    http = await rig.http()
    async with httpx.AsyncClient(base_url=rig.url) as anybody:

        async def tells(path: str, code: int, **told: object) -> None:
            async def now() -> bool:
                answer = await anybody.get(path)
                return answer.status_code == code and answer.json() == told

            await until(now, 20, f"{path} tells {code} {told}")

        await tells("/healthz", 200, status="ok")
        await tells("/readyz", 200, status="ok", missing=[])
        await tells("/health", 200, status="ok", missing=[])
        await tells("/version", 200, version=version("penstock"))
        assert (await http.post(CHAT, json=ask())).status_code == 200
        assert (await http.get("/somewhere/else")).status_code == 404
        counted = (
            'penstock_gateway_requests_total{route="/v1/chat/completions",status="200"}',
            'route="unknown",status="404"',
        )
        await until(lambda: all(one in generate_latest().decode() for one in counted), 20)
        assert "somewhere" not in generate_latest().decode()
        await rig.tokenizer_host.stop(0)
        missing = ["no tokenizer is linked"]
        await tells("/readyz", 503, status="unavailable", missing=missing)
        await tells("/health", 503, status="unavailable", missing=missing)


PAGE = "https://app.example"


async def test_pages_of_the_origins_that_are_set_may_call(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, cors_origins=[PAGE]) as rig:
        http = await rig.http()
        asked = {"access-control-request-method": "POST"}
        wanted = "authorization, content-type, x-stainless-lang"
        may = await http.options(
            CHAT, headers={"origin": PAGE, **asked, "access-control-request-headers": wanted}
        )
        assert may.status_code == 200
        assert may.headers["access-control-allow-origin"] == PAGE
        assert "POST" in may.headers["access-control-allow-methods"]
        assert may.headers["access-control-allow-headers"] == wanted
        other = await http.options(CHAT, headers={"origin": "https://evil.example", **asked})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers

        for body, status in ((ask(), 200), (ask(stream=True), 200), ({}, 400)):
            answer = await http.post(CHAT, json=body, headers={"origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        unknown = await http.post(CHAT, json=ask(), headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in unknown.headers
        refused = await http.get("/v1/models", headers={"origin": PAGE, "authorization": ""})
        assert refused.status_code == 401, "a page needs a key as everybody does"
        assert refused.headers["access-control-allow-origin"] == PAGE


async def test_without_the_setting_no_page_may_call(rig):
    http = await rig.http()
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    assert (await http.options(CHAT, headers=asked)).status_code == 405
    answer = await http.post(CHAT, json=ask(), headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


async def test_a_taken_port_is_an_error_and_leaves_nothing(rig):
    settings = rig.settings.model_copy(deep=True)
    with socket.create_server(("127.0.0.1", 0)) as another:
        settings.gateway.port = another.getsockname()[1]
        second = Host(GatewayService, settings)
        with pytest.raises(OSError, match="Address already in use"):
            await second.start()


async def test_prompts_are_shown_only_where_that_is_switched_on(rig):
    http = await rig.http()
    for shown in (False, True):
        rig.settings.log_prompts = shown
        answer = await http.post(CHAT, json=ask())
        record = await rig.record(answer.headers["x-request-id"])
        (told,) = [s["attributes"] for s in record["spans"] if s["name"] == "generate"]
        assert told == ({"prompt": "user: Hi", "answer": "Hello world"} if shown else {})
