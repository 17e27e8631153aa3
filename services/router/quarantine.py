"""Requests that end engines: found by the second one, and refused for a while.

An engine that dies takes all requests on it along, and one of them may be why. Each of them is then
a suspect: it is placed where this router has no other suspect, so that the next death has one
cause, until it has got a few tokens there. Whatever made the first engine die at that place would
have happened again by then, as the same tokens are computed again, and so the suspect is acquitted.
An engine that dies under a suspect that is alone on it convicts the suspect: it ends with an error,
and its like are refused. So the innocent beside it go on, and a poison request costs two engines.
One that takes all memory costs three: whatever kills an engine from outside may well come twice.

When no worker is free of suspects for too long they share one. A death there convicts nobody.
"""

import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import grpc

from protos import router_pb2
from services.common.errors import PenstockError
from services.router import metrics
from services.router.answer import Answer
from services.router.workers import Worker

PROOF_TOKENS = 4  # the step that ended an engine is repeated within so many
REFUSED_S = 600.0
MAX_REFUSED = 1024  # the oldest are forgotten
KILLED = "engine_killed"  # by SIGKILL: a person's, or the kernel's where memory runs out
ENGINE_DEATHS = (
    "engine_died",
    KILLED,
    "peer_stalled",
)  # a hung engine is replaced, like a dead one


class Quarantine:
    """What is refused, and which suspects are on which worker. One for each router."""

    def __init__(
        self, on_free: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_free` is called when a worker has lost its suspect."""
        self._on_free = on_free
        self._clock = clock
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # fingerprint → until
        self._suspects: defaultdict[str, set[Case]] = defaultdict(set)  # by worker

    def case(self, request: router_pb2.GenerateRequest) -> "Case":
        return Case(self, request)

    def free(self, worker: Worker) -> bool:
        """Whether no suspect of this router is on the worker."""
        return worker.id not in self._suspects

    @property
    def empty(self) -> bool:
        """Nothing is refused."""
        return not self._refused

    def refuses(self, fingerprint: bytes) -> bool:
        until = self._refused.get(fingerprint)
        if until is not None and until <= self._clock():
            del self._refused[fingerprint]
            until = None
        return until is not None

    def _convict(self, fingerprint: bytes) -> None:
        self._refused[fingerprint] = self._clock() + REFUSED_S
        self._refused.move_to_end(fingerprint)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _enter(self, case: "Case", worker: Worker) -> None:
        company = self._suspects[worker.id]
        company.add(case)
        if len(company) > 1:
            for one in company:
                one.in_company = True

    def _leave(self, case: "Case", worker: Worker) -> None:
        company = self._suspects.get(worker.id, set())
        if case in company:
            company.remove(case)
            if not company:
                del self._suspects[worker.id]
            self._on_free()


class Case:
    """One request, and the engines that died under it since it was last acquitted."""

    def __init__(self, quarantine: Quarantine, request: router_pb2.GenerateRequest) -> None:
        self.deaths = 0
        self.killed_alone = False  # a kill has met it in a trial
        self.in_company = False  # another suspect was on the same worker
        self._quarantine = quarantine
        self._request = request

    @cached_property
    def fingerprint(self) -> bytes:
        return fingerprint(self._request)

    @property
    def suspected(self) -> bool:
        return self.deaths > 0

    def raise_if_refused(self) -> None:
        """Raises FAILED_PRECONDITION: this request, or its like, was convicted."""
        # Mostly it is empty, and a fingerprint takes time that goes by the prompt's length.
        if not self._quarantine.empty and self._quarantine.refuses(self.fingerprint):
            metrics.quarantined.labels("refused").inc()
            raise _quarantined("A request like this one ended two engines, one after the other")

    def may_run_on(self, worker: Worker) -> bool:
        """Whether a death there would tell."""
        return not self.suspected or self._quarantine.free(worker)

    @contextmanager
    def trial(self, worker: Worker, answer: Answer) -> Iterator[int]:
        """The request runs on the worker. Yields how many tokens it is to give before the suspects
        of other routers may run there, too."""
        if not self.suspected:
            yield 0
            return
        self.in_company = False
        self._quarantine._enter(self, worker)
        answer.when(len(answer.tokens) + PROOF_TOKENS, lambda: self._acquit(worker))
        try:
            yield 0 if self.in_company else PROOF_TOKENS
        finally:
            self._quarantine._leave(self, worker)

    def lost(self, cause: str) -> None:
        """A worker was lost under the request. Raises FAILED_PRECONDITION if that convicts it."""
        if cause not in ENGINE_DEATHS:
            return
        self.deaths += 1
        if self.deaths == 1 or self.in_company:
            return
        if cause == KILLED and not self.killed_alone:
            self.killed_alone = True
        else:
            self._quarantine._convict(self.fingerprint)
            metrics.quarantined.labels("convicted").inc()
            raise _quarantined(f"This request ended {self.deaths} engines, one after the other")

    def _acquit(self, worker: Worker) -> None:
        self.deaths, self.killed_alone = 0, False
        self._quarantine._leave(self, worker)


def fingerprint(request: router_pb2.GenerateRequest) -> bytes:
    """Equal for requests that compute the same. The seed is left out: each try may draw another."""
    sampling = type(request.sampling)()
    sampling.CopyFrom(request.sampling)
    sampling.ClearField("seed")
    alike = router_pb2.GenerateRequest(
        model=request.model,
        checkpoint=request.checkpoint,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling,
    )
    if request.HasField("pooling"):
        alike.pooling.CopyFrom(request.pooling)
    alike.caller.tenant = request.caller.tenant
    return hashlib.blake2b(alike.SerializeToString(deterministic=True), digest_size=16).digest()


def _quarantined(what: str) -> PenstockError:
    return PenstockError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"{what}, and is not run again for {REFUSED_S / 60:.0f} minutes",
        stage="worker",
        reason="request_quarantined",
    )
