"""How one tenant is kept from holding all slots: the ways weighed in decision 0006.

A simulation: the real order (`FairOrder`) over slots of constant speed. One tenant keeps 200 long
chats going, or two do; another asks for four tokens now and then. A recalled chat computes its
prompt and its tokens again, none of them cached, which is the worst case.

    python -m bench.admission_share
"""

import heapq
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.router.admission.fair_order import Decided, FairOrder, Request

SLOTS, STEP_S, PREFILL_TOKENS_PER_S = 32, 0.03, 2000.0
FLOOD, SPARSE = (512, 768), (64, 4)  # tokens: prompt, output
FLOOD_AT_ONCE, ROUND_TRIP_S, LENGTH_S, WARM_S = 100, 0.005, 600.0, 60.0
PATIENCE_S = 0.25


class Reserve(FairOrder):
    """Instead of recalls: no tenant holds more than the slots less a reserve."""

    def __init__(self, kept_free: int) -> None:
        super().__init__(10.0, PATIENCE_S, recalls=0)
        self._most = SLOTS - kept_free

    def enter(
        self, new: Request, limit: int, capacity: int, now_s: float, decided: Decided
    ) -> tuple[str, int]:
        full = self._slots(new.tenant) >= self._most
        return super().enter(new, limit, 0 if full else capacity, now_s, decided)

    def _next(self, now_s: float) -> Request | None:
        starts = self._starts
        self._starts = {t: s for t, s in starts.items() if self._slots(t) < self._most}
        try:
            return super()._next(now_s)
        finally:
            self._starts = starts


@dataclass
class Chat:
    tenant: str
    prompt: int
    output: int
    arrived_s: float
    done: float = 0.0  # tokens
    began_s: float = 0.0
    first_wait_s: float | None = None
    stint: int = 0  # events of an earlier one are void
    charged: float = 0.0  # of this stint
    paid: float = 0.0  # tokens, in earlier ones


@dataclass
class World:
    order: FairOrder
    rng: random.Random
    floods: int
    rate: float  # sparse requests a second
    now: float = 0.0
    chats: dict[str, Chat] = field(default_factory=dict)
    events: list[tuple[float, int, str, str, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    held_s: float = 0.0
    recomputed_s: float = 0.0
    tokens: float = 0.0
    recalls: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def at(self, delay: float, what: str, id: str, stint: int = 0) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), what, id, stint))

    def come(self, tenant: str, prompt: int, output: int) -> None:
        id = f"{tenant}-{next(self.numbers):08}"
        chat = self.chats[id] = Chat(tenant, prompt, output, self.now)
        chat.charged = prompt + min(output, 128)
        decided = Decided()
        request = Request(id, tenant, 2, chat.charged, 1.0, self.now)
        state, _ = self.order.enter(request, 10_000, SLOTS, self.now, decided)
        if state == "granted":
            self.begin(id)
        self.take(decided)
        if state == "waiting":
            self.at(self.order._patience_s + ROUND_TRIP_S, "look", id)

    def begin(self, id: str) -> None:
        chat = self.chats[id]
        prefill_s = (chat.prompt + chat.done) / PREFILL_TOKENS_PER_S
        if chat.first_wait_s is None:
            chat.first_wait_s = self.now - chat.arrived_s
            if chat.tenant == "sparse" and chat.arrived_s > WARM_S:
                self.waits.append(chat.first_wait_s)
        else:
            self.recomputed_s += prefill_s
        chat.began_s = self.now + prefill_s
        self.at(prefill_s + (chat.output - chat.done) * STEP_S, "end", id, chat.stint)

    def take(self, decided: Decided) -> None:
        for id in decided.granted:
            self.begin(id)
        for id in decided.recalled:
            self.at(ROUND_TRIP_S, "yield", id, self.chats[id].stint)

    def run(self) -> None:
        for n in range(self.floods):
            for _ in range(FLOOD_AT_ONCE):
                output = int(FLOOD[1] * self.rng.uniform(0.7, 1.3))
                self.come(f"flood{n}", FLOOD[0], output)
        if self.rate:
            self.at(self.rng.expovariate(self.rate), "sparse", "")
        while self.now < LENGTH_S:
            when, _, what, id, stint = heapq.heappop(self.events)
            held = len(self.order._held)
            self.held_s += held * (min(when, LENGTH_S) - self.now)
            self.now = when
            decided = Decided()
            if what == "sparse":
                self.come("sparse", *SPARSE)
                self.at(self.rng.expovariate(self.rate), "sparse", "")
            elif what == "look":
                self.order.look(SLOTS, self.now, decided)
            elif id not in self.chats or stint != self.chats[id].stint:
                pass  # it ended, or was recalled, before this
            elif what == "end":
                chat = self.chats.pop(id)
                self.tokens += chat.output + chat.prompt
                used = chat.prompt + chat.output - chat.paid
                self.order.leave(id, used - chat.charged, self.now)
                self.order.look(SLOTS, self.now, decided)
                if chat.tenant != "sparse":
                    output = int(FLOOD[1] * self.rng.uniform(0.7, 1.3))
                    self.come(chat.tenant, FLOOD[0], output)
            else:
                chat = self.chats[id]
                done = chat.done + max(0.0, (self.now - chat.began_s) / STEP_S)
                used = chat.prompt + done - chat.paid
                left = min(128, chat.output - done)
                missed = used - chat.charged
                state = self.order.give_back(id, missed, left, SLOTS, self.now, decided)
                if state == "waiting":
                    self.recalls += 1
                    chat.stint += 1
                    chat.done, chat.paid, chat.charged = done, chat.paid + used, left
            self.take(decided)


def main() -> None:
    ways = {
        "as slots come free": lambda: FairOrder(10.0, PATIENCE_S, recalls=0),
        "reserve of 1": lambda: Reserve(1),
        "reserve of 3": lambda: Reserve(3),
        "recall at once": lambda: FairOrder(10.0, 0.0, recalls=2),
        "recall once": lambda: FairOrder(10.0, PATIENCE_S, recalls=1),
        "recall twice": lambda: FairOrder(10.0, PATIENCE_S, recalls=2),
        "recall after 1 s": lambda: FairOrder(10.0, 1.0, recalls=2),
    }
    print("floods, sparse a second, way: sparse wait p50 / p99 / worst s, slots held, lost to")
    print("recomputation, recalls")
    for floods, rate in ((1, 0.0), (1, 0.5), (1, 5.0), (2, 0.5), (8, 0.5), (8, 5.0)):
        for name, way in ways.items():
            world = World(way(), random.Random(1), floods, rate)
            world.run()
            waits = sorted(world.waits) or [0.0]
            p99 = waits[int(0.99 * (len(waits) - 1))]
            total = SLOTS * LENGTH_S
            print(
                f"{floods} {rate:3} {name:20} {statistics.median(waits):7.3f} {p99:7.3f} "
                f"{waits[-1]:7.3f}  {world.held_s / total:5.1%} {world.recomputed_s / total:6.2%} "
                f"{world.recalls}"
            )


if __name__ == "__main__":
    main()
