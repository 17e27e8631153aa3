"""What a worker tells its routers with every step: its load, and which KV blocks it holds."""

from collections.abc import Iterable, Iterator

from protos import worker_pb2
from services.worker.engine import KvEvents, Load, ModelInfo

_PIECE = 16_384
"""Blocks on disk that are told of at once, at most: there may be millions."""


class News:
    """Turns engine steps into `WorkerNews`, and keeps the set of held blocks for snapshots."""

    def __init__(self, info: ModelInfo, max_running: int) -> None:
        self._adapters = worker_pb2.Adapters()
        self._held: dict[bytes, None] = {}  # in the order stored: a snapshot is then chain by chain
        self._below: dict[bytes, None] = {}  # likewise, on disk
        self._load = worker_pb2.Load(  # of an engine that has not stepped yet
            max_running=max_running,
            free_blocks=info.token_blocks,
            total_blocks=info.token_blocks,
            block_size=info.block_size,
        )

    def snapshot(self) -> bytes:
        """All that a newly attached router must know, but for blocks on disk."""
        events = [worker_pb2.BlockEvents(stored=True, hashes=b"".join(self._held))]
        news = worker_pb2.WorkerNews(load=self._load, snapshot=True, events=events)
        news.adapters.CopyFrom(self._adapters)
        return news.SerializeToString()

    def below(self) -> Iterator[bytes]:
        """What is on disk now, in pieces: each without what has gone by the time it is made."""
        known = list(self._below)
        return (
            self._still_below(known[at : at + _PIECE]).SerializeToString()
            for at in range(0, len(known), _PIECE)
        )

    def _still_below(self, hashes: list[bytes]) -> worker_pb2.WorkerNews:
        there = b"".join(one for one in hashes if one in self._below)
        return worker_pb2.WorkerNews(below=[worker_pb2.BlockEvents(stored=True, hashes=there)])

    def of_adapters(self, digests: Iterable[str]) -> bytes:
        """These can be computed with now, and no others."""
        self._adapters = worker_pb2.Adapters(digests=digests)
        return worker_pb2.WorkerNews(adapters=self._adapters).SerializeToString()

    def of_step(
        self, load: Load, events: Iterable[KvEvents], below: Iterable[KvEvents] = ()
    ) -> bytes:
        """The change that one step made; `below`: of blocks on disk."""
        self._load = worker_pb2.Load(
            waiting=load.waiting,
            running=load.running,
            max_running=load.max_running,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=load.block_size,
            queued_prefill_tokens=load.queued_prefill_tokens,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_ms=load.decode_step_ms,
            prompt_share=load.prompt_share,
            load_tokens_per_s=load.load_tokens_per_s,
            load_delay_s=load.load_delay_s,
        )
        news = worker_pb2.WorkerNews(load=self._load)
        for told, held, changes in (
            (news.events, self._held, events),
            (news.below, self._below, below),
        ):
            for event in changes:
                _apply(event, held)
                told.add(stored=event.stored, hashes=b"".join(event.hashes))
        return news.SerializeToString()


def _apply(event: KvEvents, held: dict[bytes, None]) -> None:
    for block in event.hashes:
        if event.stored:
            held[block] = None
        else:
            held.pop(block, None)
