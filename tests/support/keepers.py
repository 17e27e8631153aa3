"""Another host, on this machine, where a rank runs: a process that keeps it, at its own address."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from services.common.children import dying_with_parent
from services.worker.engine.parallel.seats import Lock, Seat, Spread
from tests.support.cluster import ROOT

OWN = "127.0.0.2"
_KEEPS = """
import sys
from services.worker.engine.parallel.keeper import keep
from services.worker.engine.parallel.links import listen
from services.worker.engine.parallel.seats import Lock
host, rank, engine, secret, *tls = sys.argv[1:]
listener = listen(host)
print(listener.getsockname()[1], flush=True)
keep(listener, Lock(bytes.fromhex(secret), *tls), int(rank), engine)
"""


class Keeper:
    def __init__(self, rank: int, lock: Lock) -> None:
        self.host = f"127.0.0.{2 + rank}"
        told = [self.host, str(rank), OWN, lock.secret.hex(), lock.tls_dir, lock.tls_name]
        self.process = subprocess.Popen(
            [*dying_with_parent("KILL"), sys.executable, "-c", _KEEPS, *told],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def rank(self) -> int:
        """The process of its rank."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def kept(folder: Path, ranks: int, lock: Lock) -> Iterator[tuple[Spread, list[Keeper]]]:
    """Seats for ranks of which each but the first is on a host of its own."""
    with ExitStack() as exits:
        keepers = []
        for rank in range(1, ranks):
            keepers.append(Keeper(rank, lock))
            exits.callback(keepers[-1].end)
        seats = [Seat(keeper.host, str(folder), keeper.port) for keeper in keepers]
        yield Spread((Seat(OWN, str(folder)), *seats), lock), keepers
