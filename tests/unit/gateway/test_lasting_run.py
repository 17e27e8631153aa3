"""A run's own end, against what its last write is told."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from protos.common_pb2 import FINISH_STOP
from protos.runs_pb2 import RunEvent, RunEvents, StoredCaller, StoredPrompt, StoredRun
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from services.common.config import RunsSettings
from services.common.errors import PenstockError
from services.common.redis import Redis
from services.gateway.api.rest.stored_responses import ROUTE
from services.gateway.api.rest.turns import turn_of
from services.gateway.runs.lasting.failures import cancelled, too_large
from services.gateway.runs.lasting.run import Run
from services.gateway.runs.lasting.store import Hold, RunStore
from services.gateway.runs.lasting.stored import begun, failed, text_of
from services.gateway.runs.lasting.takeover import taken_over
from services.gateway.runs.prompt import Answer

PROMPT = StoredPrompt(request=PromptRequest(model="m", text="a"))
STORED = StoredRun(request_id="req_1", caller=StoredCaller(tenant="acme"), prompts=[PROMPT])
PLACE = ("acme", "req_1")
OURS = Hold(*PLACE)
BODY = text_of(STORED)


class Conversations:
    """That note what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, ...]] = []

    async def add(self, tenant: str, id: str, items: Any, models: Any, turn: str) -> None:
        self.added.append((tenant, id, items, models, turn))


@pytest.fixture
def store(redis: Redis, namespace: str) -> Callable[..., RunStore]:
    def made(**settings: Any) -> RunStore:
        return RunStore(redis, namespace, "one", RunsSettings(lease_s=60, **settings))

    return made


@pytest.mark.parametrize("why", ["full", "cancelled"])
async def test_an_answer_whose_last_words_were_not_taken_is_not_told_as_whole(
    store: Callable[..., RunStore], why: str
) -> None:
    one = store(max_bytes_per_tenant=len(BODY) + (100 if why == "full" else 10_000))
    await one.begin(PLACE, BODY, "name", "d")
    run = Run(one, OURS, STORED, [], ending=None, keeps_ids=False)
    if why == "cancelled":
        await one.cancel(PLACE, text_of(RunEvents(events=[failed(cancelled())])))

    async def answers() -> None:
        answer = Answer("req_1", "m", [])
        await run.write(answer, [TextDelta(text="a" * 200)])
        await run.finish([answer], None)

    run.task = asyncio.create_task(answers())
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert run.over == why
    await run.fail(too_large())
    *_, last = (await one.read(PLACE)).events
    assert last.HasField("failed")
    run.close()


async def test_what_is_stored_of_a_run_is_not_kept_as_long_as_its_answer_lasts(
    store: Callable[..., RunStore],
) -> None:
    """Its prompt may be of megabytes, and is in Redis. A turn's is read anew when it is added."""
    one = store()
    parts: Any = SimpleNamespace(runs=SimpleNamespace(store=one), conversations=Conversations())
    for id, conversation in (("req_1", None), ("req_2", {"id": "conv_1"})):
        stored = StoredRun()
        stored.CopyFrom(STORED)
        stored.request_id, stored.route, stored.model = id, ROUTE, "m"
        said = [{"type": "message", "role": "user", "content": "Hello?"}]
        stored.told = json.dumps({"response": {"conversation": conversation}, "input": said})
        hold = Hold("acme", id)
        await one.begin(hold.place, text_of(stored), "", "d")
        before = sys.getrefcount(stored)
        ending = await turn_of(parts, stored)
        run = Run(one, hold, stored, [], ending=ending, keeps_ids=False)
        assert sys.getrefcount(stored) == before
        answer = Answer(id, "m", [])
        await run.write(answer, [TextDelta(text="Hi."), TextDelta(finish=FINISH_STOP)])
        await run.finish([answer], None)
        run.close()
    ((tenant, conversation_id, items, models, turn),) = parts.conversations.added
    assert (tenant, conversation_id, models, turn) == ("acme", "conv_1", {"m"}, "req_2")
    assert [item["content"][0]["text"] for item in items] == ["Hello?", "Hi."]
    await one.drop(("acme", "req_2"))
    assert ending is not None
    assert await ending() == []
    assert len(parts.conversations.added) == 1, "nothing of what was deleted"


@pytest.mark.parametrize(("ids", "anew"), [([7, 8, 9], False), ([7, 8], True), ([], True)])
async def test_tokens_are_gone_on_behind_only_where_all_are_known(
    store: Callable[..., RunStore], ids: list[int], anew: bool
) -> None:
    """Of three owners the second may have had a policy by which it stored none."""
    one, answer = store(), Answer("req_1", "m", [])
    await one.begin(PLACE, BODY, "", "d")
    for seq, (count, its) in enumerate(((2, ids[:2]), (1, ids[2:])), 1):
        told = RunEvent.Delta(delta=TextDelta(text="x" * count, token_ids=[0] * count))
        first = [begun(answer)] if seq == 1 else []
        events = text_of(RunEvents(events=[*first, RunEvent(delta=told)]))
        assert await one.add(OURS, seq, events, {0: its} if its else {}) == "ok"
    run = await taken_over(one, OURS, STORED, ending=None, keeps_ids=True)
    (prompt,) = run._prompts
    assert prompt.so_far is not None
    assert prompt.request.text == "a"
    assert prompt.so_far.anew is anew
    assert [id for delta in prompt.so_far.deltas for id in delta.token_ids] == ([] if anew else ids)


async def test_a_turn_whose_end_was_deleted_before_its_owner_heard_of_it_has_ended(
    store: Callable[..., RunStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis took the end, went away, and was asked again behind the deletion."""
    one = store()
    finish = one.finish

    async def away(*told: Any) -> Any:
        monkeypatch.setattr(one, "finish", finish)
        assert await finish(*told) == "ok"
        await one.drop(PLACE)
        raise ConnectionError

    async def ending() -> list[str]:
        return []

    for its in (ending, None):
        await one.begin(PLACE, BODY, "", "d")
        run = Run(one, OURS, STORED, [], ending=its, keeps_ids=False)
        answer = Answer("req_1", "m", [])
        await run.write(answer, [TextDelta(text="a")])
        monkeypatch.setattr(one, "finish", away)
        monkeypatch.setattr("services.gateway.runs.lasting.run._RETRY_S", 0.0)
        with nullcontext() if its else pytest.raises(PenstockError, match="has the run no more"):
            await run.finish([answer], None)
        run.close()
