"""A bounded pool that no holder can take away from the others."""


class Shares:
    """`total` units for whoever comes. A holder that has less than is still free may take more.

    So one alone gets half, two get a third each, and a newcomer finds room as long as a unit is
    free: without knowing who may come, and without a quota for each to configure.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._held: dict[str, int] = {}

    def held(self, holder: str) -> int:
        return self._held.get(holder, 0)

    def take(self, holder: str, units: int = 1) -> bool:
        """Whether the holder got them: all, or none."""
        free = self.total - self.taken
        held = self.held(holder)
        if units > free or (units > 0 and held >= free):
            return False
        if units:
            self.taken += units
            self._held[holder] = held + units
        return True

    def fits_alone(self, held: int, units: int) -> bool:
        """Whether who holds so many could take `units` if nobody else had any."""
        free = self.total - held
        return units <= free and (units <= 0 or held < free)

    def give_back(self, holder: str, units: int = 1) -> None:
        self.taken -= units
        left = self._held[holder] - units
        if left:
            self._held[holder] = left
        else:
            del self._held[holder]
