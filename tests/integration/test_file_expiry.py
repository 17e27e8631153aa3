"""Files that expire, by OpenAI's own client: gone at their time, whatever held them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import openai
import pytest

from protos.common_pb2 import Caller
from protos.tokenizer_pb2 import PromptRequest
from services.common.config import JobsSettings
from services.common.errors import unavailable
from services.common.link import LinkCall
from services.gateway.api.resources.files import delete_unused
from services.gateway.stores.files import file_expiry
from services.gateway.stores.files.file_expiry import FileExpiry
from tests.support.gateway_rig import MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.waiting import until

HOUR: Any = {"anchor": "created_at", "seconds": 3600}
QUESTION = "When does the harbour open?"
CHAT: Any = "/v1/chat/completions"


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace, jobs=JobsSettings(lease_s=1.0)) as rig:
        yield rig


class Clock:
    """What has expired goes when a test says so; `failing`: what cannot be deleted."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.failing: set[str] = set()
        files = rig.gateway.files
        self.look = FileExpiry(rig.redis, rig.settings.namespace, files, self._delete).look

    async def _delete(self, caller: Caller, id: str) -> None:
        if id in self.failing:
            raise unavailable("retrieval is away", stage="gateway", reason="retrieval_unavailable")
        await delete_unused(self.rig.gateway, caller, id)

    async def strikes(self, *ids: str) -> None:
        """Their time has come."""
        root, now = f"{self.rig.settings.namespace}:{{files}}", int(time.time())
        for id in ids:
            record = json.loads(await self.rig.redis.hget(f"{root}:acme:index", id))
            record["expires_at"] = now
            await self.rig.redis.hset(f"{root}:acme:index", id, json.dumps(record))
        await self.due(*ids)

    async def due(self, *ids: str) -> None:
        """To be looked at now, even if put off."""
        names = {f"acme {id}": time.time() for id in ids}
        await self.rig.redis.zadd(
            f"{self.rig.settings.namespace}:{{files}}:expiring", names, xx=True
        )

    async def is_gone(self, id: str) -> bool:
        """Its record, its bytes, and what expires."""
        rig, key = self.rig, self.rig.gateway.files._blobs.key("acme", id)
        blobs = [blob.key async for blob in rig.gateway.files._blobs.all()]
        root = f"{rig.settings.namespace}:{{files}}"
        expiring = await rig.redis.zscore(f"{root}:expiring", f"acme {id}")
        record = await rig.redis.hexists(f"{root}:acme:index", id)
        return not record and key not in blobs and expiring is None


async def refusal(call: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.param  # type: ignore[attr-defined]


async def upload(client: openai.AsyncOpenAI, name: str = "a.md", **more: Any) -> Any:
    told: dict[str, Any] = {"purpose": "assistants", "expires_after": HOUR, **more}
    return await client.files.create(file=(name, b"The harbour opens."), **told)


async def test_a_file_that_has_expired_is_gone_from_all_that_held_it(rig: Rig) -> None:
    client, clock = await rig.openai(), Clock(rig)
    files, stores = client.files, client.vector_stores
    made = await upload(client)
    assert made.expires_at == made.created_at + 3600
    assert (await files.retrieve(made.id)).expires_at == made.expires_at
    stays = await upload(client, expires_after=openai.omit)
    assert stays.expires_at is None
    store, other = [await stores.create(name=name) for name in "so"]
    for one in (store, other):
        for file in (made, stays):
            await stores.files.create_and_poll(file.id, vector_store_id=one.id)
    await clock.look()
    assert len((await stores.search(store.id, query=QUESTION)).data) == 2, "it is not its time"

    await clock.strikes(made.id)
    for call in (files.retrieve(made.id), files.content(made.id), files.delete(made.id)):
        assert (await refusal(call))[0] == 404
    assert [one.id async for one in files.list()] == [stays.id]
    assert await refusal(stores.files.create(store.id, file_id=made.id)) == (404, "file_id")
    text = stores.files.content(made.id, vector_store_id=store.id)
    assert (await refusal(text))[0] == 404
    await clock.look()
    for one in (store, other):
        assert [file.id async for file in stores.files.list(one.id)] == [stays.id]
        (found,) = (await stores.search(one.id, query=QUESTION)).data
        assert found.file_id == stays.id
    assert await clock.is_gone(made.id)
    assert (await files.content(stays.id)).content == b"The harbour opens."
    assert await rig.gateway.files.stores_of("acme", made.id) == set()


async def test_a_file_that_is_deleted_has_no_time_any_more(rig: Rig) -> None:
    client, clock = await rig.openai(), Clock(rig)
    made = await upload(client)
    await client.files.delete(made.id)
    assert await clock.is_gone(made.id)


async def test_what_cannot_be_deleted_holds_up_no_other_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_expiry, "_AT_ONCE", 1)
    client, clock = await rig.openai(), Clock(rig)
    first, second = await upload(client), await upload(client)
    clock.failing.add(first.id)
    await clock.strikes(first.id, second.id)
    await clock.look()
    assert (await clock.is_gone(first.id), await clock.is_gone(second.id)) == (False, True)
    assert await rig.gateway.files.expired(9) == [], "it is put off"
    assert (await refusal(client.files.retrieve(first.id)))[0] == 404
    clock.failing.clear()
    await clock.due(first.id)
    await clock.look()
    assert await clock.is_gone(first.id)


async def test_a_batch_reads_its_input_to_the_end_and_its_answers_expire(rig: Rig) -> None:
    client, clock = await rig.openai(), Clock(rig)
    may = asyncio.Event()

    async def held(call: LinkCall, request: PromptRequest) -> None:
        await may.wait()
        send(call, "yes", plan=plan(request))
        finish(call, 1)

    rig.tokenizer.script = held
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT, "body": body})
        for n in range(3)
    ]
    input = await client.files.create(
        file=("b.jsonl", "\n".join(lines).encode()), purpose="batch", expires_after=HOUR
    )
    about: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await client.batches.create(input_file_id=input.id, output_expires_after=HOUR, **about)
    await clock.strikes(input.id)
    await clock.look()
    assert (await refusal(client.files.retrieve(input.id)))[0] == 404
    another = client.batches.create(input_file_id=input.id, **about)
    assert await refusal(another) == (404, "input_file_id")
    may.set()

    async def ended() -> bool:
        return (await client.batches.retrieve(batch.id)).status == "completed"

    await until(ended, 20, "the batch ends")
    batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 3
    await clock.due(input.id)
    await clock.look()
    assert await clock.is_gone(input.id)

    assert batch.output_file_id is not None
    output = await client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600
    assert len((await client.files.content(output.id)).text.splitlines()) == 3
    await clock.strikes(output.id)
    assert (await refusal(client.files.content(output.id)))[0] == 404
    await clock.look()
    assert await clock.is_gone(output.id)


async def test_a_gateway_looks_again_and_again_whatever_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, clock, looks = await rig.openai(), Clock(rig), 0
    monkeypatch.setattr(file_expiry, "_EVERY_S", 0.01)

    async def set_turn(*args: Any, **more: Any) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise ValueError("nobody foresaw it")
        return True

    redis: Any = type("Turns", (), {"set": staticmethod(set_turn)})
    delete = partial(delete_unused, rig.gateway)
    expiry = FileExpiry(redis, rig.settings.namespace, rig.gateway.files, delete)
    expiry.start()
    await until(lambda: looks > 2, 10, "it goes on")
    made = await upload(client)
    await clock.strikes(made.id)
    await until(lambda: clock.is_gone(made.id), 10, "it is gone")
    await expiry.stop()


@pytest.mark.parametrize(
    ("age", "param"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "expires_after.seconds"),
        ({"anchor": "last_active_at", "seconds": 3600}, "expires_after.anchor"),
        ({"seconds": 3600}, "expires_after.anchor"),
    ],
)
async def test_a_time_that_is_none_is_refused_by_its_field(rig: Rig, age: Any, param: str) -> None:
    client = await rig.openai()
    assert await refusal(upload(client, expires_after=age)) == (400, param)
    assert [one.id async for one in client.files.list()] == []
    about: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": "file-0"}
    batch = client.batches.create(**about, output_expires_after=age)
    assert await refusal(batch) == (400, "output_" + param)
