"""Calls of the script, gathered: each has its own reply, in order, whoever gives up."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from services.common.script_pipe import _BATCH, ScriptPipe
from tests.support.waiting import until


class Server:
    """Redis as the pipe sees it. A call's reply is its last argument, or what `answer` makes of
    it; each round trip waits for `free`."""

    def __init__(self) -> None:
        self.trips: list[list[Any]] = []
        self.ran: list[Any] = []
        self.knows_script = True
        self.failures: list[Exception] = []  # of the next round trips
        self.free = asyncio.Event()
        self.free.set()
        self.answer: Callable[[Any], Any] = lambda word: word
        self._calls: list[Any] = []

    def register_script(self, source: str) -> Any:
        script = type("Script", (), {"script": source, "sha": "sha"})
        return script()

    async def script_load(self, source: str) -> None:
        assert source == "source"
        self.knows_script = True

    def pipeline(self, transaction: bool) -> "Server":
        return self

    async def __aenter__(self) -> "Server":
        self._calls = []
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def evalsha(self, sha: str, keys: int, *args: Any) -> None:
        self._calls.append(args[-1])

    async def execute(self, raise_on_error: bool) -> list[Any]:
        calls, known = self._calls, self.knows_script
        self.trips.append(calls)
        await self.free.wait()
        if self.failures:
            raise self.failures.pop(0)
        if known:
            self.ran += calls
        return [self.answer(word) if known else NoScriptError("NOSCRIPT") for word in calls]


@pytest.fixture
async def server() -> Server:
    return Server()


def pipe(server: Server) -> ScriptPipe:
    return ScriptPipe(server, "source")  # type: ignore[arg-type]


def call(script: ScriptPipe, word: object) -> "asyncio.Task[Any]":
    async def one() -> Any:
        return await script(["key"], [word])

    return asyncio.create_task(one())


async def test_what_comes_during_a_round_trip_makes_the_next(server: Server) -> None:
    script = pipe(server)
    server.free.clear()
    calls = [call(script, 0)]
    await until(lambda: len(server.trips) == 1)
    calls += [call(script, n) for n in range(1, _BATCH + 10)]
    await asyncio.sleep(0)
    server.free.set()
    assert await asyncio.gather(*calls) == list(range(_BATCH + 10))
    assert [len(trip) for trip in server.trips] == [1, _BATCH, 9]
    assert server.ran == list(range(_BATCH + 10)), "what was called first happens first"
    assert await call(script, "later") == "later", "an idle pipe sends again"


async def test_one_caller_that_gives_up_costs_no_other_its_reply(server: Server) -> None:
    script = pipe(server)
    server.free.clear()
    calls = [call(script, n) for n in range(4)]
    await until(lambda: len(server.trips) == 1)
    calls[0].cancel()
    calls[2].cancel()
    later = call(script, "later")
    await asyncio.sleep(0)
    server.free.set()
    async with asyncio.timeout(5):
        assert [await calls[1], await calls[3], await later] == [1, 3, "later"]
    assert all(calls[n].cancelled() for n in (0, 2))


async def test_the_scripts_own_error_is_its_callers_alone(server: Server) -> None:
    script = pipe(server)
    server.answer = lambda word: ResponseError("unknown op") if word == "bad" else word
    calls = [call(script, word) for word in ("a", "bad", "b")]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert (done[0], done[2]) == ("a", "b")
    assert isinstance(done[1], ResponseError)
    assert len(server.trips) == 1, "it is not called again"


async def test_a_script_that_is_gone_is_loaded_and_each_call_made_once(server: Server) -> None:
    script = pipe(server)
    server.knows_script = False
    assert await asyncio.gather(*(call(script, n) for n in range(3))) == [0, 1, 2]
    assert server.ran == [0, 1, 2]


async def test_only_what_found_no_script_is_called_again(server: Server) -> None:
    """It was flushed between two calls of one round trip."""
    script = pipe(server)
    gone = {"b"}

    def answer(word: Any) -> Any:
        if word in gone:
            gone.remove(word)
            return NoScriptError("NOSCRIPT")
        return word

    server.answer = answer
    assert await asyncio.gather(*(call(script, word) for word in "abc")) == ["a", "b", "c"]
    assert server.trips == [["a", "b", "c"], ["b"]]


@pytest.mark.parametrize(("failures", "fails"), [(1, False), (2, True)])
async def test_two_round_trips_that_fail_are_an_outage_for_all_of_them(
    server: Server, failures: int, fails: bool
) -> None:
    script = pipe(server)
    server.failures = [RedisConnectionError("gone") for _ in range(failures)]
    done = await asyncio.gather(*(call(script, n) for n in range(3)), return_exceptions=True)
    assert [isinstance(one, RedisConnectionError) for one in done] == [fails] * 3
    assert server.trips == [[0, 1, 2]] * 2
    assert await call(script, "later") == "later"


async def test_callers_do_not_wait_for_a_pipe_that_was_cancelled(server: Server) -> None:
    """The loop is about to end."""
    script = pipe(server)
    server.free.clear()
    calls = [call(script, 0)]
    await until(lambda: len(server.trips) == 1)
    calls.append(call(script, 1))
    await asyncio.sleep(0)
    assert script._sender is not None
    script._sender.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(one.cancelled() for one in calls)
