"""TLS at the door, mutual TLS behind it, and certificates that change while requests run."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509

from protos import gateway_pb2, gateway_pb2_grpc
from services.common.link import LinkCall
from services.common.locks import certificates
from services.common.locks.certificates import CertificateError
from tests.support.authority import Authority
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.waiting import until

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
IDENTITIES = ("gateway", "tokenizer", "retrieval")
HEAD_S = 1.0


class Door:
    """A rig behind certificates that can be renewed."""

    def __init__(self, rig: Rig, authority: Authority, folder: Path) -> None:
        self.rig = rig
        self._authority = authority
        self._folder = folder
        self.trust = ssl.create_default_context(cadata=authority.pem.decode())

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.rig.url)
        return url.host, url.port or 0

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.rig.url,
            headers={"Authorization": f"Bearer {self.rig.key}"},
            verify=self.trust,
            timeout=20,
        )

    async def shown(self) -> int:
        """Serial number of the certificate that a new connection sees."""
        _, writer = await asyncio.open_connection(*self.address, ssl=self.trust)
        try:
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return x509.load_der_x509_certificate(der).serial_number
        finally:
            writer.transport.abort()

    def renew(self) -> None:
        """At the door and inside, at once."""
        self._authority.issue(self._folder / "door", address="127.0.0.1")
        self._authority.identities(self._folder, *IDENTITIES)


@pytest.fixture
async def door(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Door]:
    monkeypatch.setattr(certificates, "_LOOK_EVERY_S", 0.0)
    authority = Authority()
    authority.identities(tmp_path, *IDENTITIES)
    own = authority.issue(tmp_path / "door", address="127.0.0.1")
    async with gateway_rig(
        redis_url,
        namespace,
        tls_dir=tmp_path,
        tls_cert=own / "tls.crt",
        tls_key=own / "tls.key",
        max_connections=16,
        head_timeout_s=HEAD_S,
    ) as rig:
        yield Door(rig, authority, tmp_path)


async def test_rest_and_grpc_are_served_over_tls(door: Door) -> None:
    assert door.rig.url.startswith("https://")
    async with door.http() as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world"
        # With retrieval: gateway to retrieval is mutual TLS, too.
        answer = await http.post("/v1/embeddings", json={"model": "tiny-embed", "input": "x"})
        assert answer.status_code == 200
        large = await http.post("/v1/chat/completions", json={**CHAT, "user": "x" * 300_000})
        assert large.status_code in (200, 400)  # read whole, over many records
    given = grpc.ssl_channel_credentials(door._authority.pem)
    async with grpc.aio.secure_channel(door.rig.host.replica.facts["grpc"], given) as channel:
        request = gateway_pb2.PublicListModelsRequest()
        key = (("authorization", f"Bearer {door.rig.key}"),)
        listed = await gateway_pb2_grpc.InferenceStub(channel).ListModels(
            request, metadata=key, timeout=10
        )
        assert MODEL in [model.name for model in listed.models]


async def test_plain_text_is_not_answered(door: Door) -> None:
    reader, writer = await asyncio.open_connection(*door.address)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert b"HTTP" not in answer
    writer.transport.abort()
    async with grpc.aio.insecure_channel(door.rig.host.replica.facts["grpc"]) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(gateway_pb2.PublicListModelsRequest(), timeout=10)


async def test_a_request_in_the_packet_of_the_handshakes_end_is_answered(door: Door) -> None:
    """What a fast client's last handshake record brings along is not lost."""
    for _ in range(10):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = door.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection(*door.address)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(2**16))
        tls.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        writer.write(outgoing.read())  # the client's Finished and the request, at once
        async with asyncio.timeout(10):
            incoming.write(await reader.read(2**16))
            answer = b""
            while not answer:
                try:
                    answer = tls.read()
                except ssl.SSLWantReadError:
                    incoming.write(await reader.read(2**16))
        assert answer.startswith(b"HTTP/1.1 200")
        writer.transport.abort()


async def test_handshakes_take_places_and_end_in_time(door: Door) -> None:
    silent = [socket.create_connection(door.address) for _ in range(16)]
    try:
        for one in silent:
            one.setblocking(False)
        # An address has at most as many as it leaves free: half of them are held, the rest closed.
        loop = asyncio.get_running_loop()
        ends = [asyncio.ensure_future(closed(loop, one)) for one in silent]
        await until(lambda: sum(end.done() for end in ends) == 8, 10, "half are turned away")
        await asyncio.wait_for(asyncio.gather(*ends), 10 * HEAD_S)  # the others, in their time
    finally:
        for one in silent:
            one.close()
    async with door.http() as http:
        assert (await http.get("/healthz")).status_code == 200


async def closed(loop: asyncio.AbstractEventLoop, one: socket.socket) -> None:
    try:
        while await loop.sock_recv(one, 1000):
            pass
    except ConnectionError:
        return


async def test_certificates_change_under_load_and_nothing_fails(door: Door) -> None:
    go_on = asyncio.Event()

    async def half(call: LinkCall, request: Any) -> None:
        send(call, "before", plan=plan(request))
        await go_on.wait()
        send(call, " after")
        finish(call, 2)

    door.rig.tokenizer.script = half
    first = await door.shown()
    async with door.http() as http:
        streams = [asyncio.ensure_future(streamed(http)) for _ in range(3)]
        await until(lambda: len(door.rig.tokenizer.requests) == 3)
        assert await embedded(http) == 200
        inside = door.rig.retrieval.servicer.shown
        door.renew()
        second = await door.shown()
        assert second != first
        async with door.http() as fresh:
            answers = asyncio.gather(*(embedded(fresh) for _ in range(4)))
            assert await answers == [200] * 4
        assert door.rig.retrieval.servicer.shown not in (b"", inside)  # inside as well
        go_on.set()
        assert await asyncio.gather(*streams) == ["before after"] * 3


async def streamed(http: httpx.AsyncClient) -> str:
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, text=line[6:]).json()["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


async def embedded(http: httpx.AsyncClient) -> int:
    body = {"model": "tiny-embed", "input": "x"}
    return (await http.post("/v1/embeddings", json=body)).status_code


async def test_a_certificate_without_its_key_is_told_by_its_file(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    authority = Authority()
    one, two = (authority.issue(tmp_path / n, address="127.0.0.1") for n in ("one", "two"))
    with pytest.raises(CertificateError, match=r"door: .*two/tls\.key is not the key"):
        async with gateway_rig(
            redis_url, namespace, tls_cert=one / "tls.crt", tls_key=two / "tls.key"
        ):
            pass
