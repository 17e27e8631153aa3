"""What is metered: one request, what it may use and what it used."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.gateway.identity.limits import Bound

RELEASED = "released"
"""The status of a request that was refused at the door: what may be held for it is to be free."""
HANDED_OVER = "handed over"
"""Of one with which another gateway goes on: what is held for it is to stay."""
UNCHARGED = frozenset({RELEASED, HANDED_OVER})
"""Their leases do the rest, if Redis is not told."""


class Used(NamedTuple):
    """Tokens; `cached` are a part of `prompt`. `cost` in billionths of the currency."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    cost: int = 0


class Held(NamedTuple):
    """What is kept free for a request until it ends. `cost` in billionths of the currency."""

    tokens: int
    cost: int


@dataclass
class Run:
    """One request, from the door to its entry in the ledger."""

    id: str
    who: dict[str, str]  # tenant, user, model, tier, route: as the ledger has it
    bounds: Sequence[Bound]
    held: Held
    used: Used = field(default_factory=Used)
    status: str = ""  # how it ended
    attempt: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of a gateway to take it past its limits; the next gateway's is another."""

    def told(self) -> dict[str, Any]:
        """For meter.lua."""
        return {
            "who": self.who,
            "rules": [
                {
                    "key": f"{bound.owner}:{bound.limit.name}:{bound.limit.of}:{bound.limit.per}",
                    "of": bound.limit.of,
                    "per": bound.limit.per or "",
                    "most": _most(bound),
                }
                for bound in self.bounds
            ],
            "held": {"requests": 1, **self.held._asdict()},
            "used": self.used._asdict(),
            "status": self.status,
            "attempt": self.attempt,
        }


def _most(bound: Bound) -> float:
    """In what is counted: of costs, billionths."""
    return bound.limit.most * (1e9 if bound.limit.of == "cost" else 1)


class Room(NamedTuple):
    """What a rule leaves, in its own unit (of costs, billionths)."""

    bound: Bound
    left: float
    reset_s: float  # until all of it is free again


class Verdict(NamedTuple):
    """What the door says. `wait_s`: when the request would fit, were nobody else to come; None:
    never, it is larger than the rule that stands in the way."""

    rooms: tuple[Room, ...] = ()
    blocked_by: Bound | None = None
    wait_s: float | None = 0.0
