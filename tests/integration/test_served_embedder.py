"""Documents that a served model embeds, whose vectors whoever asks retrieval tells."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos import retrieval_pb2 as pb
from protos import retrieval_pb2_grpc
from services.common.errors import PenstockError
from services.common.unary import converse
from services.retrieval.pipeline import indexing
from tests.integration.test_retrieval import Client, hosted
from tests.support.blob_folder import pieces

SERVED: Any = {"served_embedders": {"axes": {"dimension": 3, "document": "passage: "}}}
ABOUT = {"harbour": [2.0, 0, 0], "bakery": [0, 5.0, 0]}


def vector(text: str) -> pb.Vector:
    """By what it is about, not at unit length."""
    return pb.Vector(values=next((v for word, v in ABOUT.items() if word in text), [0, 0, 1.0]))


def vectors(texts: list[str]) -> pb.TextVectors:
    return pb.TextVectors(vectors=[vector(text) for text in texts], tokens=10 * len(texts))


class Gateway(Client):
    """That answers what is wanted as `tell` does."""

    def __init__(self, stub: Any) -> None:
        super().__init__(stub)
        self.wanted: list[list[str]] = []
        self.paid: list[int] = []
        self.tell: Callable[[list[str]], Any] = vectors

    async def index_served(
        self, text: str, source_id: str = "guide", embedder: str = "axes", **more: Any
    ) -> pb.IndexReply:
        key = self.blobs.key("acme", source_id)
        await self.blobs.put(key, pieces(text.encode()))
        place = {"collection": "docs", "source_id": source_id, "title": "guide.md", "blob": key}
        told = pb.IndexRequest(caller=self.caller, embedder=embedder, **place, **more)
        replies: list[pb.IndexReply] = []

        async def answer(news: pb.IndexNews) -> pb.IndexTurn | None:
            if news.HasField("reply"):
                replies.append(news.reply)
            if news.HasField("progress"):
                self.paid.append(news.progress.tokens)
            if not news.HasField("wanted"):
                return None
            self.wanted.append([*news.wanted.texts])
            made = self.tell(self.wanted[-1])
            return pb.IndexTurn(vectors=await made if asyncio.iscoroutine(made) else made)

        with self.telemetry.span("request") as span:
            await converse(
                self.stub.IndexServed,
                pb.IndexTurn(request=told),
                answer,
                span=span,
                timeout_s=60,
                stage="retrieval",
            )
        (reply,) = replies
        return reply

    async def sources(self, query: str, **more: Any) -> dict[str, bool]:
        """What is found by the served model, and whether by its meaning."""
        request = self.request(query)
        request.embedder = "axes"
        request.MergeFrom(pb.SearchRequest(**more))
        self.reply = await self.send(request)
        return {one.source_id: one.scores.dense > 0.9 for one in self.reply.passages}


@asynccontextmanager
async def retrieval(redis_url: str, folder: Path, **own: Any) -> AsyncIterator[Any]:
    async with hosted(redis_url, folder, **(own or SERVED)) as (host, replica, channel):
        gateway: Any = Gateway(retrieval_pb2_grpc.RetrievalStub(channel))
        gateway.parts, gateway.facts = host.service.parts, replica.facts  # type: ignore[attr-defined]
        yield gateway


async def test_its_vectors_are_told_and_searched(redis_url: str, tmp_path: Path) -> None:
    async with retrieval(redis_url, tmp_path) as client:
        registered = json.loads(client.facts["embedders"])["axes"]
        assert "vectors" in client.facts["understands"].split(",")
        reply = await client.index_served("The harbour opens at six.", "a")
        assert client.wanted == [["passage: guide.md\nThe harbour opens at six."]]
        assert (reply.chunks, reply.tokens) == (1, 10)
        assert reply.embedder == registered["fingerprint"] != client.facts["embedder"]
        await client.index_served("The bakery closes at nine.", "b")
        found = await client.sources("ships?", vector=vector("harbour"))
        assert found == {"a": True, "b": False}
        assert (client.reply.tokens, list(client.reply.by_words)) == (0, [])
        assert client.reply.passages[0].scores.dense == pytest.approx(1, abs=1e-3)
        again = await client.sources("ships?", vector=pb.Vector(values=[2.0, 1e-6, 0]))
        assert again == found
        assert client.reply.cached, "a machine's rounding makes no other search"
        other = await client.found("harbour")
        assert list(other.by_words) == ["docs"], "the installation's model knows its words"


async def test_while_it_is_away_the_words_are_looked_for(redis_url: str, tmp_path: Path) -> None:
    async with retrieval(redis_url, tmp_path) as client:
        await client.index_served("The harbour opens at six.", "a")
        await client.index("The harbour closes at nine.", "b")
        assert await client.sources("harbour opens") == {"a": False, "b": False}
        best = client.reply.passages[0]
        assert (best.source_id, best.score, list(client.reply.by_words)) == ("a", 1, ["docs"])
        assert await client.sources("ships?") == {}
        none = pb.Ranking(ranker=pb.Ranking.NONE)
        assert "a" in await client.sources("harbour", ranking=none), "there is no cosine"


async def test_what_was_stored_before_a_kill_is_not_asked_for_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_STORED_AT_ONCE", 4)
    text = "".join(f"Boat {n} of the harbour sails at dawn. " for n in range(100))
    async with retrieval(redis_url, tmp_path) as client:

        async def killed(texts: list[str]) -> pb.TextVectors:
            if len(client.wanted) == 3:
                task.cancel()
                await asyncio.sleep(60)
            return vectors(texts)

        client.tell = killed
        task = asyncio.create_task(client.index_served(text))
        await asyncio.gather(task, return_exceptions=True)
        assert [len(one) for one in client.wanted] == [4] * 3
        assert client.paid == [0, 40, 80]
        assert await client.sources("boat", vector=vector("harbour")) == {}, "nothing in part"
    async with retrieval(redis_url, tmp_path) as client:
        reply = await client.index_served(text)
        assert sum(map(len, client.wanted)) == reply.chunks - 8
        of_all = 10 * (reply.chunks - 8)
        assert reply.tokens > of_all, "and as many as were counted here of what was there"
        assert client.paid[0] == reply.tokens - of_all, "told first: who gives it up pays for it"
        assert await client.sources("boat", vector=vector("harbour")) == {"guide": True}
        client.wanted.clear()
        assert (await client.index_served(text, reindexing=True)).tokens == 0
        assert client.wanted == []


@pytest.mark.parametrize(
    "told",
    [
        pb.TextVectors(vectors=[pb.Vector(values=[1.0, 0])]),
        pb.TextVectors(vectors=[pb.Vector(values=[0.0, 0, 0])]),
        pb.TextVectors(vectors=[pb.Vector(values=[float("nan"), 0, 1])]),
        pb.TextVectors(vectors=[vector("a"), vector("b")]),
        pb.TextVectors(),
    ],
)
async def test_other_vectors_are_refused_and_nothing_stays(
    redis_url: str, tmp_path: Path, told: pb.TextVectors
) -> None:
    async with retrieval(redis_url, tmp_path) as client:
        client.tell = lambda _: told
        with pytest.raises(PenstockError) as refused:
            await client.index_served("The harbour opens at six.")
        assert (refused.value.reason, refused.value.param) == ("embedder_mismatch", "vector")
        if len(told.vectors) == 1:
            with pytest.raises(PenstockError) as refused:
                await client.sources("x", vector=told.vectors[0])
            assert refused.value.param == "vector"
        await client.parts.others["axes"].store.finish()
        assert await client.sources("harbour") == {}


async def test_who_asks_otherwise_waits_for_who_can(redis_url: str, tmp_path: Path) -> None:
    """A gateway of other settings, or of another version."""
    async with retrieval(redis_url, tmp_path) as client:
        for indexing_ in (
            client.index("The harbour.", embedder="axes"),
            client.index_served("The harbour.", embedder=""),
        ):
            with pytest.raises(PenstockError) as refused:
                await indexing_
            assert refused.value.reason == "other_embedders"
        request = client.request("x")
        request.vector.CopyFrom(vector("a"))
        with pytest.raises(PenstockError) as refused:
            await client.send(request)
        assert refused.value.param == "vector"


async def test_rules_of_meaning_hold_by_the_model_that_is_here(
    redis_url: str, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules: [{name: locks, where: [uploads], action: refuse, "
        "like: {examples: [how to open a lock without its key], at_least: 0.5}}]"
    )
    async with retrieval(redis_url, tmp_path / "data", policy=rules, **SERVED) as client:
        with pytest.raises(PenstockError) as refused:
            await client.index_served("How one opens a lock without the key.")
        assert refused.value.reason == "content_policy"
        assert client.wanted == [], "what may not be stored is not told to another model"
        assert (await client.index_served("The harbour opens at six.")).chunks == 1


async def test_a_name_is_one_model_s(redis_url: str, tmp_path: Path) -> None:
    for own in (
        {"served_embedders": {"all-MiniLM-L6-v2": {"dimension": 3}}},
        {"embedders": {"axes": ""}, "served_embedders": {"axes": {"dimension": 3}}},
    ):
        with pytest.raises(ValueError, match="needs another name"):
            async with retrieval(redis_url, tmp_path, **own):
                pass
