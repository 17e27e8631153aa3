"""The GPUs that this worker sees, by NVML; nothing at all where there are none.

NVML knows all GPUs of the machine, CUDA only those of `CUDA_VISIBLE_DEVICES`, which Ray sets to
what it gives to a worker: only of these is told.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pynvml
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_LABELS = ["gpu", "uuid", "name"]


class Gpus(Collector):
    """Asks NVML when it is asked. What one GPU does not tell (power on some) is left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two scrapes may come at once
        self._usable: bool | None = None  # None: not tried yet
        self._wanted = False

    def watch(self) -> None:
        """From now on: a worker on CPUs does not load NVML."""
        self._wanted = True

    def describe(self) -> Iterator[Metric]:
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if not self._wanted or not self._start():
                return
            families = _families()
            for index in range(pynvml.nvmlDeviceGetCount()):
                with suppress(pynvml.NVMLError):
                    _measure(index, pynvml.nvmlDeviceGetHandleByIndex(index), families)
        yield from families.values()

    def _start(self) -> bool:
        if self._usable is None:
            try:
                pynvml.nvmlInit()
                self._usable = True
            except pynvml.NVMLError as error:
                log.warning("no GPU metrics: %s", error)
                self._usable = False
        return self._usable


def _measure(index: int, handle: Any, families: dict[str, GaugeMetricFamily]) -> None:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    if not _visible(index, uuid):
        return

    def tell(what: str, value: float) -> None:
        families[what].add_metric([str(index), uuid, name], value)

    with suppress(pynvml.NVMLError):
        tell("utilization_ratio", pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        tell("memory_used_bytes", memory.used)
        tell("memory_bytes", memory.total)
    with suppress(pynvml.NVMLError):
        sensor = pynvml.NVML_TEMPERATURE_GPU
        tell("temperature_celsius", pynvml.nvmlDeviceGetTemperature(handle, sensor))
    with suppress(pynvml.NVMLError):
        tell("power_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)


def _visible(index: int, uuid: str) -> bool:
    """Whether CUDA shows the GPU to this process: by number, or by (the beginning of) its UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return str(index) in names or any(n and not n.isdigit() and uuid.startswith(n) for n in names)


def _families() -> dict[str, GaugeMetricFamily]:
    told = {
        "utilization_ratio": "Share of the last moments in which some kernel ran, 0 to 1",
        "memory_used_bytes": "Memory in use, the KV cache's whole room included",
        "memory_bytes": "Memory in all",
        "temperature_celsius": "Of the chip",
        "power_watts": "Drawn now",
    }
    return {
        what: GaugeMetricFamily(f"penstock_gpu_{what}", f"{text} (only with a GPU)", labels=_LABELS)
        for what, text in told.items()
    }


GPUS = Gpus()
REGISTRY.register(GPUS)
