"""`python -m bench.door`: what identity and limits add to a request, at half of what they can take.

A real Redis, a key with four limits (requests and tokens a minute, at once, a budget a day); no
server and no model. First as many requests side by side as the door takes; then, at half that rate
and by chance (exponential gaps), the time of each one's identification, its round trip at the door,
and the wait for its entry in the ledger at the end.
"""

import argparse
import asyncio
import json
import random
import resource
import time
from pathlib import Path

from services.common.config import MeteringSettings, Settings
from services.common.embedded_redis import EmbeddedRedis
from services.common.redis import Redis, connect
from services.common.telemetry.metrics import BoundedNames
from services.gateway.identity.identity import Identity
from services.gateway.identity.limits import Limit
from services.gateway.metering.meter import Meter

_AT_ONCE = 32
LIMITS = (
    Limit(name="rpm", of="requests", most=1e9, per="minute"),
    Limit(name="tpm", of="tokens", most=1e12, per="minute"),
    Limit(name="streams", of="concurrent", most=10_000),
    Limit(name="budget", of="cost", most=1e6, per="day"),
)


class Door:
    def __init__(self, redis: Redis, settings: Settings, key: str) -> None:
        self.identity = Identity(settings, redis)
        self.meter = Meter.of(redis, settings, BoundedNames(9))
        self._header = f"Bearer {key}"
        self._number = 0

    async def request(self) -> tuple[float, float]:
        """Seconds until it was let in, and that its end took."""
        self._number += 1
        began = time.perf_counter()
        who = await self.identity.auth.identify(self._header)
        metered = await self.meter.admit(who, f"req_{self._number:030x}", "/v1", "m", (100, 400))
        let_in = time.perf_counter()
        await self.meter.settle(metered)
        return let_in - began, time.perf_counter() - let_in


async def capacity(door: Door, seconds: float) -> float:
    """Requests a second when the next comes as one ends, side by side."""
    until, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await door.request()
            count += 1

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
    return count / seconds


async def at_rate(door: Door, rate: float, seconds: float) -> list[tuple[float, float]]:
    chance, running = random.Random(0), []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        running.append(asyncio.create_task(door.request()))
        due += chance.expovariate(rate)
    return await asyncio.gather(*running)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _main(arguments: argparse.Namespace) -> dict[str, float]:
    with EmbeddedRedis() as server:
        prices = MeteringSettings(prices={"*": {"prompt": 1, "output": 2}})
        settings = Settings(redis_url=server.url, metering=prices)
        redis = connect(server.url)
        identity = Identity(settings, redis)
        limits = LIMITS[: arguments.limits]
        key, _ = await identity.keys.create("bench", limits=limits)
        door = Door(redis, settings, key)
        door.meter.start()
        await capacity(door, 0.5)
        rate = arguments.rate or await capacity(door, arguments.seconds) / 2
        cpu, calls = time.process_time(), await _calls(redis)
        times = await at_rate(door, rate, arguments.seconds)
        cpu, after = time.process_time() - cpu, await _calls(redis)
        await door.meter.stop()
        await redis.aclose()
    doors, ends = ([one[which] * 1e3 for one in times] for which in (0, 1))
    return {
        "limits": len(limits),
        "rate_per_s": round(rate, 1),
        "requests": len(times),
        "door_ms_p50": quantile(doors, 0.5),
        "door_ms_p99": quantile(doors, 0.99),
        "end_ms_p50": quantile(ends, 0.5),
        "end_ms_p99": quantile(ends, 0.99),
        "cpu_us_per_request": cpu / len(times) * 1e6,
        "redis_us_per_call": (after[1] - calls[1]) / max(1, after[0] - calls[0]),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _calls(redis: Redis) -> tuple[int, int]:
    """Of the function so far: how many, and their microseconds in Redis."""
    told = (await redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    return int(told["calls"]), int(told["usec"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, help="requests a second (default: half the most)")
    parser.add_argument("--limits", type=int, default=len(LIMITS), choices=range(len(LIMITS) + 1))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(_main(arguments))
    print("\n".join(f"{name:20} {value:10.3f}" for name, value in result.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
