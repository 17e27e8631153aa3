"""The tier on disk, as an engine's thread sees it: nothing here waits for the disk.

One thread writes what was evicted from the device, one reads what is wanted again. What they did is
told by `take`; `news` says when to call it. Between the engine and each of them lie so many bytes
at most: what is too much to be written is dropped, and the reader waits.

A disk that hangs costs whoever waits for it the time until he gives up, and nobody else: until it
answers again, it has nothing (`holds`).
"""

import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from services.worker.engine.kv.tiers.folder import Folder, Name
from services.worker.engine.kv.tiers.loading import Loading, Wanted
from services.worker.engine.kv.tiers.pace import Pace
from services.worker.engine.outputs import KvEvents, TierCounts

log = logging.getLogger(__name__)

_BETWEEN_BYTES = 64 * 2**20
"""That are read and not taken, or taken and not written, at most; or one block."""
_TOLD = 16_384
"""Blocks that came or went are told of at once, at most: at the beginning there may be millions."""
_LOOK_S = 2.0
"""What others of the host have written is learned so often."""
_ENDS_S = 2.0


_Job = tuple[Name, memoryview] | Callable[[], None]
"""A block to be written, or what else is done with the folder."""


class Arrived(NamedTuple):
    loading: Loading
    wanted: Wanted
    content: bytearray


class DiskTier:
    """Of one engine. All is for the engine's thread, but for what the two threads run."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._known: set[Name] = set()
        self._on_way: set[Name] = set()
        """To the disk."""
        self._bad: set[Name] = set()
        """Until they are removed: what of them is on its way is not written, nor believed."""
        self._hangs = False
        self.counts = TierCounts()
        self.pace = Pace()
        self._events: deque[KvEvents] = deque()
        self._told: deque[Callable[[], Arrived | None]] = deque()
        """By the threads: what the engine's is to take in."""
        self._most = max(1, _BETWEEN_BYTES // folder.block_bytes)
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Loading | list[Name] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(self._most)
        """For blocks that are read and not taken."""
        self._closing = False
        self._held_bytes = 0
        """Of the folder, as the writing thread has told last."""
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `take` has something, until `hear`."""
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("kv-writer", self._write_on), ("kv-reader", self._read_on))
        ]
        for thread in self._threads:
            thread.start()

    def holds(self, block_hash: bytes, group: int) -> bool:
        """Whether `load` is likely to find it."""
        return (block_hash, group) in self._known and not self._hangs

    def store(self, names: Sequence[Name], read: Callable[[list[int]], memoryview]) -> None:
        """Takes copies of blocks that are about to be written over: `read` gives those at some
        places of `names`."""
        new = []
        for place, name in enumerate(names):
            if name in self._known:
                self._use(name)
            elif name not in self._on_way and name not in self._bad:
                new.append(place)
        room = max(0, self._most - len(self._on_way))
        self.counts.dropped += len(new[room:])
        if not (new := new[:room]):
            return
        size, content = self._folder.block_bytes, read(new)
        for first, place in enumerate(new):
            self._on_way.add(names[place])
            self._writes.put((names[place], content[first * size : (first + 1) * size]))

    def _use(self, name: Name) -> None:
        """It is there already: what was in use on the device until now is no old file."""
        if self._writes.qsize() < self._most:
            self._writes.put(partial(self._folder.touch, name))

    def forget(self, names: Iterable[Name]) -> None:
        """Their content proved bad: it goes, also what is on its way there."""
        bad = [name for name in names if name in self._known or name in self._on_way]
        self._change(False, [name for name in bad if name in self._known])
        self._bad.update(bad)
        for name in bad:
            self._writes.put(partial(self._remove, name))

    def ahead(self, names: list[Name]) -> None:
        """Somebody who waits in the queue will want these."""
        self._reads.put(names)

    def decline(self, count: int) -> None:
        """So many blocks that it holds are computed, which is expected to be sooner."""
        self.pace.decline()
        self.counts.passed += count

    def load(self, wanted: Sequence[Wanted]) -> Loading:
        loading = Loading(wanted)
        self._reads.put(loading)
        return loading

    def give_up(self, loading: Loading, late: bool = False) -> None:
        """Nobody waits for it any more. `late`: because it took too long."""
        loading.given_up = True
        if late:
            self._hangs = True
            self.counts.missed += len(loading.wanted) - len(loading.came) - loading.num_missed

    @property
    def num_on_way(self) -> int:
        """Blocks that are taken and not written."""
        return len(self._on_way)

    def hear(self) -> None:
        """`news` was polled."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.news)

    def wait(self, seconds: float) -> None:
        """For something that `take` has, so long at most."""
        if self._told:
            return
        poll = select.poll()
        poll.register(self.news, select.POLLIN)
        poll.poll(seconds * 1000)
        self.hear()

    def take(self) -> Iterator[Arrived]:
        """What was read and is still wanted; the caller writes it to the device and adds it to what
        `came`. All other news are taken in, too."""
        while self._told:
            if arrived := self._told.popleft()():
                yield arrived

    @property
    def has_events(self) -> bool:
        return bool(self._events or self._told)

    def take_events(self) -> list[KvEvents]:
        """What came and went since the last call; of much the rest is for the next ones."""
        events: list[KvEvents] = []
        left = _TOLD
        while self._events and (left := left - len(self._events[0].hashes)) >= 0:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Ends the threads; what is not written is not kept. One that hangs is left alone."""
        if self._closing:
            return
        self._closing = True
        self._room.release()
        self._writes.put(None)
        self._reads.put(None)
        until = time.monotonic() + _ENDS_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.news)

    # On the engine's thread, behind what the others did.

    def _learn(self, added: Iterable[Name], gone: Iterable[Name], held: int, evicted: int) -> None:
        self._change(False, [name for name in gone if name in self._known])
        new = [name for name in added if name not in self._known and name not in self._bad]
        self._change(True, new)
        self.counts.held_bytes, self.counts.evicted = held, evicted

    def _change(self, stored: bool, names: list[Name]) -> None:
        (self._known.update if stored else self._known.difference_update)(names)
        hashes = [block_hash for block_hash, group in names if not group]
        for at in range(0, len(hashes), _TOLD):
            self._events.append(KvEvents(stored, hashes[at : at + _TOLD]))

    def _wrote(self, name: Name, failed: bool, new: bool) -> None:
        self._on_way.discard(name)
        self.counts.failed += failed
        self.counts.stored += new

    def _arrive(
        self, loading: Loading, wanted: Wanted, content: bytearray | None, took_s: float
    ) -> Arrived | None:
        self._hangs = False
        self._room.release()
        if loading.given_up:
            return None
        if content is None:
            loading.num_missed += 1
            self.counts.missed += 1
            self._change(False, [name for name in (wanted.name,) if name in self._known])
            return None
        self.counts.loaded += 1
        loading.read_s += took_s
        return Arrived(loading, wanted, content)

    def _removed(self, name: Name) -> None:
        self._bad.discard(name)

    # On the two threads.

    def _tell(self, what: Callable[[], Arrived | None]) -> None:
        self._told.append(what)
        with suppress(OSError):  # of an engine that is closed
            os.eventfd_write(self.news, 1)

    def _write_on(self) -> None:
        folder, next_look_s, fails = self._folder, 0.0, False
        while not self._closing:
            try:
                now_s = time.monotonic()
                if now_s >= next_look_s:
                    try:
                        folder.look()
                    finally:  # however long that took
                        now_s = time.monotonic()
                        next_look_s = now_s + _LOOK_S
                    self._tell_changes()
                if (job := self._next_write(next_look_s - now_s)) is None:
                    continue
                if callable(job):
                    job()
                    self._tell_changes()
                    continue
                name, content = job
                if name in self._bad:
                    self._tell(partial(self._wrote, name, False, False))
                    continue
                failed, new = True, False
                try:
                    new, failed = folder.write(name, content), False
                finally:
                    self._tell_changes()
                    self._tell(partial(self._wrote, name, failed, new))
                fails = False
            except Exception as error:
                if not fails:  # once, until one is written: there may be hundreds a second
                    log.warning("KV blocks are not written to disk: %s", error)
                fails = True

    def _remove(self, name: Name) -> None:
        try:
            self._folder.remove(name)
        finally:
            self._tell_changes()
            self._tell(partial(self._removed, name))

    def _next_write(self, within_s: float) -> _Job | None:
        with suppress(queue.Empty):
            return self._writes.get(timeout=max(0.0, within_s))
        return None

    def _tell_changes(self) -> None:
        folder = self._folder
        added, gone = folder.take_changes()
        if added or gone or folder.held_bytes != self._held_bytes:
            self._held_bytes = folder.held_bytes
            self._tell(partial(self._learn, added, gone, folder.held_bytes, folder.evicted))

    def _read_on(self) -> None:
        while not self._closing and (job := self._reads.get()) is not None:
            if isinstance(job, Loading):
                for wanted in job.wanted:
                    self._room.acquire()
                    if self._closing:  # nobody takes what is read, and makes room
                        return
                    began_s = time.monotonic()
                    content = None if job.given_up else self._read(wanted.name)
                    took_s = time.monotonic() - began_s
                    self._tell(partial(self._arrive, job, wanted, content, took_s))
                continue
            for name in job:
                if not self._reads.empty():
                    break  # somebody waits
                self._folder.ahead(name)

    def _read(self, name: Name) -> bytearray | None:
        try:
            return self._folder.read(name)
        except Exception as error:
            log.warning("a KV block is not read from disk: %s", error)
            return None
