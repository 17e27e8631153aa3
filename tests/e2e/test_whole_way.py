"""A prompt through all five services, with the clients that users have."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import grpc
import openai
import pydantic
import pytest
import torch
import transformers

from protos import gateway_pb2, gateway_pb2_grpc
from services.common.config import ModelSpec
from services.common.text.content import said
from tests.support.cluster import Cluster
from tests.support.inside import check
from tests.support.streams import Stream
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
QUESTION = [{"role": "user", "content": "What is the pressure of the water?"}]


def client(penstock: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{penstock.url}/v1", api_key=penstock.key, max_retries=0)


async def test_greedy_text_is_what_transformers_generates(
    penstock: Cluster, checkpoint: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    async with client(penstock) as api:
        for words in (3, 40):  # a short one and a long one
            prompt = "the water " * words
            inputs = tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
            expected = tokenizer.decode(
                output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True
            )
            answer = await api.completions.create(
                model="tiny", prompt=prompt, max_tokens=40, temperature=0
            )
            assert answer.choices[0].text == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == inputs.input_ids.shape[1]


async def test_logprobs_of_prompt_and_answer_are_those_of_transformers(
    penstock: Cluster, checkpoint: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = "the water is here " * 12
    ids = tokenizer(prompt).input_ids
    async with client(penstock) as api:
        for _ in range(2):  # the second time all of it is cached
            answer = await api.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=6,
                temperature=0,
                logprobs=3,
                echo=True,
                n=2,
                extra_body={"ignore_eos": True},
            )
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False
                )
                logprobs = model(output).logits[0, :-1].log_softmax(-1)
            best = logprobs.topk(3)
            for choice in answer.choices:
                told = choice.logprobs
                assert told is not None
                assert told.tokens is not None
                assert told.token_logprobs is not None
                assert told.top_logprobs is not None
                assert choice.text.startswith(prompt)
                assert told.token_logprobs[0] is None
                expected = logprobs.gather(1, output[0, 1:, None])[:, 0].tolist()
                assert told.token_logprobs[1:] == pytest.approx(expected, abs=2e-3)
                for here, values in zip(told.top_logprobs[1:], best.values.tolist(), strict=True):
                    # Tokens that read the same are told once, by the better one.
                    assert max(here.values()) == pytest.approx(values[0], abs=2e-3)
                    told_of = [
                        any(abs(v - found) < 2e-3 for v in values) for found in here.values()
                    ]
                    assert told_of.count(False) <= 1, "the token itself"
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.completion_tokens == 12


async def test_choices_are_streamed_as_they_are_answered_at_once(penstock: Cluster) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 12,
        "seed": 5,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100},
        "extra_body": {"min_p": 0.001, "repetition_penalty": 1.2, "min_tokens": 12},
    }
    async with client(penstock) as api:
        whole = await api.chat.completions.create(**asked)
        stream = await api.chat.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(**{**asked, "logit_bias": {"99999": 1}})
    assert refused.value.param == "logit_bias"
    texts = [choice.message.content for choice in whole.choices]
    assert len({*texts}) == 3, "each has a seed of its own"
    for index, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        streamed = [t for one in own if one.logprobs for t in one.logprobs.content or ()]
        assert [t.token for t in streamed] == [t.token for t in choice.logprobs.content]
        assert [t.logprob for t in streamed] == pytest.approx(
            [t.logprob for t in choice.logprobs.content], abs=2e-3
        )
        assert all(len(t.top_logprobs) == 2 for t in streamed)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 36


async def test_chat_streams_what_it_answers_at_once(penstock: Cluster) -> None:
    async with client(penstock) as api:
        whole = await api.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=30, seed=3, extra_body={"ignore_eos": True}
        )
        stream = await api.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=30,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert whole.usage is not None
    assert whole.usage.total_tokens == chunks[-1].usage.total_tokens


async def test_a_repeated_prompt_is_counted_as_cached(penstock: Cluster) -> None:
    async with client(penstock) as api:
        answers = [
            await api.completions.create(
                model="tiny", prompt="a prompt that comes twice " * 12, max_tokens=4, temperature=0
            )
            for _ in range(2)
        ]
    usages = [a.usage.prompt_tokens_details.cached_tokens for a in answers]  # type: ignore[union-attr]
    assert usages[0] == 0
    assert usages[1] > 64
    assert answers[0].choices[0].text == answers[1].choices[0].text


async def test_a_stop_string_ends_it_everywhere_and_is_accounted_for(penstock: Cluster) -> None:
    body = {"model": "tiny", "prompt": "a way to stop " * 10, "max_tokens": 400, "temperature": 0}
    extra = {"ignore_eos": True}
    async with client(penstock) as api:
        whole = (await api.completions.create(**body, extra_body=extra)).choices[0].text  # type: ignore[call-overload]
        stop = whole[20:24]
        raw = await api.completions.with_raw_response.create(  # type: ignore[call-overload]
            **body, stop=stop, extra_body=extra
        )
        answer = raw.parse()
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 100
    assert answer.usage.prompt_tokens_details.cached_tokens >= 64, "it was asked before"
    async with penstock.api() as http:
        record = (await http.get(f"/v1/requests/{raw.headers['x-request-id']}")).json()
    assert {"router", "worker"} <= {span["service"] for span in record["spans"]}


class Point(pydantic.BaseModel):
    x: Literal[1, 22, 333]
    on: bool | None


MOVE = openai.pydantic_function_tool(Point, name="move")


async def test_forms_and_calls_hold_whatever_the_model_is(penstock: Cluster) -> None:
    """With random weights, on two workers that hand over; streamed as at once."""
    common: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 400, "seed": 5}
    async with client(penstock) as api:
        parsed = await api.chat.completions.parse(**common, response_format=Point)
        assert isinstance(parsed.choices[0].message.parsed, Point)
        picked = await api.completions.create(
            model="tiny", prompt="Is it?", seed=5, extra_body={"guided_choice": ["yes", "no"]}
        )
        assert picked.choices[0].text in ("yes", "no")
        forced = {
            **common,
            "tools": [MOVE],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        whole = (await api.chat.completions.parse(**forced)).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Point)
        async with api.chat.completions.stream(**forced) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        (same,) = streamed.message.tool_calls or ()
        assert (same.function.name, same.function.arguments) == ("move", call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "moved"}
        told = [*QUESTION, whole.message, result]
        after = await api.chat.completions.create(
            model="tiny", messages=told, tools=[MOVE], tool_choice="none", max_tokens=4
        )
        assert after.choices[0].message.tool_calls is None
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(
                model="tiny", prompt="x", extra_body={"guided_regex": "(a"}
            )
    assert refused.value.param == "guided_regex"


async def test_documents_reach_the_prompt_and_the_record_shows_every_stage(
    penstock: Cluster,
) -> None:
    async with client(penstock) as api:
        store = await api.vector_stores.create(name="guides")
        uploaded = await api.files.create(
            file=("guide.md", b"The keeper of the Lamorna lighthouse is Greta Penrith."),
            purpose="assistants",
        )
        attached = await api.vector_stores.files.create_and_poll(
            vector_store_id=store.id, file_id=uploaded.id
        )
        assert attached.status == "completed", attached.last_error
        raw = await api.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "Who keeps the Lamorna lighthouse?"}],
            max_tokens=8,
            tools=[{"type": "file_search", "vector_store_ids": [store.id]}],  # type: ignore[list-item]
        )
        body = json.loads(raw.content)
        assert [p["filename"] for p in body["penstock"]["passages"]] == ["guide.md"]
        assert body["penstock"]["plan"]["passages"] > 0
    async with penstock.api() as http:
        record = (await http.get(f"/v1/requests/{raw.headers['x-request-id']}")).json()
    services = {span["service"] for span in record["spans"]}
    assert services == {"gateway", "retrieval", "tokenizer", "router", "worker"}
    assert len({span["id"] for span in record["spans"]}) == len(record["spans"])
    known = {span["id"] for span in record["spans"]}
    roots = [s for s in record["spans"] if s["parent"] not in known]
    assert len(roots) == 1, "one trace, one root"
    assert {"admission", "placement"} <= {d["subject"] for d in record["decisions"]}
    check(raw.text + json.dumps(record), *(p.replica for p in penstock.processes if p.replica))


async def test_nothing_of_the_inside_is_told(penstock: Cluster) -> None:
    """Neither by answers nor by refusals, of every stage and every path."""
    odd = [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/none", None),
        ("GET", "/v1/files/x", None),
        ("GET", "/v1/requests/x", None),
        ("GET", "/health", None),
        ("GET", "/readyz", None),
        ("GET", "/nowhere", None),
        ("PUT", "/v1/files", None),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": "x " * 9000}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": [9_999_999]}),
        ("POST", "/v1/completions", {"model": "none", "prompt": "x"}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2**31 - 1}),
        ("POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "x"}]}),
        ("POST", "/v1/embeddings", {"model": "none", "input": "x"}),
        ("POST", "/v1/vector_stores/vs_0/search", {"query": "x"}),
    ]
    split = {"model": "tiny", "prompt": "the water " * 60, "max_tokens": 8, "ignore_eos": True}
    replicas = [p.replica for p in penstock.processes if p.replica]
    async with penstock.api() as http:
        for method, path, body in odd:
            answer = await http.request(method, path, json=body)
            check(answer.text + str(dict(answer.headers)), *replicas)
        answer = await http.post("/v1/completions", json=split)
        record = (await http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
    check(answer.text + json.dumps(record), *replicas)
    (placed,) = [d["choice"] for d in record["decisions"] if d["subject"] == "placement"]
    assert placed.count("worker ") == 2, "a prefill and a decode worker, by their labels"


async def test_a_client_that_goes_away_frees_its_blocks(penstock: Cluster) -> None:
    async with penstock.api() as http:
        long = {"prompt": "on and on", "max_tokens": 1500, "ignore_eos": True, "n": 4}
        stream = Stream(http, {"model": "tiny", **long})
        await stream.reached(chunks=1)  # many tokens may have come as one
        stream.disconnect()

        async def idle() -> bool:
            status = await penstock.router_status()
            free = all(w.free_blocks == w.total_blocks for w in status.workers)
            return free and not status.admitted and not sum(w.running for w in status.workers)

        # Far less than the 6,000 tokens would take.
        await until(idle, 2.0, "blocks and slot are free")

        async def told() -> bool:  # the record comes once all is free
            return (await stream.record()).get("error", {}).get("code") == "cancelled"

        await until(told, what="its record says why it ended")


async def test_embeddings_and_models(penstock: Cluster) -> None:
    async with client(penstock) as api:
        names = [model.id async for model in await api.models.list()]
        assert names[0] == "tiny"
        (embedding_model,) = names[1:]
        answer = await api.embeddings.create(
            model=embedding_model, input=["a lighthouse", "a beacon by the sea", "tax law"]
        )
    near, far = (
        sum(a * b for a, b in zip(answer.data[0].embedding, other.embedding, strict=True))
        for other in answer.data[1:]
    )
    assert near > far + 0.2


async def test_numbers_of_a_served_model_are_those_of_transformers(
    penstock: Cluster, checkpoint: Path
) -> None:
    """And a client that goes away ends those that are not computed yet."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    texts = ["the water", "a lighthouse by the sea " * 9, "東京"]
    with torch.inference_mode():
        states = [model(torch.tensor([tokenizer(t).input_ids])).last_hidden_state[0] for t in texts]
    wanted = {"last": [one[-1] for one in states], "mean": [one.mean(0) for one in states]}
    wanted = {k: torch.nn.functional.normalize(torch.stack(v), dim=1) for k, v in wanted.items()}
    async with client(penstock) as api, penstock.api() as http:
        for pooling, vectors in wanted.items():
            made = await api.embeddings.create(
                model="tiny", input=texts, extra_body={"pooling": pooling}
            )
            found = torch.tensor([one.embedding for one in made.data])
            torch.testing.assert_close(found, vectors, rtol=1e-4, atol=1e-4)
        assert made.usage.prompt_tokens == sum(map(len, states))
        asked = {"model": "tiny", "query": texts[0], "documents": texts[::-1]}
        ranked = (await http.post("/v2/rerank", json=asked)).json()["results"]
        scores = {one["index"]: one["relevance_score"] for one in ranked}
        last = wanted["last"]
        cosines = [float(last[0] @ last[2 - index]) for index in range(3)]
        assert [scores[index] for index in range(3)] == pytest.approx(cosines, abs=1e-4)
        assert [one["index"] for one in ranked] == sorted(scores, key=lambda i: -scores[i])

        many = {"model": "tiny", "input": [f"text number {i}" for i in range(2048)]}
        going = asyncio.create_task(http.post("/v1/embeddings", json=many))

        async def running() -> bool:
            return (await penstock.router_status()).admitted > 0

        await until(running, 20.0, "some are under way")
        going.cancel()

        async def idle() -> bool:
            status = await penstock.router_status()
            free = all(w.free_blocks == w.total_blocks for w in status.workers)
            return free and not status.admitted and not status.queued

        await until(idle, 2.0, "blocks and slots are free")


async def test_grpc_gives_what_rest_gives(penstock: Cluster) -> None:
    replica = penstock.of("gateway")[0].replica
    assert replica is not None
    async with (
        client(penstock) as api,
        grpc.aio.insecure_channel(replica.facts["grpc"]) as channel,
    ):
        rest = await api.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=12, temperature=0
        )
        stub = gateway_pb2_grpc.InferenceStub(channel)
        request = gateway_pb2.ChatRequest(
            model="tiny",
            messages=[said("user", QUESTION[0]["content"])],
            sampling=gateway_pb2.SamplingOptions(max_tokens=12, temperature=0),
        )
        key = (("authorization", f"Bearer {penstock.key}"),)
        events = [event async for event in stub.Chat(request, metadata=key, timeout=30)]
        assert "".join(e.text for e in events) == rest.choices[0].message.content
        assert rest.usage is not None
        assert events[-1].usage.completion_tokens == rest.usage.completion_tokens
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [event async for event in stub.Chat(request, timeout=30)]
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_list_of_prompts_is_answered_as_each_would_be_alone(penstock: Cluster) -> None:
    prompts = ["the water", "a lighthouse " * 20, "tax"]
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with client(penstock) as api:
        alone = [await api.completions.create(prompt=p, **body) for p in prompts]  # type: ignore[call-overload]
        together = await api.completions.create(prompt=prompts, **body)  # type: ignore[call-overload]
        stream = await api.completions.create(prompt=prompts, stream=True, **body)  # type: ignore[call-overload]
        streamed = ["", "", ""]
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    texts = [answer.choices[0].text for answer in alone]
    assert [choice.text for choice in together.choices] == texts == streamed
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    assert together.usage.completion_tokens == 36


async def test_many_at_once_all_end_as_they_would_alone(penstock: Cluster) -> None:
    prompts = [f"number {n} " * (1 + 5 * (n % 7)) for n in range(24)]
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    async with client(penstock) as api:
        alone = [
            (await api.completions.create(prompt=p, **body)).choices[0].text  # type: ignore[call-overload]
            for p in prompts
        ]
        together = await asyncio.gather(
            *(api.completions.create(prompt=p, **body) for p in prompts)  # type: ignore[call-overload]
        )
    assert [answer.choices[0].text for answer in together] == alone


async def test_a_served_model_ranks_what_a_store_and_a_chat_find(penstock: Cluster) -> None:
    """At a gateway that names one, by what /v1/score says of the same texts: the whole way."""
    texts = ["The water is hot.", "The keeper asks for the water.", "The pressure of the water."]
    question = "What is the pressure of the water?"
    gateway = penstock.spawn(
        "gateway", RETRIEVAL__RERANKING_MODEL="tiny", RETRIEVAL__RERANKING_TIMEOUT_S="30"
    )
    await penstock.up(gateway)
    try:
        async with client(penstock) as api, penstock.api(-1) as http:

            async def ready() -> bool:
                return (await http.get("/readyz")).status_code == 200

            await until(ready, 30, "the gateway is ready")
            store = await api.vector_stores.create(name="waters")
            for number, text in enumerate(texts):
                file = await api.files.create(
                    file=(f"{number}.md", text.encode()), purpose="assistants"
                )
                await api.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id)
            asked = {"query": question, "max_num_results": 2}
            told = (await http.post(f"/v1/vector_stores/{store.id}/search", json=asked)).json()
            assert told["penstock"]["reranked"] == "tiny", told
            read = [f"{one['title']}\n{one['content'][0]['text']}" for one in told["data"]]
            scored = await http.post(
                "/v1/score", json={"model": "tiny", "text_1": question, "text_2": read}
            )
            wanted = [one["score"] for one in scored.json()["data"]]
            assert [one["score"] for one in told["data"]] == pytest.approx(wanted, abs=1e-5)
            assert len(wanted) == 2
            assert wanted == sorted(wanted, reverse=True)
            chat = await http.post(
                "/v1/chat/completions",
                json={
                    "model": "tiny",
                    "messages": [{"role": "user", "content": question}],
                    "max_tokens": 4,
                    "tools": [
                        {
                            "type": "file_search",
                            "vector_store_ids": [store.id],
                            "max_num_results": 2,
                        }
                    ],
                },
            )
            body = chat.json()
            assert body["penstock"]["search"]["reranked"] == "tiny"
            passages = [one["filename"] for one in body["penstock"]["passages"]]
            assert passages == [one["filename"] for one in told["data"]]
            record = (await http.get(f"/v1/requests/{chat.headers['x-request-id']}")).json()
            assert "rerank" in [span["name"] for span in record["spans"]]
    finally:
        gateway.kill()
        penstock.processes.remove(gateway)


async def test_a_pool_that_does_both_answers_as_the_split_ones(
    penstock: Cluster, checkpoint: Path
) -> None:
    """The same checkpoint by another name, added while the rest runs; one worker does all of it.
    Last: for some minutes its name is known still."""
    added = [ModelSpec(name="whole", path=str(checkpoint)).model_dump()]
    worker = penstock.spawn("worker", WORKER__ROLE="both", MODELS=json.dumps(added))
    await penstock.up(worker)
    prompts = ["the water", "a lighthouse keeper asks " * 30]
    body = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}

    async def chosen(answer: Any) -> list[str]:
        async with penstock.api() as http:
            record = (await http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
        return [d["choice"] for d in record["decisions"] if d["subject"] == "split"]

    try:
        async with client(penstock) as api:

            async def served() -> bool:
                return "whole" in [model.id async for model in await api.models.list()]

            await until(served, 30, "the model is known")
            for prompt in prompts:
                split, whole = [
                    await api.completions.with_raw_response.create(  # type: ignore[call-overload]
                        model=model, prompt=prompt, **body
                    )
                    for model in ("tiny", "whole")
                ]
                assert whole.parse().choices[0].text == split.parse().choices[0].text
                assert await chosen(split) == ["split"]
                assert await chosen(whole) == ["unsplit"]
            stream = await api.completions.create(  # type: ignore[call-overload]
                model="whole", prompt=prompts[1], stream=True, **body
            )
            streamed = "".join([chunk.choices[0].text async for chunk in stream])
            assert streamed == whole.parse().choices[0].text
            again = await api.completions.create(model="whole", prompt=prompts[1], **body)  # type: ignore[call-overload]
            assert again.usage.prompt_tokens_details.cached_tokens > 64
    finally:
        worker.kill()
        penstock.processes.remove(worker)
