"""Files in vector stores: what is told of those not ready, what stays of those taken out."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import openai
import pytest

from protos import gateway_pb2_grpc
from protos.gateway_pb2 import ChatRequest
from services.common.config import JobsSettings
from services.common.errors import PenstockError, invalid, unavailable
from services.common.text.content import said
from services.gateway.metering.ledger import Ledger
from services.gateway.server import GatewayService
from tests.support.another_gateway import another_gateway
from tests.support.gateway_rig import MODEL, Rig, gateway_rig
from tests.support.waiting import until

QUESTION = [{"role": "user", "content": "When does the harbour open?"}]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    jobs = JobsSettings(lease_s=1.0)
    async with gateway_rig(redis_url, namespace, max_upload_bytes=2000, jobs=jobs) as rig:
        yield rig


class Shelf:
    """A vector store, through the official client."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI, id: str) -> None:
        self.rig = rig
        self.client = client
        self.id = id

    @classmethod
    async def of(cls, rig: Rig, key: str | None = None) -> "Shelf":
        client = await rig.openai(key)
        return cls(rig, client, (await client.vector_stores.create(name="s")).id)

    async def add(self, name: str, text: str = "The harbour opens.", wait: bool = True) -> str:
        file = await self.client.files.create(file=(name, text.encode()), purpose="assistants")
        await self.client.vector_stores.files.create(self.id, file_id=file.id)
        if wait:
            await self.client.vector_stores.files.poll(file.id, vector_store_id=self.id)
        return file.id

    async def warning(self, *more_stores: str) -> str:
        answer = await self.client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=tools(self.id, *more_stores)
        )
        return str(answer.penstock.get("warning", ""))

    async def search_warning(self) -> str:
        found = await self.client.vector_stores.search(self.id, query="When?")
        assert found.model_extra is not None
        return str(found.model_extra["penstock"].get("warning", ""))

    @property
    def kept(self) -> set[str]:
        """Ids of the files of which retrieval holds something."""
        documents = self.rig.retrieval.servicer.documents
        return {file for _, store, file in documents if store == self.id}


def tools(*stores: str) -> list[dict[str, Any]]:
    return [{"type": "file_search", "vector_store_ids": list(stores)}]


async def test_an_answer_names_the_files_that_were_not_searched(rig: Rig) -> None:
    shelf = await Shelf.of(rig)
    await shelf.add("good.md")
    assert await shelf.warning() == await shelf.search_warning() == ""
    rig.retrieval.failure = invalid("the text makes more than 3 chunks, the limit", "text")
    bad = await shelf.add("bad.md")
    rig.retrieval.failure = None
    rig.retrieval.hold_index.clear()
    slow = await shelf.add("slow.md", wait=False)
    expected = {
        f"bad.md ({bad}) failed: the text makes more than 3 chunks, the limit",
        f"slow.md ({slow}) is still being indexed",
    }
    told = await shelf.warning()
    assert told.startswith("not searched: ")
    assert set(told.removeprefix("not searched: ").split("; ")) == expected
    assert await shelf.search_warning() == told
    other = await Shelf.of(rig)
    assert await other.warning() == "", "it is the searched stores' files"
    assert await other.search_warning() == ""
    assert await other.warning(shelf.id) == told

    stream = await shelf.client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=tools(shelf.id), stream=True
    )
    assert [chunk async for chunk in stream][-1].penstock["warning"] == told
    rig.retrieval.failure = unavailable("the store is away", stage="retrieval", reason="away")
    both = await shelf.warning()
    assert both.startswith(told)
    assert "answered without the vector stores" in both
    rig.retrieval.failure = None

    rig.retrieval.hold_index.set()
    await shelf.client.vector_stores.files.poll(slow, vector_store_id=shelf.id)
    await shelf.client.vector_stores.files.delete(bad, vector_store_id=shelf.id)
    assert await shelf.warning() == ""


async def test_the_same_over_grpc(rig: Rig) -> None:
    shelf = await Shelf.of(rig)
    rig.retrieval.hold_index.clear()
    slow = await shelf.add("slow.md", wait=False)
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    request = ChatRequest(
        model=MODEL,
        messages=[said("user", "When?")],
        vector_store_ids=[shelf.id],
    )
    call = stub.Chat(request, metadata=(("authorization", f"Bearer {rig.key}"),))
    events = [event async for event in call]
    assert events[0].warning == f"not searched: slow.md ({slow}) is still being indexed"
    assert not any(event.warning for event in events[1:])
    rig.retrieval.hold_index.set()


async def test_statuses_counts_and_errors_are_openais(rig: Rig) -> None:
    shelf = await Shelf.of(rig)
    stores = shelf.client.vector_stores
    await shelf.add("good.md", "12345")
    rig.retrieval.failure = invalid("the text takes more than 30 s of CPU to cut", "text")
    bad = await shelf.add("bad.md")
    rig.retrieval.failure = PenstockError(grpc.StatusCode.INTERNAL, "broken")
    broken = await shelf.add("broken.md")
    rig.retrieval.failure = None
    rig.retrieval.hold_index.clear()
    await shelf.add("slow.md", wait=False)
    store = await stores.retrieve(shelf.id)
    counts = store.file_counts
    assert (counts.completed, counts.failed, counts.in_progress, counts.total) == (1, 2, 1, 4)
    assert (store.status, store.usage_bytes) == ("in_progress", 5)
    told = await stores.files.retrieve(bad, vector_store_id=shelf.id)
    assert (told.status, told.usage_bytes) == ("failed", 0)
    assert told.last_error.code == "invalid_file"
    assert "30 s of CPU" in told.last_error.message
    told = await stores.files.retrieve(broken, vector_store_id=shelf.id)
    assert told.last_error.code == "server_error"
    failed = [f.id async for f in stores.files.list(shelf.id, filter="failed")]
    assert set(failed) == {bad, broken}
    rig.retrieval.hold_index.set()


async def test_a_text_over_the_limit_is_refused_when_it_comes(rig: Rig) -> None:
    client = await rig.openai()
    await client.files.create(file=("a.txt", b"x" * 2000), purpose="assistants")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a.txt", b"x" * 2001), purpose="assistants")
    assert (refused.value.code, refused.value.param) == ("file_too_large", "file")
    assert "larger than 2,000 bytes" in refused.value.message
    assert len([file async for file in client.files.list()]) == 1


async def test_every_store_of_a_chat_must_be_the_tenants(rig: Rig) -> None:
    own, other = await Shelf.of(rig), await Shelf.of(rig, (await rig.keys.create("rival"))[0])
    for ids in ([own.id, other.id], [other.id, own.id]):
        with pytest.raises(openai.NotFoundError) as refused:
            await own.client.chat.completions.create(
                model=MODEL, messages=QUESTION, tools=tools(*ids)
            )
        assert refused.value.param == f"tools[0].vector_store_ids[{ids.index(other.id)}]"
    assert rig.tokenizer.requests == []


@pytest.mark.parametrize("how", ["detach", "delete file", "delete store"])
@pytest.mark.parametrize("outcome", ["done", "lost"])
@pytest.mark.parametrize("where", ["here", "at another gateway"])
async def test_of_a_file_taken_out_while_it_is_indexed_nothing_stays(
    rig: Rig, how: str, outcome: str, where: str
) -> None:
    shelf = await Shelf.of(rig)
    rig.retrieval.hold_index.clear()
    if outcome == "lost":
        rig.retrieval.late_failure = unavailable("lost", stage="retrieval", reason="peer_lost")
    file = await shelf.add("slow.md", wait=False)
    await until(lambda: rig.retrieval.servicer.calls == 1, 5)
    client = shelf.client
    if where != "here":
        another = await rig.start(GatewayService)
        client = client.with_options(base_url=f"{another.replica.facts['url']}/v1")
    if how == "detach":
        await client.vector_stores.files.delete(file, vector_store_id=shelf.id)
    elif how == "delete file":
        await client.files.delete(file)
    else:
        await client.vector_stores.delete(shelf.id)
    rig.retrieval.hold_index.set()
    await until(lambda: not rig.gateway.stores.indexing.on_the_way._running, 10)
    assert shelf.kept == set()


async def test_a_file_attached_again_while_it_is_indexed_is_indexed_once_more(rig: Rig) -> None:
    shelf = await Shelf.of(rig)
    rig.retrieval.hold_index.clear()
    file = await shelf.add("slow.md", wait=False)
    await until(lambda: rig.retrieval.servicer.calls == 1, 5)
    await shelf.client.vector_stores.files.create(shelf.id, file_id=file)
    await until(lambda: rig.retrieval.servicer.calls == 2, 5)
    assert len(rig.gateway.stores.indexing.on_the_way._running) == 1
    rig.retrieval.hold_index.set()
    told = await shelf.client.vector_stores.files.poll(file, vector_store_id=shelf.id)
    assert told.status == "completed"
    assert shelf.kept == {file}


async def test_what_a_killed_gateway_had_is_indexed_by_another(rig: Rig) -> None:
    shelf = await Shelf.of(rig)
    rig.retrieval.hold_index.clear()
    async with another_gateway(rig) as other:
        theirs = shelf.client.with_options(base_url=f"{other.url}/v1")
        rig.gateway.jobs._stopping = True  # it begins none
        file = await theirs.files.create(file=("a.md", b"The harbour opens."), purpose="assistants")
        await theirs.vector_stores.files.create(shelf.id, file_id=file.id)
        await until(lambda: rig.retrieval.servicer.calls == 1, 10)
        await other.kill()
    rig.gateway.jobs._stopping = False
    rig.retrieval.hold_index.set()
    told = await shelf.client.vector_stores.files.poll(file.id, vector_store_id=shelf.id)
    assert told.status == "completed"
    assert shelf.kept == {file.id}
    entries = [e async for e in Ledger(rig.redis, rig.settings.namespace).entries()]
    assert sum(entry.prompt for entry in entries if entry.route == "index") == 3


async def test_of_a_list_of_stores_only_those_shown_are_looked_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of those their counts, not their files."""
    http = await rig.http()
    made = [(await http.post("/v1/vector_stores", json={})).json()["id"] for _ in range(5)]
    records, looked = rig.gateway.stores.records, []
    some = records.some

    async def spied(tenant: str, stores: Any) -> Any:
        looked.extend(stores)
        return await some(tenant, stores)

    monkeypatch.setattr(records, "some", spied)
    monkeypatch.setattr(records, "all_files", None)
    monkeypatch.setattr(records, "files", None)
    listed = (await http.get("/v1/vector_stores?limit=2")).json()
    assert [one["id"] for one in listed["data"]] == made[:2:-1]
    assert looked == made[:1:-1], "one more, which tells whether there are more"
    assert (listed["has_more"], listed["last_id"]) == (True, made[3])
    assert listed["data"][0]["file_counts"]["total"] == 0
