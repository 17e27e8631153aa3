"""A request as the protocol has it that it came by: what the runs know of REST and gRPC."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from protos.tokenizer_pb2 import TextDelta
from services.gateway.identity.principal import Principal
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.runs.prompt import Answer, Prompt


class Asked(Protocol):
    """Where a request comes from."""

    @property
    def request_id(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def endpoint(self) -> str:
        """As permissions.py has it."""

    @property
    def authorization(self) -> str | None: ...
    @property
    def traceparent(self) -> str | None: ...


class Teller(Protocol):
    """Where an answer goes."""

    def admitted(self, headers: Mapping[str, str]) -> None:
        """Takes what the caller is to hear of its limits, with the beginning of the answer."""

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        """Passes deltas on, which `answer` holds already; waits for a client that is slow. The
        answers of several prompts call this at the same time.
        """

    @property
    def write_now(self) -> Callable[[Answer, list[TextDelta]], None] | None:
        """As `write`, by a plain call; None while that would wait."""

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        """Ends complete answers, in the order of their prompts. `cost`: of all of them; None: the
        model has no price."""


class Front(Asked, Teller, Protocol):
    """A generation as its protocol has it: where it comes from, and where its answer goes."""

    async def read(self, principal: Principal, place: Place) -> list[Prompt]:
        """Takes the caller's request in, at `place`, and validates it: one prompt, or several
        of a completion. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED for what has no room.
        """

    @property
    def shown(self) -> bool:
        """Whether any of the answer has left."""


class LastingFront(Front, Protocol):
    """Of a request whose answer may go on without its client. What it asks for is known once it was
    read."""

    @property
    def lasts(self) -> bool:
        """Whether it does."""

    @property
    def says_begun(self) -> Callable[[Principal], Awaitable[None]] | None:
        """Tells a client that does not wait for the answer that it has begun; None: it waits."""

    @property
    def key(self) -> str:
        """For idempotency; may be empty."""

    @property
    def digest(self) -> str:
        """Of the request: a retry has the same."""

    @property
    def resumes(self) -> bool:
        """Whether its client has events of the run already."""

    @property
    def told(self) -> str:
        """JSON: what it wants to know when the run is told of later."""

    @property
    def about(self) -> str:
        """What lists are to tell of it, where it is in some."""

    def joins(self, id: str) -> None:
        """The run that answers is this one: a new one, or the one that is retried."""
