"""When a torch device gets to a point of its queue."""

from time import perf_counter

import torch


class Moment:
    """That all that the device was given so far is done. On a CPU it is."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._on_host = perf_counter()

    def wait(self) -> None:
        if self._event:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Of the device, from `earlier` on; both have come."""
        if self._event and earlier._event:
            return float(earlier._event.elapsed_time(self._event)) / 1000
        return self._on_host - earlier._on_host
