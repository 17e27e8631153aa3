"""What the tests of admission share."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from services.common.embedded_redis import EmbeddedRedis
from services.router.admission import admission
from tests.support.admission_ends import Routers
from tests.support.order_script import Script


@pytest.fixture
async def make_routers(namespace: str) -> AsyncIterator[Callable[..., Routers]]:
    made: list[Routers] = []

    def make(url: str, **options: object) -> Routers:
        made.append(Routers(url, **{"namespace": namespace, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for routers in made:
        await routers.close()


@pytest.fixture
def routers(make_routers: Callable[..., Routers], redis_url: str) -> Routers:
    return make_routers(redis_url)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """No renewal helps, unless a test asks for it."""
    monkeypatch.setattr(admission, "_RENEW_S", 1000.0)
    return {"slot_lease_s": 3000.0}


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """One to stop and to start again."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def make_script(redis_url: str) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(**options: object) -> Script:
        made.append(Script(redis_url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for script in made:
        script.close()


@pytest.fixture
def lua(make_script: Callable[..., Script]) -> Script:
    return make_script()
