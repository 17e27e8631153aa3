"""The workloads of the comparison, in the format of bench/workload.py: seeded, as token ids.

w1: 32 requests of 64 to 512 tokens that generate 32 to 256. w2: one of 512 that generates 128.
w3: 32 of one common prefix of 512 tokens and 32 of their own, 32 generated. All arrive at once.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from bench.peers.checkpoints import VOCABULARY

SPECIAL = 16
"""Ids below may mean something to a server; none of them is in a prompt."""
_STREAM = 400_000

WORKLOADS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class _Kind:
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int = 0


_KINDS = {
    "w1": _Kind(32, prompt=(64, 512), output=(32, 256)),
    "w2": _Kind(1, prompt=(512, 512), output=(128, 128)),
    "w3": _Kind(32, prompt=(32, 32), output=(32, 32), prefix=512),
}


@dataclass(frozen=True)
class Asked:
    """One request: its whole prompt, and how many tokens it generates."""

    prompt: list[int]
    output: int


def make(name: str, seed: int = 0) -> list[Asked]:
    """The requests of a workload; the same ones for the same seed, on every machine."""
    kind = _KINDS[name]
    stream = _stream(seed)
    slices, lengths = Random(f"{name}-slices-{seed}"), Random(f"{name}-lengths-{seed}")

    def text(tokens: int) -> list[int]:
        start = slices.randrange(0, len(stream) - tokens)
        return stream[start : start + tokens]

    prefix = text(kind.prefix) if kind.prefix else []
    sizes = [
        (lengths.randint(*kind.prompt), lengths.randint(*kind.output)) for _ in range(kind.requests)
    ]
    return [Asked(prefix + text(prompt), output) for prompt, output in sizes]


@cache
def _stream(seed: int) -> list[int]:
    random = Random(f"stream-{seed}")
    return [random.randrange(SPECIAL, VOCABULARY) for _ in range(_STREAM)]


def turned(requests: list[Asked], turn: int, vocabulary: int = VOCABULARY) -> list[Asked]:
    """The same requests in other tokens, so that what a prefix cache holds of another turn is of
    no use, while prefixes that requests share stay shared. Any token becomes one that a model of
    that vocabulary knows."""

    def other(token: int) -> int:
        return SPECIAL + (token - SPECIAL + 101 * turn) % (vocabulary - SPECIAL)

    return [Asked([other(token) for token in asked.prompt], asked.output) for asked in requests]


def write(requests: list[Asked], path: Path) -> None:
    with path.open("w") as file:
        for number, asked in enumerate(requests):
            line = {
                "id": f"r{number:03d}",
                "prompt_token_ids": asked.prompt,
                "max_tokens": asked.output,
                "temperature": 0,
                "ignore_eos": True,
                "arrival_s": 0.0,
            }
            file.write(json.dumps(line) + "\n")
