"""A process gives its memory back after a burst."""

import asyncio
import ctypes
import gc
import sys

import pytest

from services.common import give_back
from services.common.give_back import give_back_memory, resident_bytes
from tests.support.waiting import until

MIB = 2**20


class Knot:
    """Holds itself and small pieces: nothing but a garbage collection frees them."""

    def __init__(self) -> None:
        self.me = self
        self.pieces = [bytes(1000) for _ in range(1000)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_garbage_of_a_burst_goes_back_when_it_is_over(monkeypatch):
    monkeypatch.setattr(give_back, "_QUIET", 10.0)  # other tests' threads may be busy
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests left free would be used again
    watching = asyncio.create_task(give_back_memory(0.05))
    await asyncio.sleep(0)
    before = resident_bytes()
    gone = [Knot() for _ in range(60)]
    grown = resident_bytes()
    assert grown > before + 50 * MIB
    gone.clear()
    await until(lambda: resident_bytes() < grown - 40 * MIB, 10, "the burst's memory is back")
    watching.cancel()
