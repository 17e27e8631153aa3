"""Between an engine's device and the tier below it: what is evicted goes there before a step writes
over it, and what is wanted comes from there before the step in which it is read.

The device's memory is the engine's thread's alone: a block is copied there and back, between two
steps, which takes as long as memory takes, and whatever waits for the disk is on other threads.
"""

import time
from collections.abc import Sequence as Seq
from pathlib import Path

from services.common.locks.own_folders import refuse_of_others
from services.worker.engine.config import EngineConfig
from services.worker.engine.kv.block_pool import Evicted
from services.worker.engine.kv.cache import KvCache
from services.worker.engine.kv.tiers.disk import DiskTier
from services.worker.engine.kv.tiers.folder import Folder, check_limit
from services.worker.engine.outputs import ModelInfo
from services.worker.engine.scheduling.cost_model import CostModel
from services.worker.engine.scheduling.places import Places
from services.worker.engine.sequence import Sequence

LATE_S = 1.0
"""And as long as computing would take: then who waits for the disk does so no more."""
_LOOK_S = 0.01
_MADE = 1
"""Of how blocks are computed, laid out and named. To be counted up where a checkpoint's would be
others than before: they are then not found."""


def make_tier(config: EngineConfig, info: ModelInfo) -> DiskTier | None:
    """Below the device, if one is asked for. Raises ValueError if it cannot be had."""
    if config.kv_disk_dir is None:
        return None
    if not config.checkpoint:
        raise ValueError("kv_disk_dir needs checkpoint, to tell its blocks from those of others")
    root, size = Path(config.kv_disk_dir), info.kv_bytes_per_block
    try:
        kind = f"{_MADE} {config.checkpoint} {info.kv_format} {info.kv_shape_per_block}"
        return DiskTier(Folder(root, kind, size, config.kv_disk_bytes))
    except OSError as error:
        raise _refused(config, error) from error


def check_disk(config: EngineConfig, block_bytes: int) -> None:
    """What is known of it before an engine starts. Raises ValueError."""
    if config.kv_disk_dir is None:
        return
    check_limit(config.kv_disk_bytes, block_bytes)
    try:
        refuse_of_others(Path(config.kv_disk_dir))
    except OSError as error:
        raise _refused(config, error) from error


def _refused(config: EngineConfig, error: OSError) -> ValueError:
    return ValueError(f"kv_disk_dir {config.kv_disk_dir!r}: {error.strerror or error}")


class Loader:
    def __init__(
        self, tier: DiskTier, places: Places, cache: KvCache, cost: CostModel, block_size: int
    ) -> None:
        self.tier, self._places, self._cache, self._cost = tier, places, cache, cost
        self._block_size = block_size

    @property
    def tokens_per_s(self) -> float:
        """That come when many do; 0: not yet known."""
        block_s = self.tier.pace.block_s
        return self._block_size / (block_s * self._places.tables.num_groups) if block_s else 0.0

    def copy_out(self, evicted: Seq[Evicted]) -> None:
        """Before the step is launched that was just scheduled."""
        if evicted:
            names = [(one.block_hash, one.group) for one in evicted]
            self.tier.store(names, lambda at: self._cache.read([evicted[i].block for i in at]))

    def come_back(self, idle: bool) -> None:
        """Takes in what came, and lets those go on who waited for no more. `idle`: there is nothing
        else to do, so that it waits a moment for what comes."""
        if idle and self._places.loading:
            self.tier.wait(_LOOK_S)
        for arrived in self.tier.take():
            self._cache.write([arrived.wanted.block], arrived.content)
            arrived.loading.came.append(arrived.wanted)
        for sequence in tuple(self._places.loading):
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        loading = sequence.loading
        assert loading is not None
        waited_s = time.monotonic() - loading.began_s
        if loading.is_whole:
            self.tier.pace.learn(len(loading.wanted), loading.read_s, waited_s)
        elif not loading.is_over:
            if waited_s < LATE_S + self._cost.chunk_s(0, loading.tokens):
                return
            self.tier.give_up(loading, late=True)
            self.tier.pace.learn(len(loading.wanted), waited_s, waited_s)  # or more
            sequence.loads = False
        self._places.end_loading(sequence)
