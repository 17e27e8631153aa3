"""What is told of runs, as it comes to one gateway: read once, however many follow a run here.

Each write of a run is also a message on the run's channel (runs.lua). One connection listens to the
channels of all runs that are followed here; what it brings is kept for a moment, for all followers
of that run. What a message may have told before the channel was listened to, or while the
connection was lost, is read from the run's stream, once for all of them as well.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress

from protos.runs_pb2 import RunEvent
from services.common.fresh_look import FreshLook
from services.common.redis import Redis, RedisAway, RedisError
from services.gateway.runs.answering import all_at_once
from services.gateway.runs.lasting.store import Entry, Place, RunStore, entry_of

log = logging.getLogger(__name__)

_RECENT_BYTES = 32 * 1024  # of one run; who is further behind reads for itself
_LISTEN_S = 1.0  # between looks at the connection
_RETRY_S = 0.2  # while Redis is away


class Feed:
    """The last of one run's writes."""

    def __init__(self, store: RunStore, place: Place, look_every_s: float) -> None:
        self.followers = 0
        self.exists = True
        self.news = asyncio.Event()  # set, and another one taken, when there may be something new
        self._store = store
        self._place = place
        self._look_every_s = look_every_s
        self._stale = True  # there may be something in the stream that no message told
        self._looked_at = float("-inf")  # monotonic seconds
        self._looks = FreshLook(self._look, 0.0)
        self._last = 0  # the number of the last write that was heard of
        self._recent: deque[Entry] = deque()
        self._bytes = 0
        self._before = 0  # the number of the last one that is not kept any more

    async def look(self) -> None:
        """At the stream, where that is due: one look for all who follow. Raises one of
        `RedisAway`."""
        while self._is_due:
            await self._looks()

    async def stop(self) -> None:
        await self._looks.stop()

    @property
    def _is_due(self) -> bool:
        return self._stale or time.monotonic() - self._looked_at >= self._look_every_s

    async def _look(self) -> None:
        if not self._is_due:
            return
        self._stale = False
        try:
            page = await self._store.read(self._place, self._last)
        except BaseException:
            self._stale = True
            raise
        self._stale = self._stale or page.more
        self.exists, self._looked_at = page.exists, time.monotonic()
        self._take(page.entries)

    def _take(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.seq > self._last:
                self._last = entry.seq
                self._recent.append(entry)
                self._bytes += entry.size
        while self._bytes > _RECENT_BYTES and len(self._recent) > 1:
            gone = self._recent.popleft()
            self._bytes -= gone.size
            self._before = gone.seq
        self._wake()

    def behind(self, after: int) -> Sequence[Entry] | None:
        """What was written behind number `after`; None where that is not here any more."""
        if after < self._before:
            return None
        found: list[Entry] = []
        for entry in reversed(self._recent):
            if entry.seq <= after:
                break
            found.append(entry)
        return found[::-1]

    def hear(self, entry: Entry | None) -> None:
        """What the channel brought."""
        if entry is None:
            self.exists = False
        elif entry.seq == self._last + 1:
            return self._take([entry])
        elif entry.seq > self._last:
            self._stale = True
        self._wake()

    def missed(self) -> None:
        """Messages, perhaps."""
        self._stale = True
        self._wake()

    def _wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class Feeds:
    """Of one gateway."""

    def __init__(self, redis: Redis, store: RunStore, look_every_s: float) -> None:
        """`look_every_s`: who hears nothing for so long looks whether the run is still there."""
        self._redis = redis
        self._store = store
        self._look_every_s = look_every_s
        self._feeds: dict[str, Feed] = {}  # by their channels
        self._changed = asyncio.Event()  # which runs are followed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="what is told of runs")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def follow(self, place: Place, patience_s: float) -> AsyncGenerator[RunEvent, None]:
        """All of a run's events from the first, as they come, until it is gone. Raises one of
        `RedisAway` where Redis stays away for `patience_s`."""
        channel = self._store.channel(place)
        if (feed := self._feeds.get(channel)) is None:
            feed = self._feeds[channel] = Feed(self._store, place, self._look_every_s)
            self._changed.set()
        feed.followers += 1
        after, since = 0, time.monotonic()
        try:
            while True:
                news = feed.news
                try:
                    await feed.look()
                    entries = feed.behind(after)
                    if entries is None:
                        entries = (await self._store.read(place, after)).entries
                except RedisAway:
                    if time.monotonic() - since > patience_s:
                        raise
                    await asyncio.sleep(_RETRY_S)
                    continue
                since = time.monotonic()
                for entry in entries:
                    for event in entry.events:
                        yield event
                    after = entry.seq
                if entries:
                    continue
                if not feed.exists:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._look_every_s):
                        await news.wait()
        finally:
            feed.followers -= 1
            if not feed.followers:
                del self._feeds[channel]
                self._changed.set()
                await feed.stop()

    # ---- listening ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except (*RedisAway, RedisError) as away:
                log.debug("nothing is heard of runs: %s", type(away).__name__)
            except Exception:  # those who follow look for themselves until the next try
                log.exception("listening to runs failed")
            for feed in self._feeds.values():
                feed.missed()
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        async with self._redis.pubsub() as heard:
            await heard.subscribe(self._store.root)  # on which nothing is told: it opens
            self._changed.set()

            async def subscribe() -> None:
                """To what is followed, and to nothing else."""
                own: set[str] = set()
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    wanted = set(self._feeds)
                    if new := wanted - own:
                        await heard.subscribe(*new)
                    if old := own - wanted:
                        await heard.unsubscribe(*old)
                    own = wanted

            async def hear() -> None:
                while True:
                    message = await heard.get_message(timeout=_LISTEN_S)
                    if message is None or (feed := self._feeds.get(message["channel"])) is None:
                        continue
                    if message["type"] == "message":
                        feed.hear(entry_of(message["data"]))
                    elif message["type"] == "subscribe":  # also where it connected anew by itself
                        feed.missed()

            await all_at_once((subscribe(), hear()))
