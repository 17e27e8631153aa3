"""What the model thought of each token, in the two forms that OpenAI's API has for it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from protos.tokenizer_pb2 import Echo, TextLogprob


def of_chat(logprobs: Iterable[TextLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_candidate(one.token), "top_logprobs": [_candidate(other) for other in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _candidate(one: TextLogprob.Candidate) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}


class OfText:
    """`choices[].logprobs` of a plain completion, piece by piece: a token's `text_offset` counts
    the characters of all that came before it, the echo among them."""

    def __init__(self) -> None:
        self._before = 0  # characters of the echo

    def echo(self, echo: Echo) -> dict[str, Any]:
        """The prompt's own, first. Nobody expected its first token: there are none of that."""
        return joined([*self.of_echo(echo, max(1, len(echo.logprobs)))] or [self.next(())])

    def of_echo(self, echo: Echo, count: int) -> Iterator[dict[str, list[Any]]]:
        """The same, so many tokens at a time."""
        for start in range(0, len(echo.logprobs), count):
            told = self.next(echo.logprobs[start : start + count])
            if not start:
                told["token_logprobs"][0] = told["top_logprobs"][0] = None
            yield told
        self._before = len(echo.text)

    def next(self, logprobs: Sequence[TextLogprob]) -> dict[str, list[Any]]:
        return {
            "tokens": [one.token.text for one in logprobs],
            "token_logprobs": [one.token.logprob for one in logprobs],
            "top_logprobs": [_by_text(one) for one in logprobs],
            "text_offset": [self._before + one.offset for one in logprobs],
        }


def _by_text(one: TextLogprob) -> dict[str, float] | None:
    """The best and the token itself; of two that read the same the better one."""
    found: dict[str, float] = {}
    for other in (*one.top, *([one.token] if one.top else ())):
        found.setdefault(other.text, other.logprob)
    return found or None


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of `OfText`'s pieces, one after the other."""
    return {name: [one for piece in pieces for one in piece[name]] for name in pieces[0]}
