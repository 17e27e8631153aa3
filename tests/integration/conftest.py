"""What the router's tests share."""

from collections.abc import AsyncIterator

import pytest

from tests.support.router_stack import Stack, stack_on


@pytest.fixture
async def stack(redis_url: str, namespace: str) -> AsyncIterator[Stack]:
    async with stack_on(redis_url, namespace) as made:
        yield made
