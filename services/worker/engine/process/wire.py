"""Frames between the replica's process and the engine process, over socket pairs.

    frame   = u32 n | u64 size[0] ... size[n - 1] | part[0] ... part[n - 1]     (little-endian)
    part[0] = a pickle (protocol 5), part[1:] = its out-of-band buffers

KV data travels as an out-of-band buffer: it is not copied into the pickle nor out of it. Both ends
are one program that trusts itself, hence pickle; from the network nothing is unpickled but what
ranks of other hosts send, who have proved that they are the engine's (parallel/links.py).

To the engine: (operation, *arguments), see process.py. From it: `ModelInfo` first, then
`StepOutput`, `LongStep`, `Snapshot`, `Done` and, as the last, `Failure`.
"""

import pickle
import struct
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answer to the operation `snapshot`, in order with the StepOutputs around it."""

    number: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to the operation `load_adapter`."""

    number: int
    why_not: str
    """Empty: it is done."""
    in_use: bool = False
    """See PlaceInUse."""


@dataclass(frozen=True, slots=True)
class LongStep:
    """A step begins that is expected to take so long that it is worth telling."""

    expected_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine cannot go on: it did not load, or its loop failed."""

    message: str
    killed: bool = False
    """See EngineDied."""


def encode(message: object) -> list[bytes | memoryview]:
    """The frame's pieces, to be written one after the other: a message without buffers is one, so
    that its reader wakes once."""
    buffers: list[PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    rest = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{1 + len(rest)}Q", len(head), *(len(part) for part in rest))
    return [COUNT.pack(1 + len(rest)) + sizes + head, *rest]


def decode_sizes(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def decode(parts: list[bytes] | list[bytearray]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])
