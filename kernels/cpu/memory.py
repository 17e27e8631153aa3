"""Memory as the kernels want it: it begins with a cache line and, where it is large, lies in huge
pages, which the processor finds with fewer looks at its tables."""

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE = 64
"""Bytes of a cache line."""
HUGE = 2 * 2**20
"""Bytes of a huge page."""


def zeros(count: int, dtype: Any) -> NDArray[Any]:
    """[count], of which a page costs memory once it is written. Raises MemoryError."""
    size = count * np.dtype(dtype).itemsize
    if size < HUGE:
        memory = np.zeros(size + LINE, np.uint8)
        return _from(memory, LINE, size).view(dtype)
    # Not numpy's own: what it takes from the kernel need not begin with a huge page.
    try:
        pages = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"Unable to allocate {size} bytes: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return _from(np.frombuffer(pages, np.uint8), HUGE, size).view(dtype)


def _from(memory: NDArray[np.uint8], alignment: int, size: int) -> NDArray[np.uint8]:
    start = -memory.ctypes.data % alignment
    return memory[start : start + size]


def huge_bytes(memory: NDArray[Any]) -> int:
    """How much of the mapping that holds it is in huge pages now."""
    address, inside, found = memory.ctypes.data, False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                first, last = (int(end, 16) for end in name.split("-"))
                inside = first <= address < last
            elif inside and name in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                found += int(rest.split()[0]) * 1024
    return found
