"""What a rank is told first."""

from dataclasses import dataclass

from services.worker.engine.config import EngineConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks find one another."""

    host: str = LOOPBACK
    """The rank's own address, at which it listens for the others."""
    file: str = ""
    """In which the ranks of one host write where that is."""
    store: tuple[str, int] | None = None
    """Or where the first rank serves what they would write."""
    listener: int = -1
    """The first rank's, of `store`."""


@dataclass(frozen=True, slots=True)
class Begin:
    config: EngineConfig
    """The rank's own."""
    rank: int
    ranks: int
    meeting: Meeting
    model: str
    """Directory of the checkpoint on its host."""
