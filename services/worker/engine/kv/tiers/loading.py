"""What a sequence waits for, of blocks below the device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.worker.engine.kv.tiers.folder import Name


class Wanted(NamedTuple):
    name: Name
    block: int
    """Of the device's: where it goes."""


@dataclass(eq=False)
class Loading:
    """Blocks on their way to the device, for one who waits for them."""

    wanted: Sequence[Wanted]
    began_s: float = field(default_factory=time.monotonic)
    came: list[Wanted] = field(default_factory=list)
    """They are in the device's memory."""
    num_missed: int = 0
    read_s: float = 0.0
    """That reading what came has taken."""
    tokens: int = 0
    """Leading ones whose keys and values are there when all has come."""
    given_up: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.came) == len(self.wanted)

    @property
    def is_over(self) -> bool:
        return len(self.came) + self.num_missed == len(self.wanted)
