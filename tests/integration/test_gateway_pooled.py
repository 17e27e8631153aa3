"""Embeddings, scores, ranks and classes of served models at the gateway: what clients send and get,
over REST and gRPC."""

import base64
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

from protos.common_pb2 import Pooling, TokenIds
from protos.gateway_pb2 import (
    PublicClassifyRequest,
    PublicEmbedRequest,
    PublicRerankRequest,
    PublicScoreRequest,
)
from protos.gateway_pb2_grpc import InferenceStub
from protos.tokenizer_pb2 import Pooled, PromptRequest, TextDelta
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import invalid
from services.common.link import LinkCall
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, gateway_rig, say_numbers
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(redis_server: EmbeddedRedis) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_server.url, f"test-{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def api(rig: Rig) -> httpx.AsyncClient:
    rig.tokenizer.script = say_numbers
    rig.tokenizer.requests.clear()
    return await rig.http()


async def told(api: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await api.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_embeddings_of_a_served_model_by_the_openai_client(rig: Rig, api: Any) -> None:
    """Its token ids are the model's own; without a format the client asks for base64 itself."""
    client = await rig.openai()
    made = await client.embeddings.create(model=MODEL, input=["aa", "b"], dimensions=3)
    assert [one.embedding for one in made.data] == [[2, 0.5, -0.5], [1, 0.5, -0.5]]
    assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == (MODEL, 3, 3)
    asked = rig.tokenizer.requests[-1]
    assert asked.caller.tenant
    assert (asked.pool.dimensions, asked.pool.HasField("pooling")) == (3, False)
    ids = await client.embeddings.create(
        model=MODEL, input=[[7, 8, 9], [4]], encoding_format="float", extra_body={"pooling": "mean"}
    )
    assert [one.embedding[0] for one in ids.data] == [3, 1]
    pool = rig.tokenizer.requests[-1].pool
    assert [list(one.token_ids.ids) for one in pool.inputs] == [[7, 8, 9], [4]]
    assert pool.pooling == Pooling.MEAN
    raw = await told(api, "/v1/embeddings", input="abc", encoding_format="base64")
    (one,) = raw["data"]
    vector = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    assert vector.tolist() == [3, 0.5, -0.5, 7]


async def test_scores_as_vllms_clients_ask_for_them(api: Any) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents")):
        one = dict(zip(names, ("q", ["aa", "aaaa"]), strict=True))
        found = await told(api, "/v1/score", **one)
        assert (found["object"], found["model"]) == ("list", MODEL)
        assert [(d["object"], d["index"]) for d in found["data"]] == [("score", 0), ("score", 1)]
        assert [d["score"] for d in found["data"]] == pytest.approx([0.21, 0.41])
        assert found["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        assert found["id"].startswith("score-")
    pairs = await told(api, "/v1/score", text_1=["a", "b"], text_2=["aa", "a"])
    assert [d["score"] for d in pairs["data"]] == pytest.approx([0.22, 0.12])
    single = await told(api, "/v1/score", text_1="a", text_2="aaa")
    assert [d["score"] for d in single["data"]] == pytest.approx([0.31])


async def test_ranks_as_coheres_clients_ask_for_them(api: Any) -> None:
    documents = ["aa", {"text": "aaaaa"}, "bb", "a"]
    for version in ("1", "2"):
        found = await told(api, f"/v{version}/rerank", query="q", documents=documents, top_n=3)
        assert [one["index"] for one in found["results"]] == [1, 0, 2], "of equals the first"
        assert [one["relevance_score"] for one in found["results"]] == pytest.approx(
            [0.51, 0.21, 0.21]
        )
        assert all("document" not in one for one in found["results"])
        assert found["id"].startswith("req_")
        assert found["meta"]["api_version"]["version"] == version
        assert found["usage"]["total_tokens"] == 10
    whole = await told(api, "/v1/rerank", query="q", documents=documents, return_documents=True)
    assert [one["document"] for one in whole["results"]] == [
        {"text": text} for text in ("aaaaa", "aa", "bb", "a")
    ]


async def test_classes(api: Any) -> None:
    found = await told(api, "/v1/classify", input=["aaaa", "a"])
    assert [(d["label"], d["probs"], d["num_classes"]) for d in found["data"]] == [
        ("yes", [0.25, 0.75], 2),
        ("no", [0.625, 0.375], 2),
    ]
    assert found["id"].startswith("classify-")


async def test_the_same_over_grpc(rig: Rig, api: Any) -> None:
    stub = InferenceStub(await rig.channel())
    key, _ = await rig.keys.create("acme")
    signed = (("authorization", f"Bearer {key}"),)
    vectors = await stub.Embed(
        PublicEmbedRequest(model=MODEL, texts=["aa", "b"], dimensions=2, pooling=Pooling.LAST),
        metadata=signed,
    )
    assert [list(v.values) for v in vectors.vectors] == [[2, 0.5], [1, 0.5]]
    assert vectors.tokens == 3
    assert rig.tokenizer.requests[-1].pool.pooling == Pooling.LAST
    ids = [TokenIds(ids=[1, 2, 3])]
    by_ids = await stub.Embed(PublicEmbedRequest(model=MODEL, token_ids=ids), metadata=signed)
    assert by_ids.vectors[0].values[0] == 3
    score = PublicScoreRequest(model=MODEL, queries=["q"], documents=["aa", "aaaa"])
    assert list((await stub.Score(score, metadata=signed)).scores) == pytest.approx([0.21, 0.41])
    ranks = await stub.Rerank(
        PublicRerankRequest(model=MODEL, query="q", documents=["a", "aaa", "aa"], top_n=2),
        metadata=signed,
    )
    assert [one.index for one in ranks.results] == [1, 2]
    classes = await stub.Classify(
        PublicClassifyRequest(model=MODEL, texts=["aaaa"]), metadata=signed
    )
    assert list(classes.labels) == ["no", "yes"]
    assert list(classes.results[0].probabilities) == [0.25, 0.75]
    for call, request, param in (
        (stub.Embed, PublicEmbedRequest(model=MODEL, texts=["a", ""]), "texts[1]"),
        (stub.Embed, PublicEmbedRequest(model=MODEL, texts=["a"], token_ids=ids), "token_ids"),
        (stub.Embed, PublicEmbedRequest(model=MODEL, token_ids=[*ids, TokenIds()]), "token_ids[1]"),
        (stub.Classify, PublicClassifyRequest(model=MODEL, token_ids=[TokenIds()]), "token_ids[0]"),
        (
            stub.Embed,
            PublicEmbedRequest(model=MODEL, texts=["a"], pooling=Pooling.LOGITS),
            "pooling",
        ),
        (stub.Score, PublicScoreRequest(model=MODEL, queries=["q"]), "documents"),
        (stub.Rerank, PublicRerankRequest(model=MODEL, documents=["a"]), "query"),
        (stub.Classify, PublicClassifyRequest(model=MODEL), "texts"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request, metadata=signed)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert dict(refused.value.trailing_metadata())["x-param"] == param
    rig.tokenizer.script = fails("inputs[0]")
    for request, param in (
        (PublicEmbedRequest(model=MODEL, token_ids=ids), "token_ids[0]"),
        (PublicEmbedRequest(model=MODEL, texts=["a"]), "texts[0]"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Embed(request, metadata=signed)
        assert dict(refused.value.trailing_metadata())["x-param"] == param


E, S, R, C = "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (E, {"input": ["a", " "]}, "input[1]"),
        (E, {"input": [[1], [2.5]]}, "input[1]"),
        (E, {"input": ["a"] * 2049}, "input"),
        (E, {"input": "a", "dimensions": 0}, "dimensions"),
        (E, {"input": "a", "pooling": "cls"}, "pooling"),
        (E, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (E, {"input": "a", "normalize": False}, "normalize"),
        (S, {"text_1": "a"}, "text_2"),
        (S, {"text_1": "a", "documents": ["b"]}, "documents"),
        (S, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (S, {"text_1": "a", "text_2": []}, "text_2"),
        (R, {"query": "", "documents": ["a"]}, "query"),
        (R, {"query": "q", "documents": []}, "documents"),
        (R, {"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        (R, {"query": "q", "documents": ["a", {"title": "t"}]}, "documents[1]"),
        (R, {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        (R, {"query": "q", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        (C, {"input": []}, "input"),
        (C, {"input": "a", "odd": 1}, "odd"),
    ],
)
async def test_what_is_wrong_is_named(
    rig: Rig, api: Any, path: str, body: dict[str, Any], param: str
) -> None:
    refused = await api.post(path, json={"model": MODEL, **body})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    if param not in body and "[" not in param:
        assert refused.json()["error"]["code"] == "missing_required_parameter"
    assert not rig.tokenizer.requests


def fails(param: str) -> Callable[[LinkCall, PromptRequest], Any]:
    async def script(call: LinkCall, request: PromptRequest) -> None:
        raise invalid(f"{param} is too long", param, stage="tokenizer")

    return script


@pytest.mark.parametrize(
    ("path", "body", "theirs", "ours"),
    [
        (E, {"input": "a"}, "inputs[0]", "input[0]"),
        (S, {"text_1": "a", "text_2": "b"}, "inputs[0]", "text_2[0]"),
        (S, {"text_1": "a", "text_2": "b"}, "queries[0]", "text_1[0]"),
        (R, {"query": "q", "documents": ["a"]}, "inputs[0]", "documents[0]"),
        (R, {"query": "q", "documents": ["a"]}, "queries[0]", "query"),
        (C, {"input": "a"}, "model", "model"),
    ],
)
async def test_what_the_tokenizer_refuses_has_the_clients_name(
    rig: Rig, api: Any, path: str, body: dict[str, Any], theirs: str, ours: str
) -> None:
    rig.tokenizer.script = fails(theirs)
    refused = await api.post(path, json={"model": MODEL, **body})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["message"]) == (ours, f"{ours} is too long")


async def test_keys_models_records_and_a_client_that_goes(rig: Rig, api: Any) -> None:
    key, _ = await rig.keys.create("small", models=["other"])
    small = await rig.http(key)
    body = {"model": MODEL, "query": "q", "documents": ["a"]}
    for path in ("/v1/rerank", "/v2/rerank"):
        assert (await small.post(path, json=body)).status_code == 403
    assert (await api.post(R, json={**body, "model": "nobody"})).status_code == 404
    retrieval = await api.post(R, json={**body, "model": EMBEDDING_MODEL})
    assert (retrieval.status_code, retrieval.json()["error"]["param"]) == (400, "model")
    unsigned = httpx.AsyncClient(base_url=api.base_url)
    assert (await unsigned.post(R, json=body)).status_code == 401
    await unsigned.aclose()
    assert not rig.tokenizer.requests

    answer = await api.post(R, json={**body, "user": "eva"})
    record = (await api.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
    assert (record["status"], record["model"], record["metadata"]) == ("ok", MODEL, {"user": "eva"})
    assert {"request", "compute", "prompt"} <= {span["name"] for span in record["spans"]}

    async def waits(call: LinkCall, request: PromptRequest) -> None:
        await until(lambda: call.cancelled)

    rig.tokenizer.script = waits
    before = rig.tokenizer.cancelled
    with pytest.raises(httpx.ReadTimeout):
        await api.post(R, json=body, timeout=0.5)
    await until(lambda: rig.tokenizer.cancelled > before, what="it is cancelled below")
    await until(lambda: rig.gateway.intake.running == 0, what="its place is free")


async def test_an_answer_of_which_some_is_missing_is_none(rig: Rig, api: Any) -> None:
    async def breaks_off(call: LinkCall, request: PromptRequest) -> None:
        delta = TextDelta(pooled=[Pooled(index=0, values=b"\0\0\0\0")])
        call.send(delta.SerializeToString())

    rig.tokenizer.script = breaks_off
    client = await rig.openai()
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=0).embeddings.create(model=MODEL, input=["a", "b"])
