"""The public gRPC service: the same policy as REST."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.common_pb2 import FINISH_STOP, Constraint, Passage, TokenIds, Tool
from protos.gateway_pb2 import (
    ChatRequest,
    CompleteRequest,
    PublicEmbedRequest,
    PublicGetRecordRequest,
    PublicListModelsRequest,
    SamplingOptions,
)
from protos.gateway_pb2_grpc import InferenceStub
from protos.tokenizer_pb2 import Echo
from services.common.errors import PenstockError
from services.common.service import Host
from services.common.text.content import said
from services.gateway import neighbours
from services.gateway.api.grpc import inbox as grpc_inbox
from services.gateway.api.grpc import strangers as grpc_strangers
from services.gateway.server import GatewayService
from tests.support.gateway_rig import EMBEDDING_MODEL, MODEL, Rig, finish, gateway_rig, plan, send
from tests.support.inside import check
from tests.support.transport import TRANSPORT
from tests.support.waiting import until

MESSAGES = [said("user", "Hi")]
LIMIT_S = 30.0


@pytest.fixture
async def rig(redis_url: str, namespace: str) -> AsyncIterator[Rig]:
    async with gateway_rig(redis_url, namespace) as rig:
        yield rig


async def stub(rig: Rig) -> Any:
    return InferenceStub(await rig.channel())


def signed(rig: Rig) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {rig.key}"),)


async def refusal(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    answer = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return raised.value.code(), dict(raised.value.trailing_metadata())


async def test_chat_streams_text_then_the_end(rig):
    request = ChatRequest(
        model=MODEL,
        messages=MESSAGES,
        documents=[Passage(title="a", text="b")],
        sampling=SamplingOptions(
            temperature=0, seed=2**64 - 1, max_tokens=7, stop=["x"], logit_bias={5: -1}
        ),
    )
    call = (await stub(rig)).Chat(request, metadata=signed(rig))
    events = [event async for event in call]
    assert "".join(event.text for event in events) == "Hello world"
    assert events[0].plan.window == 512
    assert [p.title for p in events[0].passages] == ["a"]
    assert events[-1].finish == FINISH_STOP
    assert events[-1].usage.cached_tokens == 4
    assert dict(await call.trailing_metadata())["x-request-id"].startswith("req_")
    sent = rig.tokenizer.requests[0]
    assert (sent.sampling.temperature, sent.sampling.seed, sent.sampling.max_tokens) == (
        0.0,
        2**64 - 1,
        7,
    )
    assert list(sent.stop) == ["x"]
    assert [(bias.id, bias.bias) for bias in sent.sampling.logit_bias] == [(5, -1)]
    assert sent.caller.tenant == "acme"


async def test_complete_with_token_ids(rig):
    request = CompleteRequest(model=MODEL, token_ids=TokenIds(ids=[4, 5]))
    call = (await stub(rig)).Complete(request, metadata=signed(rig))
    assert "".join([event.text async for event in call]) == "Hello world"
    assert list(rig.tokenizer.requests[0].token_ids.ids) == [4, 5]


async def test_prompts_of_one_request_are_answered_each(rig):
    async def script(call: Any, request: Any) -> None:
        shown = request.text or str(list(request.token_ids.ids))
        for choice in range(2):
            first = {"plan": plan(request), "echo": Echo(text=shown)} if choice == 0 else {}
            send(call, f"{shown}-{choice}", choice=choice, **first)
            finish(call, 1, choice=choice)

    rig.tokenizer.script = script
    service = await stub(rig)
    for prompts, shown in (
        ({"texts": ["a", "b", "c"]}, ["a", "b", "c"]),
        ({"token_ids": [TokenIds(ids=[4, 5]), TokenIds(ids=[6])]}, ["[4, 5]", "[6]"]),
    ):
        request = CompleteRequest(
            model=MODEL, prompts=prompts, sampling=SamplingOptions(n=2, echo=True)
        )
        call = service.Complete(request, metadata=signed(rig), timeout=LIMIT_S)
        events = [event async for event in call]
        said: dict[int, str] = {}
        for event in events:
            said[event.choice] = said.get(event.choice, "") + event.text
        assert [said[index] for index in sorted(said)] == [
            f"{one}-{choice}" for one in shown for choice in range(2)
        ]
        begun = [event for event in events if event.HasField("echo")]
        assert {(e.choice, e.echo.text) for e in begun} == {
            (2 * index, one) for index, one in enumerate(shown)
        }
        assert all(event.plan.window == 512 for event in begun)
        ended = [event.choice for event in events if event.finish]
        assert ended == list(range(2 * len(shown)))
        assert events[-1].usage.completion_tokens == 2 * len(shown)
    rig.settings.gateway.max_prompts = 2
    rig.settings.gateway.max_prompt_tokens = 2
    ids = TokenIds(ids=[4, 5])
    for odd, param in (
        ({}, "prompt"),
        ({"texts": ["a"] * 3}, "prompt"),
        ({"texts": ["a", ""]}, "prompt[1]"),
        ({"token_ids": [ids, ids]}, "prompt"),
        ({"texts": ["a"], "token_ids": [ids]}, "prompts.token_ids"),
    ):
        request = CompleteRequest(model=MODEL, prompts=odd)
        code, trailers = await refusal(service.Complete(request, metadata=signed(rig)))
        assert (code, trailers["x-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, param)


async def test_a_record_is_what_rest_tells_of_it(rig):
    service = await stub(rig)
    call = service.Chat(ChatRequest(model=MODEL, messages=MESSAGES), metadata=signed(rig))
    assert [event async for event in call]
    id = dict(await call.trailing_metadata())["x-request-id"]
    told = await rig.record(id)
    record = await service.GetRecord(PublicGetRecordRequest(request_id=id), metadata=signed(rig))
    assert (record.id, record.route, record.status, record.tokens) == (id, "Chat", "ok", 3)
    assert record.time_to_first_token_ms == told["time_to_first_token_ms"] > 0
    assert [span.name for span in record.spans] == [span["name"] for span in told["spans"]]
    assert [span.parent for span in record.spans].count("") == 1
    assert record.decisions[0].reasons == told["decisions"][0]["reasons"]
    failing = service.Chat(ChatRequest(model="none", messages=MESSAGES), metadata=signed(rig))
    _, trailers = await refusal(failing)
    request = PublicGetRecordRequest(request_id=trailers["x-request-id"])
    failed = await service.GetRecord(request, metadata=signed(rig))
    assert (failed.status, failed.error.code) == ("not_found", "model_not_found")
    theirs, _ = await rig.keys.create("globex")
    for asked, key in ((id, theirs), ("req", rig.key)):
        call = service.GetRecord(
            PublicGetRecordRequest(request_id=asked), metadata=(("authorization", f"Bearer {key}"),)
        )
        code, _ = await refusal(call)
        assert code == grpc.StatusCode.NOT_FOUND


async def test_too_many_token_ids_are_refused(rig):
    rig.settings.gateway.max_prompt_tokens = 2
    request = CompleteRequest(model=MODEL, token_ids=TokenIds(ids=[4, 5, 6]))
    code, trailers = await refusal((await stub(rig)).Complete(request, metadata=signed(rig)))
    assert (code, trailers["x-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


async def test_what_is_too_many_is_refused_by_its_name(rig):
    rig.settings.gateway.max_messages = 2
    service = await stub(rig)
    for more, param in (
        ({"messages": MESSAGES * 3}, "messages"),
        ({"documents": [Passage(text="x")] * 65}, "documents"),
        ({"vector_store_ids": ["vs_0"] * 11}, "vector_store_ids"),
        ({"sampling": SamplingOptions(stop=["x"] * 5)}, "sampling.stop"),
    ):
        request = ChatRequest(**{"model": MODEL, "messages": MESSAGES, **more})
        code, trailers = await refusal(service.Chat(request, metadata=signed(rig)))
        assert (code, trailers["x-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, param)


async def test_embed_and_list_models(rig):
    service = await stub(rig)
    request = PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a", "b"])
    reply = await service.Embed(request, metadata=signed(rig))
    assert len(reply.vectors) == 2
    assert reply.tokens == 2
    listed = await service.ListModels(PublicListModelsRequest(), metadata=signed(rig))
    assert [model.name for model in listed.models] == ["other", MODEL, EMBEDDING_MODEL]


async def test_refusals_name_the_field_as_grpc_has_it(rig):
    service = await stub(rig)
    for request, param in (
        (ChatRequest(model=MODEL), "messages"),
        (
            ChatRequest(model=MODEL, messages=MESSAGES, sampling=SamplingOptions(temperature=3.0)),
            "sampling.temperature",
        ),
        (
            ChatRequest(model=MODEL, messages=[said("critic", "x")]),
            "messages[0].role",
        ),
        (
            ChatRequest(
                model=MODEL, messages=MESSAGES, documents=[Passage(text="x", source_id="f")]
            ),
            "documents[0]",
        ),
        *(
            (
                ChatRequest(model=MODEL, messages=MESSAGES, sampling=SamplingOptions(**options)),
                f"sampling.{param}",
            )
            for options, param in (
                ({"temperature": math.nan}, "temperature"),
                ({"logit_bias": {5: math.nan}}, "logit_bias[5]"),
                ({"logit_bias": {5: math.inf}}, "logit_bias[5]"),
                ({"logit_bias": {5: 101}}, "logit_bias[5]"),
            )
        ),
        *(
            (
                ChatRequest(model=MODEL, messages=MESSAGES, **{field: of('{"default": NaN}')}),
                param,
            )
            for field, of, param in (
                ("tools", lambda said: [Tool(name="f", parameters=said)], "tools[0].parameters"),
                ("constraint", lambda said: Constraint(json_schema=said), "constraint.json_schema"),
                ("chat_template_kwargs", str, "chat_template_kwargs"),
            )
        ),
    ):
        code, trailers = await refusal(service.Chat(request, metadata=signed(rig)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert trailers["x-param"] == param
    missing = ChatRequest(model=MODEL, messages=MESSAGES, vector_store_ids=["vs_0"])
    code, trailers = await refusal(service.Chat(missing, metadata=signed(rig)))
    assert (code, trailers["x-param"]) == (grpc.StatusCode.NOT_FOUND, "vector_store_ids[0]")
    assert rig.tokenizer.requests == []


async def test_a_key_is_refused_where_no_answer_lasts(rig):
    service, key = await stub(rig), (*signed(rig), ("idempotency-key", "k"))
    for call in (
        service.Embed(PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a"]), metadata=key),
        service.GetRecord(PublicGetRecordRequest(request_id="req"), metadata=key),
        service.ListModels(PublicListModelsRequest(), metadata=key),
    ):
        code, trailers = await refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert trailers["x-param"] == "Idempotency-Key"


async def test_every_call_needs_a_key(rig):
    service = await stub(rig)
    calls = (
        lambda **more: service.Chat(ChatRequest(model=MODEL, messages=MESSAGES), **more),
        lambda **more: service.Complete(CompleteRequest(model=MODEL, text="x"), **more),
        lambda **more: service.Embed(PublicEmbedRequest(texts=["x"]), **more),
        lambda **more: service.ListModels(PublicListModelsRequest(), **more),
    )
    for call in calls:
        for metadata in ((), (("authorization", "Bearer psk-no"),)):
            code, trailers = await refusal(call(metadata=metadata))
            assert code == grpc.StatusCode.UNAUTHENTICATED
            assert trailers["x-request-id"]


async def test_errors_from_below_keep_code_and_advice(rig):
    async def full(call: Any, request: Any) -> None:
        raise PenstockError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="queue_full", retry_after_s=2.0
        )

    rig.tokenizer.script = full
    request = ChatRequest(model=MODEL, messages=MESSAGES)
    code, trailers = await refusal((await stub(rig)).Chat(request, metadata=signed(rig)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers["retry-after"] == "2"


async def test_what_breaks_inside_is_told_without_whereabouts(rig):
    async def breaks(call: Any, request: Any) -> None:
        raise FileNotFoundError(f"/tmp/secret of {rig.tokenizer_host.id} at 10.1.2.3:4567")

    async def one_word(call: Any, request: Any) -> None:
        send(call, "word", plan=plan(request))
        await asyncio.Event().wait()

    service = await stub(rig)
    rig.tokenizer.script = breaks
    broken = service.Chat(ChatRequest(model=MODEL, messages=MESSAGES), metadata=signed(rig))
    rig.tokenizer.script = breaks
    await refusal(broken)
    rig.tokenizer.script = one_word
    rig.gateway.settings.gateway.tokenizer_patience_s = 0.0  # no other one will come
    lost = service.Chat(ChatRequest(model=MODEL, messages=MESSAGES), metadata=signed(rig))
    assert (await lost.read()).text == "word"
    await rig.tokenizer_host._server.stop(None)  # as if it were killed
    await refusal(lost)
    for call in (broken, lost):
        told = [await call.details(), *(await call.trailing_metadata())]
        check(repr(told), rig.host.replica, rig.tokenizer_host.replica)


async def test_a_cancelled_call_cancels_the_work(rig):
    async def one_word(call: Any, request: Any) -> None:
        send(call, "word", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = one_word
    call = (await stub(rig)).Chat(ChatRequest(model=MODEL, messages=MESSAGES), metadata=signed(rig))
    assert (await call.read()).text == "word"
    call.cancel()
    await until(lambda: rig.tokenizer.cancelled == 1, 5)
    await until(lambda: rig.gateway.intake.running == 0, 5)


async def test_health_and_reflection(rig):
    channel = await rig.channel()
    health = health_pb2_grpc.HealthStub(channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service="penstock.v1.Inference"))
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection.ServerReflectionInfo(iter([ask])):
        names = {service.name for service in answer.list_services_response.service}
        assert "penstock.v1.Inference" in names


async def test_strangers_that_watch_leave_tenants_and_others_their_places(redis_url, namespace):
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(gateway_rig(redis_url, namespace, max_requests=100))
        address = rig.host.replica.facts["grpc"]
        watches = []
        for _ in range(3):
            own = (("grpc.use_local_subchannel_pool", 1),)
            channel = grpc.aio.insecure_channel(address, options=own)
            health = health_pb2_grpc.HealthStub(await stack.enter_async_context(channel))
            watches += [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(100)]

        async def served(watch: Any) -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await watch.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

        answers = await asyncio.gather(*map(served, watches))
        assert answers.count(True) == grpc_strangers.PLACES // 2
        listed = await (await stub(rig)).ListModels(PublicListModelsRequest(), metadata=signed(rig))
        assert listed.models
        for watch in watches:
            watch.cancel()
        places = rig.host.service._grpc._strangers._places
        await until(lambda: places.taken == 0, 5)


@pytest.mark.parametrize(
    "method",
    [
        "health.v1.Health/Watch",
        "reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_strangers_message_is_bounded_in_time_and_waits_for_its_turn(
    rig, monkeypatch, method
):
    monkeypatch.setattr(grpc_strangers, "MESSAGE_TIMEOUT_S", 60.0)
    strangers = rig.host.service._grpc._strangers
    open_call = (await rig.channel()).stream_stream(f"/grpc.{method}")
    for _ in range(4):
        await strangers._turns.take("ipv4:elsewhere")
    call = open_call()
    sending = asyncio.create_task(call.write(b"\xff" * 4_000_000))
    await asyncio.wait([sending], timeout=0.3)
    assert not sending.done()  # no more than a window of it has left
    for _ in range(4):
        strangers._turns.give_back()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await asyncio.wait([sending])
    monkeypatch.setattr(grpc_strangers, "MESSAGE_TIMEOUT_S", 0.2)
    assert await open_call().code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: strangers._places.taken == 0, 5)


async def test_a_health_check_waits_for_nobodys_withheld_message(rig, monkeypatch):
    """Kubernetes gives it one second."""
    monkeypatch.setattr(grpc_strangers, "MESSAGE_TIMEOUT_S", 60.0)
    channel = await rig.channel()
    withheld = [channel.stream_stream("/grpc.health.v1.Health/Check")() for _ in range(4)]
    strangers = rig.host.service._grpc._strangers
    await until(lambda: not strangers._turns.free, 5)
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="nobody's"), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert not any(call.done() for call in withheld)
    for call in withheld:
        await call.write(b"")
        assert await call.read() == answer.SerializeToString()
        assert await call.code() == grpc.StatusCode.OK
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Check(health_pb2.HealthCheckRequest(service="nobody's"))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_strangers_write_no_stack_traces_into_the_log(rig, caplog):
    check = (await rig.channel()).stream_stream("/grpc.health.v1.Health/Check")
    call = check()
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no message" in await call.details()
    assert not caplog.records
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (ExecuteBatchError("its caller was gone"), ValueError("a fault of ours")):
        try:
            raise error
        except Exception:
            log.exception("failed")
    assert [record.exc_info[1].args for record in caplog.records] == [("a fault of ours",)]


async def test_its_address_is_its_own_and_as_configured(rig, monkeypatch):
    replica = rig.host.replica
    assert replica.facts["grpc"] != replica.address
    async with TRANSPORT.dial(replica.address, "gateway") as internal:
        code, _ = await refusal(InferenceStub(internal).ListModels(PublicListModelsRequest()))
        assert code == grpc.StatusCode.UNIMPLEMENTED
    settings = rig.settings.model_copy(deep=True)
    settings.gateway.grpc_port = int(replica.facts["grpc"].rpartition(":")[2])
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 0.0)
    anothers = settings.model_copy(update={"namespace": "another"})
    with pytest.raises(RuntimeError, match=f"port {settings.gateway.grpc_port} on .*: in use"):
        await Host(GatewayService, anothers).start()
    await rig.host.stop(0)
    second = await rig.start(GatewayService, settings)
    assert second.replica.facts["grpc"] == replica.facts["grpc"]


async def test_a_message_over_the_limit_is_refused_to_those_who_may_send_one(redis_url, namespace):
    async with gateway_rig(redis_url, namespace, body_limit_bytes=10_000) as rig:
        service = await stub(rig)
        large = CompleteRequest(model=MODEL, text="x" * 10_001)
        code, _ = await refusal(service.Complete(large))
        assert code == grpc.StatusCode.UNAUTHENTICATED
        code, _ = await refusal(service.Complete(large, metadata=signed(rig)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: rig.gateway.intake.running == rig.gateway.intake.bytes_held == 0, 5)
        fits = CompleteRequest(model=MODEL, text="x" * 9_000)
        events = [event async for event in service.Complete(fits, metadata=signed(rig))]
        assert events[-1].finish == FINISH_STOP


async def test_a_message_stays_unread_until_its_caller_is_known(rig):
    """A stranger's message waits on the stranger's side, and holds neither place nor bytes."""
    known = asyncio.Event()
    identify = rig.gateway.auth.identify

    async def slowly(authorization: str | None) -> Any:
        await known.wait()
        return await identify(authorization)

    rig.gateway.auth.identify = slowly
    channel = await rig.channel()
    call = channel.stream_stream("/penstock.v1.Inference/Complete")(
        metadata=(("authorization", "Bearer psk-" + "a" * 43),)
    )
    sending = asyncio.create_task(call.write(b"x" * 4_000_000))
    await asyncio.wait([sending], timeout=0.3)
    assert not sending.done()  # no more than a window of it has left
    assert (rig.gateway.intake.running, rig.gateway.intake.bytes_held) == (0, 0)
    known.set()
    assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
    await asyncio.wait([sending])


async def test_a_call_that_withholds_its_message_ends_and_leaves_the_others_their_turns(
    rig, monkeypatch
):
    monkeypatch.setattr(grpc_inbox, "MESSAGE_TIMEOUT_S", 1.0)
    channel = await rig.channel()
    open_call = channel.stream_stream("/penstock.v1.Inference/Complete")
    withheld = [open_call(metadata=signed(rig)) for _ in range(12)]
    await until(lambda: rig.gateway.intake.running == 12, 5)
    other, _ = await rig.keys.create("rival", "other")
    request = CompleteRequest(model=MODEL, text="x")
    call = (await stub(rig)).Complete(request, metadata=(("authorization", f"Bearer {other}"),))
    assert [event async for event in call][-1].finish == FINISH_STOP
    for call in withheld:
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (rig.gateway.intake.running, rig.gateway.intake.bytes_held) == (0, 0)


async def test_what_is_no_message_is_refused(rig):
    channel = await rig.channel()
    for method in ("Chat", "Complete", "Embed"):
        for sent in (b"\xff\xff", None):
            call = channel.stream_stream(f"/penstock.v1.Inference/{method}")(metadata=signed(rig))
            if sent is not None:
                await call.write(sent)
            await call.done_writing()
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tenants_calls_are_bounded_like_its_requests(redis_url, namespace):
    async def waits(call: Any, request: Any) -> None:
        await asyncio.Event().wait()

    async with gateway_rig(redis_url, namespace, max_requests=4) as rig:
        rig.tokenizer.script = waits
        service = await stub(rig)
        request = ChatRequest(model=MODEL, messages=MESSAGES)
        running = [service.Chat(request, metadata=signed(rig)) for _ in range(2)]
        await until(lambda: len(rig.tokenizer.requests) == 2, 5)
        assert 0 < rig.gateway.intake.bytes_held < 1000  # what came, not the most that might have
        code, trailers = await refusal(service.Chat(request, metadata=signed(rig)))
        assert (code, trailers["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1")
        for call in running:
            call.cancel()
        await until(lambda: rig.gateway.intake.running == 0, 5)


async def test_a_caller_that_does_not_read_loses_its_place(redis_url, namespace):
    async def pours(call: Any, request: Any) -> None:
        send(call, "x", plan=plan(request))
        while True:
            send(call, "x" * 10_000)
            await asyncio.sleep(0.001)

    async with gateway_rig(redis_url, namespace, write_timeout_s=0.3) as rig:
        rig.tokenizer.script = pours
        request = ChatRequest(model=MODEL, messages=MESSAGES)
        small_window = [("grpc.http2.bdp_probe", 0)]
        address = rig.host.replica.facts["grpc"]
        async with grpc.aio.insecure_channel(address, options=small_window) as channel:
            call = InferenceStub(channel).Chat(request, metadata=signed(rig))
            await until(lambda: rig.tokenizer.cancelled == 1, 5)
            await until(lambda: rig.gateway.intake.running == 0, 5)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            id = dict(await call.trailing_metadata())["x-request-id"]
        assert (await rig.record(id))["error"]["code"] == "client_too_slow"


async def test_drain_lets_a_call_finish_and_refuses_new_ones(rig):
    go_on = asyncio.Event()

    async def waits(call: Any, request: Any) -> None:
        send(call, "first", plan=plan(request))
        await go_on.wait()
        send(call, " last")
        finish(call)

    rig.tokenizer.script = waits
    service = await stub(rig)
    request = ChatRequest(model=MODEL, messages=MESSAGES)
    call = service.Chat(request, metadata=signed(rig))
    events = aiter(call)
    assert (await anext(events)).text == "first"
    stopping = asyncio.create_task(rig.host.stop(10))
    await until(lambda: rig.gateway.intake.draining, 5)
    code, _ = await refusal(service.Chat(request, metadata=signed(rig)))
    assert code == grpc.StatusCode.UNAVAILABLE
    health = health_pb2_grpc.HealthStub(await rig.channel())
    status = await health.Check(health_pb2.HealthCheckRequest(service="penstock.v1.Inference"))
    assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
    go_on.set()
    assert [event async for event in events][-1].finish == FINISH_STOP
    async with asyncio.timeout(10):
        await stopping


async def test_a_call_that_outlasts_a_drains_grace_is_told_so(rig):
    async def never_ends(link_call: Any, request: Any) -> None:
        send(link_call, "first", plan=plan(request))
        await asyncio.Event().wait()

    rig.tokenizer.script = never_ends
    call = (await stub(rig)).Chat(ChatRequest(model=MODEL, messages=MESSAGES), metadata=signed(rig))
    assert (await call.read()).text == "first"
    stopping = asyncio.create_task(rig.host.stop(0.2))
    code, _ = await refusal(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "shut down" in await call.details()
    await stopping
