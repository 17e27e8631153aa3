"""The Redis client."""

import asyncio

import pytest

from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, RedisAway, ResponseError, Script, _KeepsCancel, connect


async def test_a_cancel_is_never_swallowed(redis_url):
    client = connect(redis_url)
    await client.ping()
    for turn in range(160):
        task = asyncio.create_task(client.hvals("nothing"))
        for _ in range(turn % 8):
            await asyncio.sleep(0)
        reached = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == reached, f"cancelled at loop turn {turn % 8}"
    assert await client.ping()
    await client.aclose()


async def test_a_cancel_by_a_signals_handler_is_not_swallowed(redis_url):
    """It comes while the task itself runs, and is delivered where that waits next."""
    client = connect(redis_url)
    await client.ping()

    async def ask() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await client.ping()

    asked = asyncio.create_task(ask())
    await asyncio.wait([asked])
    assert asked.cancelled()

    async def tidies_up() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            tidied.append(await client.echo("after its cancel it may ask still"))

    tidied: list[str] = []
    tidying = asyncio.create_task(tidies_up())
    await asyncio.sleep(0)
    tidying.cancel()
    await asyncio.wait([tidying])
    assert tidied
    await client.aclose()


async def test_a_function_that_redis_lost_is_loaded_again(redis_url):
    client = connect(redis_url)
    twice = Script(client, "return {KEYS[1], ARGV[1], ARGV[1]}")
    assert await twice(["k"], ["v"]) == ["k", "v", "v"]
    await client.script_flush()
    assert await twice(["k"], ["v"]) == ["k", "v", "v"]
    await client.aclose()


async def test_a_redis_that_is_silent_or_full_or_not_there_is_away():
    connected = asyncio.Event()
    silent = await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    for url in (f"redis://127.0.0.1:{port}/0", "redis://127.0.0.1:1/0"):
        client = connect(url)
        with pytest.raises(RedisAway):
            await asyncio.wait_for(client.get("k"), 15)
        await client.aclose()
    assert connected.is_set()
    silent.close()
    with EmbeddedRedis() as server:
        client = connect(server.url)
        await client.config_set("maxmemory", 1)
        with pytest.raises(RedisAway):
            await client.set("k", "v")
        await client.aclose()


async def test_a_burst_shares_a_few_connections():
    with EmbeddedRedis() as server:
        client = connect(server.url)
        calls = (client.blpop(["nothing"], 0.01) for _ in range(200))
        await asyncio.gather(*calls, return_exceptions=True)  # a busy machine's may wait too long
        assert (await client.info("clients"))["connected_clients"] <= 64
        await client.aclose()


@pytest.mark.parametrize("url", ["redis://host/0", "rediss://host/0", "unix:///socket?db=0"])
async def test_every_kind_of_connection_keeps_cancels(url):
    client = connect(url)
    connection = client.connection_pool.make_connection()
    assert isinstance(connection, _KeepsCancel)
    kept = (connection.db, connection.socket_timeout, connection.socket_connect_timeout)
    assert kept == (0, 2.0, 1.0)
    await client.aclose()


WRITES = "return redis.call('SET', KEYS[1], 'v')"


async def cannot_save(client: Redis) -> None:
    """As with a full disk: its snapshots go where no file can be made, and it takes no writes."""
    await client.config_set("dir", "/proc")
    await client.config_set("save", "3600 1")
    await client.bgsave()
    async with asyncio.timeout(10):
        while (await client.info("persistence"))["rdb_last_bgsave_status"] == "ok":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def is_full(client: Redis) -> None:
    await client.config_set("maxmemory", 1)


@pytest.mark.parametrize("takes_no_writes", [cannot_save, is_full])
async def test_that_no_writes_are_taken_is_one_error_whoever_writes(takes_no_writes) -> None:
    with EmbeddedRedis() as server:
        client = connect(server.url)
        await client.set("k", "before")
        await takes_no_writes(client)
        with pytest.raises(RedisAway):
            await client.set("k", "v")
        with pytest.raises(RedisAway):
            await Script(client, WRITES)(["k"])
        async with client.pipeline(transaction=True) as at_once:
            at_once.set("k", "v")
            at_once.get("k")
            with pytest.raises(RedisAway):
                await at_once.execute()
        async with client.pipeline(transaction=True) as at_once:
            at_once.eval(WRITES, 1, "k")
            with pytest.raises(RedisAway):
                await at_once.execute()
        assert await client.get("k") == "before"
        await client.config_set("save", "")  # else it would not end without a snapshot
        await client.aclose()


async def test_a_functions_own_error_is_not_taken_for_it(redis) -> None:
    with pytest.raises(ResponseError) as told:
        await Script(redis, "return redis.error_reply('ODD no OOM here')")(["k"])
    assert not isinstance(told.value, RedisAway)
