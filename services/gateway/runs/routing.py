"""A request that the policy sends to another model than it asked for.

What counts is who answers: that model's permission, limits and price, and its name in the record
and the metrics. So the tokenizer says where a request is to go and does no more; the gateway judges
it anew, and asks again. A request has one model: where one of its prompts is routed all are, and of
several no text leaves before each is known to stay.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.common.errors import unavailable
from services.gateway.identity.principal import Principal
from services.gateway.metering.estimate import expected
from services.gateway.parts import Gateway
from services.gateway.runs.front import Front
from services.gateway.runs.prompt import Answer, Prompt
from services.gateway.runs.records import Journal

_MOST = 3  # times; the same policy sends a request to one model and leaves it there


class Routed(Exception):
    """The policy sends the request to this model; nothing has been done for it."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class Routing:
    def __init__(
        self,
        gateway: Gateway,
        front: Front,
        principal: Principal,
        journal: Journal,
        prompts: Sequence[Prompt],
        answers: Sequence[Answer],
    ) -> None:
        self._gateway = gateway
        self._front = front
        self._principal = principal
        self._journal = journal
        self._prompts = prompts
        self._answers = answers

    def start(self) -> asyncio.Barrier | None:
        """None: no prompt has to wait for others."""
        rules = self._gateway.policy.current.rules.spec.rules
        routes = any(rule.action == "route" for rule in rules)
        return asyncio.Barrier(len(self._prompts)) if routes and len(self._prompts) > 1 else None

    async def follow(self, answer: Callable[[], Awaitable[None]]) -> None:
        """`answer`, and again with the model that it is Routed to."""
        for _ in range(_MOST):
            try:
                return await answer()
            except Routed as to:
                await self.go_to(to.model)
        raise _unsteady()

    async def go_to(self, model: str) -> None:
        """Raises as a request for that model would be refused."""
        journal, meter = self._journal, self._gateway.meter
        if any(answer.arrived for answer in self._answers):
            raise _unsteady()
        journal.decide("model", model, asked=journal.model)
        self._principal.authorize(model)
        window = (await self._gateway.models.find(model)).window
        most = expected(self._prompts, window, meter.open_output_tokens)
        assert journal.metered is not None, "it has not passed the limits"
        await meter.change_model(journal.metered, self._principal, model, most)
        self._front.admitted(journal.metered.headers)
        journal.model = journal.served = model
        for prompt in self._prompts:
            prompt.request.model = model
        for answer in self._answers:
            answer.model = model


def _unsteady() -> Exception:
    return unavailable(
        "the content policy changed while it was applied", stage="gateway", reason="policy_changed"
    )
