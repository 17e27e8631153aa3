"""Which adapters an engine has."""

from collections.abc import Callable

from services.worker.engine.adapters.adapter import Adapter

Put = Callable[[int, Adapter | None], None]
"""Has the runner take an adapter into a place, or forget what is there."""


class AdaptersFull(ValueError):
    """There is no place for one more."""


class PlaceInUse(AdaptersFull):
    """There will be one: an adapter that goes has it until nobody uses that."""


class Adapters:
    """At most so many, each in a place. One that is to go gets no more requests, and keeps its
    place until nobody uses it."""

    def __init__(self, put: Put, most: int) -> None:
        self._put = put
        self._free = list(range(most))[::-1]
        self._places: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self.most = most

    def place(self, id: str) -> int | None:
        """Of one that requests may name."""
        return self._places.get(id)

    def load(self, adapter: Adapter) -> None:
        """One that is there stays as it is. Raises AdaptersFull, and what the runner raises."""
        if adapter.id in self._leaving:  # it is the same
            self._places[adapter.id] = self._leaving.pop(adapter.id)
        if adapter.id in self._places:
            return
        if not self._free:
            full = PlaceInUse if self._leaving else AdaptersFull
            raise full(
                f"{self.most} adapters are loaded, as many as max_adapters allows"
                if self.most
                else "adapters are off: max_adapters is 0"
            )
        place = self._free[-1]
        try:
            self._put(place, adapter)
        except BaseException:
            self._put(place, None)  # half of it may be there
            raise
        self._places[adapter.id] = self._free.pop()

    def drop(self, id: str) -> None:
        """It goes as soon as nobody uses it (`sweep`)."""
        if id in self._places:
            self._leaving[id] = self._places.pop(id)

    @property
    def leaving(self) -> bool:
        return bool(self._leaving)

    def sweep(self, used: set[int]) -> None:
        """Frees the places of those that go, but for the `used` ones."""
        for id, place in list(self._leaving.items()):
            if place not in used:
                self._put(place, None)
                self._free.append(place)
                del self._leaving[id]
