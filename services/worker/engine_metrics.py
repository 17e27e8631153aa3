"""The engine's process, which has no metrics of its own: what it takes of processor and memory."""

from collections.abc import Callable, Iterator

import psutil
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class EngineProcess(Collector):
    """Looks at the process only when it is asked."""

    def __init__(self) -> None:
        self._pid: Callable[[], int | None] = lambda: None

    def watch(self, pid: Callable[[], int | None]) -> None:
        """The process that is to be looked at from now on."""
        self._pid = pid

    def describe(self) -> Iterator[Metric]:
        return iter(_families())

    def collect(self) -> Iterator[Metric]:
        if (pid := self._pid()) is None:
            return
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:  # it has just ended
            return
        cpu, resident = families = _families()
        cpu.add_metric([], times.user + times.system)
        resident.add_metric([], memory.rss)
        yield from families


def _families() -> tuple[CounterMetricFamily, GaugeMetricFamily]:
    return (
        CounterMetricFamily(
            "penstock_worker_engine_cpu_seconds_total", "Processor time of the engine's process"
        ),
        GaugeMetricFamily(
            "penstock_worker_engine_resident_memory_bytes", "Memory of the engine's process"
        ),
    )


ENGINE = EngineProcess()
REGISTRY.register(ENGINE)
