"""A request's body, as an ASGI server hands it over."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from services.common.config import GatewaySettings
from services.common.errors import PenstockError
from services.common.fairness.shares import Shares
from services.gateway.api.rest import body as body_module
from services.gateway.api.rest.body import ClientGoneError, RequestBody
from services.gateway.intake import Place


class Client:
    """Sends its pieces when they are read. `clock` is what the body looks at, and moves by
    `pause_s` before each piece."""

    def __init__(self, pieces: Iterable[bytes], pause_s: float = 0.0) -> None:
        self.pieces = list(pieces)
        self.pause_s = pause_s
        self.clock = 0.0
        self.asked = 0

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        await asyncio.sleep(0)
        self.clock += self.pause_s
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}


def body_of(client: Client, monkeypatch: pytest.MonkeyPatch, **headers: str) -> RequestBody:
    monkeypatch.setattr(body_module, "time", SimpleNamespace(monotonic=lambda: client.clock))
    settings = GatewaySettings(body_grace_s=10, body_min_bytes_per_s=10)
    return RequestBody(Headers(headers), client.receive, settings)


def place() -> Place:
    return Place("t", Shares(1_000_000))


async def test_a_body_that_keeps_its_pace_may_take_longer_than_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client([b"x" * 50] * 10, pause_s=5)  # 10 bytes a second, 50 s
    assert await body_of(client, monkeypatch).whole(place()) == b"x" * 500


async def test_a_body_that_falls_behind_its_pace_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client([b"x" * 50] * 10, pause_s=9)
    with pytest.raises(PenstockError) as told:
        await body_of(client, monkeypatch).whole(place())
    assert told.value.reason == "body_timeout"
    assert client.pieces, "it was not heard to its end"


async def test_who_waits_for_leave_to_send_is_not_given_it_by_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read is to answer 100 Continue: of a refused request nothing shall be sent."""
    client = Client([b"all"])
    assert not await body_of(client, monkeypatch, expect="100-continue").skim()
    assert client.asked == 0
    await body_of(client, monkeypatch).skim()
    assert client.asked == 1


async def test_a_client_that_goes_amid_its_body_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client([b"x", b"y"])
    body = body_of(client, monkeypatch)

    async def leaves() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    pieces = body.pieces(place())
    assert await anext(pieces) == b"x"
    body._receive = leaves
    with pytest.raises(ClientGoneError):
        await anext(pieces)


@pytest.mark.parametrize(("announced", "first"), [("30", 30), ("", 10), ("x", 10), ("12", 12)])
async def test_a_bodys_bytes_are_held_once(
    monkeypatch: pytest.MonkeyPatch, announced: str, first: int
) -> None:
    """As many as were announced before the first is read, or what arrives."""
    client, memory = Client([b"x" * 10] * 3), Shares(1_000_000)
    at = Place("t", memory)
    held = []
    headers = {"content-length": announced} if announced else {}
    body = body_of(client, monkeypatch, **headers)
    async for _ in body.pieces(at):
        held.append(memory.taken)
    assert held == [first, max(first, 20), 30]
    assert body.complete
    at.leave()
    assert memory.taken == 0


async def test_what_is_announced_is_refused_before_a_byte_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = GatewaySettings().body_limit_bytes
    for length, room, of_others, reason in (
        (limit + 1, 10**9, 0, "body_too_large"),
        (limit, limit - 1, 0, "body_too_large"),
        (limit, 2 * limit, limit + 1, "too_many_bytes"),
    ):
        client, shares = Client([b"x"]), Shares(room)
        assert shares.take("other", of_others)
        body = body_of(client, monkeypatch, **{"content-length": str(length)})
        with pytest.raises(PenstockError) as told:
            await body.whole(Place("t", shares))
        assert (told.value.reason, client.asked) == (reason, 0)
    client = Client([b"x" * limit])
    length = {"content-length": str(limit)}
    assert (
        len(await body_of(client, monkeypatch, **length).whole(Place("t", Shares(10**9)))) == limit
    )
    client = Client([b"x" * limit, b"x"])
    with pytest.raises(PenstockError) as told:
        await body_of(client, monkeypatch).whole(Place("t", Shares(10**9)))
    assert told.value.reason == "body_too_large"
