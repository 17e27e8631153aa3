"""A process gives its memory back after a burst."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from services.common import give_back

MIB = 2**20

# In a process of its own: in one that has run other tests, a burst fits into what they left free.
BURST = """
import asyncio, json
from services.common import give_back

class Knot:  # holds itself and small pieces: nothing but a garbage collection frees them
    def __init__(self):
        self.me = self
        self.pieces = [bytes(1000) for _ in range(1000)]

async def main():
    give_back._QUIET = 10.0  # a process this small is never idle at its start
    watching = asyncio.create_task(give_back.give_back_memory(0.05))
    await asyncio.sleep(0)
    sizes = [give_back.resident_bytes()]
    gone, later = [Knot() for _ in range(60)], [Knot() for _ in range(40)]
    stays = [bytes(1000) for _ in range(1000)]  # on top: what is below goes back by a trim only
    sizes.append(give_back.resident_bytes())
    for burst, size in ((gone, 40), (later, 30)):
        burst.clear()
        async with asyncio.timeout(30):
            while give_back.resident_bytes() > sizes[-1] - size * 2**20:
                await asyncio.sleep(0.01)
        sizes.append(give_back.resident_bytes())
    watching.cancel()
    print(json.dumps(sizes))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_garbage_of_a_burst_goes_back_when_it_is_over():
    ran = subprocess.run(
        [sys.executable, "-c", BURST], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    before, grown, after, at_last = json.loads(ran.stdout)
    assert grown > before + 80 * MIB
    assert after < grown - 40 * MIB
    assert at_last < after - 30 * MIB, "what was still in use then, and ended while nothing grew"


async def test_only_a_quiet_process_that_has_grown_is_swept(monkeypatch):
    """What each look finds: CPU seconds since the last one, and the size; and what it does."""
    looks = [  # of 10 s each
        (0.9, 100 + 16, False),  # not grown by more than 16 MiB
        (1.1, 200, False),  # busy
        (0.9, 117, True),
        (0.9, 117, False),
        (0.9, 117, True),  # what was under way then may have ended
        *[(0.9, 117, False)] * 3,
        (0.9, 117, True),
        (1.1, 117, False),
        (0.9, 117, True),  # after a burst at once
        (0.9, 60, False),  # by itself
        (0.9, 77, True),  # of what it had shrunk to
    ]
    cpu_s, size, swept = 0.0, 100 * MIB, list[int]()
    libc = SimpleNamespace(malloc_trim=swept.append)
    monkeypatch.setattr(give_back.ctypes, "CDLL", lambda _: libc)
    monkeypatch.setattr(give_back, "resident_bytes", lambda: size)
    monkeypatch.setattr(give_back, "time", SimpleNamespace(process_time=lambda: cpu_s))
    ask, answer = asyncio.Queue[float](), asyncio.Queue[None]()

    async def sleep(seconds: float) -> None:
        ask.put_nowait(seconds)
        await answer.get()

    monkeypatch.setattr(give_back, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    watching = asyncio.create_task(give_back.give_back_memory(10.0))
    assert await ask.get() == 10.0
    for used_s, mib, sweeps in looks:
        cpu_s, size, before = cpu_s + used_s, mib * MIB, len(swept)
        answer.put_nowait(None)
        await ask.get()
        assert (len(swept) > before) == sweeps, (used_s, mib)
    watching.cancel()


LARGE = """
import json, sys
from services.common import give_back

if sys.argv[1] == "kept":
    give_back.keep_pages()
first = bytes(30 * 2**20)
del first  # from here on glibc would take pieces of up to this size from the heap
before = give_back.resident_bytes()
kept, pieces = [], []
for _ in range(80):
    pieces.append(b"x" * 2**20)
    kept.append(b"y" * 2000)  # small, and stays: between the large ones, if they are on the heap
held = give_back.resident_bytes()
pieces.clear()
print(json.dumps([before, held, give_back.resident_bytes()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["kept", "as glibc does"])
def test_large_pieces_go_back_at_once(how: str):
    ran = subprocess.run(
        [sys.executable, "-c", LARGE, how], capture_output=True, text=True, timeout=60, check=True
    )
    before, held, after = json.loads(ran.stdout)
    assert held > before + 70 * MIB
    assert (after < before + 10 * MIB) is (how == "kept")


AGAIN = """
import resource, sys
from services.common import give_back

if sys.argv[1] == "kept":
    give_back.keep_pages()
pieces = [b"x" * 220_000 for _ in range(4)]  # glibc's bounds rise to these at most
pieces.clear()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = faults()
for _ in range(100):  # one request after the other, each with several copies of its text
    pieces = [b"x" * 220_000 for _ in range(4)]
    pieces.clear()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
@pytest.mark.parametrize("how", ["kept", "as glibc does"])
def test_pages_of_one_request_are_the_next_one_s(how: str):
    ran = subprocess.run(
        [sys.executable, "-c", AGAIN, how], capture_output=True, text=True, timeout=60, check=True
    )
    assert (int(ran.stdout) < 1000) is (how == "kept"), "54 pages a piece, 400 pieces"
