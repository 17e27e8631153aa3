"""When a worker takes itself for broken."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.config import ModelSpec, Settings
from services.common.errors import PenstockError
from services.common.telemetry.telemetry import Telemetry
from services.worker import server
from services.worker.engine import Load, Request, Sampling, StepOutput
from services.worker.news import News
from services.worker.sequences import Sequences
from services.worker.server import WorkerService
from tests.unit.worker.worker_rig import NO_REDIS

LOAD = Load(0, 1, 1, 1, 1, 16, 0, 0.0, 0.0, 1.0)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr("services.worker.sequences.time", clock)
    return clock


@pytest.fixture
def service(clock: Clock, tmp_path: Any) -> WorkerService:
    """One whose engine has made a step and has one request pending."""
    settings = Settings(
        models=[ModelSpec(name="m", path=str(tmp_path))],
        internal_secret="x" * 16,
        data_dir=tmp_path,
    )
    made = WorkerService(settings, NO_REDIS, Telemetry("worker", "w"), "w")
    engine = made._engine = cast(Any, SimpleNamespace(running=True, add=lambda request: None))
    made._sequences = Sequences(engine)
    made._news = News(cast(Any, type("Info", (), {"token_blocks": 1, "block_size": 16})()), 1)
    made._receiver = cast(Any, None)
    made._links = cast(Any, type("Links", (), {"broadcast": lambda self, news: None})())
    made._on_step(StepOutput(1, 0, 0, LOAD, pending=1))
    return made


def test_a_hung_engine_is_found_out(service: WorkerService, clock: Clock) -> None:
    clock.now += 29
    service.check()
    service._on_step(StepOutput(2, 0, 0, LOAD, pending=1))
    clock.now += 29
    service.check()
    clock.now += 2
    with pytest.raises(PenstockError, match="no step for 31 s") as told:
        service.check()
    assert told.value.reason == "engine_stalled"


def test_a_long_step_has_its_time_and_no_more(service: WorkerService, clock: Clock) -> None:
    service._on_long_step(20.0)
    assert service._vitals().step_s == 20.0
    clock.now += 30 + 59
    service.check()
    clock.now += 2
    with pytest.raises(PenstockError, match="no step"):
        service.check()
    service._on_step(StepOutput(2, 0, 0, LOAD, pending=1))
    assert service._vitals().step_s == 0
    clock.now += 31
    with pytest.raises(PenstockError, match="no step"):
        service.check()


async def test_an_idle_engine_has_its_time_from_its_next_request_on(
    service: WorkerService, clock: Clock
) -> None:
    service._on_step(StepOutput(2, 0, 0, LOAD, pending=0))
    clock.now += 3600
    service.check()
    service._sequences.add(Request("a", [3], Sampling(1)), lambda output: None)
    clock.now += 29
    service.check()
    clock.now += 2
    with pytest.raises(PenstockError, match="no step for 31 s"):
        service.check()
