"""What a request has given out so far, and the one door through which its tokens leave."""

import asyncio
import math
import time
from collections.abc import Callable

from protos import common_pb2, router_pb2, worker_pb2
from services.common.link import LinkCall
from services.common.packed_ids import count
from services.router import metrics

_FINAL = (common_pb2.FINISH_STOP, common_pb2.FINISH_LENGTH)


class Answer:
    """The tokens of one request, whichever workers they come from.

    Deltas pass as they are; only the first and the last are rewritten, because their usage is of
    the whole request and a worker knows of its own part alone. The first has it for a tokenizer
    that ends the request itself, at a stop string.

    What another router gave out before it was lost is part of the request's prompt, and counts as
    output (`before`); `tokens` are those made here.
    """

    def __init__(self, request: router_pb2.GenerateRequest, call: LinkCall) -> None:
        self.request = request
        self.before = int(request.generated_prefix)
        self.prompt_tokens = count(request.prompt_token_ids)  # `before` included
        self.tokens: list[int] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cached_tokens = 0  # of the prompt, where it was first computed
        self.draft_tokens = self.accepted_tokens = 0  # guesses of its tokens, made here
        self.first_token_s = 0.0  # monotonic; 0: none yet
        self._call = call
        self._awaited: float = math.inf  # tokens, see `when`
        self._on_awaited: Callable[[], None] = lambda: None
        self._began_s = self._last_s = time.monotonic()

    @property
    def finished(self) -> bool:
        """Its last token was given out: whatever happens now, the answer is whole."""
        return self.done.done()

    @property
    def begun(self) -> bool:
        """Some of it was made, here or by another router."""
        return bool(self.before or self.tokens)

    @property
    def ttft_s(self) -> float:
        """From the request's arrival at this router to its first token; 0: none yet."""
        return self.first_token_s - self._began_s if self.first_token_s else 0.0

    @property
    def tokens_left(self) -> int:
        """How many more tokens the client wants at most."""
        return int(self.request.sampling.max_tokens) - len(self.tokens)

    @property
    def used(self) -> int:
        """Tokens that are charged here: those before were charged where they were made, and the
        prompt of several choices with the first of them."""
        other = self.before or self.request.choice  # pays for the prompt, or has paid
        return len(self.tokens) + (0 if other else self.prompt_tokens)

    def take(self, delta: worker_pb2.TokenDelta, payload: bytes) -> None:
        """Sends one delta on; `payload` is the same, serialized."""
        if self.finished:
            return
        first = not self.tokens
        if delta.token_ids:
            self.tokens.extend(delta.token_ids)
            self._measure(len(delta.token_ids))
            self.draft_tokens += delta.draft_tokens
            self.accepted_tokens += delta.accepted_tokens
        last = delta.finish in _FINAL
        if first or last:
            delta.usage.CopyFrom(self.usage())
            payload = delta.SerializeToString()
        self._call.send(payload)
        if last:
            self.done.set_result(None)
        if len(self.tokens) >= self._awaited:
            self._awaited = math.inf
            self._on_awaited()

    def when(self, tokens: int, callback: Callable[[], None]) -> None:
        """Calls back once, when so many tokens were given out. Replaces an earlier call."""
        self._awaited, self._on_awaited = tokens, callback

    def usage(self) -> common_pb2.Usage:
        """Of the whole request, up to now."""
        return common_pb2.Usage(
            prompt_tokens=self.prompt_tokens - self.before,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.before + len(self.tokens),
        )

    def _measure(self, count: int) -> None:
        now = time.monotonic()
        if self.first_token_s:
            metrics.itl.observe((now - self._last_s) / count)
        else:
            self.first_token_s = now
            if not self.before:
                metrics.ttft.observe(self.ttft_s)
        self._last_s = now
