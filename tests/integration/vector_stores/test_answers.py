"""What chats and responses search for, and tell of it."""

from typing import Any

import pytest

from protos import gateway_pb2_grpc
from protos.gateway_pb2 import ChatRequest
from protos.retrieval_pb2 import Filter, Ranking
from services.common.errors import unavailable
from services.common.text.content import said
from tests.support.gateway_rig import MODEL, Rig
from tests.support.ports import QUESTION, Port


async def test_a_response_tells_its_search(rig: Rig) -> None:
    port = await Port.of(rig)
    old = await port.add("old.md", attributes={"year": 1999})
    await port.add("new.md", attributes={"year": 2024})
    filters = {"type": "lt", "key": "year", "value": 2000}
    ranking = {"score_threshold": 0.1}
    tool = {
        "type": "file_search",
        "vector_store_ids": [port.id],
        "max_num_results": 3,
        "filters": filters,
        "ranking_options": ranking,
    }
    asked: Any = {"model": MODEL, "input": QUESTION, "tools": [tool]}
    results: Any = {"include": ["file_search_call.results"]}
    first = await port.client.responses.create(**asked, **results)
    call, message = first.output
    assert (call.type, call.status, call.queries) == ("file_search_call", "completed", [QUESTION])
    assert [(one.file_id, one.filename) for one in call.results or ()] == [(old, "old.md")]
    assert (call.results or [])[0].attributes == {"year": 1999.0}
    assert message.type == "message"
    (search,) = rig.retrieval.servicer.searches
    assert (search.limit, round(search.score_threshold, 3)) == (3, 0.1)
    assert search.filter.comparison.operator == Filter.LT
    again = await port.client.responses.retrieve(first.id)
    assert [item.to_dict() for item in again.output] == [item.to_dict() for item in first.output]
    without = await port.client.responses.create(**asked, previous_response_id=first.id)
    assert without.output[0].results is None  # type: ignore[union-attr]
    repeated: Any = [*first.output, {"role": "user", "content": QUESTION}]
    await port.client.responses.create(**{**asked, "input": repeated})

    stream = await port.client.responses.create(**asked, **results, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    at = kinds.index("response.output_item.added")
    assert kinds[at : at + 5] == [
        "response.output_item.added",
        "response.file_search_call.in_progress",
        "response.file_search_call.searching",
        "response.file_search_call.completed",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ended = events[-1].response
    assert [item.type for item in ended.output] == ["file_search_call", "message"]
    rig.retrieval.failure = unavailable("away", stage="retrieval", reason="store")
    skipped = await port.client.responses.create(**asked)
    assert [item.type for item in skipped.output] == ["message"]


@pytest.mark.parametrize(
    ("ranking", "told"),
    [
        ({"ranker": "none"}, Ranking(ranker=Ranking.NONE)),
        (
            {"hybrid_search": {"embedding_weight": 0, "text_weight": 2, "late_weight": 0.5}},
            Ranking(text_weight=2, late_weight=0.5),
        ),
    ],
)
async def test_a_chat_searches_as_it_is_told_by_both_ways(
    rig: Rig, ranking: dict[str, Any], told: Ranking
) -> None:
    port = await Port.of(rig)
    await port.add("old.md", attributes={"year": 1999})
    filters = {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 1999}]}
    tool: Any = {
        "type": "file_search",
        "vector_store_ids": [port.id],
        "filters": filters,
        "ranking_options": {"score_threshold": 0.25, **ranking},
    }
    messages: Any = [{"role": "user", "content": QUESTION}]
    answer = await port.client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    assert len(answer.penstock["passages"]) == 1  # type: ignore[attr-defined]
    search = ChatRequest.FileSearch(score_threshold=0.25, **ranking)
    search.filters.update(filters)
    request = ChatRequest(
        model=MODEL,
        messages=[said("user", QUESTION)],
        vector_store_ids=[port.id],
        file_search=search,
    )
    stub = gateway_pb2_grpc.InferenceStub(await rig.channel())
    own = (("authorization", f"Bearer {rig.key}"),)
    _ = [event async for event in stub.Chat(request, metadata=own)]
    first, second = rig.retrieval.servicer.searches
    assert (first.filter, first.score_threshold) == (second.filter, second.score_threshold)
    assert first.ranking == second.ranking == told
    assert first.filter.compound.filters[0].comparison.key == "year"
