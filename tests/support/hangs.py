"""What would wait for ever fails instead."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LIMIT_S = 30


@contextmanager
def no_hanging() -> Iterator[None]:
    """For what blocks in the kernel, in the main thread."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"waits for more than {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
