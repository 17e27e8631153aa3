"""Stop strings in streamed text: nothing of one, and nothing after it, is ever given out."""

from collections.abc import Sequence


class StopStrings:
    """Filters one request's text.

    The first stop string to be complete counts; of several that end at the same character, the
    longest. So the result does not depend on where the text was split. Held back is only what could
    still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def __bool__(self) -> bool:
        """There are some."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """What of the text so far may go out now. Empty once `hit` is set."""
        if not self._stops or self.hit is not None:
            return "" if self.hit is not None else text
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        safe = min(_first_possible(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held


def _first_possible(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that is a beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
