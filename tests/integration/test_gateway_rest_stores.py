"""/v1/files, /v1/vector_stores and /v1/embeddings in full: what each takes, refuses and answers.

One gateway for all; each test is a tenant of its own.
"""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from protos.gateway_pb2 import PublicEmbedRequest, PublicSearchStoreRequest
from protos.gateway_pb2_grpc import InferenceStub
from protos.retrieval_pb2 import Ranking
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import invalid
from services.common.telemetry.spans import Span
from services.gateway.stores.files import storage_room
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PURPOSE = {"purpose": "assistants"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as rig:
        yield rig


class Tenant:
    """A new tenant's way in, and what it does there all the time."""

    def __init__(self, name: str, http: httpx.AsyncClient) -> None:
        self.name = name
        self.http = http

    @classmethod
    async def of(cls, rig: Rig) -> "Tenant":
        key, record = await rig.keys.create(f"tenant-{uuid.uuid4().hex[:8]}")
        return cls(record.tenant, await rig.http(key))

    @property
    def metadata(self) -> Any:
        return (("authorization", self.http.headers["authorization"]),)

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def file(self, name: str = "a.txt", text: str = "water") -> str:
        upload = {"file": (name, text.encode())}
        answer = await self.http.post("/v1/files", files=upload, data=PURPOSE)
        return str(answer.json()["id"])

    async def store(self, *files: str) -> str:
        """With all of them indexed."""
        store = str((await self.post("/v1/vector_stores", {"file_ids": list(files)}))["id"])

        async def done() -> bool:
            counts = (await self.get(f"/v1/vector_stores/{store}"))["file_counts"]
            return bool(counts["completed"] == counts["total"])

        await until(done, 10, "all files are indexed")
        return store

    async def refused(self, path: str, body: dict[str, Any]) -> tuple[int, str | None, str]:
        answer = await self.http.post(path, json=body)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["code"]


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "status", "code", "param"),
    [
        ({"json": {"file": "x"}}, 415, "unsupported_media_type", None),
        ({"data": {"purpose": "assistants", "file": "x"}}, 415, "unsupported_media_type", None),
        ({"files": {"file": ("a.txt", b"x")}}, 400, "missing_required_parameter", "purpose"),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {"purpose": "vision"}},
            400,
            "unsupported_parameter",
            "purpose",
        ),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {**PURPOSE, "expires_after": "1"}},
            400,
            "unknown_parameter",
            "expires_after",
        ),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {**PURPOSE, "expires_afterwards": "1"}},
            400,
            "unknown_parameter",
            "expires_afterwards",
        ),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {**PURPOSE, "o" * 80: "1"}},
            400,
            "unknown_parameter",
            "o" * 64,
        ),
        (
            {
                "files": {"file": ("a.txt", b"x")},
                "data": {**PURPOSE, "expires_after[seconds]": "3600"},
            },
            400,
            "missing_required_parameter",
            "expires_after.anchor",
        ),
        *(
            (
                {
                    "files": {"file": ("a.txt", b"x")},
                    "data": {**PURPOSE, **{f"expires_after[{name}]": text for name, text in age}},
                },
                400,
                code,
                f"expires_after.{param}",
            )
            for age, code, param in (
                (
                    (("anchor", "last_active_at"), ("seconds", "3600")),
                    "unsupported_value",
                    "anchor",
                ),
                ((("anchor", "created_at"), ("seconds", "3599")), "invalid_value", "seconds"),
                ((("anchor", "created_at"), ("seconds", "2592001")), "invalid_value", "seconds"),
                ((("anchor", "created_at"), ("seconds", "1h")), "invalid_value", "seconds"),
            )
        ),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {"purpose": ["assistants", "user_data"]}},
            400,
            "invalid_argument",
            "purpose",
        ),
        ({"files": {"purpose": (None, "assistants")}}, 400, "missing_required_parameter", "file"),
        (
            {"files": {"purpose": (None, "assistants"), "file": (None, "x")}},
            400,
            "missing_required_parameter",
            "file",
        ),
        (
            {"files": [("file", ("a.txt", b"x")), ("file", ("b.txt", b"x"))], "data": PURPOSE},
            400,
            "invalid_form",
            None,
        ),
        (
            {"files": {"file": ("\x1b]0;a.txt", b"x")}, "data": PURPOSE},
            400,
            "invalid_argument",
            "file",
        ),
        (
            {"files": {"file": ("a.txt", b"x")}, "data": {f"f{n}": "1" for n in range(9)}},
            400,
            "invalid_form",
            None,
        ),
    ],
)
async def test_a_form_is_a_file_and_its_purpose(rig, form, status, code, param):
    tenant = await Tenant.of(rig)
    answer = await tenant.http.post("/v1/files", **form)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert (await tenant.get("/v1/files"))["data"] == []


async def test_the_kind_of_a_form_is_read_in_any_case(rig):
    tenant = await Tenant.of(rig)
    content = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.md"\r\n\r\n'
        b"# a\r\n--b--\r\n"
    )
    kind = {"content-type": "Multipart/Form-Data; boundary=b"}
    answer = await tenant.http.post("/v1/files", content=content, headers=kind)
    assert (answer.status_code, answer.json()["filename"]) == (200, "a.md")


async def test_a_files_life(rig):
    tenant = await Tenant.of(rig)
    ids = [await tenant.file(f"{n}.txt", "grüße") for n in range(3)]
    assert (await tenant.get(f"/v1/files/{ids[0]}"))["filename"] == "0.txt"
    content = await tenant.http.get(f"/v1/files/{ids[0]}/content")
    assert content.content == "grüße".encode()
    assert content.headers["content-type"] == "application/octet-stream"
    for query, shown in (
        ("", ids[::-1]),
        ("?purpose=assistants&limit=2", ids[:0:-1]),
        ("?order=asc&after=" + ids[0], ids[1:]),
        ("?purpose=batch", []),
    ):
        assert [file["id"] for file in (await tenant.get(f"/v1/files{query}"))["data"]] == shown
    odd = await tenant.http.get("/v1/files?purpose=zz")
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "purpose")
    for method, path in (
        ("DELETE", f"/v1/files/{ids[0]}"),
        ("GET", f"/v1/files/{ids[0]}"),
        ("GET", f"/v1/files/{ids[0]}/content"),
    ):
        answer = await tenant.http.request(method, path)
        if method == "DELETE":
            assert answer.json() == {"id": ids[0], "object": "file", "deleted": True}
        else:
            assert answer.status_code == 404
    assert len((await tenant.get("/v1/files"))["data"]) == 2


# ---- vector stores ------------------------------------------------------------------------------


def expires_after(days: int) -> dict[str, Any]:
    return {"anchor": "last_active_at", "days": days}


async def test_what_a_store_is_made_of(rig):
    tenant = await Tenant.of(rig)
    file = await tenant.file()
    body = {
        "name": "n" * 256,
        "file_ids": [file, file],
        "metadata": {"k": "v"},
        "chunking_strategy": {"type": "auto"},
        "expires_after": None,
    }
    made = await tenant.post("/v1/vector_stores", body)
    assert (made["name"], made["metadata"]) == ("n" * 256, {"k": "v"})
    assert made["file_counts"]["total"] == 1
    empty = await tenant.post("/v1/vector_stores", {})
    assert (empty["name"], empty["metadata"], empty["status"]) == ("", {}, "completed")
    for odd, param, code in (
        ({"name": "n" * 257}, "name", "invalid_value"),
        ({"file_ids": [file] * 2001}, "file_ids", "invalid_value"),
        ({"file_ids": [""]}, "file_ids[0]", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
        ({"expires_after": {"days": 1}}, "expires_after.anchor", "missing_required_parameter"),
        ({"expires_after": expires_after(366)}, "expires_after.days", "invalid_value"),
        ({"cache": {"max_age_s": -1}}, "cache.max_age_s", "invalid_value"),
        ({"cache": {"similar_at_least": 1.1}}, "cache.similar_at_least", "invalid_value"),
        ({"cache": {"age": 1}}, "cache.age", "unknown_parameter"),
        (
            {"chunking_strategy": {"type": "static"}},
            "chunking_strategy.static",
            "missing_required_parameter",
        ),
        ({"description": "d" * 513}, "description", "invalid_value"),
        ({"odd": 1}, "odd", "unknown_parameter"),
    ):
        assert await tenant.refused("/v1/vector_stores", odd) == (400, param, code)
    assert len((await tenant.get("/v1/vector_stores"))["data"]) == 2
    gone = await tenant.http.delete(f"/v1/vector_stores/{empty['id']}")
    assert gone.json() == {"id": empty["id"], "object": "vector_store.deleted", "deleted": True}
    assert [s["id"] for s in (await tenant.get("/v1/vector_stores"))["data"]] == [made["id"]]


async def test_the_files_of_a_store(rig):
    tenant = await Tenant.of(rig)
    files = [await tenant.file(f"{n}.txt", f"water {n}") for n in range(3)]
    store = await tenant.store(*files[:2])
    path = f"/v1/vector_stores/{store}/files"
    rig.retrieval.hold_index.clear()
    attached = await tenant.post(path, {"file_id": files[2], "attributes": {}})
    assert (attached["id"], attached["status"]) == (files[2], "in_progress")
    for query, shown in (
        ("", files[::-1]),
        ("?filter=completed", files[1::-1]),
        ("?filter=in_progress", files[2:]),
        ("?filter=failed", []),
        ("?limit=1&order=asc", files[:1]),
    ):
        assert [file["id"] for file in (await tenant.get(path + query))["data"]] == shown
    one = await tenant.http.get(f"{path}/{files[2]}")
    assert (one.json()["status"], one.headers["openai-poll-after-ms"]) == ("in_progress", "100")
    rig.retrieval.hold_index.set()
    for body, param in (
        ({}, "file_id"),
        ({"file_id": files[0], "attributes": {"a": [1]}}, "attributes.a"),
        ({"file_id": files[0], "odd": 1}, "odd"),
    ):
        assert (await tenant.refused(path, body))[:2] == (400, param)
    odd = await tenant.http.get(path + "?filter=odd")
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "filter")
    gone = await tenant.http.delete(f"{path}/{files[0]}")
    assert gone.json() == {
        "id": files[0],
        "object": "vector_store.file.deleted",
        "deleted": True,
    }
    assert (await tenant.http.get(f"{path}/{files[0]}")).status_code == 404
    assert {file["id"] for file in (await tenant.get(path))["data"]} == set(files[1:])
    nobodys = "/v1/vector_stores/vs_" + "0" * 30
    assert (await tenant.http.get(nobodys + "/files")).status_code == 404
    assert (await tenant.refused(nobodys + "/files", {"file_id": files[1]}))[0] == 404


def ranked(**options: Any) -> dict[str, Any]:
    return {"ranking_options": options}


async def test_a_search(rig):
    tenant = await Tenant.of(rig)
    best = await tenant.file("best.pdf", "the tide comes in")
    files = [await tenant.file(f"{n}.md", f"tide {n}") for n in range(11)]
    store = await tenant.store(best, *files)
    path = f"/v1/vector_stores/{store}/search"
    for (_, _, file), document in rig.retrieval.servicer.documents.items():
        if file == best:
            document.title = "best.pdf › Tides"
    found = await tenant.post(path, {"query": "the tide"})
    assert len(found["data"]) == 10
    assert found["data"][0] == {
        "file_id": best,
        "filename": "best.pdf",
        "score": 1.0,
        "attributes": {},
        "content": [{"type": "text", "text": "the tide comes in"}],
        "title": "best.pdf › Tides",
        "pages": {"first": 2, "last": 3},
    }
    del found["data"]
    assert found == {
        "object": "vector_store.search_results.page",
        "search_query": ["the tide"],
        "has_more": False,
        "next_page": None,
        "penstock": {},
    }
    for more, number in (
        ({"query": ["the tide"], "max_num_results": 12}, 12),
        ({"max_num_results": 3}, 3),
        (ranked(score_threshold=0.5, ranker="none"), 1),
        ({**ranked(), "rewrite_query": False}, 10),
    ):
        assert len((await tenant.post(path, {"query": "the tide", **more}))["data"]) == number
    weights = {"embedding_weight": 1, "text_weight": 2, "late_weight": 3}
    await tenant.post(path, {"query": "the tide", **ranked(hybrid_search=weights)})
    ranking = rig.retrieval.servicer.searches[-1].ranking
    assert ranking == Ranking(embedding_weight=1, text_weight=2, late_weight=3)
    for odd, param in (
        ({"query": " "}, "query[0]"),
        ({"query": []}, "query"),
        ({"query": ["tide"] * 9}, "query"),
        ({}, "query"),
        ({"query": "x", "max_num_results": 0}, "max_num_results"),
        ({"query": "x", "max_num_results": 51}, "max_num_results"),
        ({"query": "x", **ranked(score_threshold=1.1)}, "ranking_options.score_threshold"),
        ({"query": "x", **ranked(score_threshold=-0.1)}, "ranking_options.score_threshold"),
        ({"query": "x", **ranked(ranker="best")}, "ranking_options.ranker"),
        (
            {"query": "x", **ranked(hybrid_search={"embedding_weight": -1, "text_weight": 1})},
            "ranking_options.hybrid_search.embedding_weight",
        ),
        (
            {"query": "x", **ranked(hybrid_search={**weights, "late_weight": -1})},
            "ranking_options.hybrid_search.late_weight",
        ),
        (
            {"query": "x", **ranked(hybrid_search={"embedding_weight": 0, "text_weight": 0})},
            "ranking_options.hybrid_search",
        ),
        (
            {"query": "x", **ranked(ranker="none", hybrid_search=weights)},
            "ranking_options.hybrid_search",
        ),
        ({"query": "x", "filters": {"type": "eq"}}, "filters.key"),
        ({"query": "x", "rewrite_query": "x"}, "rewrite_query"),
    ):
        assert (await tenant.refused(path, odd))[:2] == (400, param)
    other = await Tenant.of(rig)
    assert (await other.refused(path, {"query": "the tide"}))[0] == 404
    mine = await other.store(await other.file("mine.md", "the tide of mine"))
    (one,) = (await other.post(f"/v1/vector_stores/{mine}/search", {"query": "the tide"}))["data"]
    assert one["filename"] == "mine.md", "and of this store alone"
    assert all(search.judged for search in rig.retrieval.servicer.searches), "by the policy, there"


async def test_a_store_of_an_earlier_embedding_model_is_said_to_be_one(rig):
    tenant = await Tenant.of(rig)
    store = await tenant.store(await tenant.file())
    path, asked = f"/v1/vector_stores/{store}/search", {"query": "water"}
    tool = {"type": "file_search", "vector_store_ids": [store]}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "water?"}], "tools": [tool]}
    told = f"files of {store} were indexed by an earlier embedding model and are found by their"
    try:
        for earlier in ([], [store]):
            rig.retrieval.servicer.by_words = earlier
            rig.retrieval.servicer.incomplete = bool(earlier)
            for answer in (
                await tenant.post(path, asked),
                await tenant.post("/v1/chat/completions", chat),
            ):
                warning = answer["penstock"].get("warning", "")
                assert (told in warning) is bool(earlier)
                assert ("indexed cannot be read" in warning) is bool(earlier)
    finally:
        rig.retrieval.servicer.by_words, rig.retrieval.servicer.incomplete = [], False


async def test_a_search_over_grpc_is_the_same(rig):
    tenant, other = await Tenant.of(rig), await Tenant.of(rig)
    best = await tenant.file("best.md", "the tide comes in")
    store = await tenant.store(best, await tenant.file("less.md", "tide 1"))
    stub: Any = InferenceStub(await rig.channel())

    async def search(who: Tenant, **fields: Any) -> Any:
        request = PublicSearchStoreRequest(**{"vector_store_id": store, "query": "tide", **fields})
        return await stub.SearchStore(request, metadata=who.metadata)

    found = await search(tenant, query="the tide")
    assert [passage.source_id for passage in found.passages][:1] == [best]
    assert (len(found.passages), found.passages[0].text) == (2, "the tide comes in")
    assert found.tokens == 2
    assert rig.retrieval.servicer.searches[-1].judged
    assert len((await search(tenant, max_num_results=1)).passages) == 1
    assert len((await search(tenant, query="the tide", score_threshold=0.6)).passages) == 1
    for who, fields, code, param in (
        (other, {}, grpc.StatusCode.NOT_FOUND, None),
        (tenant, {"vector_store_id": "vs"}, grpc.StatusCode.NOT_FOUND, None),
        (tenant, {"query": " "}, grpc.StatusCode.INVALID_ARGUMENT, "query"),
        (tenant, {"max_num_results": 51}, grpc.StatusCode.INVALID_ARGUMENT, "max_num_results"),
        (tenant, {"score_threshold": 1.1}, grpc.StatusCode.INVALID_ARGUMENT, "score_threshold"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await search(who, **fields)
        told = dict(raised.value.trailing_metadata())
        assert (raised.value.code(), told.get("x-param")) == (code, param)


# ---- embeddings ---------------------------------------------------------------------------------


async def test_embeddings_are_told_whole(rig):
    tenant = await Tenant.of(rig)
    body = {"model": EMBEDDING_MODEL, "input": ["a", "b", "a"], "user": "u", "dimensions": None}
    told = await tenant.post("/v1/embeddings", body)
    assert (told["object"], told["model"]) == ("list", EMBEDDING_MODEL)
    assert told["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [(one["object"], one["index"]) for one in told["data"]] == [
        ("embedding", n) for n in range(3)
    ]
    vectors = [one["embedding"] for one in told["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    for odd, param in (
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"odd": 1}, "odd"),
        ({"model": ""}, "model"),
    ):
        assert (await tenant.refused("/v1/embeddings", {**body, **odd}))[:2] == (400, param)


async def test_a_key_without_the_embedding_model_embeds_nothing(rig):
    key, _ = await rig.keys.create("small", models=[MODEL])
    tenant = Tenant("small", await rig.http(key))
    body = {"model": EMBEDDING_MODEL, "input": "a"}
    calls = rig.retrieval.servicer.calls
    refused = (403, "model", "model_not_allowed")
    assert await tenant.refused("/v1/embeddings", body) == refused
    stub = InferenceStub(await rig.channel())
    request = PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a"])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(request, metadata=(("authorization", f"Bearer {key}"),))
    assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert rig.retrieval.servicer.calls == calls
    unknown = {**body, "model": "nobody"}
    assert (await tenant.refused("/v1/embeddings", unknown))[0] == 403
    file, store = await tenant.file(), await tenant.store()
    path = f"/v1/vector_stores/{store}"
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "When is the tide?"}]}
    with_stores = {**asked, "tools": [{"type": "file_search", "vector_store_ids": [store]}]}
    for where, what in (
        (f"{path}/search", {"query": "a"}),
        (f"{path}/files", {"file_id": file}),
        ("/v1/vector_stores", {"file_ids": [file]}),
        ("/v1/chat/completions", with_stores),
    ):
        answer = await tenant.http.post(where, json=what)
        assert answer.status_code == 403, where
        error = answer.json()["error"]
        assert (error["code"], EMBEDDING_MODEL in error["message"]) == ("model_not_allowed", True)
    assert (await tenant.http.post("/v1/chat/completions", json=asked)).status_code == 200
    assert rig.retrieval.servicer.calls == calls
    every = await Tenant.of(rig)
    missing = await every.refused("/v1/embeddings", unknown)
    assert missing == (404, "model", "model_not_found")


async def test_nothing_is_kept_of_requests_that_failed(rig):
    tenant = await Tenant.of(rig)
    store = await tenant.store()
    file = await tenant.file()
    before = _living_requests()
    rig.retrieval.failure = invalid("no good", "text")
    try:
        for path, body, status in (
            ("/v1/embeddings", {"model": EMBEDDING_MODEL, "input": "a"}, 400),
            (f"/v1/vector_stores/{store}/search", {"query": "a"}, 400),
            (f"/v1/vector_stores/{store}/files", {"file_id": file}, 200),
        ):
            answer = await tenant.http.post(path, json=body)
            assert answer.status_code == status
        await until(lambda: not rig.gateway.stores.indexing.on_the_way._running, 10)
        removal = await tenant.http.delete(f"/v1/vector_stores/{store}/files/{file}")
        assert removal.status_code == 400
        for _ in range(60):
            await tenant.http.post("/v1/embeddings", json={"model": EMBEDDING_MODEL, "input": "a"})
    finally:
        rig.retrieval.failure = None
    # Timers and connections remember the last ones for a while; a leak is of each.
    assert _living_requests() < before + 25


def _living_requests() -> int:
    gc.collect()
    spans = [one for one in gc.get_objects() if isinstance(one, Span)]
    return sum(one.name == "request" for one in spans)


async def test_a_client_that_goes_away_ends_its_embedding(rig):
    tenant = await Tenant.of(rig)
    calls = rig.retrieval.servicer.calls
    rig.retrieval.hold.clear()
    request = asyncio.create_task(
        tenant.http.post("/v1/embeddings", json={"model": EMBEDDING_MODEL, "input": "a"})
    )
    try:
        await until(lambda: rig.retrieval.servicer.calls > calls, 5)
        assert rig.gateway.intake.running == 1
        request.cancel()
        await until(lambda: rig.gateway.intake.running == 0, 5, "its place is free")
    finally:
        rig.retrieval.hold.set()


async def test_room_that_all_tenants_have_filled_is_told_as_nobodys_own_limit(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_room, "_LOOK_EVERY_S", 0.01)
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    async with gateway_rig(redis_server.url, namespace, max_blob_bytes=100) as rig:
        first, second = [await Tenant.of(rig) for _ in range(2)]
        taken = await first.file(text="x" * 70)
        upload = {"file": ("a.txt", b"x" * 31)}
        answer = await second.http.post("/v1/files", files=upload, data=PURPOSE)
        told = answer.json()["error"]
        assert (answer.status_code, told["code"]) == (507, "storage_full")
        assert "not your own limit" in told["message"]
        assert rig.host.replica is not None
        metrics = rig.host.replica.metrics_url

        async def shown() -> bool:
            async with httpx.AsyncClient() as http:
                page = (await http.get(metrics)).text
            return "penstock_gateway_blob_bytes 70.0" in page and "blob_bytes_limit 100.0" in page

        await until(shown)
        assert (await first.http.delete(f"/v1/files/{taken}")).status_code == 200
        answer = await second.http.post("/v1/files", files=upload, data=PURPOSE)
        assert answer.status_code == 200
