"""Prompts that are computed before they are asked for, where nobody could be kept waiting
(decision 0059).

A chat's next prompt is partly known once its answer is made. Its tokenizer sends what is known; the
worker that holds most of it computes the rest, and the request that comes finds its blocks.

It takes no slot and stands in no order: it runs only on a worker that has nothing else to do, as
this router sees it, and is dropped when any request of the model comes to this router, or the
worker tells of one from elsewhere. A step cannot be left in its middle, so the prompt goes in small
pieces, each of so many tokens as the worker computes in `_PIECE_S`, or of one block: that is how
much later a request can begin that came just then.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from protos import common_pb2, router_pb2, worker_pb2
from services.common.packed_ids import count, head
from services.router import metrics
from services.router.block_index import BlockIndex
from services.router.breaker import State
from services.router.chains import chains_of
from services.router.leg import Leg, Way, WorkerLostError
from services.router.placement import PRIOR_PREFILL_TOKENS_PER_S
from services.router.workers import PREFILL_ROLES, Worker

_PIECE_S = 0.02


class Warmed(NamedTuple):
    """What became of one prompt."""

    # unheld: nobody has its beginning, so that it was not just answered, or nothing is kept
    outcome: Literal["whole", "dropped", "busy", "unheld"]
    held: int = 0  # tokens that were in the cache
    done: int = 0  # that are now

    def delta(self) -> worker_pb2.TokenDelta:
        usage = common_pb2.Usage(prompt_tokens=self.done, cached_tokens=self.held)
        return worker_pb2.TokenDelta(finish=common_pb2.FINISH_LENGTH, usage=usage)


class _Run:
    """One prompt on one worker."""

    def __init__(self) -> None:
        self.leg: Leg | None = None
        self.dropped = False

    def drop(self) -> None:
        """Its worker counts as free of it from now on."""
        self.dropped = True
        if self.leg is not None:
            self.leg.stop()


class Warming:
    """Where prompts are warmed now."""

    def __init__(self) -> None:
        self._running: defaultdict[str, dict[Worker, _Run]] = defaultdict(dict)

    def drop(self, model: str) -> None:
        """A request of the model has come."""
        for run in self._running.get(model, {}).values():
            run.drop()

    def stop(self) -> None:
        """The router is drained: nothing of it is worth waiting for."""
        for model in self._running:
            self.drop(model)

    def on(self, worker: Worker) -> bool:
        return worker in self._running.get(worker.model, {})

    @contextmanager
    def began(self, worker: Worker) -> Iterator[_Run]:
        run = self._running[worker.model][worker] = _Run()
        try:
            yield run
        finally:
            del self._running[worker.model][worker]


async def warm(
    warming: Warming,
    index: BlockIndex,
    request: router_pb2.GenerateRequest,
    workers: Sequence[Worker],
    way: Way,
) -> Warmed:
    """`workers`: those that may be given it. Raises PenstockError."""
    ids = request.prompt_token_ids
    chains = await chains_of(index, ids, request.caller.tenant, request.checkpoint, workers)
    matched = [index.match(chain) for chain in chains]
    # From here to the first piece nothing is waited for: an idle worker is idle yet.
    held = {
        one: max(found.get(one.holder.bit, 0) for found in matched) * one.block_size
        for one in workers
    }
    most = max(held.values(), default=0)
    # Elsewhere it would be more than the rest.
    idle = [one for one in workers if held[one] == most and _is_idle(one) and not warming.on(one)]
    if workers and not most:
        warmed = Warmed("unheld")
    elif not idle:
        warmed = Warmed("busy")
    else:
        worker = max(idle, key=lambda one: one.role in PREFILL_ROLES)
        warmed = await _on(worker, warming, request, most, way)
    metrics.warmed.labels(warmed.outcome).inc()
    metrics.warmed_tokens.inc(warmed.done - warmed.held)
    return warmed


async def _on(
    worker: Worker,
    warming: Warming,
    request: router_pb2.GenerateRequest,
    held: int,
    way: Way,
) -> Warmed:
    size = worker.block_size
    whole = count(request.prompt_token_ids) // size * size
    rate = worker.load.prefill_tokens_per_s or PRIOR_PREFILL_TOKENS_PER_S
    piece = max(1, int(rate * _PIECE_S) // size) * size
    done = held
    with warming.began(worker) as run:
        while done < whole:
            end = min(done + piece, whole)
            if run.dropped or not worker.peer.ready:
                return Warmed("dropped", held, done)
            if not await _piece(worker, request, done, end, run, way):
                return Warmed("dropped", held, done)
            done = end
            # Its load may still tell of the piece, and of nothing else.
            if done < whole and worker.load.running + worker.load.waiting > 1:
                return Warmed("dropped", held, done)
    return Warmed("whole", held, done)


async def _piece(
    worker: Worker,
    request: router_pb2.GenerateRequest,
    done: int,
    end: int,
    run: _Run,
    way: Way,
) -> bool:
    """Whether the tokens up to `end` are in its cache now; the first `done` are."""
    work = worker_pb2.WorkRequest(
        caller=request.caller,
        model=request.model,
        checkpoint=request.checkpoint,
        prompt_token_ids=head(request.prompt_token_ids, end),
        sampling=common_pb2.Sampling(max_tokens=1),  # an engine gives one, which nobody hears of
        mode=worker_pb2.WorkRequest.UNSPLIT,
    )
    work.caller.priority = common_pb2.PRIORITY_LOW
    async with Leg(worker, work, end - done, way) as leg:
        run.leg = leg
        await asyncio.wait([leg.ended])
        if run.dropped:
            return False
        if failure := leg.failure():
            raise failure.error if isinstance(failure, WorkerLostError) else failure
    return True


def _is_idle(worker: Worker) -> bool:
    busy = worker.load.running or worker.load.waiting or worker.unseen
    return not busy and worker.breaker.state is State.CLOSED  # a try is for those who wait
