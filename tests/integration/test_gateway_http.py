"""The gateway at the level of HTTP: bytes, refusals, and errors in words."""

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import LinkCall
from services.gateway.api.generation_schema import CompletionRequest
from tests.support.gateway_rig import (
    MODEL,
    Rig,
    finish,
    gateway_rig,
    plan,
    send,
)
from tests.support.http_chats import CHAT, MESSAGES, ask, events, raising, silent
from tests.support.inside import check
from tests.support.waiting import until


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(
        redis_url, namespace, body_limit_bytes=100_000, max_upload_bytes=100_000
    ) as rig:
        yield rig


async def test_an_answer_that_is_over_leaves_no_garbage(rig):
    """What requests leave in circles, Python looks for, and holds all streams meanwhile."""
    kinds = {"Exchange", "RestFront", "KeepAlive", "TextStream", "LinkRequest", "LinkCall", "Task"}
    http, bodies = await rig.http(), [ask(stream=True), ask()]
    for body in bodies:
        await http.post(CHAT, json=body)  # what is made once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for body in bodies:
            assert (await http.post(CHAT, json=body)).status_code == 200
        await until(lambda: not rig.gateway.intake.running)
        gc.collect()
        assert not kinds & {type(one).__name__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def test_the_bytes_of_a_stream(rig):
    """The second delta comes once the first was read: of those that come at once one is made."""
    read = asyncio.Event()

    async def script(call: LinkCall, request: Any) -> None:
        send(call, 'a"\n', plan=plan(request))
        await read.wait()
        send(call, "\u2028\U0001f600")
        finish(call, 2)

    rig.tokenizer.script = script
    http = await rig.http()
    body, content = ask(stream=True, stream_options={"include_usage": True}), b""
    async with http.stream("POST", CHAT, json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"].startswith("req_")
        async for piece in answer.aiter_bytes():
            content += piece
            if b'"a\\"\\n"' in content:
                read.set()
    assert content.isascii()
    told = events(content.decode())
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
    assert (await http.put(CHAT)).headers["allow"] == "GET, POST"
    answer = await http.get("/v1/completions")
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
