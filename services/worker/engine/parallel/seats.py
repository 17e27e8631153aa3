"""Where the ranks of a model run that is cut over several hosts."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lock:
    """What both ends of a link show one another."""

    secret: bytes = field(repr=False)
    """32 bytes or more, of these ranks alone."""
    tls_dir: str = ""
    """Folder with tls.crt, tls.key, ca.crt, of the same path on each host; empty: no TLS."""
    tls_name: str = ""
    """DNS name in the other end's certificate."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place."""

    host: str
    """Its address, by which other ranks reach it."""
    model: str
    """Directory of the checkpoint there."""
    port: int = 0
    """Where its keeper listens (keeper.py); 0: it is on the engine's own host, and its child."""
    gpu: str = ""
    """On a GPU: the one that it sees, as CUDA_VISIBLE_DEVICES has it; empty: what its parent
    sees."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The ranks' seats, the first one on the engine's own host."""

    seats: tuple[Seat, ...]
    lock: Lock

    @property
    def is_distant(self) -> bool:
        """Whether some rank is on another host."""
        return any(seat.port for seat in self.seats)

    def beside(self, rank: int) -> int:
        """How many ranks its host has."""
        return sum(seat.host == self.seats[rank].host for seat in self.seats)
