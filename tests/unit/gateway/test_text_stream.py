"""A stream of text over tokenizers that are lost or drain, and a client that reads or does not."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from protos.common_pb2 import FINISH_STOP, Record, Span, Status, Usage
from protos.tokenizer_pb2 import PromptPlan, PromptRequest, TextDelta
from services.common.errors import PenstockError
from services.common.link import End
from services.gateway.runs.text_stream import MAX_LOSSES, MAX_UNREAD_BYTES, TextStream
from tests.support import gateway_parts
from tests.support.gateway_parts import Opened
from tests.support.waiting import until


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

        outcome = asyncio.ensure_future(ended())
        return SimpleNamespace(outcome=outcome, cancel=lambda: None, settle=lambda: None)


def stream_from(tokenizers: Any) -> TextStream:
    return TextStream(cast(Any, tokenizers), b"", patience_s=0, deadline=0, traceparent="")


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
    (last,) = tokenizers.asked[-1].resume.choices
    assert (list(last.token_ids), last.characters) == ([*range(1, told)], 2 * (told - 1))


async def test_tokenizers_that_drain_are_no_losses() -> None:
    """A rolling restart may pass a long answer on any number of times."""
    stream = stream_from(Tokenizers(*["draining", "peer_lost"] * MAX_LOSSES, "draining", ""))
    await text_of(stream)
    assert stream.finished
    assert len(stream.attempts) == 2 * MAX_LOSSES + 2


async def test_a_single_delta_may_be_large() -> None:
    """As the logprobs of a long prompt are."""
    large = TextDelta(text="x" * (MAX_UNREAD_BYTES + 1), token_ids=[1], finish=FINISH_STOP)

    def script(opened: Opened) -> None:
        opened.say(large)
        opened.finish(End())

    assert len(await text_of(stream_from(gateway_parts.Tokenizers(script)))) == len(large.text)


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
        outcome = asyncio.ensure_future(ended())
        return SimpleNamespace(outcome=outcome, cancel=left.set, settle=lambda: None)

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


async def test_who_reads_slowly_gets_what_came_with_the_end_too() -> None:
    """While the client takes one piece, the rest of its answer and the end arrive."""
    say: list[Callable[[bytes], None]] = []
    over = asyncio.Event()

    def opened(_: bytes, *, on_item: Callable[[bytes], None], **__: Any) -> Any:
        async def ended() -> End:
            await over.wait()
            return End()

        say.append(on_item)
        on_item(TextDelta(text="first").SerializeToString())
        outcome = asyncio.ensure_future(ended())
        return SimpleNamespace(outcome=outcome, cancel=over.set, settle=lambda: None)

    async def pick_least_loaded(patience_s: float) -> Any:
        return SimpleNamespace(id="tokenizer", link=SimpleNamespace(open=opened))

    stream = stream_from(SimpleNamespace(pick_least_loaded=pick_least_loaded))
    batches = stream.batches()
    async with asyncio.timeout(5):
        await anext(batches)
        say[0](TextDelta(text="last", finish=FINISH_STOP).SerializeToString())
        over.set()
        for _ in range(3):  # the end is there, before the next look
            await asyncio.sleep(0)
        assert [[delta.text for delta in batch] async for batch in batches] == [["last"]]
    assert stream.finished


# ---- what is handed on, and when ----------------------------------------------------------------

PLAN = PromptPlan(window=512, user=5)


def lost(reason: str, stage: str = "tokenizer", span: str = "") -> End:
    spans = [Span(service="tokenizer", name=span)] if span else []
    code = grpc.StatusCode.UNAVAILABLE.value[0]
    return End(status=Status(code=code, stage=stage, reason=reason), record=Record(spans=spans))


def begins(opened: Opened) -> None:
    first = TextDelta(text="é\U0001f600", token_ids=[5, 6], plan=PLAN, prompt_digest=b"d")
    first.checkpoint = "c0ffee"
    first.usage.CopyFrom(Usage(prompt_tokens=9, cached_tokens=4))
    guessed = Usage(prompt_tokens=9, cached_tokens=4, draft_tokens=3, accepted_tokens=1)
    opened.say(first, TextDelta(token_ids=[7], usage=guessed))


async def test_another_tokenizer_is_told_all_that_it_has_to_know() -> None:
    def script(opened: Opened) -> None:
        if len(tokenizers.opened) == 1:
            begins(opened)
            opened.finish(lost("peer_lost", span="one"))
        else:
            opened.say(TextDelta(text="!", token_ids=[8], finish=FINISH_STOP))
            opened.finish(End(record=Record(spans=[Span(service="tokenizer", name="two")])))

    tokenizers = gateway_parts.Tokenizers(script)
    stream = TextStream(
        cast(Any, tokenizers),
        PromptRequest(model="m", text="Q").SerializeToString(),
        patience_s=3,
        deadline=99.0,
        traceparent="trace",
    )
    assert await text_of(stream) == "é\U0001f600!"
    first, second = tokenizers.opened
    assert not first.request.HasField("resume")
    resume = second.request.resume
    assert resume.checkpoint == "c0ffee"
    assert (resume.plan, resume.prompt_digest) == (PLAN, b"d")
    (begun,) = resume.choices
    assert (begun.choice, begun.cached_tokens, begun.finished) == (0, 4, False)
    assert (begun.draft_tokens, begun.accepted_tokens) == (3, 1)
    assert (list(begun.token_ids), begun.characters) == ([5, 6, 7], 2)
    for opened in (first, second):
        assert (opened.request.model, opened.request.text) == ("m", "Q")
        assert (opened.deadline, opened.traceparent) == (99.0, "trace")
    assert tokenizers.patience_s == 3
    assert stream.attempts == ["tokenizer-1", "tokenizer-2"]
    assert [span.name for span in stream.record.spans] == ["one", "two"]
    assert (first.settled, second.settled) == (False, True)
    stream.cancel()
    assert second.cancelled


async def test_before_the_first_token_it_begins_anew() -> None:
    stream = stream_from(tokenizers := gateway_parts.Tokenizers())
    tokenizers.script = lambda opened: opened.finish(
        lost("peer_lost") if len(tokenizers.opened) == 1 else End()
    )
    assert await text_of(stream) == ""
    assert not tokenizers.opened[1].request.HasField("resume")
    assert not stream.finished


@pytest.mark.parametrize(
    ("end", "goes_on"),
    [
        (lost("peer_lost"), True),
        (lost("peer_stalled"), True),
        (lost("draining"), True),
        (lost("cannot_resume"), False),
        (lost("no_replica"), False),
        (lost("peer_lost", stage="router"), False),
        (lost("peer_lost", stage="worker"), False),
        (lost("draining", stage="router"), False),
        (End(), False),
    ],
)
async def test_only_a_tokenizers_own_loss_is_made_good(end: End, goes_on: bool) -> None:
    def script(opened: Opened) -> None:
        begins(opened)
        opened.finish(end if len(tokenizers.opened) == 1 else lost("queue_full"))

    stream = stream_from(tokenizers := gateway_parts.Tokenizers(script))
    await text_of(stream)
    assert len(tokenizers.opened) == 1 + goes_on
    assert stream.end.status.reason == ("queue_full" if goes_on else end.status.reason)
    assert not stream.finished


async def test_what_came_before_the_end_is_given_out_in_its_order() -> None:
    def script(opened: Opened) -> None:
        for letter in "abcdef":
            opened.say(TextDelta(text=letter, token_ids=[1]))
        opened.finish(lost("queue_full"))

    stream = stream_from(gateway_parts.Tokenizers(script))
    batches = [batch async for batch in stream.batches()]
    assert all(batches), "none is empty"
    assert "".join(delta.text for batch in batches for delta in batch) == "abcdef"


async def test_a_given_up_stream_leaves_nothing_waiting() -> None:
    stream = stream_from(gateway_parts.Tokenizers(begins))
    stream.cancel()  # nothing is open yet
    before = asyncio.all_tasks()
    batches = stream.batches()
    await anext(batches)
    await batches.aclose()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_nothing_goes_straight_behind_the_end_of_who_reads() -> None:
    opened: list[Opened] = []
    taken: list[list[TextDelta]] = []

    def script(one: Opened) -> None:
        opened.append(one)
        begins(one)

    stream = stream_from(gateway_parts.Tokenizers(script))

    async def read() -> None:
        async for _ in stream.batches():
            stream.straight = lambda: taken.append

    reading = asyncio.create_task(read())
    await until(lambda: stream.straight is not None)
    opened[0].say(TextDelta(text="in time"))
    await until(lambda: len(taken) == 1)
    reading.cancel()
    opened[0].say(TextDelta(text="late"))
    await asyncio.wait([reading])
    await asyncio.sleep(0)
    assert [delta.text for deltas in taken for delta in deltas] == ["in time"]
