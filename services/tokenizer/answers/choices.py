"""Several answers to one prompt: each is a request of its own from here on, with its own seed.

So what ends, stops or is lost under one of them concerns no other. The first goes ahead, and once
it has begun the others follow: they find the prompt's blocks in the prefix cache, so that it is
computed once, whatever the placement of the first was.
"""

import asyncio
from collections.abc import Sequence

from services.common.link import End
from services.common.waiting import first_done
from services.tokenizer.answers.generation import Way, generate
from services.tokenizer.answers.output import Output

_GOLDEN = 0x9E3779B97F4A7C15  # odd: no two choices of a request have one seed


def seed_of(seed: int, choice: int) -> int:
    """The first choice's is the request's own."""
    return (seed + choice * _GOLDEN) % 2**64


async def generate_all(
    requests: Sequence[bytes], outputs: Sequence[Output], way: Way, at_once: int
) -> End:
    """`generate` for each that is not finished, so many at once. Returns when all are, or one
    cannot be, with that one's end. Raises as `generate`."""
    if len(outputs) == 1:
        return await generate(requests[0], outputs[0], way)
    running: list[asyncio.Task[End | None]] = []
    turns = asyncio.Semaphore(at_once)
    try:
        for request, output in zip(requests, outputs, strict=True):
            if not output.finish:
                running.append(asyncio.create_task(_one(request, output, way, turns)))
            if not running[1:] and not output.finish:
                await _begun(output, running[0])
        for done in asyncio.as_completed(running):
            if (end := await done) is not None:
                return end
        return End()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _one(request: bytes, output: Output, way: Way, turns: asyncio.Semaphore) -> End | None:
    """Its end, if that is no end of the answer."""
    async with turns:
        end = await generate(request, output, way)
    return None if output.finish else end


async def _begun(output: Output, running: asyncio.Task[End | None]) -> None:
    """Or at its end."""
    begun = asyncio.create_task(output.begun.wait())
    try:
        await first_done(running, begun)
    finally:
        begun.cancel()
