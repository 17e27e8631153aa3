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
_LONGEST_PAUSE = 720  # looks: an hour
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


async def give_back_memory(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Watches this process for ever. Does nothing but on Linux with glibc.

    Gives back when a burst is over, and again after twice, four times, ... as long: what was still
    under way then, and so kept its memory, ends without a trace of its own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or sys.platform != "linux":
        return
    lowest, busy_s = resident_bytes(), time.process_time()
    pause = rest = 1  # in looks
    while True:
        await asyncio.sleep(look_every_s)
        used_s, busy_s = time.process_time() - busy_s, time.process_time()
        now = resident_bytes()
        lowest = min(lowest, now)
        if used_s >= _QUIET * look_every_s:
            pause = rest = 1
            continue
        rest -= 1
        if rest <= 0 and now > lowest + _GROWTH_BYTES:
            gc.collect()
            await asyncio.to_thread(trim, 0)
            log.info("gave %d MiB back to the system", (now - resident_bytes()) >> 20)
            pause = min(2 * pause, _LONGEST_PAUSE)
            rest = pause


def keep_pages(large_bytes: int = 2**20) -> None:
    """From now on each piece of `large_bytes` or more has a mapping of its own, and goes back as
    soon as it is free; and up to 16 MiB that are free at the heap's end stay until the process is
    quiet. By itself glibc raises the first bound to the size of what was freed, up to 32 MiB: the
    next pieces of a burst then lie on the heap, and small ones that stay come to lie between them.
    And it gives the heap's end back so readily that a prompt of 220 KB took its pages anew at each
    step of its way, some thousand in a gateway, a third of what it cost.

    For a process that sees large bodies, not for one that computes: mapping costs time (the
    encoder's batches took a quarter more CPU).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform == "linux":
        mallopt(_M_MMAP_THRESHOLD, large_bytes)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)


def resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
