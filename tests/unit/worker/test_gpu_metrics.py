"""GPUs as NVML tells of them, without one: its functions are stand-ins, its errors its own."""

from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from services.worker.engine_metrics import EngineProcess
from services.worker.gpu_metrics import Gpus


def told(gpus: Any) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    return {
        family.name: [(tuple(s.labels.values()), s.value) for s in family.samples]
        for family in gpus.collect()
    }


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with two GPUs; what NVML was asked for."""
    asked: list[str] = []
    stands_for: dict[str, Any] = {
        "nvmlInit": lambda: asked.append("init"),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}abc",
        "nvmlDeviceGetName": lambda handle: "H200",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=25 + handle),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=7, total=10),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 60 + handle,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_500,
    }
    for name, stand_in in stands_for.items():
        monkeypatch.setattr(pynvml, name, stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return asked


def test_each_gpu_is_told_in_base_units(two: list[str]) -> None:
    gpus = Gpus()
    gpus.watch()
    families = told(gpus)
    first, second = ("0", "GPU-0abc", "H200"), ("1", "GPU-1abc", "H200")
    assert families["penstock_gpu_utilization_ratio"] == [(first, 0.25), (second, 0.26)]
    assert families["penstock_gpu_memory_used_bytes"] == [(first, 7), (second, 7)]
    assert families["penstock_gpu_memory_bytes"] == [(first, 10), (second, 10)]
    assert families["penstock_gpu_temperature_celsius"] == [(first, 60), (second, 61)]
    assert families["penstock_gpu_power_watts"] == [(first, 350.5), (second, 350.5)]
    assert told(gpus)
    assert two == ["init"], "once"


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1", ["1"]), ("GPU-0a", ["0"]), ("0, 1", ["0", "1"]), ("", []), ("-1", [])],
)
def test_a_worker_tells_of_its_own_gpus_alone(
    two: list[str], monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus()
    gpus.watch()
    found = told(gpus)["penstock_gpu_utilization_ratio"]
    assert [labels[0] for labels, _ in found] == seen


def test_what_a_gpu_does_not_tell_is_left_out(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_power(handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", no_power)
    gpus = Gpus()
    gpus.watch()
    families = told(gpus)
    assert families["penstock_gpu_power_watts"] == []
    assert len(families["penstock_gpu_temperature_celsius"]) == 2


def test_without_a_gpu_there_is_nothing_and_nobody_asks_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", none)
    gpus = Gpus()
    assert told(gpus) == {}
    assert caplog.text == "", "a worker on CPUs does not ask"
    gpus.watch()
    assert told(gpus) == told(gpus) == {}
    assert len(caplog.records) == 1


def test_the_engines_process_is_measured_while_it_is_there() -> None:
    engine = EngineProcess()
    assert told(engine) == {}
    engine.watch(lambda: psutil.Process().pid)
    families = told(engine)
    (((), cpu),) = families["penstock_worker_engine_cpu_seconds"]
    assert 0 < cpu <= sum(psutil.Process().cpu_times()[:2])
    (((), resident),) = families["penstock_worker_engine_resident_memory_bytes"]
    assert resident > 2**20
    engine.watch(lambda: 2**22 - 1)
    assert told(engine) == {}
