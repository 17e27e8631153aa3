"""`asyncio.run` for commands: one that waits hears of a signal whenever it comes."""

import asyncio
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, which leaves a signal unheard that comes once the loop has looked for
    signals and before it sleeps, or that another thread is given: it then sleeps on until
    something else wakes it, a minute where an answer may take one."""
    return asyncio.run(_woken(work))


async def _woken(work: Coroutine[Any, Any, T]) -> T:
    with _waking(asyncio.get_running_loop()):
        return await work


@contextmanager
def _waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Each signal writes to a socket that the loop watches; its handler runs as ever."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield
        return
    heard, told = socket.socketpair()
    with heard, told:
        heard.setblocking(False)
        told.setblocking(False)
        loop.add_reader(heard, heard.recv, 4096)
        before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(heard)
