"""What every test may use: a real Redis and a namespace of its own in it."""

import os

# One thread per process: tests share two cores (set before torch is imported anywhere).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton decides when kernels are defined whether they are for a GPU or for its interpreter.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from redis.crc import key_slot

from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, Script, connect
from tests.support.leftovers import Held, left
from tests.support.transport import SECRET

os.environ["PENSTOCK_INTERNAL_SECRET"] = SECRET

# A job in the background of a shell is deaf to it, and so is whatever it starts: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may depend on how fast a busy machine is, generated inputs included.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that Ray's processes have, whose timers and transports are not asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    from tests.support.lanes import processes

    return processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.lanes import Lanes

    return Lanes(config, log)


@pytest.fixture(scope="module", autouse=True)
def leaves_little(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file of tests ends what it began."""
    before = Held.now()
    yield
    if found := left(before):
        pytest.fail(f"{request.node.name} leaves {'; '.join(found)}", pytrace=False)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def namespace() -> str:
    """A prefix for Redis keys that no other test uses."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session", autouse=True)
def one_slot() -> Iterator[None]:
    """A Redis cluster runs a function on keys of one slot only; the tests' Redis has but one."""
    run = Script.__call__

    async def checked(self: Script, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        assert len({key_slot(key.encode()) for key in keys}) <= 1, f"of several slots: {keys}"
        return await run(self, keys, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Script, "__call__", checked)
        yield
