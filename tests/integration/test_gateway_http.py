"""The gateway at the level of HTTP: bytes, refusals, limits, and everything that breaks."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import generate_latest

from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import LinkCall
from services.common.service import Host
from services.gateway.api.generation_schema import CompletionRequest
from services.gateway.server import GatewayService
from tests.support.gateway_rig import (
    EMBEDDING_MODEL,
    MODEL,
    Rig,
    ScriptedTokenizer,
    SmallRetrieval,
    finish,
    gateway_rig,
    plan,
    say,
    send,
)
from tests.support.inside import check
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **more}


def raising(error: PenstockError, after: tuple[str, ...] = ()):
    async def script(call: LinkCall, request: Any) -> None:
        for word in after:
            send(call, word, plan=plan(request))
        await asyncio.sleep(0.05 if after else 0)
        raise error

    return script


async def silent(call: LinkCall, request: Any) -> None:
    await asyncio.Event().wait()


def events(body: str) -> list[str]:
    blocks = body.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, max_requests=6, body_limit_bytes=100_000) as rig:
        yield rig


# ---- what a stream looks like -------------------------------------------------------------------


async def test_the_bytes_of_a_stream(rig):
    rig.tokenizer.script = say('a"\n', "\u2028\U0001f600")
    http = await rig.http()
    answer = await http.post(CHAT, json=ask(stream=True, stream_options={"include_usage": True}))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.content.isascii()
    told = events(answer.text)
    assert told.pop() == "[DONE]"
    chunks = [json.loads(chunk) for chunk in told]
    head = {"id", "object", "created", "model", "choices", "usage"}
    assert all(set(chunk) - {"penstock"} == head for chunk in chunks)
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": 'a"\n'},
        {"content": "\u2028\U0001f600"},
        {},
    ]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 2,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_an_error_in_mid_stream_is_told_and_ends_it(rig):
    lost = unavailable("lost worker-1", stage="worker", reason="")
    rig.tokenizer.script = raising(lost, after=("so ", "far"))
    http = await rig.http()
    answer = await http.post(CHAT, json=ask(stream=True))
    assert answer.status_code == 200
    told = [json.loads(event) for event in events(answer.text)]
    assert "".join(c["choices"][0]["delta"]["content"] for c in told[:-1]) == "so far"
    assert told[-1]["error"] == {
        "message": "lost worker-1",
        "type": "server_error",
        "param": None,
        "code": "worker_unavailable",
        "stage": "worker",
    }
    record = await rig.record(answer.headers["x-request-id"])
    assert record["status"] == "unavailable"
    assert record["error"]["stage"] == "worker"


# ---- several prompts in one request -------------------------------------------------------------


async def echo(call: LinkCall, request: Any) -> None:
    """Says the prompt, letter by letter; a `!` in it fails."""
    for index, letter in enumerate(request.text):
        if letter == "!":
            raise invalid("no exclamations", "prompt", reason="loud")
        send(call, letter, **({"plan": plan(request)} if index == 0 else {}))
        await asyncio.sleep(0.001)
    finish(call, len(request.text))


async def test_several_prompts_stream_side_by_side(rig):
    rig.tokenizer.script = echo
    http = await rig.http()
    prompts = ["a" * 30, "b" * 20, "c"]
    body = {"model": MODEL, "prompt": prompts, "stream": True}
    answer = await http.post(
        "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    )
    told = events(answer.text)
    assert told.pop() == "[DONE]"
    chunks = [json.loads(chunk) for chunk in told]
    last = chunks.pop()
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 51)
    assert last["usage"]["prompt_tokens"] == 24
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    order = [choice["index"] for choice in choices if choice["text"]]
    for index, prompt in enumerate(prompts):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt
        assert [choice["finish_reason"] for choice in mine][-2:] == [None, "stop"]
    assert order != sorted(order), "they do not wait in line"
    await until(lambda: rig.gateway.intake.running == 0, 5)


async def test_one_prompt_that_fails_ends_the_request_and_is_named(rig):
    rig.tokenizer.script = echo
    http = await rig.http()
    body = {"model": MODEL, "prompt": ["a" * 4000, "!"]}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt[1]"
    await until(lambda: rig.tokenizer.cancelled == 1, 5, "the other is cancelled")
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "!"})
    assert answer.json()["error"]["param"] == "prompt"
    body["prompt"] = ["a"] * (rig.settings.gateway.max_prompts + 1)
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_a_client_that_goes_away_cancels_all_its_prompts(rig):
    rig.tokenizer.script = silent
    http = await rig.http()
    request = asyncio.create_task(
        http.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b", "c"]})
    )
    await until(lambda: len(rig.tokenizer.requests) == 3, 5)
    request.cancel()
    await until(lambda: rig.tokenizer.cancelled == 3, 5)
    await until(lambda: rig.gateway.intake.running == 0, 5)


# ---- nothing of the inside is told --------------------------------------------------------------


async def test_what_breaks_inside_is_told_without_whereabouts(rig):
    http = await rig.http()
    replicas = [h.replica for h in (rig.host, rig.tokenizer_host, rig.retrieval_host)]

    async def seen(answer: httpx.Response, stage: str) -> None:
        error = json.loads(events(answer.text)[-1]) if answer.status_code == 200 else answer.json()
        assert error["error"]["stage"] == stage
        record = await rig.record(answer.headers["x-request-id"])
        assert record["error"]["stage"] == stage
        check(answer.text + json.dumps(record), *replicas)

    async def breaks(call: LinkCall, request: Any) -> None:
        raise FileNotFoundError(f"/tmp/secret of {rig.tokenizer_host.id} at 10.1.2.3:4567")

    rig.tokenizer.script = breaks
    await seen(await http.post(CHAT, json=ask()), "tokenizer")
    await seen(await http.post(CHAT, json=ask(stream=True)), "tokenizer")

    async def one_word(call: LinkCall, request: Any) -> None:
        send(call, "word", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = one_word
    rig.gateway.settings.gateway.tokenizer_patience_s = 0.0  # no other one will come
    streaming = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
    await until(lambda: rig.tokenizer.requests, 5)
    await rig.tokenizer_host._server.stop(None)  # as if it were killed
    await seen(await streaming, "tokenizer")


async def test_a_fault_of_the_gateway_is_told_without_its_text(rig, monkeypatch):
    async def breaks(*_: Any) -> None:
        raise ValueError(f"bad thing in /tmp/x of {rig.host.id}")

    monkeypatch.setattr(rig.gateway.models, "find", breaks)
    http = await rig.http()
    answer = await http.post(CHAT, json=ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    record = await rig.record(answer.headers["x-request-id"])
    assert record["error"]["message"] == answer.json()["error"]["message"]
    check(answer.text + json.dumps(record))


# ---- errors before the stream -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (invalid("blocked", "messages[0].content", reason="content_policy"), 400, "content_policy"),
        (
            PenstockError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "queue full",
                stage="router",
                reason="queue_full",
                retry_after_s=2.2,
            ),
            429,
            "queue_full",
        ),
        (unavailable("no worker", stage="router"), 503, "router_unavailable"),
        (unavailable("lost it", stage="worker", reason="peer_lost"), 503, "peer_lost"),
        (PenstockError(grpc.StatusCode.INTERNAL, "broken", stage="worker"), 500, "internal"),
    ],
)
async def test_errors_from_below_have_their_status(rig, stream, error, status, code):
    rig.tokenizer.script = raising(error)
    http = await rig.http()
    answer = await http.post(CHAT, json=ask(stream=stream))
    assert answer.status_code == status
    told = answer.json()["error"]
    assert told["code"] == code
    assert told["message"] == error.message
    assert told["param"] == (error.param or None)
    assert answer.headers["x-request-id"]
    if status == 429:
        assert answer.headers["retry-after"] == "3"
    assert len(rig.tokenizer.requests) == 1, "whoever told it has tried what there is to try"


async def test_without_a_good_key_there_is_nothing(rig):
    http = await rig.http()
    _, record = await rig.keys.create("acme")
    for headers in (
        {"Authorization": ""},
        {"Authorization": "Bearer psk-short"},
        {"Authorization": "Basic " + rig.key},
        {"Authorization": "Bearer psk-" + "a" * 43},
        {"Authorization": "Bearer " + record.id},
    ):
        for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/vector_stores"):
            answer = await http.post(path, json=ask(), headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/v1/files", "/v1/requests/x"):
            assert (await http.get(path, headers=headers)).status_code == 401
    assert rig.tokenizer.requests == []


async def test_no_header_names_a_tenant_or_a_priority(rig):
    http = await rig.http()
    claims = {"x-tenant": "rival", "x-tenant-id": "rival", "x-priority": "high", "x-salt": "s"}
    assert (await http.post(CHAT, json=ask(), headers=claims)).status_code == 200
    caller = rig.tokenizer.requests[0].caller
    assert (caller.tenant, caller.priority) == ("acme", 2)


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b'{"model": "\xff"}', {}, 400, "invalid_json"),
        (b"{}", {}, 400, "missing_required_parameter"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b"x" * 100_001, {}, 413, "body_too_large"),
    ],
)
async def test_bodies_that_are_none(rig, content, headers, status, code):
    http = await rig.http()
    headers = {"content-type": "application/json", **headers}
    answer = await http.post(CHAT, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


async def test_a_large_prompt_is_read_beside_the_event_loop(rig, monkeypatch):
    read_by = []
    as_ever = CompletionRequest.prompts

    def watched(self: CompletionRequest, limits: Any) -> Any:
        read_by.append(threading.get_ident())
        return as_ever(self, limits)

    monkeypatch.setattr(CompletionRequest, "prompts", watched)
    http = await rig.http()
    large = {"model": MODEL, "prompt": [77] * 25_000}
    assert (await http.post("/v1/completions", json=large)).status_code == 200
    assert threading.get_ident() not in read_by
    rig.settings.gateway.max_prompt_tokens = 24_999
    answer = await http.post("/v1/completions", json=large)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_the_body_limit_holds_without_a_content_length(rig):
    http = await rig.http()

    async def endless() -> AsyncIterator[bytes]:
        yield b'{"model": "'
        for _ in range(200):
            yield b"x" * 10_000

    answer = await http.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


async def test_a_chat_of_too_many_messages_is_refused_by_name(rig):
    rig.settings.gateway.max_messages = 3
    http = await rig.http()
    assert (await http.post(CHAT, json=ask(messages=MESSAGES * 3))).status_code == 200
    answer = await http.post(CHAT, json=ask(messages=MESSAGES * 4))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert len(rig.tokenizer.requests) == 1


async def test_unknown_paths_methods_and_models(rig):
    http = await rig.http()
    assert (await http.get("/v1/nothing")).json()["error"]["code"] == "unknown_url"
    answer = await http.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert (await http.put("/v1/files/file-0")).headers["allow"] == "GET, DELETE"
    answer = await http.post(CHAT, json=ask(model="nobody"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_an_odd_id_is_answered_as_an_unknown_one(rig):
    http = await rig.http()
    upload = {"file": ("a.txt", b"water")}
    file = (await http.post("/v1/files", files=upload, data={"purpose": "assistants"})).json()["id"]
    store = (await http.post("/v1/vector_stores", json={"file_ids": [file]})).json()["id"]
    # The keys of Redis that a file's or a store's id would lead to, if it were taken as it comes.
    for odd in (f"{file}:stores", f"{file}%3Astores", "file-%0a", f"{file}%00"):
        for method, path in (
            ("GET", f"/v1/files/{odd}"),
            ("GET", f"/v1/files/{odd}/content"),
            ("DELETE", f"/v1/files/{odd}"),
            ("GET", f"/v1/vector_stores/{odd}"),
            ("GET", f"/v1/vector_stores/{odd}/files"),
            ("GET", f"/v1/vector_stores/{store}/files/{odd}"),
            ("DELETE", f"/v1/vector_stores/{store}/files/{odd}"),
            ("GET", f"/v1/requests/{odd}"),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == 404, path
            assert answer.json()["error"]["code"] == "not_found"
    for path, body, param in (
        ("/v1/vector_stores", {"file_ids": [file, file + ":stores"]}, "file_ids[1]"),
        (f"/v1/vector_stores/{store}/files", {"file_id": file + ":stores"}, "file_id"),
        (
            CHAT,
            ask(tools=[{"type": "file_search", "vector_store_ids": [store, store + ":x"]}]),
            "tools[0].vector_store_ids[1]",
        ),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)


async def test_a_revoked_key_is_refused_at_once(rig):
    key, record = await rig.keys.create("acme")
    http = await rig.http(key)
    assert (await http.get("/v1/models")).status_code == 200
    await rig.keys.revoke(record.id)

    async def refused() -> bool:
        return (await http.get("/v1/models")).status_code == 401

    await until(refused, 5, "long before key_cache_s")


async def test_bad_queries_and_forms(rig):
    http = await rig.http()
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("before=a", "before")):
        answer = await http.get(f"/v1/files?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await http.get("/v1/files?after=file-x")).json()["error"]["param"] == "after"
    form = {"content-type": "multipart/form-data; boundary=b"}
    for content in (b"", b"--b\r\nnonsense", b"--b--\r\n"):
        answer = await http.post("/v1/files", content=content, headers=form)
        assert answer.status_code == 400
    answer = await http.post(
        "/v1/files", files={"file": ("a.txt", b"x" * 200_000)}, data={"purpose": "assistants"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "charset", ["punycode", "idna", "undefined", "unicode_escape", "utf-16", "no-such"]
)
async def test_a_form_is_utf_8_and_no_other_codec_is_tried(rig, charset):
    content = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="\\ud800.md"\r\n\r\n'
        b"# a\r\n--b--\r\n"
    )
    http = await rig.http()
    kind = "multipart/form-data; boundary=b"
    answer = await http.post(
        "/v1/files", content=content, headers={"content-type": f"{kind}; charset={charset}"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    answer = await http.post(
        "/v1/files", content=content, headers={"content-type": f'{kind}; charset="UTF-8"'}
    )
    assert answer.status_code == 200


# ---- cancel, time, load -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_the_work(rig, stream):
    async def one_word_and_silence(call: LinkCall, request: Any) -> None:
        send(call, "word", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = one_word_and_silence
    http = await rig.http()
    request = asyncio.create_task(http.post(CHAT, json=ask(stream=stream)))
    await until(lambda: rig.tokenizer.requests, 5)
    request.cancel()
    await until(lambda: rig.tokenizer.cancelled == 1, 5)
    await until(lambda: rig.gateway.intake.running == 0, 5)


async def test_beyond_the_limit_of_requests_429(rig):
    rig.tokenizer.script = silent
    http = await rig.http()
    running = [asyncio.create_task(http.post(CHAT, json=ask())) for _ in range(3)]
    await until(lambda: len(rig.tokenizer.requests) == 3, 5)
    answer = await http.post(CHAT, json=ask())
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "too_many_requests"
    for request in running:
        request.cancel()
    await until(lambda: rig.gateway.intake.running == 0, 5)
    rig.tokenizer.script = say("ok")
    assert (await http.post(CHAT, json=ask())).status_code == 200


async def test_nothing_outlasts_the_request_timeout(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, request_timeout_s=1.0) as rig:
        rig.tokenizer.script = silent
        http = await rig.http()
        answer = await http.post(CHAT, json=ask())
        assert answer.status_code == 504
        assert answer.json()["error"]["stage"] == "tokenizer"
        await until(lambda: rig.tokenizer.cancelled == 1, 5)


async def test_a_tokenizer_lost_before_the_first_word_is_replaced(rig):
    other = await rig.start(ScriptedTokenizer)
    await until(lambda: len(rig.gateway.tokenizers.ready()) == 2, 10)
    rig.tokenizer.script = silent
    other.service.script = silent
    http = await rig.http()
    request = asyncio.create_task(http.post(CHAT, json=ask()))
    await until(lambda: rig.tokenizer.requests or other.service.requests, 5)
    asked, spare = (
        (rig.tokenizer_host, other)
        if rig.tokenizer.requests
        else (
            other,
            rig.tokenizer_host,
        )
    )
    spare.service.script = say("still here")
    await asked.stop(0)
    answer = await request
    assert answer.json()["choices"][0]["message"]["content"] == "still here"
    record = await rig.record(answer.headers["x-request-id"])
    (moved,) = [d for d in record["decisions"] if d["subject"] == "tokenizer"]
    assert moved["choice"].startswith("tokenizer ")
    assert moved["choice"] != moved["reasons"]["lost"]
    check(json.dumps(record), spare.replica, asked.replica)


async def test_an_answer_does_not_wait_for_a_record_that_does_not_come(rig):
    async def never_ends(call: LinkCall, request: Any) -> None:
        await say("so", " it", " is")(call, request)
        await asyncio.Event().wait()

    rig.tokenizer.script = never_ends
    http = await rig.http()
    async with asyncio.timeout(20):
        answer = await http.post(CHAT, json=ask())
    assert answer.json()["choices"][0]["message"]["content"] == "so it is"
    assert (await rig.record(answer.headers["x-request-id"]))["status"] == "ok"


async def test_drain_lets_streams_finish_and_refuses_new_ones(rig):
    go_on = asyncio.Event()

    async def waits(call: LinkCall, request: Any) -> None:
        send(call, "first", plan=plan(request))
        await go_on.wait()
        send(call, " last")
        finish(call)

    rig.tokenizer.script = waits
    http = await rig.http()
    running = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
    await until(lambda: rig.tokenizer.requests, 5)
    stopping = asyncio.create_task(rig.host.stop(10))
    await until(lambda: rig.gateway.intake.draining, 5)
    refused = await http.post(CHAT, json=ask())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    go_on.set()
    assert events((await running).text)[-1] == "[DONE]"
    async with asyncio.timeout(10):
        await stopping
    with pytest.raises(httpx.ConnectError):
        await http.get("/healthz")


async def test_what_outlasts_a_drains_grace_is_told_so(rig):
    async def never_ends(call: LinkCall, request: Any) -> None:
        send(call, "first", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = never_ends
    http = await rig.http()
    streamed = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
    whole = asyncio.create_task(http.post(CHAT, json=ask()))
    await until(lambda: len(rig.tokenizer.requests) == 2, 5)
    await rig.host.stop(0.2)
    last = json.loads(events((await streamed).text)[-1])
    assert (last["error"]["code"], last["error"]["stage"]) == ("draining", "gateway")
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    await until(lambda: rig.tokenizer.cancelled == 2, 5)


# ---- retrieval and Redis away -------------------------------------------------------------------


async def store_of(rig: Rig, http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/vector_stores", json={"name": "s"})).json()["id"])


async def test_without_retrieval_the_answer_says_so(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, retrieval_timeout_s=0.3) as rig:
        http = await rig.http()
        tools = [{"type": "file_search", "vector_store_ids": [await store_of(rig, http)]}]

        async def asked() -> dict[str, Any]:
            answer = await http.post(CHAT, json=ask(tools=tools))
            assert answer.status_code == 200
            assert answer.json()["penstock"]["passages"] == []
            assert "answered without the vector stores" in answer.json()["penstock"]["warning"]
            record = await rig.record(answer.headers["x-request-id"])
            (made,) = [d for d in record["decisions"] if d["subject"] == "retrieval"]
            assert made["choice"] == "skipped"
            return dict(made["reasons"])

        rig.retrieval.hold.clear()
        assert (await asked())["cause"] == "timeout"
        rig.retrieval.hold.set()
        rig.retrieval.failure = unavailable("the store is away", stage="retrieval", reason="store")
        assert (await asked())["cause"] == "store"
        await rig.retrieval_host.stop(0)
        assert (await asked())["cause"] in ("unreachable", "no_replica", "timeout")


@pytest.mark.parametrize("how", ["killed", "draining"])
async def test_a_lost_retrieval_is_passed_over_while_it_is_still_registered(rig, how):
    spare = await rig.start(SmallRetrieval)
    await until(lambda: len(rig.gateway.retrieval._channels) == 2, 5)
    if how == "killed":
        await rig.retrieval_host._server.stop(None)
    else:
        rig.retrieval.failure = unavailable("stopping", stage="retrieval", reason="draining")
    http = await rig.http()
    body = {"model": EMBEDDING_MODEL, "input": "x"}
    for _ in range(8):  # in random order: each of them tries the lost one first with 1/2
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200
    assert len(rig.gateway.retrieval._channels) == 2
    await spare.stop(0)
    refused = await http.post("/v1/embeddings", json=body)
    assert refused.status_code == 503


async def test_redis_killed_while_streaming(namespace):
    with EmbeddedRedis() as redis:
        async with gateway_rig(redis.url, namespace, key_cache_s=0.0) as rig:
            go_on = asyncio.Event()

            async def waits(call: LinkCall, request: Any) -> None:
                send(call, "first", plan=plan(request))
                await go_on.wait()
                finish(call)

            rig.tokenizer.script = waits
            http = await rig.http()
            other_key, _ = await rig.keys.create("acme")
            running = asyncio.create_task(http.post(CHAT, json=ask(stream=True)))
            await until(lambda: rig.tokenizer.requests, 5)
            os.kill(redis.pid, signal.SIGKILL)
            go_on.set()
            assert events((await running).text)[-1] == "[DONE]"

            # A key known before holds; an unknown one cannot be checked.
            assert (await http.post(CHAT, json=ask())).status_code == 200
            stranger = await rig.http(other_key)
            refused = await stranger.post(CHAT, json=ask())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "keys_unavailable"
            away = await http.get("/v1/files")
            assert away.status_code == 503
            assert away.json()["error"]["code"] == "storage_unavailable"

            async def degraded() -> bool:
                told = await http.get("/readyz")
                assert told.status_code == 200, "known keys are served"
                return told.json()["status"] == "degraded" and "Redis" in told.json()["missing"][0]

            await until(degraded, 5, "readiness says what is away")


# ---- records and operation ----------------------------------------------------------------------


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
