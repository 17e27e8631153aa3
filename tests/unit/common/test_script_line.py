"""Calls of the script on one connection: each has its own reply, in order, whoever gives up and
whatever becomes of the connection."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import MaxConnectionsError

from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, RedisAway, ResponseError, connect
from services.common.script_line import ScriptLine
from tests.support.waiting import until, within

SOURCE = """
if ARGV[1] == 'bad' then return redis.error_reply('odd') end
if ARGV[1] == 'full' then return redis.error_reply('OOM command not allowed') end
if ARGV[1] == 'nil' then return false end
redis.call('RPUSH', KEYS[1], ARGV[1])
return ARGV[1]
"""
PATIENCE_S = 0.5


@pytest.fixture
async def script(redis: Redis) -> ScriptLine:
    return ScriptLine(redis, SOURCE, PATIENCE_S)


def call(script: ScriptLine, namespace: str, word: object) -> "asyncio.Future[Any]":
    return script([namespace], [word])


async def ran(redis: Redis, namespace: str) -> list[str]:
    return await redis.lrange(namespace, 0, -1)


async def test_each_has_its_own_reply_in_order(script, redis, namespace):
    words = [f"w{n}" for n in range(300)]
    assert await asyncio.gather(*(call(script, namespace, word) for word in words)) == words
    first = call(script, namespace, "x0")
    await until(lambda: not script._unsent)
    assert await asyncio.gather(first, call(script, namespace, "x1")) == ["x0", "x1"]
    assert await ran(redis, namespace) == [*words, "x0", "x1"]


async def test_one_caller_that_gives_up_costs_no_other_its_reply(script, redis, namespace):
    calls = [call(script, namespace, str(n)) for n in range(4)]
    calls[0].cancel()
    calls[2].cancel()
    assert await within(20, asyncio.gather(calls[1], calls[3])) == ["1", "3"]
    assert await ran(redis, namespace) == ["0", "1", "2", "3"], "which undoes no call"


async def test_the_scripts_own_error_is_its_callers_alone(script, redis, namespace):
    words = ("a", "bad", "full", "nil", "b")
    done = await asyncio.gather(
        *(call(script, namespace, word) for word in words), return_exceptions=True
    )
    assert (done[0], done[3], done[4]) == ("a", None, "b")
    assert isinstance(done[1], ResponseError)
    assert isinstance(done[2], RedisAway), "no writes are taken for now"
    assert await ran(redis, namespace) == ["a", "b"], "it is not called again"


async def test_a_script_that_is_gone_is_loaded_and_each_call_made_once(script, redis, namespace):
    await call(script, namespace, "first")
    await redis.script_flush()
    words = [str(n) for n in range(3)]
    assert await asyncio.gather(*(call(script, namespace, word) for word in words)) == words
    assert await ran(redis, namespace) == ["first", *words]


async def test_a_connection_that_was_closed_is_made_anew(script, redis, namespace):
    await call(script, namespace, "a")
    await redis.client_kill_filter(skipme=True)
    assert await call(script, namespace, "b") == "b"


async def test_its_connection_is_nobody_elses_from_the_beginning(script, redis, namespace):
    with suppress(MaxConnectionsError):
        while True:
            redis.connection_pool.get_available_connection()
    assert await call(script, namespace, "a") == "a"


async def test_callers_do_not_wait_for_a_line_that_was_cancelled(script, namespace):
    """The loop is about to end."""
    calls = [call(script, namespace, "a"), call(script, namespace, "b")]
    assert script._reader is not None
    script._reader.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(one.cancelled() for one in calls)


# ---- a Redis of its own -------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as server:
        yield server


@pytest.fixture
async def own(server: EmbeddedRedis) -> AsyncIterator[ScriptLine]:
    client = connect(server.url)
    yield ScriptLine(client, SOURCE, PATIENCE_S)
    await client.aclose()


async def test_a_redis_that_is_away_fails_all_and_is_found_again(own, server):
    assert await call(own, "list", "a") == "a"
    server.stop()
    done = await asyncio.gather(*(call(own, "list", n) for n in "bc"), return_exceptions=True)
    assert all(isinstance(one, RedisAway) for one in done)
    server.start()
    assert await call(own, "list", "d") == "d"


async def test_a_redis_that_hangs_costs_one_patience(own, server):
    assert await call(own, "list", "a") == "a"
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        calls = [call(own, "list", "b")]
        await asyncio.sleep(PATIENCE_S / 2)
        calls.append(call(own, "list", "c"))
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, RedisAway) for one in done)
        assert PATIENCE_S <= time.monotonic() - began < 10 * PATIENCE_S
        with pytest.raises(RedisAway):  # nor does it take a connection
            await within(10 * PATIENCE_S, call(own, "list", "d"))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await call(own, "list", "e") == "e"


async def test_a_loop_that_is_late_is_no_outage(own):
    await call(own, "list", "a")
    late = call(own, "list", "b")
    await asyncio.sleep(0)
    time.sleep(3 * PATIENCE_S)  # noqa: ASYNC251 - the loop is held up
    assert await late == "b"
