"""Batches through the official client: real gateways, a scripted tokenizer."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import openai
import pytest

from protos.tokenizer_pb2 import PromptRequest
from services.common.config import JobsSettings, MeteringSettings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.link import LinkCall
from services.common.text.content import text_of
from services.gateway.identity.limits import Limit
from services.gateway.identity.tenants import TenantStore
from services.gateway.jobs.queue import Queue
from services.gateway.metering.ledger import Ledger
from tests.support.another_gateway import another_gateway
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
PRICES = {MODEL: {"prompt": 2, "output": 10, "tiers": {"low": {"prompt": 1, "output": 5}}}}


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    jobs = JobsSettings(lease_s=1.0, backoff_s=0.02, tries=3, max_lines=300, max_unfinished=2)
    metering = MeteringSettings(prices=PRICES)  # type: ignore[arg-type]
    async with gateway_rig(redis_url, namespace, jobs=jobs, metering=metering) as rig:
        rig.tokenizer.script = echo
        yield rig


def asked(request: PromptRequest) -> str:
    return text_of(request.chat.messages[0])


async def echo(call: LinkCall, request: PromptRequest) -> None:
    send(call, asked(request), plan=plan(request))
    finish(call, 1)


class Gated:
    """Echoes what a test lets through; `begun` counts how often each was asked."""

    def __init__(self, rig: Rig) -> None:
        self.may = asyncio.Semaphore(0)
        self.begun: Counter[str] = Counter()
        rig.tokenizer.script = self

    async def __call__(self, call: LinkCall, request: PromptRequest) -> None:
        self.begun[asked(request)] += 1
        await self.may.acquire()
        await echo(call, request)

    def go(self, count: int = 1000) -> None:
        for _ in range(count):
            self.may.release()


def line(id: str, body: dict[str, Any] | None = None, url: str = CHAT, **more: Any) -> str:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": id}]}
    return json.dumps(
        {"custom_id": id, "method": "POST", "url": url, "body": body or chat, **more},
        ensure_ascii=False,
    )


class Desk:
    """One tenant's client, and what it does all the time."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI) -> None:
        self.rig = rig
        self.client = client

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None) -> "Desk":
        return cls(rig, await rig.openai(key))

    async def begin(self, *lines: str, endpoint: Any = CHAT, window: Any = "24h") -> Any:
        text = "\n".join(lines)
        file = await self.client.files.create(file=("b.jsonl", text.encode()), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window=window,
            metadata={"for": "test"},
        )

    async def ended(self, id: str, within_s: float = 20) -> Any:
        found: list[Any] = []

        async def over() -> bool:
            found[:] = [await self.client.batches.retrieve(id)]
            return found[0].status in ("completed", "failed", "expired", "cancelled")

        await until(over, within_s, "the batch ends")
        return found[0]

    async def reads(self, file: str | None) -> dict[str, Any]:
        """The lines of a file by their custom ids, each of which is there once."""
        if file is None:
            return {}
        lines = (await self.client.files.content(file)).text.splitlines()
        told = [json.loads(line) for line in lines]
        by_id = {one["custom_id"]: one for one in told}
        assert len(by_id) == len(told)
        return by_id


async def nothing_left(rig: Rig, unfinished: int = 0) -> None:
    """Of what is over, nor of what was refused: each other batch waits for its expiry."""

    async def gone() -> bool:
        keys = [key async for key in rig.redis.scan_iter(f"{rig.settings.namespace}:*:todo:line:*")]
        control = Queue("batch", "acme", "control")
        return not keys and await rig.gateway.jobs.queues.size(control) == unfinished

    await until(gone, 10, "nothing is left")


@pytest.mark.parametrize("after", ["stop", "finish", "add"])
async def test_a_gateway_that_is_lost_between_two_writes_leaves_nothing_undone(
    rig: Rig, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as Redis can tell, an exception behind a write is a kill there."""
    gated, desk = Gated(rig), await Desk.of(rig)
    made = await desk.begin(*(line(str(n)) for n in range(20)))
    await until(lambda: gated.begun.total() > 0, 10)
    what = rig.gateway.jobs.queues if after == "add" else rig.gateway.batches.store
    write, lost = getattr(what, after), [0]

    async def lost_once(*args: Any) -> Any:
        result = await write(*args)
        lost[0] += 1
        if lost[0] == 1:
            raise ValueError
        return result

    monkeypatch.setattr(what, after, lost_once)
    once = desk.client.with_options(max_retries=0)
    with suppress(openai.InternalServerError):
        await once.batches.cancel(made.id)
    assert lost == [1] or after == "finish"

    async def stopped() -> bool:
        return bool((await desk.client.batches.retrieve(made.id)).status == "cancelling")

    await until(stopped, 10, "its cancel is not lost")
    gated.go()
    batch = await desk.ended(made.id)
    assert batch.status == "cancelled"
    counts = batch.request_counts
    assert counts.completed + counts.failed == 20
    assert lost[0] > 0
    await nothing_left(rig)


async def charged(rig: Rig) -> Counter[str]:
    """Output tokens by request, from the ledger."""
    total: Counter[str] = Counter()
    async for entry in Ledger(rig.redis, rig.settings.namespace).entries():
        total[entry.id] += entry.output
    return total


async def test_a_batch_is_answered_line_by_line(rig: Rig) -> None:
    desk = await Desk.of(rig)
    words = [f"wörd {n}" for n in range(20)]
    bad = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "x": 1}
    made = await desk.begin(*map(line, words), "", line("bad", bad), line("none", {"model": "no"}))
    assert made.status in ("validating", "in_progress")
    assert (made.endpoint, made.completion_window, made.metadata) == (CHAT, "24h", {"for": "test"})
    assert made.expires_at == made.created_at + 86_400
    batch = await desk.ended(made.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
    assert made.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at

    output = await desk.reads(batch.output_file_id)
    assert set(output) == set(words)
    for word, told in output.items():
        assert told["error"] is None
        assert told["response"]["status_code"] == 200
        body = told["response"]["body"]
        assert body["choices"][0]["message"]["content"] == word
        record = await rig.record(told["response"]["request_id"])
        assert record["status"] == "ok"
    errors = await desk.reads(batch.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["code"] == "unknown_parameter"
    assert set(errors) == {"bad", "none"}

    entries = [e async for e in Ledger(rig.redis, rig.settings.namespace).entries()]
    mine = [entry for entry in entries if entry.status == "ok"]
    assert {entry.id for entry in mine} == {o["response"]["request_id"] for o in output.values()}
    assert {entry.tier for entry in mine} == {"low"}
    seeds = {request.sampling.seed for request in rig.tokenizer.requests}
    assert len(seeds) == len(words)
    listed = [one.id async for one in desk.client.batches.list(limit=1)]
    assert listed == [made.id]
    file = await desk.client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{made.id}_output.jsonl")
    await desk.client.files.delete(batch.output_file_id)
    await desk.client.files.delete(batch.input_file_id)
    assert [f.id async for f in desk.client.files.list()] == [batch.error_file_id]


@pytest.mark.parametrize(
    ("endpoint", "body", "told"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "p"}, "text_completion"),
        ("/v1/embeddings", {"model": EMBEDDING_MODEL, "input": "p"}, "list"),
        ("/v1/responses", {"model": MODEL, "input": "p", "store": False}, "response"),
    ],
)
async def test_other_endpoints(rig: Rig, endpoint: str, body: dict[str, Any], told: str) -> None:
    async def script(call: LinkCall, request: PromptRequest) -> None:
        send(call, "Well", plan=plan(request))
        finish(call, 1)

    rig.tokenizer.script = script
    desk = await Desk.of(rig)
    batch = await desk.begin(line("a", body, endpoint), endpoint=endpoint)
    batch = await desk.ended(batch.id)
    output = await desk.reads(batch.output_file_id)
    assert output["a"]["response"]["body"]["object"] == told, await desk.reads(batch.error_file_id)


@pytest.mark.parametrize(
    ("second", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/embeddings"), "mismatched_url", "url"),
        (json.dumps({"custom_id": "b"}), "missing_required_parameter", "body"),
        (line("b", extra=1), "unknown_parameter", "extra"),
        (line("b", {"model": MODEL, "stream": True}), "unsupported_parameter", "body.stream"),
    ],
)
async def test_a_bad_file_fails_with_its_line(
    rig: Rig, second: str, code: str, param: str | None
) -> None:
    desk = await Desk.of(rig)
    batch = await desk.ended((await desk.begin(line("a"), "", second)).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    (fault,) = batch.errors.data
    assert (fault.code, fault.param, fault.line) == (code, param, 3)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert rig.tokenizer.requests == []


async def test_a_batch_whose_input_is_deleted_as_it_begins_fails_by_its_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, files = await Desk.of(rig), rig.gateway.files
    read = files.content

    async def deleted_first(tenant: str, id: str) -> bytes:
        await files.delete(tenant, id)
        return await read(tenant, id)

    monkeypatch.setattr(files, "content", deleted_first)
    batch = await desk.ended((await desk.begin(line("a"))).id)
    (fault,) = batch.errors.data
    assert (batch.status, fault.code) == ("failed", "file_not_found")
    assert (fault.param, fault.line) == ("input_file_id", None)
    assert batch.input_file_id in fault.message


async def test_what_is_refused_is_refused_by_name(rig: Rig) -> None:
    desk = await Desk.of(rig)
    gated = Gated(rig)
    http = await rig.http()
    text = await desk.client.files.create(file=("a.txt", b"x"), purpose="assistants")
    good = {"input_file_id": text.id, "endpoint": CHAT, "completion_window": "24h"}

    async def refused(**changes: Any) -> tuple[int, Any, Any]:
        answer = await http.post("/v1/batches", json={**good, **changes})
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["code"]

    assert await refused() == (400, "input_file_id", "wrong_purpose")
    none = "file-" + 30 * "0"
    assert await refused(input_file_id=none) == (404, "input_file_id", "not_found")
    assert await refused(endpoint="/v1/score") == (400, "endpoint", "unsupported_value")
    assert (await refused(completion_window="8d"))[:2] == (400, "completion_window")
    assert (await refused(completion_window="soon"))[:2] == (400, "completion_window")
    assert await refused(model="x") == (400, "model", "unknown_parameter")
    with pytest.raises(openai.BadRequestError, match="jsonl"):
        await desk.client.files.create(file=("b.txt", b"{}"), purpose="batch")

    first = await desk.begin(line("a"))
    with pytest.raises(openai.ConflictError) as used:
        await desk.client.with_options(max_retries=0).files.delete(first.input_file_id)
    assert used.value.code == "file_in_use"
    await desk.begin(line("b"))
    with pytest.raises(openai.RateLimitError) as full:
        await Desk(rig, desk.client.with_options(max_retries=0)).begin(line("c"))
    assert full.value.code == "too_many_batches"
    store = await desk.client.vector_stores.create(name="s")
    with pytest.raises(openai.BadRequestError) as wrong:
        await desk.client.vector_stores.files.create(store.id, file_id=first.input_file_id)
    assert wrong.value.code == "wrong_purpose"
    gated.go()
    await desk.ended(first.id)
    long = await desk.ended((await desk.begin(*(line(str(n)) for n in range(301)))).id)
    assert long.errors.data[0].code == "too_many_requests"
    await nothing_left(rig)


async def test_answers_have_their_places_among_the_files(redis_url: str, namespace: str) -> None:
    """One input made as many files of answers as there were batches of it, in Redis."""
    async with gateway_rig(redis_url, namespace, max_files=2) as rig:
        rig.tokenizer.script = echo
        desk = await Desk.of(rig)
        first = await desk.ended((await desk.begin(line("a"))).id)
        assert first.output_file_id
        again = {"endpoint": CHAT, "completion_window": "24h"}
        http = await rig.http()
        full = await http.post("/v1/batches", json={"input_file_id": first.input_file_id, **again})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_files")
        await desk.client.files.delete(first.output_file_id)
        made = await http.post("/v1/batches", json={"input_file_id": first.input_file_id, **again})
        assert (await desk.ended(made.json()["id"])).status == "completed"


async def test_another_tenant_sees_nothing_of_it(rig: Rig) -> None:
    desk = await Desk.of(rig)
    rival = await Desk.of(rig, (await rig.keys.create("rival"))[0])
    batch = await desk.ended((await desk.begin(line("a"))).id)
    assert [one.id async for one in rival.client.batches.list()] == []
    for call in (rival.client.batches.retrieve, rival.client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(batch.id)
    for file in (batch.output_file_id, batch.input_file_id):
        with pytest.raises(openai.NotFoundError):
            await rival.client.files.content(file)
    with pytest.raises(openai.NotFoundError):
        await rival.client.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        )


async def test_what_runs_when_a_batch_is_cancelled_ends(rig: Rig) -> None:
    gated, desk = Gated(rig), await Desk.of(rig)
    made = await desk.begin(*(line(str(n)) for n in range(50)))
    await until(lambda: gated.begun.total() > 0, 10)
    gated.go(3)
    await until(lambda: gated.begun.total() > 3, 10)
    cancelled = await desk.client.batches.cancel(made.id)
    assert cancelled.status == "cancelling"
    assert cancelled.cancelling_at is not None
    gated.go()
    batch = await desk.ended(made.id)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    output, errors = (
        await desk.reads(batch.output_file_id),
        await desk.reads(batch.error_file_id),
    )
    assert len(output) == gated.begun.total() < 50
    assert set(output) | set(errors) == {str(n) for n in range(50)}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (50, len(output), len(errors))
    assert (await charged(rig)).total() == len(output)
    with pytest.raises(openai.BadRequestError) as ended:
        await desk.client.batches.cancel(made.id)
    assert ended.value.code == "batch_ended"


async def test_a_batch_expires_with_what_it_has(rig: Rig) -> None:
    gated, desk = Gated(rig), await Desk.of(rig)
    gated.go(2)
    made = await desk.begin(*(line(str(n)) for n in range(20)), window="1s")
    status: list[str] = []

    async def stopped() -> bool:
        status[:] = [(await desk.client.batches.retrieve(made.id)).status]
        return status[0] not in ("validating", "in_progress")

    await until(stopped, 15, "its time is over")
    assert status == ["finalizing"], "what runs is waited for"
    gated.go()
    batch = await desk.ended(made.id)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    output = await desk.reads(batch.output_file_id)
    errors = await desk.reads(batch.error_file_id)
    assert 2 <= len(output) == gated.begun.total()
    assert set(output) | set(errors) == {str(n) for n in range(20)}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert all(one["response"] is None for one in errors.values())


@pytest.mark.parametrize("how", ["revoked", "suspended"])
async def test_who_may_no_longer_ends_his_batch(rig: Rig, how: str) -> None:
    tenants = TenantStore(rig.redis, rig.settings.namespace)
    await tenants.add("acme")
    key, record = await rig.keys.create("acme")
    gated, other = Gated(rig), await Desk.of(rig)
    made = await (await Desk.of(rig, key)).begin(*(line(str(n)) for n in range(20)))
    await until(lambda: gated.begun.total() == 1, 10)
    if how == "revoked":
        await rig.keys.revoke(record.id)
    else:
        await tenants.change("acme", "suspend", lambda _: {"suspended": 1})
    gated.go()
    store = rig.gateway.batches.store
    await until(lambda: _ended(store, made.id), 20)
    batch = (await store.find("acme", made.id)).as_json()
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "invalid_api_key"
    assert batch["request_counts"] == {"total": 20, "completed": 1, "failed": 19}
    assert gated.begun.total() == 1
    if how == "revoked":
        assert len(await other.reads(batch["output_file_id"])) == 1


async def _ended(store: Any, id: str) -> bool:
    return bool((await store.find("acme", id)).ended)


async def test_what_fails_by_the_platforms_fault_is_tried_again_and_then_dead(rig: Rig) -> None:
    tried: Counter[str] = Counter()

    async def script(call: LinkCall, request: PromptRequest) -> None:
        word = asked(request)
        tried[word] += 1
        if word == "deadly":
            raise unavailable("it died", stage="worker", reason="engine_died", retry_after_s=0.02)
        if word == "broken" or (word == "shaky" and tried[word] == 1):
            raise PenstockError(grpc.StatusCode.INTERNAL, "out of order", stage="worker")
        if word == "away" and tried[word] <= 5:
            raise unavailable("no worker", stage="router", reason="no_worker", retry_after_s=0.02)
        if word == "wrong":
            raise invalid("too long", "messages", stage="tokenizer", reason="too_long")
        await echo(call, request)

    rig.tokenizer.script = script
    desk = await Desk.of(rig)
    words = ("fine", "broken", "shaky", "away", "wrong", "deadly")
    batch = await desk.ended((await desk.begin(*map(line, words))).id, 30)
    assert batch.status == "completed"
    assert set(await desk.reads(batch.output_file_id)) == {"fine", "shaky", "away"}
    errors = await desk.reads(batch.error_file_id)
    assert errors["wrong"]["response"]["body"]["error"]["code"] == "too_long"
    assert errors["broken"]["response"] is None
    assert "out of order" in errors["broken"]["error"]["message"]
    assert tried == {"fine": 1, "broken": 3, "shaky": 2, "away": 6, "wrong": 1, "deadly": 3}
    dead = await rig.gateway.jobs.queues.dead(10)
    assert {one.as_told()["queue"] for one in dead} == {batch.id}
    assert {(one.queue.tenant, one.queue.name) for one in dead} == {("acme", batch.id)}
    assert sorted(one.why.partition(": ")[2] for one in dead) == ["it died", "out of order"]
    assert (await charged(rig)).total() == 3


async def test_a_limit_holds_a_batch_back_and_loses_nothing(rig: Rig) -> None:
    limit = Limit(name="few", of="concurrent", most=1)
    key, _ = await rig.keys.create("bounded", limits=[limit])
    running, most = [0], [0]

    async def script(call: LinkCall, request: PromptRequest) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        await echo(call, request)

    rig.tokenizer.script = script
    desk = await Desk.of(rig, key)
    batch = await desk.ended((await desk.begin(*(line(str(n)) for n in range(5)))).id, 30)
    assert (batch.status, batch.request_counts.completed, most[0]) == ("completed", 5, 1)


async def test_a_killed_gateways_lines_are_answered_once(rig: Rig) -> None:
    """Another gateway takes them over; nothing is answered or charged twice."""
    gated = Gated(rig)
    desk = await Desk.of(rig)
    count = 60
    async with another_gateway(rig) as other:
        theirs = Desk(rig, desk.client.with_options(base_url=f"{other.url}/v1"))
        rig.gateway.jobs._stopping = True  # it begins none: the other has them all
        made = await theirs.begin(*(line(str(n)) for n in range(count)))
        gated.go(10)
        await until(lambda: gated.begun.total() > 10, 20)
        in_the_middle = gated.begun.total()
        assert in_the_middle < count
        await other.kill()
    rig.gateway.jobs._stopping = False
    gated.go()
    batch = await desk.ended(made.id, 30)
    assert (batch.status, batch.request_counts.completed) == ("completed", count)
    output = await desk.reads(batch.output_file_id)
    assert set(output) == {str(n) for n in range(count)}
    assert gated.begun.total() > count, "some were computed twice"
    ids = {one["response"]["request_id"] for one in output.values()}

    async def settled() -> bool:
        return await charged(rig) == Counter(dict.fromkeys(ids, 1))

    await until(settled, 30, "the ledger is what was answered")


async def test_a_batch_outlives_a_restart_of_everything(rig: Rig) -> None:
    """Shut down in the middle: what runs is handed over at once, and done again."""
    gated, desk = Gated(rig), await Desk.of(rig)
    made = await desk.begin(*(line(str(n)) for n in range(8)))
    await until(lambda: gated.begun.total() >= 1, 10)
    await rig.host.stop(0)
    began = time.monotonic()
    gated.go()
    async with another_gateway(rig) as other:
        client = desk.client.with_options(base_url=f"{other.url}/v1")
        batch = await Desk(rig, client).ended(made.id, 30)
        assert (batch.status, batch.request_counts.completed) == ("completed", 8)
    assert time.monotonic() - began < 30
    assert (await charged(rig)).total() == 8
