"""The tokenizer service over its links: gateway's end in front, a scripted router behind."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest

from protos import tokenizer_pb2, tokenizer_pb2_grpc
from protos.common_pb2 import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
)
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest
from protos.worker_pb2 import TokenDelta
from services.common.config import (
    Settings,
    WorkerSettings,
)
from services.common.discovery import Registration, Replica
from services.common.errors import PenstockError, unavailable
from services.common.link import LinkCall
from services.common.redis import connect
from services.common.service import Host
from services.common.text.content import said
from services.tokenizer import metrics
from services.tokenizer.prompts.context import assemble
from services.tokenizer.server import TokenizerService
from tests.support.prompts import prompt_of
from tests.support.resumes import resume_of
from tests.support.served import checkpoint_of, listing
from tests.support.tokenizer_bed import (
    TOKENIZER,
    Bed,
    bed,
    ids,
    question,
    says,
    write_model,
)
from tests.support.transport import TRANSPORT
from tests.support.waiting import until


async def test_a_question_goes_through_and_text_comes_back(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    answer = "The water 東京 🚰 is here."
    async with bed(tmp_path, redis_url, namespace, says(answer)) as b:
        end = await b.ask(question())
        assert end.status.code == 0
        assert b.text == answer
        assert not any("\ufffd" in delta.text for delta in b.deltas)
        assert sum(len(delta.token_ids) for delta in b.deltas) == len(ids(answer))
        assert [d.finish for d in b.deltas] == [FINISH_NONE] * (len(b.deltas) - 1) + [FINISH_LENGTH]
        (sent,) = b.router().requests
        plan = b.deltas[0].plan
        assert plan.passages_used == 1
        prompt = plan.system + plan.history + plan.passages + plan.user + plan.template
        assert prompt == len(prompt_of(sent)) == b.deltas[-1].usage.prompt_tokens
        assert b.deltas[-1].usage.cached_tokens == 3
        decoded = TOKENIZER.decode(prompt_of(sent), skip_special_tokens=False)
        assert decoded == (
            "<|bos|><|system|>Be brief.<|eos|><|documents|>[1] T\nIt is water.<|eos|>"
            "<|user|>What is it?<|eos|><|assistant|>"
        )
        assert (sent.caller.tenant, sent.sampling.max_tokens) == ("t", 40)
        assert (sent.sampling.seed, list(sent.sampling.stop_token_ids)) == (7, [9])
        # The record has the whole way: this service's spans and decisions and the router's.
        spans = {span.name: span for span in end.record.spans}
        assert set(spans) == {"tokenizer", "policy", "assemble", "router"}
        assert spans["tokenizer"].parent_id == "b7ad6b7169203331"
        for name in ("policy", "assemble", "router"):
            assert spans[name].parent_id == spans["tokenizer"].span_id
        assert [d.subject for d in end.record.decisions] == ["context", "placement"]
        assert end.record.decisions[0].choice == "whole"
        assert "water" not in str(end.record)


async def models_of(b: Bed) -> Sequence[tokenizer_pb2.ModelInfo]:
    assert b.tokenizer.replica is not None
    async with TRANSPORT.dial(b.tokenizer.replica.address, "tokenizer") as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        reply = await stub.ListModels(tokenizer_pb2.ListModelsRequest(), timeout=5.0)
    return reply.models


async def test_the_models_are_listed(tmp_path: Path, redis_url: str, namespace: str) -> None:
    async with bed(tmp_path, redis_url, namespace) as b:
        (model,) = await models_of(b)
        assert (model.name, model.window) == ("tiny", 512)
        assert model.created == int((tmp_path / "config.json").stat().st_mtime)
        unknown = question()
        unknown.model = "huge"
        error = await b.refused(unknown)
        assert (error.code, error.param) == (grpc.StatusCode.NOT_FOUND, "model")
        assert error.stage == "tokenizer"


@pytest.mark.parametrize("config", ["auto", "none"])
async def test_what_a_request_does_not_name_is_sampled_as_the_checkpoint_says(
    tmp_path: Path, redis_url: str, namespace: str, config: Literal["auto", "none"]
) -> None:
    def write(folder: Path) -> None:
        write_model(folder)
        (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')

    request = question()
    request.sampling.unnamed.extend(["top_k", "top_p"])
    given = (tmp_path, redis_url, namespace, says("x"))
    async with bed(*given, write=write, generation_config=config) as b:
        assert (await b.ask(request)).status.code == 0
        (asked,) = b.router(0).requests
        told = await models_of(b)
    own = {"temperature": 0.6, "top_k": 20} if config == "auto" else {}
    assert dict(told[0].sampling) == own
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, own.get("top_k", 0))
    assert not sampling.unnamed


async def test_prompts_fit_the_room_that_the_workers_register(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, says("water")) as b:
        service = b.tokenizer.service
        assert isinstance(service, TokenizerService)
        catalog = service._pipeline.catalog
        whole = await catalog.find("tiny")
        assert whole.window == 512
        facts = {"model": "tiny", "digest": whole.checkpoint, "max_model_len": "96"}
        worker = Replica("worker", "worker-1", "127.0.0.1:1", "host", 1, facts=facts)
        registration = Registration(service.redis, namespace, worker, lease_s=5.0)
        await registration.start()

        async def seen() -> bool:
            return (await catalog.find("tiny")).window == 96

        await until(seen, what="the worker was seen")
        (listed,) = await catalog.all()
        assert listed.window == 96
        request = question()
        request.chat.passages.add(title="Long", text="water " * 60)
        request.sampling.max_tokens = 0
        assert (await b.ask(request)).status.code == 0
        plan = b.deltas[0].plan
        assert (plan.window, plan.passages_used, plan.passages_dropped) == (96, 1, 1)
        (sent,) = b.router().requests
        assert len(prompt_of(sent)) + sent.sampling.max_tokens == 96
        too_long = await b.refused(question("water " * 90))
        assert (too_long.param, too_long.reason) == ("messages", "context_length_exceeded")
        await registration.stop()


async def test_an_answer_gone_on_with_keeps_the_window_that_it_began_with(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    """A worker with less room may have come meanwhile."""
    async with bed(tmp_path, redis_url, namespace, says("water")) as b:
        request = question()
        request.sampling.max_tokens = 0
        assert (await b.ask(request)).status.code == 0
        begun = b.deltas[0]
        request.resume.CopyFrom(resume_of([begun]))
        request.resume.choices[0].finished = False
        catalog = b.pipeline.catalog
        facts = {"model": "tiny", "digest": begun.checkpoint, "max_model_len": "96"}
        worker = Replica("worker", "worker-1", "127.0.0.1:1", "host", 1, facts=facts)
        registration = Registration(b.tokenizer.service.redis, namespace, worker, lease_s=5.0)
        await registration.start()

        async def seen() -> bool:
            return (await catalog.find("tiny")).window == 96

        await until(seen, what="the worker was seen")
        assert (await b.ask(request)).status.code == 0
        sent = b.router().requests[-1]
        assert sent.generated_prefix == len(begun.token_ids)
        assert len(prompt_of(sent)) + sent.sampling.max_tokens == 512
        await registration.stop()


async def test_requests_and_tokens_are_counted_once(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    def counts() -> dict[str, float]:
        outcomes = ("ok", "invalid_argument", "not_found", "cancelled", "internal")
        found = {name: metrics.REQUESTS.labels(name)._value.get() for name in outcomes}
        for name, counter in (("in", metrics.PROMPT_TOKENS), ("out", metrics.COMPLETION_TOKENS)):
            found[name] = counter.labels("tiny")._value.get()
        for what in ("passages", "messages"):
            found[what] = metrics.CUT.labels(what)._value.get()
        return found

    before = counts()

    def since() -> dict[str, float]:
        nonlocal before
        last, before = before, counts()
        return {name: before[name] - last[name] for name in last if before[name] != last[name]}

    answer = "The water"
    async with bed(tmp_path, redis_url, namespace, says(answer)) as b:
        request = question()
        assert (await b.ask(request)).status.code == 0
        prompt = len(prompt_of(b.router().requests[0]))
        assert since() == {"ok": 1, "in": prompt, "out": len(ids(answer))}
        # Gone on with, only what is new is counted: another tokenizer has counted the rest.
        first = b.deltas[0]
        resumed = question()
        resumed.resume.CopyFrom(resume_of([first]))
        resumed.resume.choices[0].finished = False
        assert (await b.ask(resumed)).status.code == 0
        assert since() == {"ok": 1, "out": len(ids(answer))}
        cut = question()
        cut.chat.messages.insert(1, said("user", "water " * 400))
        for _ in range(2):
            cut.chat.passages.add(title="Long", text="water " * 400)
        assert (await b.ask(cut)).status.code == 0
        counted = since()
        assert (counted["passages"], counted["messages"]) == (2, 1)
        await b.refused(question(stop=[""]))
        assert since() == {"invalid_argument": 1}
        await b.refused(PromptRequest(model="huge", text="a"))
        assert since() == {"not_found": 1}
        junk = b.link.open(b"\xff\xff", deadline=time.monotonic() + 20, on_item=lambda _: None)
        assert (await junk.ended()).status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert since() == {"invalid_argument": 1}


async def test_threads_are_taken_and_time_is_kept_in_the_caller_s_name(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    async def notes(call: LinkCall, request: GenerateRequest) -> None:
        deadlines.append(call.deadline)
        await says("water")(call, request)

    async with bed(tmp_path, redis_url, namespace, notes) as b:
        tenants: list[str] = []
        run = b.pipeline.threads.run

        async def noted(tenant: str, work: Any) -> Any:
            tenants.append(tenant)
            return await run(tenant, work)

        monkeypatch.setattr(b.pipeline.threads, "run", noted)
        until_s = time.monotonic() + 500
        assert (await b.open(asked_by("acme"), timeout_s=500).ended()).status.code == 0
        assert tenants == ["acme"] * 2, "for the policy and for the prompt"
        assert until_s - 10 < deadlines[0] < until_s + 10
        begun = b.deltas[0]
        request = asked_by("acme")
        request.resume.CopyFrom(resume_of([begun]))
        request.resume.choices[0].finished = False
        tenants.clear()
        assert (await b.ask(request)).status.code == 0
        assert tenants == ["acme"] * 2, "for the prompt and for what was begun"

        with_passages, short = question(), question()
        short.chat.ClearField("passages")
        model = await b.pipeline.catalog.find(short.model)
        with_options, with_tools = PromptRequest(), PromptRequest()
        with_options.CopyFrom(short)
        with_tools.CopyFrom(short)
        with_options.chat.template_options = '{"a": 1}'
        with_tools.chat.tools.add(name="look", parameters="{}")
        for request, slowest_s, taken in (
            (short, 0.0, 1),
            (with_options, 0.0, 2),
            (with_tools, 0.0, 2),
            (with_passages, 0.0, 2),
            (short, 0.5, 2),
        ):
            model.template._plain.slowest_s = slowest_s
            tenants.clear()
            await b.ask(request)
            assert len(tenants) == taken, "for the policy, and for a prompt that may take long"


async def test_a_fault_of_our_own_is_told_without_its_text(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("secret prompt text")

    monkeypatch.setattr("services.tokenizer.pipeline.assemble", broken)
    async with bed(tmp_path, redis_url, namespace, says("never")) as b:
        end = await b.ask(question())
        error = PenstockError.from_status(end.status)
        assert (error.code, error.stage) == (grpc.StatusCode.INTERNAL, "tokenizer")
        assert "secret" not in error.message
        assert "tokenizer" in {span.name for span in end.record.spans}


async def test_more_than_the_limit_of_requests_is_refused(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    never = asyncio.Event()
    async with bed(tmp_path, redis_url, namespace, says("water", never), max_requests=2) as b:
        running = [b.open(question()) for _ in range(2)]
        await until(lambda: len(b.router().requests) == 2)
        assert (await b.refused(question())).reason == "too_many_requests"
        never.set()
        for request in running:
            assert (await request.ended()).status.code == 0


async def test_the_window_is_bounded_by_the_setting(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    write_model(tmp_path)
    settings = Settings(
        redis_url=redis_url,
        namespace=namespace,
        worker=WorkerSettings(max_model_len=64),
    )
    redis = connect(redis_url)
    listed = await listing(redis, settings, checkpoint_of(tmp_path, "tiny"))
    host = Host(TokenizerService, settings)
    replica = await host.start()
    async with TRANSPORT.dial(replica.address, "tokenizer") as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        (model,) = (await stub.ListModels(tokenizer_pb2.ListModelsRequest(), timeout=5.0)).models
    assert model.window == 64
    await host.stop(grace_s=0)
    await listed.stop()
    await redis.aclose()


async def test_a_stop_string_ends_the_generation(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    never = asyncio.Event()
    script = says("The water.\n\nUser: and much more of it", never)
    async with bed(tmp_path, redis_url, namespace, script) as b:
        stops = ["\n\nUser", "###", "never", "<|eos|>"]  # as many as there may be
        end = await b.ask(question(stop=stops))
        assert end.status.code == 0
        assert b.text == "The water."
        last = b.deltas[-1]
        assert last.finish == FINISH_STOP
        all_ids = ids("The water.\n\nUser: and much more of it")
        until_stop = next(
            n for n in range(len(all_ids)) if "\n\nUser" in TOKENIZER.decode(all_ids[:n])
        )
        assert last.usage.completion_tokens == until_stop
        assert sum(len(delta.token_ids) for delta in b.deltas) == until_stop
        assert last.usage.cached_tokens == 3
        await until(lambda: b.router().cancelled == 1, what="the router heard of it")


async def test_a_cancel_travels_to_the_router(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    never = asyncio.Event()
    async with bed(tmp_path, redis_url, namespace, says("The water", never)) as b:
        request = b.open(question())
        await until(lambda: b.text == "The water")
        request.cancel()
        await until(lambda: b.router().cancelled == 1)
        await until(lambda: b.router().links.running == 0)


@pytest.mark.parametrize("reason", ["peer_lost", "peer_stalled", "draining"])
async def test_workers_that_the_router_lost_are_no_reason_to_try_another_router(
    tmp_path: Path, redis_url: str, namespace: str, reason: str
) -> None:
    async def gives_up(_call: LinkCall, _request: GenerateRequest) -> None:
        raise unavailable("the last of the workers is away", stage="worker", reason=reason)

    async with bed(tmp_path, redis_url, namespace, gives_up, gives_up) as b:
        error = await b.refused(question())
        assert (error.stage, error.reason) == ("worker", reason)
        assert sum(len(b.router(n).requests) for n in (0, 1)) == 1


async def test_a_prompt_whose_checkpoint_was_replaced_is_tokenized_anew(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    """For another one, as long as there is one."""
    gone: set[str] = set()

    async def replaces(call: LinkCall, request: GenerateRequest) -> None:
        if request.checkpoint in gone or not request.checkpoint:
            raise unavailable("replaced", stage="router", reason="checkpoint_replaced")
        await says("water")(call, request)

    async with bed(tmp_path / "old", redis_url, namespace, replaces) as b:
        (tmp_path / "new").mkdir()
        write_model(tmp_path / "new")
        (tmp_path / "new" / "model.safetensors").write_bytes(b"other weights")
        redis = connect(redis_url)
        listed = await listing(redis, b.settings, checkpoint_of(tmp_path / "new", "tiny"))
        assert (await b.ask(question())).status.code == 0
        (first,) = {r.checkpoint for r in b.router().requests}
        gone.add(first)
        b.router().requests.clear()
        end = await b.ask(question())
        assert (end.status.code, b.text) == (0, "water")
        tried = [request.checkpoint for request in b.router().requests]
        assert len(tried) == len(set(tried)) == 2
        assert b.deltas[0].checkpoint == tried[1]
        subjects = [(d.subject, d.choice) for d in end.record.decisions]
        assert subjects.count(("checkpoint", "replaced")) == 1
        gone.add(tried[1])
        error = await b.refused(question())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "model_not_read")
        await listed.stop()
        await redis.aclose()


async def test_no_router_is_an_error_that_names_it(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, patience_s=0.05) as b:
        error = await b.refused(question())
        assert (error.code, error.stage) == (grpc.StatusCode.UNAVAILABLE, "router")
        assert error.reason == "no_replica"


async def test_the_router_s_refusal_arrives_whole(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async def full(_call: LinkCall, _request: GenerateRequest) -> None:
        raise PenstockError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", reason="queue_full", retry_after_s=2.0
        )

    async with bed(tmp_path, redis_url, namespace, full) as b:
        error = await b.refused(question())
        assert (error.code, error.stage) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "router")
        assert (error.reason, error.retry_after_s) == ("queue_full", 2.0)
        assert len(b.router().requests) == 1


async def test_an_output_without_a_finish_is_no_success(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async def breaks_off(call: LinkCall, _request: GenerateRequest) -> None:
        call.send(TokenDelta(token_ids=ids("water")).SerializeToString())

    async with bed(tmp_path, redis_url, namespace, breaks_off) as b:
        error = await b.refused(question())
        assert (error.code, error.stage) == (grpc.StatusCode.INTERNAL, "router")


async def test_long_prompts_do_not_hold_the_loop(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, says("water")) as b:
        long = b.open(PromptRequest(model="tiny", text="the water of the penstock " * 80_000))
        gaps, before = [0.0], time.thread_time()
        while not long.outcome.done():
            # The loop's own CPU time between two turns: other processes do not count.
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - before)
            before = time.thread_time()
        assert (await long.ended()).status.reason == "context_length_exceeded"
        assert max(gaps) < 0.1


async def test_many_prompts_of_one_tenant_do_not_hold_up_another_tenants(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(*given: Any) -> Any:
        assert gate.wait(20)
        return assemble(*given)

    monkeypatch.setattr("services.tokenizer.pipeline.assemble", slow)
    async with bed(tmp_path, redis_url, namespace, says("water")) as b:
        flood = [b.open(asked_by("flood")) for _ in range(30)]
        await until(lambda: b.pipeline.threads._turns._waiting.keys() == {"flood"})
        other = b.open(asked_by("other"))
        await until(lambda: "other" in b.pipeline.threads._turns._waiting)
        gate.set()
        for call in (other, *flood):
            assert (await call.ended()).status.code == 0
        order = [request.caller.tenant for request in b.router().requests]
    assert order.index("other") < 6


def asked_by(tenant: str) -> PromptRequest:
    """More than a short prompt."""
    request = question()
    request.caller.tenant, request.caller.request_id = tenant, "r" * 1024
    return request


async def test_a_drain_lets_running_requests_finish(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    go = asyncio.Event()
    async with bed(tmp_path, redis_url, namespace, says("water", go)) as b:
        running = b.open(question())
        await until(lambda: b.text == "water")
        drain = asyncio.create_task(b.tokenizer.service.drain(10.0))
        await until(lambda: b.link.state.value == "draining")
        late = await b.open(question()).ended()
        assert late.status.reason == "draining"
        b.deltas.clear()
        go.set()
        assert (await running.ended()).status.code == 0
        await drain


async def test_tokens_alone_are_those_that_a_router_would_get_and_may_be_more_than_fit(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    async with bed(tmp_path, redis_url, namespace, says("Yes")) as b:
        await b.ask(question())
        (sent,) = b.router().requests
        b.deltas.clear()
        counted = question()
        counted.tokens_only = True
        await b.ask(counted)
        (delta,) = b.deltas
        assert list(delta.token_ids) == prompt_of(sent)
        assert delta.usage.prompt_tokens == len(prompt_of(sent))
        b.deltas.clear()
        ids_of = PromptRequest(caller=counted.caller, model=counted.model, tokens_only=True)
        ids_of.token_ids.ids.extend(ids("It is") * 300)
        await b.ask(ids_of)
        assert b.deltas[0].text == "It is" * 300
        ids_of.token_ids.ids.extend(ids("It is") * 150_000)
        refused = (await b.open(ids_of).ended()).status
        assert refused.message.startswith("fewer than 300000 tokens are counted at once")
        assert len(b.router().requests) == 1
