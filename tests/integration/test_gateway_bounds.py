"""The front door's bounds: what one tenant, a stranger or a client that is silent may take."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.common.link import LinkCall
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, say
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


async def test_a_stranger_takes_neither_place_nor_bytes(rig):
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
