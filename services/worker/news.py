"""What a worker tells its routers with every step: its load, and which KV blocks it holds."""

from collections.abc import Iterable

from protos import worker_pb2
from services.worker.engine import KvEvents, Load, ModelInfo


class News:
    """Turns engine steps into `WorkerNews`, and keeps the set of held blocks for snapshots."""

    def __init__(self, info: ModelInfo, max_running: int) -> None:
        self._held: dict[bytes, None] = {}  # in the order stored: a snapshot is then chain by chain
        self._load = worker_pb2.Load(  # of an engine that has not stepped yet
            max_running=max_running,
            free_blocks=info.num_blocks,
            total_blocks=info.num_blocks,
            block_size=info.block_size,
        )

    def snapshot(self) -> bytes:
        """All that a newly attached router must know."""
        events = [worker_pb2.BlockEvents(stored=True, hashes=b"".join(self._held))]
        news = worker_pb2.WorkerNews(load=self._load, snapshot=True, events=events)
        return news.SerializeToString()

    def of_step(self, load: Load, events: Iterable[KvEvents]) -> bytes:
        """The change that one step made."""
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
        )
        news = worker_pb2.WorkerNews(load=self._load)
        for event in events:
            self._apply(event)
            news.events.add(stored=event.stored, hashes=b"".join(event.hashes))
        return news.SerializeToString()

    def _apply(self, event: KvEvents) -> None:
        for block in event.hashes:
            if event.stored:
                self._held[block] = None
            else:
                self._held.pop(block, None)
