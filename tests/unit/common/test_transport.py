"""The lock between services: who shows the secret is served, a stranger is refused unread."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import REGISTRY
from pydantic import SecretStr

from services.common.config import Settings
from services.common.transport import Transport, end_call, listen
from tests.support.waiting import leaving_no_task

SECRET = "a secret of at least 16 characters"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass
class Seen:
    """What reached the server's own code."""

    messages: list[bytes] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)


def handlers(seen: Seen) -> grpc.GenericRpcHandler:
    """A method of each kind that answers with what it was sent, and notes all that it reads."""

    def read(raw: bytes) -> bytes:
        seen.messages.append(raw)
        return raw

    async def one(request: Any, context: Any) -> bytes:
        seen.metadata.append(dict(context.invocation_metadata()))
        return request if isinstance(request, bytes) else b"".join([m async for m in request])

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield await one(request, context)

    made = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(
            many if kind.endswith("stream") else one, request_deserializer=read
        )
        for kind in KINDS
    }
    return grpc.method_handlers_generic_handler("test.Echo", made)


@asynccontextmanager
async def serving(secret: str = SECRET) -> AsyncIterator[tuple[str, Seen]]:
    seen, told = Seen(), health.aio.HealthServicer()
    server = Transport(secret).server(health=told)
    server.add_generic_rpc_handlers((handlers(seen),))
    health_pb2_grpc.add_HealthServicer_to_server(told, server)
    reflection.enable_server_reflection(("test.Echo", reflection.SERVICE_NAME), server)
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel, kind: str, message: bytes, **options: Any) -> bytes:
    request = message if kind.startswith("unary") else iter([message])
    call = getattr(channel, kind)(f"/test.Echo/{kind}")(request, timeout=10, **options)
    if kind.endswith("unary"):
        return bytes(await call)
    return b"".join([part async for part in call])


async def refused_code(
    address: str, kind: str, message: bytes, method: str = "", metadata: Any = ()
) -> grpc.StatusCode:
    """What a call is ended with, by gRPC's blocking client: where a message is on its way as its
    call ends, the other one at times says INTERNAL ("Internal error from Core") of itself."""

    def call() -> grpc.StatusCode:
        request = message if kind.startswith("unary") else iter([message])
        with grpc.insecure_channel(address) as channel:
            made = getattr(channel, kind)(method or f"/test.Echo/{kind}")
            with pytest.raises(grpc.RpcError) as error:
                list(made(request, timeout=10, metadata=metadata))
        return error.value.code()

    return await asyncio.to_thread(call)


async def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call()
    return error.value.code()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_the_secret_is_served(kind: str) -> None:
    async with serving() as (address, seen), Transport(SECRET).dial(address, "echo") as channel:
        assert await ask(channel, kind, b"hello", metadata=(("own", "pair"),)) == b"hello"
        assert await ask(channel, kind, b"again") == b"again"
    assert [metadata.get("own") for metadata in seen.metadata] == ["pair", None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shown", [(), (("penstock-secret-bin", b""),), (("penstock-secret-bin", SECRET[1:].encode()),)]
)
async def test_a_stranger_is_refused(kind: str, shown: Any) -> None:
    async with serving() as (address, seen):
        code = await refused_code(address, kind, b"hello", metadata=shown)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert not seen.messages
    assert not seen.metadata


def refusals(why: str) -> float:
    found = REGISTRY.get_sample_value("penstock_refused_calls_total", {"why": why})
    return found or 0.0


async def test_strangers_are_counted() -> None:
    before = refusals("secret")
    async with serving() as (address, _), grpc.aio.insecure_channel(address) as channel:
        await refused(lambda: ask(channel, "unary_unary", b"hello"))
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert refusals("secret") == before + 1


async def test_a_server_that_tells_nobody_of_its_health_refuses_who_asks() -> None:
    server = Transport(SECRET).server()
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        asked = lambda: check(health_pb2.HealthCheckRequest(), timeout=10)  # noqa: E731
        assert await refused(asked) is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_a_stranger_is_refused_before_its_message() -> None:
    async with serving() as (address, _), grpc.aio.insecure_channel(address) as channel:
        # A caller that has sent nothing but its headers gets the answer.
        call = channel.stream_unary("/test.Echo/unary_unary")
        assert await refused(lambda: call(never(), timeout=10)) is grpc.StatusCode.UNAUTHENTICATED


async def test_strangers_learn_whether_it_is_well_and_nothing_else() -> None:
    check = health_pb2.HealthCheckRequest()
    async with serving() as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(check, timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        unread = channel.stream_unary(
            "/grpc.health.v1.Health/Check",
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await unread(never(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        async def watch() -> None:
            await stub.Watch(check, timeout=10).read()

        assert await refused(watch) is grpc.StatusCode.UNAUTHENTICATED
        ask = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        method = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
        code = await refused_code(address, "stream_stream", ask, method)
        assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_data_directory_shares_one_secret(tmp_path: Path) -> None:
    def transport(folder: str) -> Transport:
        return Transport.of(
            Settings(data_dir=tmp_path / folder, internal_secret=SecretStr("")), "cli"
        )

    server = transport("one").server()
    server.add_generic_rpc_handlers((handlers(Seen()),))
    address = f"127.0.0.1:{listen(server, '127.0.0.1', 0)}"
    await server.start()
    async with (
        transport("one").dial(address, "echo") as mine,
        transport("two").dial(address, "echo") as other,
    ):
        assert await ask(mine, "unary_unary", b"hello") == b"hello"
        code = await refused(lambda: ask(other, "unary_unary", b"hello"))
        assert code is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)


async def test_a_given_secret_needs_no_data_directory(tmp_path: Path) -> None:
    Transport.of(Settings(data_dir=tmp_path / "none", internal_secret=SecretStr(SECRET)), "cli")
    assert not (tmp_path / "none").exists()


def test_a_short_secret_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"internal_secret[\s\S]*16 characters"):
        Settings(internal_secret=SecretStr("short"))


async def test_a_secret_is_changed_in_three_steps_and_no_call_is_refused() -> None:
    """All of the last step and of the next run side by side while services restart one by one."""
    old, new = "the old secret of an install", "the new secret of an install"
    steps = [(old, ""), (old, new), (new, old), (new, "")]
    for before, after in pairwise(steps):
        for server, caller in ((before, after), (after, before), (after, after)):
            assert await takes(server, caller[0]), (server, caller)


async def test_only_the_second_secret_of_a_server_is_taken_besides_and_it_is_never_sent() -> None:
    old, new = "the old secret of an install", "the new secret of an install"
    assert not await takes((new, ""), old)
    assert not await takes((new, old), "another secret of an install")
    assert not await takes((new, ""), "")
    settings = Settings(internal_secret=SecretStr(new), internal_secret_also=SecretStr(old))
    assert not await takes((old, ""), settings), "it sent the second one"
    assert await takes((new, ""), settings)


async def takes(server: tuple[str, str], caller: "str | Settings") -> bool:
    """Whether a server with these two secrets answers a caller."""
    settings = Settings(
        internal_secret=SecretStr(server[0]), internal_secret_also=SecretStr(server[1])
    )
    grpc_server = Transport.of(settings, "router").server()
    grpc_server.add_generic_rpc_handlers((handlers(Seen()),))
    port = listen(grpc_server, "127.0.0.1", 0)
    await grpc_server.start()
    own = Transport(caller) if isinstance(caller, str) else Transport.of(caller, "tokenizer")
    try:
        async with own.dial(f"127.0.0.1:{port}", "router") as channel:
            await channel.unary_unary("/test.Echo/unary_unary")(b"hello", timeout=10)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    else:
        return True
    finally:
        await grpc_server.stop(None)


async def test_a_call_whose_write_failed_leaves_nothing_behind() -> None:
    """Its server is gone, and what it had sent was not read."""

    async def talk_and_leave(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)
        yield b"unread"
        yield b"unread, too"

    async def write_on(call: Any) -> None:
        while True:
            await call.write(b"more")

    handler = grpc.stream_stream_rpc_method_handler(talk_and_leave)
    made = grpc.method_handlers_generic_handler("test.Talk", {"leave": handler})
    async with leaving_no_task():
        server = Transport(SECRET).server()
        server.add_generic_rpc_handlers((made,))
        port = listen(server, "127.0.0.1", 0)
        await server.start()
        async with Transport(SECRET).dial(f"127.0.0.1:{port}", "x") as channel:
            call = channel.stream_stream("/test.Talk/leave")()
            await call.write(b"hello")
            assert await call.read() == b"hello"
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await asyncio.wait_for(write_on(call), 10)
            end_call(call)
        await server.stop(None)
