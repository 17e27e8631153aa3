"""Whatever JSON arrives at whatever path: an answer with a status of its own, never a 500."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.tokenizer_pb2 import PromptRequest
from services.common.link import LinkCall
from services.gateway.api.generation_schema import ChatCompletionRequest, CompletionRequest
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, gateway_rig, say_numbers

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/classify",
    "/v1/files",
    "/v1/vector_stores",
    "/v1/vector_stores/vs_0/files",
    "/v1/vector_stores/vs_0/search",
    "/v1/requests/x",
)
WORDS = st.sampled_from(
    [MODEL, EMBEDDING_MODEL, "user", "text", "Hi", "", "\0", "é", "file_search"]
)
NAMES = st.sampled_from(
    sorted(
        {
            *ChatCompletionRequest.model_fields,
            *ChatCompletionRequest.NEUTRAL,
            *CompletionRequest.NEUTRAL,
            *("prompt", "input", "query", "name", "file_id", "role", "content", "type", "text"),
            *("documents", "text_1", "text_2", "dimensions", "pooling", "top_n"),
            *("vector_store_ids", "ranking_options", "odd \u2028 name"),
        }
    )
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)
VALID = st.fixed_dictionaries(
    {"model": st.just(MODEL), "messages": st.just([{"role": "user", "content": "Hi"}])},
    optional={"prompt": WORDS, "stream": st.booleans(), "stop": JSON, "max_tokens": st.integers()},
)

TEXTS = WORDS | st.lists(WORDS, max_size=3)
POOLED = st.one_of(
    st.fixed_dictionaries(
        {"model": st.just(MODEL), **fields}, optional={"top_n": JSON, "user": JSON}
    )
    for fields in (
        {"input": TEXTS | JSON},
        {"text_1": TEXTS, "text_2": TEXTS},
        {"query": WORDS, "documents": TEXTS | JSON},
    )
)


@pytest.fixture(scope="module")
def door(redis_server: Any) -> Iterator[httpx.Client]:
    """A gateway on a loop of its own: hypothesis drives it from this thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    rig_context = gateway_rig(redis_server.url, "fuzz")
    rig = asyncio.run_coroutine_threadsafe(rig_context.__aenter__(), loop).result(60)
    says = rig.tokenizer.script

    async def script(call: LinkCall, request: PromptRequest) -> None:
        await (say_numbers if request.HasField("pool") else says)(call, request)

    rig.tokenizer.script = script
    headers = {"Authorization": f"Bearer {rig.key}"}
    with httpx.Client(base_url=rig.url, headers=headers, timeout=10) as client:
        yield client
    asyncio.run_coroutine_threadsafe(rig_context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from(PATHS), body=JSON | VALID | POOLED)
def test_any_json_is_answered(door, path, body):
    answer = door.post(path, json=body)
    assert answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "stage"}
    elif "event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        json.loads(answer.text)
