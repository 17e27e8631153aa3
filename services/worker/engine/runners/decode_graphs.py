"""Decode steps of several batch sizes, each captured once in a CUDA graph: a replay is one call,
where launching a step's kernels one by one takes longer than they do."""

from collections.abc import Callable

import torch
from torch import Tensor


def batch_sizes(most: int) -> list[int]:
    """In which decodes come, up to `most`: close enough that filling up costs little, few enough
    that capturing does."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    def __init__(self, most: int, step: Callable[[int], Tensor], device: torch.device) -> None:
        """`step` computes a decode step of so many rows, of inputs that are there already, always
        at the same places, and gives their logits. On a CPU nothing is captured: it is called each
        time."""
        self._sizes, self._step = batch_sizes(most), step
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}
        """Each graph's own, so that no other's takes the place."""
        if device.type == "cuda":
            self._capture(device)

    def size(self, rows: int) -> int:
        """The least that takes so many rows."""
        return next(size for size in self._sizes if size >= rows)

    def run(self, size: int) -> Tensor:
        """One of the sizes that `size` gives. The logits hold until it runs again."""
        if not self._graphs:
            return self._step(size)
        self._graphs[size].replay()
        return self._logits[size]

    def _capture(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others find room in its memory
            with torch.cuda.stream(stream):
                self._step(size)  # compiles kernels, which a capture cannot
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._logits[size] = self._step(size)
            pool = graph.pool()
            self._graphs[size] = graph
        torch.cuda.current_stream(device).wait_stream(stream)
