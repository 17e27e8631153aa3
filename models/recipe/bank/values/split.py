"""The split of values into a training and a held-out side, by their checksums alone."""

import zlib

SHARE = 8  # one in so many is held out


def checksum(value: str) -> int:
    """The same for a value in whatever case."""
    return zlib.crc32(value.lower().encode())


def is_held_out(value: str) -> bool:
    """Whether a value (a name, a number, a title) belongs to the side that training never sees."""
    return checksum(value) % SHARE == 0
