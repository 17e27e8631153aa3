"""What the doctor says: one line a finding, and what to do about it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from services.common.locks.secrets import redacted

LIMIT_S = 5.0
"""No check takes longer; whatever it looks at may hang."""

State = Literal["ok", "warning", "failed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What was found `about` something. Holds no secret."""

    state: State
    about: str
    told: str
    advice: str = ""  # what to do; of an ok one nothing

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ok(about: str, told: str) -> Finding:
    return Finding("ok", about, told)


def warning(about: str, told: str, advice: str) -> Finding:
    return Finding("warning", about, told, advice)


def failed(about: str, told: str, advice: str) -> Finding:
    return Finding("failed", about, told, advice)


async def bounded(about: str, check: Awaitable[list[Finding]]) -> list[Finding]:
    """The check's findings, or that it did not come to an end."""
    try:
        async with asyncio.timeout(LIMIT_S):
            return await check
    except TimeoutError:
        return [failed(about, f"no answer within {LIMIT_S:g} s", "see whether it hangs")]
    except Exception as error:
        told = redacted(f"{type(error).__name__}: {error}")
        return [failed(about, f"cannot be looked at: {told}", "see what that says")]


async def aside(blocking: Callable[..., T], *arguments: Any) -> T:
    """Runs a blocking call in a thread that nobody waits for at the end: one that hangs, as on a
    file system that went away, holds up nothing else."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], told: object) -> None:
        if not result.done():
            settle(told)

    def run() -> None:
        try:
            told: tuple[Callable[[Any], None], object] = (result.set_result, blocking(*arguments))
        except Exception as error:
            told = (result.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: it took too long
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, daemon=True).start()
    return await result
