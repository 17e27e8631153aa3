"""What a router has to tell the order, and waits for no answer to: which slots were taken ahead of
it, and which were left.

Where nobody waits and there is room, nobody waits for these news either: they gather for a moment,
since one call for ten requests takes Redis and this router hardly more than one for one, and no
first token stands behind it. Else they leave one turn of the loop later, with all others of that
turn.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.router.admission.room import Room
from services.router.admission.ticket import Ticket

GATHER_S = 0.01
_KEPT = 10_000  # of those that have left, of each model: more gather only while Redis is away


class Leaver(NamedTuple):
    id: str
    missed: float  # work, when it was charged


def _latest(left: Iterable[Leaver] = ()) -> deque[Leaver]:
    """What is told of at once is bounded: those that left before have leases, which end as well."""
    return deque(left, maxlen=_KEPT)


@dataclass
class Told:
    """Of one model."""

    held: list[Ticket] = field(default_factory=list)
    left: deque[Leaver] = field(default_factory=_latest)


class News:
    """What has gathered; `due` is called when it is to leave (`take`), and never for nothing."""

    def __init__(self, room: Room, due: Callable[[], None]) -> None:
        self._room = room
        self._due = due
        self._gathered: dict[str, Told] = defaultdict(Told)  # by model
        self._timer: asyncio.Handle | None = None
        self._at = 0.0
        """When it is due; uvloop's handle of what is due at once does not know."""

    def __len__(self) -> int:
        return sum(len(told.held) + len(told.left) for told in self._gathered.values())

    def held(self, ticket: Ticket) -> None:
        """It went ahead."""
        self._gathered[ticket.model].held.append(ticket)
        self._leave_within(GATHER_S)

    def left(self, model: str, leaver: Leaver) -> None:
        self._gathered[model].left.append(leaver)
        self._leave_within(GATHER_S if self._room.is_wide(model) else 0.0)

    def keep(self, model: str, left: Iterable[Leaver]) -> None:
        """These could not be told; when Redis is back they can."""
        told = self._gathered[model]
        told.left = _latest([*left, *told.left])

    def drop_held(self) -> None:
        """Redis cannot be told of them. Of those that hold their slots when it is back, renewals
        tell."""
        for model, told in self._gathered.items():
            for _ in told.held:
                self._room.entered(model)
            told.held.clear()

    def take(self) -> dict[str, Told]:
        """All that has gathered, by model."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken, self._gathered = self._gathered, defaultdict(Told)
        return taken

    def _leave_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._timer is not None:
            if self._at <= at:
                return
            self._timer.cancel()
        self._timer, self._at = loop.call_later(seconds, self._due), at
