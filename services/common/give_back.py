"""Memory goes back to the system when a burst of requests is over.

Left alone it would stay: what exceptions tie into cycles waits for Python's garbage collector,
which counts allocations and does nothing while nothing happens; and what is free the C library
keeps, in one arena for each thread that ever allocated.
"""

import asyncio
import ctypes
import gc
import logging
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_QUIET = 0.1  # of a core; a collection holds all requests for up to a tenth of a second
_GROWTH_BYTES = 16 * 2**20
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


async def give_back_memory(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Watches this process for ever. Does nothing but on Linux with glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or sys.platform != "linux":
        return
    floor, busy_s = resident_bytes(), time.process_time()
    while True:
        await asyncio.sleep(look_every_s)
        used_s, busy_s = time.process_time() - busy_s, time.process_time()
        now = resident_bytes()
        if used_s < _QUIET * look_every_s and now > floor + _GROWTH_BYTES:
            gc.collect()
            await asyncio.to_thread(trim, 0)
            floor = resident_bytes()
            log.info("gave %d MiB back to the system", (now - floor) >> 20)
        else:
            floor = min(floor, now)


def resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
