"""Why a replica did not start reaches whoever waits for it."""

from services.common.redis import Redis, connect
from services.common.start_failures import StartFailure, first_told, forget, tell

FIRST = StartFailure("retrieval", "no such model", "/logs/retrieval")
SECOND = StartFailure("router", "so", "")


async def test_the_first_is_told_until_it_is_forgotten(redis: Redis, namespace: str) -> None:
    assert await first_told(redis, namespace) is None
    for failure in (FIRST, SECOND):
        await tell(redis, namespace, failure)
    assert await first_told(redis, namespace) == FIRST
    assert await first_told(redis, f"{namespace}-other") is None
    (key,) = [key async for key in redis.scan_iter(f"{namespace}*")]
    assert 0 < await redis.ttl(key) <= 3600, "one that nobody forgets is no burden for ever"
    await forget(redis, f"{namespace}-other")
    assert await first_told(redis, namespace) == FIRST
    await forget(redis, namespace)
    assert await first_told(redis, namespace) is None


async def test_a_replica_that_fails_again_and_again_keeps_a_bounded_list_with_the_first(
    redis: Redis, namespace: str
) -> None:
    await tell(redis, namespace, FIRST)
    for attempt in range(150):
        await tell(redis, namespace, StartFailure("router", f"attempt {attempt}", ""))
    (key,) = [key async for key in redis.scan_iter(f"{namespace}*")]
    assert await redis.llen(key) <= 100
    assert await first_told(redis, namespace) == FIRST


def test_in_words_with_the_log_where_there_is_one() -> None:
    assert str(FIRST) == "retrieval did not start: no such model\nits log: /logs/retrieval"
    assert str(SECOND) == "router did not start: so"


async def test_without_redis_it_is_no_second_failure(namespace: str) -> None:
    away = connect("redis://127.0.0.1:1/0")
    await tell(away, namespace, FIRST)
    assert await first_told(away, namespace) is None
    await away.aclose()
