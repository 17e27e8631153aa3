import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.common.telemetry.tally import Tally

BUCKETS = (0.001, 0.0025, 1, 2.5, 30)


def test_it_tells_what_the_clients_own_histogram_tells() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    given = ("gaps_seconds", "Between tokens", ("model", "kind"))
    tally = Tally(*given, BUCKETS, ours)
    histogram = Histogram(*given, buckets=BUCKETS, registry=theirs)
    chance = random.Random(1)
    values = [*BUCKETS, 0, 31, *(10 ** chance.uniform(-4, 3) for _ in range(200))]
    for value in values:
        for one in (tally, histogram):
            one.labels(model_of(value), "x").observe(value)

    alone = ("steps_seconds", "Of no label", ())
    for one in (Tally(*alone, BUCKETS, ours), Histogram(*alone, buckets=BUCKETS, registry=theirs)):
        one.observe(0.3)
    never = ("never_seconds", "Not yet", ())
    Tally(*never, BUCKETS, ours)
    Histogram(*never, buckets=BUCKETS, registry=theirs)

    def told(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return sorted(line for line in lines if "_created" not in line)

    assert told(ours) == told(theirs)
    with pytest.raises(ValueError, match="model, kind"):
        tally.labels("one")


def model_of(value: float) -> str:
    return "a" if value < 1 else "b"
