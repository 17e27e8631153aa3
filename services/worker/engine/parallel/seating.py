"""Ranks are started: those of this host as children, those of others by their keepers."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from services.worker.engine.config import EngineConfig
from services.worker.engine.parallel.begin import LOOPBACK, Begin, Meeting
from services.worker.engine.parallel.board import Board
from services.worker.engine.parallel.links import Refused, listen
from services.worker.engine.parallel.members import Child, Distant
from services.worker.engine.parallel.seats import Lock, Seat, Spread
from services.worker.engine.process import wire
from services.worker.engine.process.cores import usable_cores

AnyMember = Child | Distant


def seated(config: EngineConfig, board: Board, file: str) -> list[AnyMember]:
    """All ranks, told how to begin. `file`: by which those of one host meet. The calling thread is
    the parent of those that are here. Raises ValueError where another host is not reached."""
    count = config.tensor_parallel
    seats = config.spread or Spread((Seat(LOOPBACK, config.model),) * count, Lock(b""))
    members: list[AnyMember] = []
    with _meetings(seats, file) as meetings:
        begins = [
            Begin(_own(config, rank, seats.beside(rank)), rank, count, meetings[rank], seat.model)
            for rank, seat in enumerate(seats.seats)
        ]
        try:
            _start(members, seats, begins, board)
            for member in members:
                for piece in wire.encode(begins[member.rank]):
                    member.connection.sendall(piece)
        except BaseException:
            for member in members:
                member.end()
                member.close()
            raise
    return sorted(members, key=lambda member: member.rank)


def _own(config: EngineConfig, rank: int, beside: int) -> EngineConfig:
    """`beside`: ranks of its host, it among them. Hosts are taken to have as many cores."""
    device = config.device
    threads = max(1, (config.threads or usable_cores()) // beside)
    if device != "cpu":  # with seats it sees the GPU of its own alone
        device = "cuda:0" if config.spread else f"cuda:{rank}"
    return replace(
        config,
        tensor_parallel=1,
        device=device,
        threads=threads,
        spread=None,
        ranks_beside=beside,
    )


def _start(members: list[AnyMember], spread: Spread, begins: list[Begin], board: Board) -> None:
    """Those of other hosts side by side: each answers when it runs."""
    distant: list[Future[Distant]] = []
    with ThreadPoolExecutor(len(spread.seats)) as pool:
        for rank, seat in enumerate(spread.seats):
            if seat.port:
                distant.append(pool.submit(_reached, rank, spread))
                continue
            begin = begins[rank]
            environment = {
                "OMP_NUM_THREADS": str(begin.config.threads),
                "OMP_WAIT_POLICY": "PASSIVE",
            }
            if seat.gpu:
                environment["CUDA_VISIBLE_DEVICES"] = seat.gpu
            listener = begin.meeting.listener
            fds = [listener] if listener >= 0 else []
            members.append(Child(rank, board, environment, fds))
    failed = [error for one in distant if (error := one.exception()) is not None]
    members.extend(one.result() for one in distant if one.exception() is None)
    if failed:
        raise failed[0]


def _reached(rank: int, spread: Spread) -> Distant:
    seat = spread.seats[rank]
    try:
        return Distant(rank, seat, spread.lock, spread.seats[0].host)
    except (OSError, Refused) as error:
        raise ValueError(f"rank {rank} at {seat.host} is not reached: {error}") from None


@contextmanager
def _meetings(spread: Spread, file: str) -> Iterator[list[Meeting]]:
    """Of each rank."""
    if not spread.is_distant:
        yield [Meeting(file=file)] * len(spread.seats)
        return
    first = spread.seats[0]
    with listen(first.host) as listener:
        store = first.host, listener.getsockname()[1]
        meetings = [Meeting(seat.host, store=store) for seat in spread.seats]
        meetings[0] = replace(meetings[0], listener=listener.fileno())
        yield meetings
