"""What a model said of questions and passages, for searches that are told again: of the same texts
it says the same, so they are not paid for twice (decision 0062)."""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_MOST = 32_768  # some 200 bytes each


class KnownScores:
    """Of one gateway, apart by tenant; for `max_age_s`, as other weights may be served by then."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._known: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def of(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """Those that are known."""
        least = time.monotonic() - self._max_age_s
        found = {}
        for key in keys:
            since, score = self._known.get(key, (-math.inf, 0.0))
            if since > least:
                found[key] = score
        return found

    def keep(self, scores: Sequence[tuple[bytes, float]]) -> None:
        if not self._max_age_s:
            return
        now = time.monotonic()
        for key, score in scores:
            self._known[key] = now, score
            self._known.move_to_end(key)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)


def key_of(*texts: str) -> bytes:
    digest = blake2b(digest_size=16)
    for text in texts:
        told = text.encode()
        digest.update(len(told).to_bytes(8))
        digest.update(told)
    return digest.digest()
