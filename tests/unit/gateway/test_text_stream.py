"""A stream of text over tokenizers that are lost or drain, and a client that reads or does not."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from protos.common_pb2 import FINISH_STOP, Status
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.link import End
from services.gateway.text_stream import MAX_LOSSES, MAX_UNREAD_BYTES, TextStream


class Tokenizers:
    """Each request opened tells one piece of text, and ends as the next of `ends` says: by the
    reason why its tokenizer was lost, or well with ""."""

    def __init__(self, *ends: str) -> None:
        self.ends = list(ends)
        self.asked: list[PromptRequest] = []

    async def pick_least_loaded(self, patience_s: float) -> Any:
        return SimpleNamespace(id="tokenizer", link=SimpleNamespace(open=self._open))

    def _open(self, payload: bytes, *, on_item: Callable[[bytes], None], **_: Any) -> Any:
        self.asked.append(PromptRequest.FromString(payload))
        reason = self.ends.pop(0)
        number = len(self.asked)
        finish = {} if reason else {"finish": FINISH_STOP}
        on_item(TextDelta(text=f"{number} ", token_ids=[number], **finish).SerializeToString())

        async def ended() -> End:
            if not reason:
                return End()
            code = grpc.StatusCode.UNAVAILABLE.value[0]
            return End(status=Status(code=code, stage="tokenizer", reason=reason))

        return SimpleNamespace(ended=ended, cancel=lambda: None, settle=lambda: None)


def stream_from(tokenizers: Any) -> TextStream:
    return TextStream(
        cast(Any, tokenizers), PromptRequest(), patience_s=0, deadline=0, traceparent=""
    )


async def text_of(stream: TextStream) -> str:
    async with asyncio.timeout(5):
        return "".join([delta.text async for batch in stream.batches() for delta in batch])


@pytest.mark.parametrize("losses", [MAX_LOSSES, MAX_LOSSES + 1])
async def test_an_answer_outlives_so_many_losses(losses: int) -> None:
    """It may be the request that tokenizers die of."""
    tokenizers = Tokenizers(*["peer_lost"] * losses, "")
    stream = stream_from(tokenizers)
    text = await text_of(stream)
    told = min(losses, MAX_LOSSES) + 1
    assert text == "".join(f"{n} " for n in range(1, told + 1))
    assert stream.finished is (losses <= MAX_LOSSES)
    last = tokenizers.asked[-1].resume
    assert (list(last.token_ids), last.characters) == ([*range(1, told)], 2 * (told - 1))


async def test_tokenizers_that_drain_are_no_losses() -> None:
    """A rolling restart may pass a long answer on any number of times."""
    stream = stream_from(Tokenizers(*["draining", "peer_lost"] * MAX_LOSSES, "draining", ""))
    await text_of(stream)
    assert stream.finished
    assert len(stream.attempts) == 2 * MAX_LOSSES + 2


@pytest.mark.parametrize("reads", [True, False])
async def test_only_what_waits_unread_counts_as_unread(reads: bool) -> None:
    pieces, left = 8, asyncio.Event()
    payload = TextDelta(text="x" * (MAX_UNREAD_BYTES // 4)).SerializeToString()
    say: list[Callable[[bytes], None]] = []

    def opened(_: bytes, *, on_item: Callable[[bytes], None], **__: Any) -> Any:
        async def ended() -> End:
            await left.wait()
            return End()

        say.append(on_item)
        on_item(payload)
        return SimpleNamespace(ended=ended, cancel=left.set, settle=lambda: None)

    async def pick_least_loaded(patience_s: float) -> Any:
        return SimpleNamespace(id="tokenizer", link=SimpleNamespace(open=opened))

    batches = stream_from(SimpleNamespace(pick_least_loaded=pick_least_loaded)).batches()
    async with asyncio.timeout(5):
        await anext(batches)
        for _ in range(pieces):
            say[0](payload)
            if reads:
                assert len(await anext(batches)) == 1
        assert left.is_set() is not reads
        left.set()
        if reads:
            assert [batch async for batch in batches] == []
        else:
            with pytest.raises(PenstockError, match="did not read"):
                _ = [batch async for batch in batches]
