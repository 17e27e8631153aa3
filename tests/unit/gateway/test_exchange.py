"""One HTTP exchange as an ASGI server sees it: what is answered, and what ends with its client."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from services.common.config import GatewaySettings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.fairness.shares import Shares
from services.gateway import metrics
from services.gateway.api.rest.http import (
    CLIENT_GONE,
    Endpoint,
    Exchange,
    Handler,
    error_body,
    http_status,
)
from services.gateway.intake import Place
from tests.support.waiting import until

ROUTE = "/v1/things/{thing}"
SETTINGS = GatewaySettings(max_prompt_tokens=10_000, body_limit_bytes=100_000)


class Wire:
    """A client: sends its pieces, reads what comes, and stays until it leaves."""

    def __init__(self, *pieces: bytes, method: str = "POST", stalls: bool = False, **headers: str):
        sent = pieces or (b"{}",)
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": stalls or number < len(sent)}
            for number, piece in enumerate(sent, 1)
        ]
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        named = {"content_type": "application/json", **headers}
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": "/v1/things/7",
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in named.items()
            ],
        }

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, handler: Handler, settings: GatewaySettings = SETTINGS) -> None:
        endpoint = Endpoint(ROUTE, {"POST": handler, "DELETE": handler}, settings)
        async with asyncio.timeout(30):
            await endpoint(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(bytes(message["body"]) for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


def fails(error: Exception) -> Handler:
    async def handler(exchange: Exchange) -> None:
        raise error

    return handler


async def echoes(exchange: Exchange) -> None:
    exchange.place = Place("t", Shares(10**6))
    body = await exchange.json_body()
    await exchange.reply(body, "text/plain")


def counted(status: int) -> float:
    return float(metrics.requests.labels(ROUTE, status)._value.get())


# ---- errors -------------------------------------------------------------------------------------

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (CODE.INVALID_ARGUMENT, 400, "invalid_request_error"),
        (CODE.OUT_OF_RANGE, 400, "invalid_request_error"),
        (CODE.FAILED_PRECONDITION, 400, "invalid_request_error"),
        (CODE.UNIMPLEMENTED, 400, "invalid_request_error"),
        (CODE.UNAUTHENTICATED, 401, "authentication_error"),
        (CODE.PERMISSION_DENIED, 403, "permission_error"),
        (CODE.NOT_FOUND, 404, "invalid_request_error"),
        (CODE.ALREADY_EXISTS, 409, "invalid_request_error"),
        (CODE.ABORTED, 409, "invalid_request_error"),
        (CODE.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (CODE.INTERNAL, 500, "server_error"),
        (CODE.UNKNOWN, 500, "server_error"),
        (CODE.DATA_LOSS, 500, "server_error"),
        (CODE.UNAVAILABLE, 503, "server_error"),
        (CODE.DEADLINE_EXCEEDED, 504, "server_error"),
    ],
)
def test_each_code_has_its_status_and_type(code, status, kind):
    error = PenstockError(code, "so it is", stage="router", param="x", reason="why")
    assert http_status(error) == status
    told = {"message": "so it is", "type": kind, "param": "x", "code": "why", "stage": "router"}
    assert error_body(error) == {"error": told}


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("method_not_allowed", 405),
        ("body_timeout", 408),
        ("head_timeout", 408),
        ("body_too_large", 413),
        ("unsupported_media_type", 415),
        ("head_too_large", 431),
        ("anything_else", 400),
    ],
)
def test_some_reasons_have_a_status_of_their_own(reason, status):
    error = invalid("x", "", reason=reason)
    assert http_status(error) == status
    assert error_body(error)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "code", "stage"),
    [
        (PenstockError(CODE.UNAVAILABLE, "x", stage="worker"), "worker_unavailable", "worker"),
        (PenstockError(CODE.DEADLINE_EXCEEDED, "x"), "gateway_timeout", "gateway"),
        (PenstockError(CODE.NOT_FOUND, "x"), "not_found", "gateway"),
    ],
)
def test_an_error_without_a_reason_has_a_code_all_the_same(error, code, stage):
    told = error_body(error)["error"]
    assert (told["code"], told["stage"], told["param"]) == (code, stage, None)


def full(after_s: float) -> PenstockError:
    return PenstockError(CODE.RESOURCE_EXHAUSTED, "full", retry_after_s=after_s)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (full(2.2), {"retry-after": "3"}),
        (full(0), {}),
        (full(0.3), {"retry-after": "1"}),
        (unavailable("x", stage="s"), {"retry-after": "1", "connection": "close"}),
        (
            unavailable("x", stage="s", retry_after_s=0),
            {"retry-after": "1", "connection": "close"},
        ),
        (PenstockError(CODE.UNAUTHENTICATED, "x"), {"www-authenticate": "Bearer"}),
        (PenstockError(CODE.INTERNAL, "x"), {}),
        (PenstockError(CODE.INTERNAL, "x", retry_after_s=4), {"retry-after": "4"}),
        (invalid("x", "y"), {}),
    ],
)
async def test_an_errors_headers_say_what_to_do(error, headers):
    wire = Wire()
    await wire.ask(fails(error))
    told = wire.headers
    assert told.pop("x-request-id").startswith("req_")
    assert told.pop("content-type") == "application/json"
    assert int(told.pop("content-length")) == len(wire.body)
    assert told == headers
    assert wire.complete


async def test_what_nobody_foresaw_is_told_without_its_text():
    wire, before = Wire(), counted(500)
    await wire.ask(fails(ValueError("the secret")))
    assert (wire.status, wire.error["code"]) == (500, "internal")
    assert b"secret" not in wire.body
    assert counted(500) == before + 1


async def test_an_error_in_a_stream_is_its_last_event():
    async def streams(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.write(b"data: 1\n\n")
        raise unavailable("lost", stage="worker")

    wire, before = Wire(), counted(200)
    await wire.ask(streams)
    assert wire.status == 200
    assert (wire.headers["cache-control"], wire.headers["x-accel-buffering"]) == ("no-cache", "no")
    first, last, rest = wire.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_unavailable"
    assert wire.complete
    assert counted(200) == before + 1, "its status was told before it failed"


async def test_behind_a_complete_answer_nothing_is_sent():
    async def fails_late(exchange: Exchange) -> None:
        await exchange.reply_json({"done": True})
        raise ValueError

    wire = Wire()
    await wire.ask(fails_late)
    assert (wire.status, json.loads(wire.body)) == (200, {"done": True})
    assert len(wire.sent) == 2


async def test_other_methods_are_told_which_there_are():
    wire = Wire(method="PUT")
    await wire.ask(echoes)
    assert (wire.status, wire.headers["allow"]) == (405, "POST, DELETE")
    assert wire.error["code"] == "method_not_allowed"
    assert "PUT" in wire.error["message"]


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "application/json; charset=utf-8"}, 200),
        ({"content_type": "Application/JSON"}, 200),
        ({"content_encoding": "identity"}, 200),
        ({"content_type": "application/jsonl"}, 415),
        ({"content_type": ""}, 415),
        ({"content_encoding": "br"}, 415),
    ],
)
async def test_a_body_is_json_and_uncompressed(headers, status):
    wire = Wire(b'{"a":', b" 1}", **headers)
    await wire.ask(echoes)
    assert wire.status == status
    assert (wire.body == b'{"a": 1}') is (status == 200)


@pytest.mark.parametrize("mark", [b",", b":", b"[", b"{"])
async def test_marks_are_counted_up_to_twice_the_tokens_of_a_prompt(mark):
    for count, status in ((20_000, 200), (20_001, 413)):
        wire = Wire(mark * (count - 1), mark, b" " * 9)
        await wire.ask(echoes)
        assert wire.status == status
    wire = Wire(b"x" * 90_000)
    await wire.ask(echoes)
    assert wire.status == 200, "text may be longer"


async def test_a_refused_body_is_read_to_its_end_behind_the_answer():
    """Closing the connection on who still sends would reset it, and the answer might be lost."""
    wire = Wire(b"a", b"b", b"c")
    await wire.ask(fails(invalid("no", "x")))
    assert wire.headers["connection"] == "close"
    assert wire.messages == []
    assert (json.loads(wire.body)["error"]["param"], wire.complete) == ("x", True)


async def test_who_withholds_the_rest_has_the_whole_answer_and_is_closed_on(monkeypatch):
    monkeypatch.setattr("services.gateway.api.rest.body.LINGER_S", 0.2)
    wire = Wire(b"a", stalls=True)
    asking = asyncio.create_task(wire.ask(fails(invalid("no", "x"))))
    await until(lambda: len(wire.sent) >= 2)
    assert wire.error["param"] == "x", "it does not wait for the body"
    assert len(wire.body) == int(wire.headers["content-length"])
    await asking
    assert wire.complete


async def test_a_read_body_leaves_the_connection_open():
    wire = Wire(b"all")
    await wire.ask(echoes)
    assert "connection" not in wire.headers


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**16 + 1, 3 * 2**16 + 5])
async def test_a_large_answer_leaves_in_pieces(size):
    content = bytes(range(256)) * (size // 256 + 1)

    async def large(exchange: Exchange) -> None:
        await exchange.reply(content[:size], "text/plain", 201, {"x-more": "1"})

    wire = Wire()
    await wire.ask(large)
    assert wire.body == content[:size]
    assert max(len(message["body"]) for message in wire.sent[1:]) <= 2**16
    assert (wire.status, wire.headers["x-more"]) == (201, "1")
    assert wire.headers["content-length"] == str(size)
    assert [message.get("more_body", False) for message in wire.sent[1:]][-1] is False


# ---- clients that leave -------------------------------------------------------------------------


class Waits:
    """A handler that reads its request and waits, until it is cancelled or let go."""

    def __init__(self) -> None:
        self.began, self.go_on, self.cancelled = asyncio.Event(), asyncio.Event(), 0
        self.on_cancel: Callable[[], Any] = lambda: None

    async def __call__(self, exchange: Exchange) -> None:
        exchange.place = Place("t", Shares(10**6))
        await exchange.json_body()
        exchange.watch_client()
        self.began.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.on_cancel()
            raise
        await exchange.reply_json({})


def watchers() -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("client of")]


async def test_who_leaves_ends_the_work_and_is_counted_so():
    wire, handler, before = Wire(), Waits(), counted(CLIENT_GONE)
    asking = asyncio.create_task(wire.ask(handler))
    await handler.began.wait()
    wire.left.set()
    await asking
    assert (handler.cancelled, wire.sent) == (1, [])
    assert counted(CLIENT_GONE) == before + 1


async def test_who_leaves_amid_the_body_is_counted_as_gone():
    wire, before = Wire(b"{", stalls=True), counted(CLIENT_GONE)
    wire.left.set()
    await wire.ask(echoes)
    assert wire.sent == []
    assert counted(CLIENT_GONE) == before + 1


async def test_who_leaves_behind_the_answer_ends_nothing():
    wire, before = Wire(), counted(200)
    over = asyncio.Event()
    handler = Waits()
    handler.go_on.set()

    async def goes_on(exchange: Exchange) -> None:
        await handler(exchange)
        wire.left.set()
        for _ in range(5):  # the watcher hears of it
            await asyncio.sleep(0)
        over.set()

    await wire.ask(goes_on)
    assert over.is_set()
    assert (wire.status, counted(200)) == (200, before + 1)


@pytest.mark.parametrize("client_leaves", [False, True])
async def test_the_servers_own_cancel_stays_one(client_leaves):
    wire, handler = Wire(), Waits()
    asking = asyncio.create_task(wire.ask(handler))
    await handler.began.wait()
    if client_leaves:
        handler.on_cancel = asking.cancel  # at the same moment
        wire.left.set()
    else:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert handler.cancelled == 1


@pytest.mark.parametrize("ends", ["well", "by the server"])
async def test_no_client_is_watched_any_longer(ends):
    wire, handler = Wire(), Waits()
    asking = asyncio.create_task(wire.ask(handler))
    await handler.began.wait()
    assert len(watchers()) == 1
    if ends == "well":
        handler.go_on.set()
    else:
        asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert watchers() == []


async def test_each_request_is_counted_and_timed_once():
    def timed() -> float:
        (metric,) = metrics.duration.labels(ROUTE).collect()
        return next(s.value for s in metric.samples if s.name.endswith("_count"))

    before, answered = timed(), counted(200)
    ids = set()
    for _ in range(3):
        wire = Wire()
        await wire.ask(echoes)
        ids.add(wire.headers["x-request-id"])
    assert (timed(), counted(200)) == (before + 3, answered + 3)
    assert len(ids) == 3
