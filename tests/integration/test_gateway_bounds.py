"""The front door's bounds: what one tenant, a stranger or a client that is silent may take."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from protos.gateway_conversations_pb2 import ListConversationItemsRequest
from protos.gateway_conversations_pb2_grpc import ConversationsStub
from protos.gateway_pb2 import ChatRequest, GetRunRequest
from protos.gateway_pb2_grpc import InferenceStub, RunsStub
from protos.gateway_stores_pb2 import GetAttachedFileRequest
from protos.gateway_stores_pb2_grpc import VectorStoresStub
from services.common.link import LinkCall
from services.common.text.content import said
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, plan, say, send
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SOON_S = 10  # far more than any of these takes


async def silent(call: LinkCall, request: Any) -> None:
    await asyncio.Event().wait()


class Raw:
    """A client that sends exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(SOON_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.strip().split("\r\n")
            headers = dict(field.lower().split(": ", 1) for field in fields)
            body = await self.reader.readexactly(int(headers["content-length"]))
            return int(line.split()[1]), headers, body

    async def error(self) -> tuple[int, str, dict[str, str]]:
        status, headers, body = await self.answer()
        return status, json.loads(body)["error"]["code"], headers

    async def closed(self) -> None:
        """Returns when the other end has closed, whatever it still had to say."""
        async with asyncio.timeout(SOON_S):
            try:
                while await self.reader.read(2**16):
                    pass
            except ConnectionError:
                return


@asynccontextmanager
async def raw(rig: Rig) -> AsyncIterator[Raw]:
    host, _, port = rig.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


def head(key: str | None, length: int | None, path: str = CHAT, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *more]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, **more}


async def other_key(rig: Rig) -> str:
    key, _ = await rig.keys.create("rival", "other")
    return key


# ---- places and bytes ---------------------------------------------------------------------------


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(
        redis_url, namespace, max_requests=6, max_held_bytes=40_000, body_limit_bytes=15_000
    ) as rig:
        yield rig


async def test_a_tenant_that_withholds_its_bodies_leaves_the_others_their_places(rig):
    async with raw(rig) as one, raw(rig) as two, raw(rig) as three, raw(rig) as four:
        for client in (one, two, three):
            await client.send(head(rig.key, 100))
        await until(lambda: rig.gateway.intake.running == 3, SOON_S)
        await four.send(head(rig.key, 100))
        status, code, headers = await four.error()  # before a byte of its body
        assert (status, code, headers["retry-after"]) == (429, "too_many_requests", "1")
        other = await rig.http(await other_key(rig))
        assert (await other.post(CHAT, json=chat())).status_code == 200
    await until(lambda: rig.gateway.intake.running == 0, SOON_S)
    assert (await (await rig.http()).post(CHAT, json=chat())).status_code == 200


async def test_a_stranger_takes_neither_place_nor_bytes(rig, monkeypatch):
    monkeypatch.setattr("services.gateway.api.rest.body.LINGER_S", 0.2)
    for path in (CHAT, "/v1/embeddings", "/v1/files"):
        async with raw(rig) as client:
            await client.send(head("psk-" + "a" * 43, 10_000, path))
            status, code, headers = await client.error()
            assert (status, code) == (401, "invalid_api_key")
            assert headers["connection"] == "close"
            assert (rig.gateway.intake.running, rig.gateway.intake.bytes_held) == (0, 0)
            await client.closed()


async def test_a_refused_client_that_has_sent_all_keeps_its_connection(rig):
    async with raw(rig) as client:
        for _ in range(2):
            await client.send(head(None, 2) + b"{}")
            status, _, headers = await client.error()
            assert status == 401
            assert "connection" not in headers


@pytest.mark.parametrize("length", [12_000, None])
async def test_a_tenants_bodies_are_bounded_in_all(rig, length):
    rig.tokenizer.script = silent
    http = await rig.http()
    large = chat(user="x" * 10, stop=["y" * 200], metadata={"pad": "z" * 400})
    large["messages"] = [{"role": "user", "content": "x" * 10_000}]
    running = [asyncio.create_task(http.post(CHAT, json=large)) for _ in range(2)]
    await until(lambda: len(rig.tokenizer.requests) == 2, SOON_S)
    assert rig.gateway.intake.bytes_held > 20_000
    async with raw(rig) as client:
        await client.send(head(rig.key, length))
        if length is None:  # told nothing, it is held as it comes
            await client.send(b"1\r\n{\r\n")
        status, code, headers = await client.error()
        assert (status, code, headers["retry-after"]) == (429, "too_many_bytes", "1")
    other = await rig.http(await other_key(rig))
    rig.tokenizer.script = say("ok")
    assert (await other.post(CHAT, json=large)).status_code == 200
    for request in running:
        request.cancel()
    await until(lambda: rig.gateway.intake.bytes_held == 0, SOON_S)


async def test_large_answers_count_while_they_are_sent(rig):
    http = await rig.http()
    form = {"files": {"file": ("a.txt", b"x" * 12_000)}, "data": {"purpose": "assistants"}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    with rig.gateway.intake.visit("acme") as taken:
        taken.hold(30_000)
        assert (await http.get(f"/v1/files/{file}/content")).status_code == 429
        texts = {"model": EMBEDDING_MODEL, "input": ["x"] * 100}
        assert (await http.post("/v1/embeddings", json=texts)).status_code == 429
        assert (await http.get(f"/v1/files/{file}")).status_code == 200
    assert (await http.get(f"/v1/files/{file}/content")).content == b"x" * 12_000
    assert rig.gateway.intake.bytes_held == 0


@pytest.mark.parametrize("way", ["rest", "grpc"])
async def test_looks_at_what_is_stored_count_what_they_read(rig, way):
    """They take no place among the running requests: as many as a tenant liked read 32 MB each."""
    rig.tokenizer.script = say("y" * 10_000)
    http, looks = await rig.http(), await (_looks_by_rest if way == "rest" else _looks_by_grpc)(rig)

    async def told() -> set[str]:
        return {await look() for look in looks}

    await until(lambda: rig.gateway.intake.running == 0, SOON_S)
    assert await told() == {"ok"}
    with rig.gateway.intake.visit("acme") as taken:
        taken.hold(30_000)
        assert await told() == {"too_many_bytes"}
        assert (await http.get("/v1/files")).status_code == 200
    assert await told() == {"ok"}
    assert rig.gateway.intake.bytes_held == 0


Look = Callable[[], Awaitable[str]]
LONG = {"role": "user", "content": "x" * 10_000}


async def _conversation(rig: Rig, items: int) -> str:
    """Of so many long ones."""
    http = await rig.http()
    id = (await http.post("/v1/conversations", json={"items": [LONG]})).json()["id"]
    for _ in range(items - 1):
        await http.post(f"/v1/conversations/{id}/items", json={"items": [LONG]})
    return str(id)


async def _looks_by_rest(rig: Rig) -> list[Look]:
    http = await rig.http()
    asked = await http.post(CHAT, json=chat(messages=[LONG], store=True))
    stored = f"{CHAT}/{asked.json()['id']}"
    asked = await http.post("/v1/responses", json={"model": MODEL, "input": [LONG]})
    response = f"/v1/responses/{asked.json()['id']}"
    talk = f"/v1/conversations/{await _conversation(rig, 3)}/items"
    paths = [talk, CHAT, stored, f"{stored}/messages", response, f"{response}/input_items"]

    async def look(path: str) -> str:
        answer = await http.get(path)
        return "ok" if answer.status_code == 200 else answer.json()["error"]["code"]

    return [partial(look, path) for path in paths]


async def _looks_by_grpc(rig: Rig) -> list[Look]:
    channel = await rig.channel()
    own = (("authorization", f"Bearer {rig.key}"),)
    asked = ChatRequest(model=MODEL, messages=[said("user", LONG["content"])])
    call = InferenceStub(channel).Chat(asked, metadata=(*own, ("idempotency-key", "k")))
    async for _ in call:
        pass
    run = GetRunRequest(run_id=dict(await call.initial_metadata())["x-request-id"])
    items = ListConversationItemsRequest(conversation_id=await _conversation(rig, 1))
    calls = [
        (RunsStub(channel).GetRun, run),
        (ConversationsStub(channel).ListConversationItems, items),
    ]

    async def look(method: Any, request: Any) -> str:
        try:
            await method(request, metadata=own)
        except grpc.aio.AioRpcError as error:
            return "too_many_bytes" if "bytes of your requests" in str(error.details()) else "?"
        return "ok"

    return [partial(look, *one) for one in calls]


@pytest.mark.parametrize("way", ["rest", "grpc"])
async def test_reading_documents_anew_takes_places_and_ends_with_who_asked(rig, way):
    """As many as a tenant liked were read at a time, also for clients that had left."""
    http = await rig.http()
    form = {"files": {"file": ("a.txt", b"Six.")}, "data": {"purpose": "assistants"}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    store = (await http.post("/v1/vector_stores", json={"file_ids": [file]})).json()["id"]
    path = f"/v1/vector_stores/{store}/files/{file}/content"
    rig.retrieval.hold.clear()
    stub = VectorStoresStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    asked = GetAttachedFileRequest(vector_store_id=store, file_id=file)

    async def read() -> None:
        if way == "rest":
            await http.get(path)
        else:
            async for _ in stub.GetAttachedFileContent(asked, metadata=own):
                pass

    readers = [asyncio.create_task(read()) for _ in range(3)]
    await until(lambda: rig.gateway.intake.running == 3, SOON_S)
    refused = await http.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert (await http.get(f"/v1/files/{file}")).status_code == 200
    for reader in readers:
        reader.cancel()
    await until(lambda: rig.gateway.intake.running == 0, SOON_S)
    rig.retrieval.hold.set()
    assert (await http.get(path)).json()["data"][0]["text"] == "Six."


async def test_a_body_keeps_a_rate_or_loses_its_place(redis_url, namespace):
    async with gateway_rig(
        redis_url, namespace, body_grace_s=0.2, body_min_bytes_per_s=1_000_000
    ) as rig:
        async with raw(rig) as never, raw(rig) as trickle:
            await never.send(head(rig.key, 1000))
            await trickle.send(head(rig.key, None) + b"1\r\n{\r\n")
            for client in (never, trickle):
                status, code, headers = await client.error()
                assert (status, code, headers["connection"]) == (408, "body_timeout", "close")
                await client.closed()
        assert (rig.gateway.intake.running, rig.gateway.intake.bytes_held) == (0, 0)


async def test_more_values_than_any_prompt_has_are_refused_unparsed(rig):
    http = await rig.http()
    rig.settings.gateway.max_prompt_tokens = 1000
    fits = {"model": MODEL, "prompt": [1] * 1000}
    assert (await http.post("/v1/completions", json=fits)).status_code == 200
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 2002})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "commas" in answer.json()["error"]["message"]


# ---- connections --------------------------------------------------------------------------------


@pytest.fixture
async def door(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(
        redis_url, namespace, max_connections=8, head_timeout_s=0.4, write_timeout_s=0.4
    ) as rig:
        yield rig


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"GET",
    ],
)
async def test_a_head_that_does_not_come_ends_the_connection(door, sent):
    async with raw(door) as client:
        await client.send(sent)
        for _ in range(sent.count(b"\r\n\r\n")):
            assert (await client.answer())[0] == 200
        status, code, headers = await client.error()
        assert (status, code, headers["connection"]) == (408, "head_timeout", "close")
        await client.closed()


async def test_time_spent_on_an_answer_is_not_the_clients(door):
    """Neither a slow answer nor a pause between requests counts as a head that does not come."""
    go_on = asyncio.Event()

    async def waits(call: LinkCall, request: Any) -> None:
        await go_on.wait()
        await say("ok")(call, request)

    door.tokenizer.script = waits
    body = json.dumps(chat()).encode()
    async with raw(door) as client, raw(door) as stale:
        await client.send(head(door.key, len(body)) + body + b"GET /healthz HTTP/1.1\r\nHo")
        await stale.closed()  # by now a head that was awaited from the start is overdue
        go_on.set()
        assert (await client.answer())[0] == 200
        await client.send(b"st: x\r\n\r\n")
        assert (await client.answer())[0] == 200
        async with raw(door) as stale:
            await stale.closed()
        await client.send(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 40_000,
        b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000,
        b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 129 + b"\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000 + b"\r\n\r\n",
    ],
)
async def test_a_head_is_bounded(rig, sent):
    async with raw(rig) as client:
        await client.send(sent)
        status, code, headers = await client.error()
        assert (status, code, headers["connection"]) == (431, "head_too_large", "close")
        await client.closed()


@pytest.mark.parametrize("framing", [b"1;" + b"x" * 2**20, b"0\r\nA: " + b"x" * 2**20])
async def test_what_frames_a_body_is_bounded_too(rig, framing):
    async with raw(rig) as client:
        await client.send(head(rig.key, None) + b"1\r\n{\r\n")
        await until(lambda: rig.gateway.intake.running == 1, SOON_S)
        client.writer.write(framing)
        await client.closed()
    await until(lambda: rig.gateway.intake.running == 0, SOON_S)


@pytest.mark.parametrize("body", [b"x\r\n", b"1\r\n{}0\r\n\r\n", b"8000000000000000000\r\n"])
async def test_a_body_that_is_framed_wrongly_is_told_so(rig, body):
    async with raw(rig) as client:
        await client.send(head(rig.key, None))
        await until(lambda: rig.gateway.intake.running == 1, SOON_S)
        await client.send(body)
        assert (await client.error())[:2] == (400, "invalid_http")
        await client.closed()
    await until(lambda: rig.gateway.intake.running == 0, SOON_S)


async def test_a_wish_for_another_protocol_costs_no_body(rig):
    """Java's client sends this with each request; what follows on the connection counts too."""
    body = json.dumps(chat()).encode()
    wish = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAA")
    ask = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n"
    async with raw(rig) as client:
        for length in (len(body), None):
            sent = body if length else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            start = head(rig.key, length, CHAT, *wish)
            await client.send(start + sent[:7])
            await until(lambda: rig.gateway.intake.running == 1, SOON_S)
            await client.send(sent[7:] + ask + ask)
            assert [(await client.answer())[0] for _ in range(3)] == [200] * 3
        await client.send(ask * 40)  # no way around the bound
        await client.closed()


async def test_requests_sent_ahead_are_bounded(rig):
    """Each costs kilobytes for its 25 bytes, and nobody has asked for a key."""
    ask = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    async with raw(rig) as client:
        await client.send(ask * 20)
        assert [(await client.answer())[0] for _ in range(20)] == [200] * 20
    rig.tokenizer.script = silent
    async with raw(rig) as client:
        body = json.dumps(chat()).encode()
        await client.send(head(rig.key, len(body)) + body)
        await until(lambda: len(rig.tokenizer.requests) == 1, SOON_S)
        await client.send(ask * 33)
        await client.closed()


async def test_trailers_are_no_headers(rig):
    body = json.dumps(chat()).encode()
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n" + b"A: x\r\n" * 200 + b"\r\n"
    async with raw(rig) as client:
        await client.send(head(rig.key, None) + chunk)
        assert (await client.answer())[0] == 200


async def test_one_address_leaves_room_for_others(door):
    door.tokenizer.script = silent
    body = json.dumps(chat()).encode()
    async with AsyncExitStack() as stack:
        for number in range(4):
            caller = await stack.enter_async_context(raw(door))
            await caller.send(head(door.key, len(body)) + body)
            await until(lambda so_far=number: len(door.tokenizer.requests) > so_far, SOON_S)
        fifth = await stack.enter_async_context(raw(door))
        status, code, headers = await fifth.error()
        assert (status, code, headers["retry-after"]) == (429, "too_many_connections", "1")
        await fifth.closed()
        host, _, port = door.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        stack.callback(writer.transport.abort)
        other = Raw(_, writer)
        await other.send(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await other.answer())[0] == 200

    async def let_in() -> bool:
        async with raw(door) as client:
            await client.send(b"GET /healthz HTTP/1.1\r\n\r\n")
            return (await client.answer())[0] == 200

    await until(let_in, SOON_S, "the first ones' places have come back")


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\n\r\n"])
async def test_connections_that_ask_nothing_keep_nobody_out(door, begun):
    async with AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(raw(door)) for _ in range(4)]
        for one in idle:
            await one.send(begun)
            if begun.endswith(b"\r\n\r\n"):
                await one.answer()
        for _ in range(2):
            late = await stack.enter_async_context(raw(door))
            await late.send(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await late.answer())[0] == 200
        for one in idle[:2]:
            await one.closed()


# ---- clients that do not read -------------------------------------------------------------------


async def test_a_stream_that_nobody_reads_is_cut_and_its_place_comes_back(door):
    async def pours(call: LinkCall, request: Any) -> None:
        send(call, "x", plan=plan(request))
        while True:
            send(call, "x" * 50_000)
            await asyncio.sleep(0.001)

    door.tokenizer.script = pours
    body = json.dumps(chat(stream=True)).encode()
    async with raw(door) as client:
        client.writer.transport.pause_reading()
        await client.send(head(door.key, len(body)) + body)
        await until(lambda: door.tokenizer.requests, SOON_S)
        await until(lambda: door.tokenizer.cancelled == 1, SOON_S)
        await until(lambda: door.gateway.intake.running == 0, SOON_S)
        client.writer.transport.resume_reading()
        await client.closed()


async def test_a_file_that_nobody_reads_is_not_held(door):
    door.gateway.files._max_chars = 8_000_000  # more than the two sockets' buffers take
    own = door.settings.gateway
    quick_s = own.write_timeout_s
    own.head_timeout_s = own.write_timeout_s = SOON_S  # for a busy machine's client
    http = await door.http()
    form = {"files": {"file": ("a.txt", b"x" * 8_000_000)}, "data": {"purpose": "assistants"}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    assert (await http.get(f"/v1/files/{file}/content")).content == b"x" * 8_000_000
    own.write_timeout_s = quick_s
    async with raw(door) as client:
        client.writer.transport.pause_reading()
        ask = f"GET /v1/files/{file}/content HTTP/1.1\r\nAuthorization: Bearer {door.key}\r\n\r\n"
        await client.send(ask.encode())
        await until(lambda: door.gateway.intake.bytes_held == 8_000_000, SOON_S)
        await until(lambda: door.gateway.intake.bytes_held == 0, SOON_S)
        client.writer.transport.resume_reading()
        await client.closed()
