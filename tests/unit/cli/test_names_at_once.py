"""Names of models and adapters that are given at once."""

import asyncio

from services.cli.stack.wanted_models import WantedModels
from services.common.config import ModelSpec
from services.common.redis import Redis


async def test_of_a_name_that_is_given_at_once_there_is_one(redis: Redis, namespace: str) -> None:
    """Else requests for it would go to either."""
    wanted = WantedModels(redis, namespace)
    await wanted.start_with([ModelSpec(name=name, path="/m") for name in ("a", "b")], "k")
    await redis.hset(f"{namespace}:{{models}}:wanted", "junk", "no JSON")
    for name in ("x", "y", "z"):
        given = await asyncio.gather(
            wanted.add(ModelSpec(name=name, path="/x")),
            wanted.add_adapter("a", name, "/1"),
            wanted.add_adapter("b", name, "/2"),
        )
        assert given.count(True) == 1
    assert not await wanted.add_adapter("a", "b", "/1")
    assert await wanted.add_adapter("a", "new", "/1")
    assert not await wanted.add(ModelSpec(name="new", path="/x"))
    assert await wanted.remove_adapter("new")
    assert await wanted.add(ModelSpec(name="new", path="/x"))
