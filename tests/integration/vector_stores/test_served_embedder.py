"""A vector store embedded by a served model: gateway, retrieval and its store as they are, the
model by a script."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.common_pb2 import FINISH_STOP, Usage
from protos.tokenizer_pb2 import Pooled, PromptRequest, TextDelta
from services.common.config import JobsSettings
from services.common.config.retrieval import ServedEmbedder
from services.common.errors import unavailable
from services.common.link import LinkCall
from services.gateway.metering.ledger import Ledger
from services.retrieval.pipeline import indexing
from services.retrieval.server import RetrievalService
from tests.support.gateway_rig import MODEL, Rig, gateway_rig, say
from tests.support.ports import Port
from tests.support.waiting import until

SERVED = "other"  # by this rig's tokenizer
PATIENT_S = 120.0  # retrieval has a real model
ABOUT = {"harbour": [1.0, 0, 0], "ships": [0.9, 0.1, 0], "bakery": [0, 1.0, 0]}


class Model:
    """Makes vectors by what texts are about; while it is not `there`, none."""

    def __init__(self) -> None:
        self.there = True
        self.seen: list[list[str]] = []
        self.hold = asyncio.Event()
        self.hold.set()  # cleared: nothing of it comes
        self._says = say("Hello")

    async def __call__(self, call: LinkCall, request: PromptRequest) -> None:
        if not request.HasField("pool"):
            return await self._says(call, request)
        if not self.there:
            raise unavailable("no workers", stage="router", reason="no_workers")
        self.seen.append([one.text for one in request.pool.inputs])
        await self.hold.wait()
        for index, text in enumerate(self.seen[-1]):
            about = next((v for word, v in ABOUT.items() if word in text), [0, 0, 1.0])
            delta = TextDelta(checkpoint="c", usage=Usage(prompt_tokens=10))
            delta.pooled.append(Pooled(index=index, values=np.array(about, "<f4").tobytes()))
            delta.finish = FINISH_STOP if index == len(self.seen[-1]) - 1 else 0
            call.send(delta.SerializeToString())
        return None


@pytest.fixture
async def rig(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Rig]:
    served = {SERVED: ServedEmbedder(dimension=3, query="Q: ", document="D: ")}
    jobs = JobsSettings(lease_s=1.0)
    async with gateway_rig(redis_url, namespace, jobs=jobs, served_embedders=served) as rig:
        await rig.retrieval_host.stop(0)
        rig.settings = rig.settings.model_copy(update={"data_dir": tmp_path})
        await rig.start(RetrievalService)
        await until(lambda: rig.gateway.retrieval.has(SERVED), PATIENT_S)
        yield rig


async def warned(port: Port, query: str) -> tuple[list[str], str]:
    page = await port.stores.search(port.id, query=query)
    extra: dict[str, Any] = page.model_extra or {}
    files = [one.filename for one in page.data]
    return files, (extra.get("penstock") or {}).get("warning") or ""


async def test_a_store_is_embedded_and_searched_by_a_served_model(rig: Rig) -> None:
    model = Model()
    rig.tokenizer.script = model
    port = await Port.of(rig, extra_body={"embedding_model": SERVED})
    await port.add("a.md", chunking_strategy={"type": "auto"})
    file = await port.file("b.md", "The bakery opens at four.")
    await port.stores.files.create_and_poll(file, vector_store_id=port.id)
    assert model.seen == [["D: a.md\nThe harbour opens."], ["D: b.md\nThe bakery opens at four."]]
    assert await warned(port, "ships?") == (["a.md", "b.md"], "")
    assert model.seen[-1] == ["Q: ships?"]
    messages: Any = [{"role": "user", "content": "Where may ships stay?"}]
    tool: Any = {"type": "file_search", "vector_store_ids": [port.id]}

    async def chat() -> list[str]:
        await port.client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
        return [one.title for one in rig.tokenizer.requests[-1].chat.passages]

    assert (await chat())[0] == "a.md"

    model.there = False
    files, warning = await warned(port, "bakery?")
    assert files == ["b.md"]
    assert warning == (
        "the embedding model 'other' failed: no workers: its stores were searched by words alone"
    )
    assert await chat() == [], "none of its words is there"
    model.there = True
    assert (await warned(port, "bakery?"))[1] == ""

    entries = [one async for one in Ledger(rig.redis, rig.settings.namespace).entries()]
    of_files = [(one.model, one.prompt) for one in entries if one.route == "index"]
    assert of_files == [(SERVED, 10)] * 2
    of_chats = [(one.model, one.prompt) for one in entries if one.route == "search"]
    assert sorted(of_chats) == [(SERVED, 0), (SERVED, 10)]


async def test_a_file_is_gone_on_with_where_its_model_was_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 4)
    model = Model()
    rig.tokenizer.script = model
    port = await Port.of(rig, extra_body={"embedding_model": SERVED})
    text = "".join(f"Boat {n} of the harbour sails at dawn. " for n in range(100))
    file = await port.file("fleet.md", text)

    def second(call: LinkCall, request: PromptRequest) -> Any:
        model.there = len(model.seen) != 2
        return model(call, request)

    rig.tokenizer.script = second
    await port.stores.files.create(port.id, file_id=file)
    await until(lambda: not model.there, PATIENT_S)
    assert [len(one) for one in model.seen] == [4, 4]
    assert (await port.stores.files.retrieve(file, vector_store_id=port.id)).status == "in_progress"
    rig.tokenizer.script = model
    model.there = True

    async def arrived() -> bool:
        told = await port.stores.files.retrieve(file, vector_store_id=port.id)
        assert told.status != "failed", told.last_error
        return bool(told.status == "completed")

    await until(arrived, PATIENT_S)
    sent = [text for some in model.seen for text in some]
    assert len(sent) == len(set(sent)) > 8, "each text once"
    files, warning = await warned(port, "ships?")
    assert (set(files), warning) == ({"fleet.md"}, "")
