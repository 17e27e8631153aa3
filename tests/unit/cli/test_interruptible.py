import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

from services.cli.interruptible import run

_LONG_S = 30.0


def _asleep(thread: int) -> bool:
    """One of this process, by its native id: it waits in the kernel."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_signal_that_does_not_disturb_the_loop_s_sleep_is_heard() -> None:
    """As one that comes just before it begins to sleep: here another thread is given it."""
    waiting = threading.get_native_id()

    def interrupt() -> None:
        seen = 0
        while seen < 5:  # once it may wait for this thread's end of a turn
            time.sleep(0.001)
            seen = seen + 1 if _asleep(waiting) else 0
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def wait() -> None:
        threading.Thread(target=interrupt).start()
        await asyncio.sleep(_LONG_S)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(wait())
    assert time.monotonic() - begun < _LONG_S


def test_a_loop_that_has_ended_is_woken_no_more() -> None:
    async def wait() -> str:
        return "done"

    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert run(wait()) == "done"
    assert signal.set_wakeup_fd(before) == before


def test_threads_besides_the_first_hear_no_signals() -> None:
    async def wait() -> None:
        told.append("done")

    told: list[str] = []
    thread = threading.Thread(target=lambda: run(wait()))
    thread.start()
    thread.join()
    assert told == ["done"]


def test_no_command_waits_otherwise() -> None:
    commands = Path(__file__).parents[3] / "services" / "cli"
    own = {"interruptible.py", "model_keeper.py"}  # the latter's is a thread's
    found = [
        path.name
        for path in sorted(commands.rglob("*.py"))
        if path.name not in own and "asyncio.run(" in path.read_text()
    ]
    assert not found
