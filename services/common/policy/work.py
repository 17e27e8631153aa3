"""What the policy may spend on one request, so that none takes a service for itself.

Every rule takes time in proportion to the text, but some text costs a hundred times as much as
other: what is made of nothing but candidates that fail their check. And a pattern without a longest
match may go over the same text again for each of its matches. So the time is looked at between
searches, each of which goes over a bounded piece where the pattern has a longest match.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_EVERY = 32 * 1024  # bytes that are gone over between two looks at the clock
_LONG_S = 0.005  # of a processor; what takes longer gives way to others between looks
_PAUSE_S = 0.0002
_STEP = 64  # bytes that a search, or a check of a candidate, counts for beside those it goes over


class TooMuchError(Exception):
    """The policy cannot look at all of it; `param` names the field at which it stopped."""

    def __init__(self, why: str, param: str) -> None:
        super().__init__(why)
        self.why = why
        self.param = param


@dataclass(frozen=True)
class Allowance:
    """Of one request."""

    bytes: int = 16 * 2**20  # of its texts together, as UTF-8
    seconds: float = 2.0  # of a processor


class Work:
    """One request's so far. One thread's."""

    def __init__(self, allowance: Allowance, clock: Callable[[], float] = time.thread_time) -> None:
        self.param = ""  # the field that is looked at
        self.spent = 0  # bytes that were gone over
        self._allowance = allowance
        self._clock = clock
        began = clock()
        self._until = began + allowance.seconds
        self._long = began + _LONG_S
        self._looked = 0

    def take(self, size: int, param: str) -> None:
        """Another text of so many bytes in all. Raises TooMuchError."""
        if size > self._allowance.bytes:
            most = self._allowance.bytes
            why = f"the content policy looks at {most} bytes of text in a request, and no more"
            raise TooMuchError(why, param)

    def spend(self, size: int) -> None:
        """Raises TooMuchError."""
        self.spent += size + _STEP
        if self.spent - self._looked >= _LOOK_EVERY:
            self._looked = self.spent
            now = self._clock()
            if now > self._until:
                seconds = self._allowance.seconds
                why = f"it takes the content policy over {seconds:g} s to look at this request"
                raise TooMuchError(why, self.param)
            if now > self._long:  # the process' streams wait for Python's lock
                time.sleep(_PAUSE_S)
