"""What a rank is told first."""

from dataclasses import dataclass

from services.worker.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Begin:
    config: EngineConfig
    """The rank's own."""
    rank: int
    ranks: int
    meeting: str
    """A file by which the ranks find one another."""
