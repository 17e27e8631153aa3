"""A served model ranks anew what searches find."""

from typing import Any

import pytest

from protos import gateway_pb2_grpc
from protos.gateway_pb2 import PublicSearchStoreRequest
from protos.tokenizer_pb2 import PromptRequest
from services.common.link import LinkCall
from tests.support.gateway_rig import MODEL, Rig, say_numbers
from tests.support.ports import QUESTION, Port


async def two_lengths(rig: Rig) -> Port:
    """A store of a short text, which the search finds first, and of a longer one."""
    port = await Port.of(rig)
    for name, text in (("short.md", QUESTION), ("long.md", f"{QUESTION[:-1]} now, today ?")):
        file = await port.file(name, text)
        await port.stores.files.create_and_poll(file, vector_store_id=port.id)
    return port


async def test_a_served_model_ranks_what_searches_find(rig: Rig) -> None:
    """The scripted one by length. Of several queries all pairs that it has not ranked yet are asked
    of it at once."""
    port, http = await two_lengths(rig), await rig.http()
    rig.tokenizer.script = say_numbers
    url = f"/v1/vector_stores/{port.id}/search"

    async def found(**about: Any) -> tuple[list[tuple[str, float]], dict[str, Any]]:
        told = (await http.post(url, json={"query": QUESTION, **about})).json()
        return [(one["filename"], one["score"]) for one in told["data"]], told["penstock"]

    as_found, told = await found()
    assert [name for name, _ in as_found] == ["short.md", "long.md"]
    assert "reranked" not in told
    rig.gateway.settings.retrieval.reranking_model = MODEL
    ranked, told = await found()
    assert [name for name, _ in ranked] == ["long.md", "short.md"]
    assert [score for _, score in ranked] == pytest.approx([4.71, 3.61])
    assert told["reranked"] == MODEL
    assert (await found(max_num_results=1))[0] == ranked[:1]
    assert (await found(ranking_options={"ranker": "none"}))[0] == as_found
    several, _ = await found(query=[QUESTION, "harbour", "the harbour"])
    assert [name for name, _ in several] == ["long.md", "short.md"]
    pool = rig.tokenizer.requests[-1].pool
    assert sorted(one.text for one in pool.queries) == ["harbour"] * 2 + ["the harbour"] * 2

    rig.gateway.settings.retrieval.reranking_model = "nobody"
    again, told = await found()
    assert (again, told["not_reranked"]) == (as_found, "model_not_found")
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    search = PublicSearchStoreRequest(vector_store_id=port.id, query=QUESTION)
    reply = await stub.SearchStore(search, metadata=own)
    assert (reply.reranked, reply.not_reranked) == ("", "model_not_found")


async def test_a_chats_passages_are_as_the_model_ranks_them(rig: Rig) -> None:
    port, http = await two_lengths(rig), await rig.http()
    answers = rig.tokenizer.script

    async def each(call: LinkCall, request: PromptRequest) -> None:
        await (say_numbers if request.HasField("pool") else answers)(call, request)

    rig.tokenizer.script = each
    rig.gateway.settings.retrieval.reranking_model = "other"
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "file_search", "vector_store_ids": [port.id]}],
    }
    answer = await http.post("/v1/chat/completions", json=asked)
    told = answer.json()["penstock"]
    assert [one["filename"] for one in told["passages"]] == ["long.md", "short.md"]
    assert told["search"]["reranked"] == "other"
    record = await rig.record(answer.headers["x-request-id"])
    assert ("passages", "reranked") in [(d["subject"], d["choice"]) for d in record["decisions"]]
