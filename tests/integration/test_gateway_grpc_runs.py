"""Answers over gRPC that outlive their calls: asked for again, followed, cancelled, deleted."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos import gateway_pb2 as pb
from protos.common_pb2 import FINISH_STOP
from protos.gateway_pb2_grpc import InferenceStub, RunsStub
from services.common.config import MeteringSettings, RunsSettings
from services.common.text.content import said
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.stories import TEXT, WORDS, Story, calls_a_tool
from tests.support.waiting import until

CODE = grpc.StatusCode
ASK = pb.ChatRequest(model=MODEL, messages=[said("user", "Well?")])
PRICES = {MODEL: {"prompt": 2, "output": 10}}


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    metering = MeteringSettings(prices=PRICES)  # type: ignore[arg-type]
    runs = RunsSettings(lease_s=1.0)
    async with gateway_rig(redis_url, namespace, metering=metering, runs=runs) as rig:
        yield rig


class Desk:
    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self.inference = InferenceStub(channel)
        self.runs = RunsStub(channel)
        self.own = (("authorization", f"Bearer {key}"),)

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None) -> "Desk":
        return cls(await rig.channel(), key or rig.key)

    async def begin(self, story: Story, key: str = "k") -> str:
        """A chat of which two words were said, and which nobody listens to any more; its id."""
        story.go(2)
        call = self.inference.Chat(ASK, metadata=(*self.own, ("idempotency-key", key)))
        text = ""
        async for event in call:
            text += event.text
            if text == "".join(WORDS[:2]):
                break
        id = dict(await call.initial_metadata())["x-request-id"]
        call.cancel()
        return str(id)

    async def get(self, id: str) -> pb.PublicRun:
        run: pb.PublicRun = await self.runs.GetRun(pb.GetRunRequest(run_id=id), metadata=self.own)
        return run

    async def follow(self, id: str, after: int = 0) -> list[pb.GenerateEvent]:
        request = pb.FollowRunRequest(run_id=id, starting_after=after)
        call = self.runs.FollowRun(request, metadata=self.own, timeout=30)
        return [event async for event in call]


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), str(dict(raised.value.trailing_metadata() or ()).get("x-param", ""))


async def test_a_run_is_told_as_far_as_it_is_and_to_its_end(rig: Rig) -> None:
    story, desk = Story(rig), await Desk.of(rig)
    id = await desk.begin(story)
    run = await desk.get(id)
    assert (run.id, run.model, run.status) == (id, MODEL, "in_progress")
    (choice,) = run.choices
    assert (choice.text, choice.finish) == ("".join(WORDS[:2]), 0)
    assert choice.plan.window == 512
    story.go()
    events = await desk.follow(id)
    assert "".join(event.text for event in events) == TEXT
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert await desk.follow(id, 3) == events[3:]
    assert await desk.follow(id, len(events)) == []
    assert await refused(desk.follow(id, len(events) + 1)) == (
        CODE.INVALID_ARGUMENT,
        "starting_after",
    )
    whole = await desk.get(id)
    (choice,) = whole.choices
    assert (whole.status, choice.text, choice.finish) == ("completed", TEXT, FINISH_STOP)
    assert choice.usage == events[-1].usage
    assert choice.cost == events[-1].cost
    retried = desk.inference.Chat(ASK, metadata=(*desk.own, ("idempotency-key", "k")))
    assert [event async for event in retried] == events
    assert len(story.resumed) == 1


async def test_a_run_is_cancelled_and_deleted(rig: Rig) -> None:
    story, desk = Story(rig), await Desk.of(rig)
    id = await desk.begin(story)
    run = await desk.runs.CancelRun(pb.CancelRunRequest(run_id=id), metadata=desk.own)
    assert (run.status, run.error.code) == ("cancelled", "cancelled")
    assert run.choices[0].text == "".join(WORDS[:2])
    await until(lambda: rig.tokenizer.cancelled == 1, 10)
    again = await desk.runs.CancelRun(pb.CancelRunRequest(run_id=id), metadata=desk.own)
    assert again == run
    assert (await refused(desk.follow(id)))[0] is CODE.CANCELLED
    gone = await desk.runs.DeleteRun(pb.DeleteRunRequest(run_id=id), metadata=desk.own)
    assert (gone.id, gone.deleted) == (id, True)
    for call in (
        desk.get(id),
        desk.follow(id),
        desk.runs.DeleteRun(pb.DeleteRunRequest(run_id=id), metadata=desk.own),
    ):
        assert await refused(call) == (CODE.NOT_FOUND, "run_id")
    assert await refused(desk.get("")) == (CODE.INVALID_ARGUMENT, "run_id")


async def test_a_run_is_its_tenants_and_grpcs(rig: Rig) -> None:
    story, desk = Story(rig), await Desk.of(rig)
    story.go()
    id = await desk.begin(story)
    theirs = await Desk.of(rig, (await rig.keys.create("globex"))[0])
    assert (await refused(theirs.get(id)))[0] is CODE.NOT_FOUND
    other = await Desk.of(rig, (await rig.keys.create("acme", models=["other"]))[0])
    assert (await refused(other.get(id)))[0] is CODE.PERMISSION_DENIED
    http, body = await rig.http(), {"model": MODEL, "messages": [{"role": "user", "content": "?"}]}
    story.go()
    answer = await http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "rest"})
    rests = answer.headers["x-request-id"]
    assert (await refused(desk.get(rests)))[0] is CODE.NOT_FOUND
    assert (await http.get(f"/v1/chat/completions/{id}")).status_code == 404


async def test_calls_of_tools_are_told_whole(rig: Rig) -> None:
    desk = await Desk.of(rig)
    rig.tokenizer.script = calls_a_tool
    call = desk.inference.Chat(ASK, metadata=(*desk.own, ("idempotency-key", "k")))
    events = [event async for event in call]
    id = dict(await call.initial_metadata())["x-request-id"]
    (choice,) = (await desk.get(id)).choices
    pieces = [piece for event in events for piece in event.tool_calls]
    assert [one.name for one in choice.tool_calls] == [one.name for one in pieces if one.name]
    assert choice.tool_calls[0].arguments == "".join(one.arguments for one in pieces)
    assert choice.reasoning == "".join(event.reasoning for event in events)
