"""What a request's record will say of its way through the router: what was decided, and why."""

from collections.abc import Callable, Sequence
from functools import partial

from protos import common_pb2
from services.common.telemetry.telemetry import decision
from services.router.admission import LANE_NAMES, Ticket
from services.router.answer import Answer
from services.router.breaker import State
from services.router.leg import WorkerLostError
from services.router.placement import TOLD, Placement, Plan, SplitMode, reasons
from services.router.quarantine import Case
from services.router.workers import Worker


class Journal:
    """One request's decisions, and the record of what is below this router.

    They are written out when somebody asks: a request's first token does not wait for that.
    """

    def __init__(self) -> None:
        self.below = common_pb2.Record()
        self._noted: list[Callable[[], common_pb2.Decision]] = []

    @property
    def decisions(self) -> list[common_pb2.Decision]:
        return [written() for written in self._noted]

    def admission(self, ticket: Ticket) -> None:
        self._decide(
            "admission",
            _admitted(ticket),
            waited_ms=ticket.waited_s * 1000,
            waiting_before=ticket.before,
            lane=LANE_NAMES[ticket.lane],
            cost_tokens=ticket.cost,
            weight=ticket.weight,
            order=ticket.order,
        )

    def recall(self, ticket: Ticket, answer: Answer) -> None:
        self._decide(
            "recall",
            "its slot went to who was owed it",
            number=ticket.recalls,
            tokens_so_far=len(answer.tokens),
            order=ticket.order,
        )

    def failover(
        self, plan: Plan, lost: Sequence[WorkerLostError], answer: Answer, case: Case
    ) -> None:
        self._decide(
            "failover",
            plan.name,
            lost=lost[-1].worker.id,
            cause=lost[-1].cause,
            tokens_so_far=len(answer.tokens),
            number=len(lost),
            **({"engines_ended": case.deaths} if case.suspected else {}),
        )

    def placement(self, placement: Placement, split: SplitMode) -> None:
        plan = placement.plan
        told = partial(reasons, plan, placement.candidates[:TOLD], len(placement.candidates))
        self._noted.append(lambda: decision("router", "placement", plan.name, told()))
        self._decide(
            "split",
            "split" if plan.prefill else "unsplit",
            why=placement.split_reason,
            mode=split,
            uncached_tokens=plan.uncached_tokens,
            **{f"{kind}_cost_s": cost for kind, cost in placement.best_costs().items()},
        )

    def breakers(self, workers: Sequence[Worker]) -> None:
        open = {w.id: w.breaker.describe() for w in workers if w.breaker.state is not State.CLOSED}
        if open:
            self._decide("breaker", "left alone", **open)

    def _decide(self, subject: str, choice: str, **figures: object) -> None:
        self._noted.append(partial(decision, "router", subject, choice, figures))


def _admitted(ticket: Ticket) -> str:
    if not ticket.holds:
        return "refused"
    if ticket.resumed:
        return "went on"
    return "queued" if ticket.queued else "at once"
