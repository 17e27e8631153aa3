"""Who was verified, by the hash of what was shown: in memory, for a time, and bounded.

What was wrong is not in here, so nobody makes room for himself by guessing; and as one caller, who
may have as many tokens as his issuer gives him, has `_MOST_OF_ONE` places at most, nobody does by
collecting. Beyond `_MOST` who was verified longest ago is forgotten: he is looked up again.
"""

from collections import OrderedDict
from collections.abc import Iterable

from services.gateway.identity.principal import Principal

_MOST = 50_000  # a kilobyte each
_MOST_OF_ONE = 100


class Known:
    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[float, Principal]] = OrderedDict()  # the latest last
        # The same hashes, by tenant and user, the latest last.
        self._of: dict[str, dict[str, dict[str, None]]] = {}

    def __contains__(self, hashed: str) -> bool:
        return hashed in self._entries

    def get(self, hashed: str) -> tuple[float, Principal] | None:
        """Who it is, and when he was verified, by the monotonic clock."""
        return self._entries.get(hashed)

    def keep(self, hashed: str, at: float, principal: Principal) -> None:
        """As the latest."""
        self.forget(hashed)
        self._entries[hashed] = (at, principal)
        own = self._of.setdefault(principal.tenant, {}).setdefault(principal.user, {})
        own[hashed] = None
        if len(own) > _MOST_OF_ONE:
            self.forget(next(iter(own)))
        if len(self._entries) > _MOST:
            self.forget(next(iter(self._entries)))

    def forget(self, hashed: str) -> None:
        _, principal = self._entries.pop(hashed, (0.0, None))
        if principal is None:
            return
        users = self._of[principal.tenant]
        own = users[principal.user]
        del own[hashed]
        if not own:
            del users[principal.user]
        if not users:
            del self._of[principal.tenant]

    def forget_tenant(self, name: str) -> None:
        for own in self._of.pop(name, {}).values():
            for hashed in own:
                del self._entries[hashed]

    def hashes(self) -> list[str]:
        return list(self._entries)

    def latest(self) -> Iterable[tuple[float, Principal]]:
        """First who was verified last."""
        return reversed(self._entries.values())
