"""Which constraint is tried next."""

from collections import OrderedDict

from services.worker.engine.messages import Constraint


class Turns:
    """Fair between tenants: one at a time of each, and first of who has had least. So whoever sends
    many slow ones waits for himself."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, OrderedDict[Constraint, None]] = {}
        self._tried: dict[Constraint, bytes] = {}
        """Now, and by whom."""
        self._had_s: dict[bytes, float] = {}
        """Since anybody waited."""

    def add(self, constraint: Constraint, tenant: bytes) -> None:
        """Which may be there already."""
        self._waiting.setdefault(tenant, OrderedDict())[constraint] = None

    def leave(self, constraint: Constraint, tenant: bytes) -> None:
        if own := self._waiting.get(tenant):
            own.pop(constraint, None)
            if not own:
                del self._waiting[tenant]

    def take(self) -> Constraint | None:
        """The next one, which is then being tried; it leaves when it is `done`."""
        busy = {*self._tried.values()}
        turns = sorted(self._waiting.keys() - busy, key=lambda one: self._had_s.get(one, 0.0))
        for tenant in turns:
            for constraint in self._waiting[tenant]:
                if constraint not in self._tried:
                    self._tried[constraint] = tenant
                    return constraint
        return None

    def done(self, constraint: Constraint, took_s: float) -> bytes:
        """Gives the tenant whose turn it was."""
        tenant = self._tried.pop(constraint)
        self._had_s[tenant] = self._had_s.get(tenant, 0.0) + took_s
        for other in [*self._waiting]:
            self.leave(constraint, other)
        if not (self._waiting or self._tried):
            self._had_s.clear()
        return tenant
