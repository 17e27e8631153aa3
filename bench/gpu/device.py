"""The device's own ceilings, and how time is taken on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    torch: torch.device
    name: str
    bytes_per_s: float
    """Of a large copy, read and written together."""
    flops_per_s: float
    """Of a large product in bfloat16."""

    @property
    def is_dry(self) -> bool:
        return self.torch.type == "cpu"


def measured(dry: bool) -> Device:
    """Raises RuntimeError where there is no GPU, unless dry."""
    if not dry and not torch.cuda.is_available():
        raise RuntimeError("torch sees no NVIDIA GPU; --dry runs on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    size, width = (2**20, 64) if dry else (2**31, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    product_s = seconds(lambda: a @ b, device)
    name = "a CPU, dry" if dry else torch.cuda.get_device_name(device)
    return Device(device, name, 2 * size / copy_s, 2 * width**3 / product_s)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of many runs, with caches emptied between them; on a CPU of one."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, warmup=20, rep=100, return_mode="median")
    return milliseconds / 1e3
