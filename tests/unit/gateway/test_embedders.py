"""A chat over stores of several embedding models: a search by each, told as one."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protos.common_pb2 import Passage
from protos.retrieval_pb2 import SearchReply, SearchRequest
from services.common.config import MeteringSettings
from services.common.errors import PenstockError, unavailable
from services.gateway.stores.retrieval.searching import fused
from services.gateway.stores.vector_stores.store_files import Unready
from tests.support.gateway_parts import (
    EMBEDDING_MODEL,
    MODEL,
    SharedMeter,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.unit.gateway.generating import Front, refused, says, served, usage
from tests.unit.gateway.test_generate import searching

PRICES = MeteringSettings.model_validate(
    {"prices": {"wide": {"prompt": 100.0}, EMBEDDING_MODEL: {"prompt": 10.0}}}
)


def reply(*titles: str, tokens: int = 7) -> SearchReply:
    passages = [Passage(title=title, score=0.9 - n / 10) for n, title in enumerate(titles)]
    return SearchReply(passages=passages, tokens=tokens)


@pytest.fixture
def meter() -> SharedMeter:
    return SharedMeter()


@pytest.fixture
def parts(meter: SharedMeter) -> Iterator[Any]:
    with gateway_parts(PRICES, meter) as parts:
        parts.tokenizers = Tokenizers(says("Hello", used=usage(8, 0, 3)))
        parts.retrieval.further = {"wide"}
        parts.retrieval.replies = {"": reply("a", "b"), "wide": reply("x", "y", tokens=9)}
        parts.stores.unready = Unready(models={"vs_2": "wide"})

        async def search_for_chat(request: SearchRequest, span: Any, record: Any) -> SearchReply:
            parts.retrieval.searches.append(request)
            found = parts.retrieval.replies[request.embedder]
            if isinstance(found, PenstockError):
                raise found
            return found

        parts.retrieval.search_for_chat = search_for_chat
        yield parts


def titles(parts: Any) -> list[str]:
    """Behind the client's own passage."""
    return [one.title for one in parts.tokenizers.opened[-1].request.chat.passages][1:]


async def test_each_model_s_stores_are_searched_by_it_and_told_in_turns(parts, meter):
    front = Front(searching(max_chunks=3))
    await served(parts, front)
    asked = {one.embedder: list(one.collections) for one in parts.retrieval.searches}
    assert asked == {"": ["vs_1"], "wide": ["vs_2"]}
    assert [one.query for one in parts.retrieval.searches] == ["Q", "Q"]
    assert titles(parts) == ["a", "x", "b"]
    assert front.finished[0].search.tokens == 16
    lines = {run.id: run.who["model"] for run in meter.settled if run.who["route"] == "search"}
    id = front.request_id
    assert lines == {f"{id}:search": EMBEDDING_MODEL, f"{id}:search:1": "wide"}
    assert front.cost.nanos == 7 * 10_000 + 9 * 100_000


async def test_of_one_model_there_is_one_search(parts):
    parts.stores.unready = Unready(models={"vs_1": EMBEDDING_MODEL})
    await served(parts, Front(searching()))
    (search,) = parts.retrieval.searches
    assert (search.embedder, list(search.collections)) == ("", ["vs_1", "vs_2"])


async def test_what_one_cannot_do_a_warning_says(parts):
    away = unavailable("too slow", stage="retrieval", reason="embedder_slow")
    parts.retrieval.replies["wide"] = away
    front = Front(searching())
    await served(parts, front)
    assert titles(parts) == ["a", "b"]
    assert front.finished[0].warning == "answered without vs_2: too slow"
    parts.retrieval.replies[""] = away
    front = Front(searching())
    await served(parts, front)
    assert titles(parts) == []
    assert front.finished[0].warning == "answered without the vector stores: too slow"


async def test_a_model_that_is_gone_leaves_the_words_and_says_so(parts):
    parts.retrieval.further = set()
    front = Front(searching())
    await served(parts, front)
    (search,) = parts.retrieval.searches
    assert (search.embedder, list(search.collections)) == ("", ["vs_1", "vs_2"])
    assert "vs_2: the embedding model 'wide' is not there" in front.finished[0].warning


async def test_who_may_not_use_one_of_them_is_refused(parts):
    parts.auth.keys["Bearer k"] = principal(models=frozenset({MODEL, EMBEDDING_MODEL}))
    error = await refused(parts, Front(searching()))
    assert error.code is grpc.StatusCode.PERMISSION_DENIED
    assert "wide" in error.message


def test_what_is_so_of_one_search_is_so_of_all() -> None:
    first, second = reply("a"), reply("x")
    first.cached = second.stale = True
    second.age_s = 7
    second.by_words.append("vs_2")
    both = fused([first, second], 1)
    assert [one.title for one in both.passages] == ["a"]
    assert (both.cached, both.stale, both.age_s) == (False, True, 7)
    assert list(both.by_words) == ["vs_2"]
