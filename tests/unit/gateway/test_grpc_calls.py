"""Public gRPC calls by themselves: what is asked of a caller first, what it is told, and how."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from protos.common_pb2 import (
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    Constraint,
    ContentPart,
    Message,
    Passage,
    TokenIds,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)
from protos.gateway_pb2 import (
    ChatRequest,
    CompleteRequest,
    GenerateEvent,
    PublicEmbedRequest,
    PublicListModelsReply,
    SamplingOptions,
)
from protos.retrieval_pb2 import EmbedReply, SearchReply, Vector
from protos.tokenizer_pb2 import PromptPlan, TextDelta, ToolCallDelta
from services.common.errors import PenstockError, invalid
from services.common.link import End
from services.common.text.content import said, text_of
from services.gateway import metrics
from services.gateway.api.grpc import calls
from services.gateway.api.grpc.inbox import Inbox
from services.gateway.api.grpc.inference import Inference
from services.gateway.api.rest.http import CLIENT_GONE
from tests.support.gateway_parts import (
    EMBEDDING_MODEL,
    MODEL,
    Opened,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.support.waiting import until

CODE = grpc.StatusCode
HI = [said("user", "Hi")]


class Aborted(Exception):
    """What grpc raises within `abort`."""


class Call:
    """A call's context: its caller, who sends one message and reads what comes."""

    def __init__(self, message: Any = None, key: str = "Bearer k", reads: bool = True) -> None:
        self.message = message.SerializeToString() if message is not None else grpc.aio.EOF
        self.metadata = (
            ("authorization", key),
            ("traceparent", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"),
        )
        self.reads = reads
        self.asked = 0
        self.events: list[GenerateEvent] = []
        self.trailers: dict[str, str] = {}
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> Any:
        return self.metadata

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.trailers = dict(trailers)

    async def read(self) -> Any:
        self.asked += 1
        return self.message

    async def send_initial_metadata(self, headers: Any) -> None:
        assert not self.events
        self.headers = dict(headers)

    async def write(self, event: GenerateEvent) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        copy = GenerateEvent()
        copy.CopyFrom(event)
        self.events.append(copy)

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        self.code, self.details, self.trailers = code, details, dict(trailers)
        raise Aborted


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts(max_requests=4, max_held_bytes=100_000, body_limit_bytes=20_000) as parts:
        parts.tokenizers = Tokenizers(answers)
        yield parts


def answers(opened: Opened) -> None:
    plan = PromptPlan(window=512, passages_used=1)
    opened.say(
        TextDelta(token_ids=[1], plan=plan),
        TextDelta(text="Hello", token_ids=[2]),
        TextDelta(token_ids=[3]),
        TextDelta(finish=FINISH_STOP, usage=Usage(prompt_tokens=8, completion_tokens=3)),
    )
    opened.finish()


def says(error: PenstockError) -> Callable[[Opened], None]:
    return lambda opened: opened.finish(End(status=error.to_status()))


def inference(parts: Any) -> Inference:
    return Inference(parts, Inbox(parts.settings.gateway))


async def chat(parts: Any, call: Call) -> Call:
    async with asyncio.timeout(30):
        try:
            await inference(parts).chat(None, call)
        except Aborted:
            assert call.code is not None
    return call


async def complete(parts: Any, call: Call) -> Call:
    async with asyncio.timeout(30):
        try:
            await inference(parts).complete(None, call)
        except Aborted:
            assert call.code is not None
    return call


def counted(route: str, status: int) -> float:
    return float(metrics.requests.labels(route, status)._value.get())


# ---- answers ------------------------------------------------------------------------------------


async def test_the_first_event_tells_the_plan_though_no_text_has_come(parts):
    async def one_by_one(opened: Opened) -> None:
        plan = PromptPlan(window=512, passages_used=1)
        opened.say(TextDelta(token_ids=[1], plan=plan))
        await until(lambda: len(call.events) == 1)
        opened.say(TextDelta(token_ids=[2]))
        for _ in range(9):  # it is looked at, and is no event
            await asyncio.sleep(0)
        opened.say(TextDelta(text="Hello", token_ids=[3]))
        await until(lambda: len(call.events) == 2)
        opened.say(TextDelta(finish=FINISH_STOP, usage=Usage(completion_tokens=3)))
        opened.finish()

    telling: list[asyncio.Task[None]] = []
    parts.tokenizers.script = lambda opened: telling.append(asyncio.create_task(one_by_one(opened)))
    parts.retrieval.reply = PenstockError(CODE.UNAVAILABLE, "away")
    documents = [Passage(title="a", text="b"), Passage(title="c", text="d")]
    call = Call(
        ChatRequest(model=MODEL, messages=HI, documents=documents, vector_store_ids=["vs_1"])
    )
    await chat(parts, call)
    await telling[0]
    first, text, last = call.events
    assert (first.text, first.plan.window, [p.title for p in first.passages]) == ("", 512, ["a"])
    assert "away" in first.warning
    assert (text.text, text.HasField("plan"), text.warning, list(text.passages)) == (
        "Hello",
        False,
        "",
        [],
    )
    assert (last.finish, last.usage.completion_tokens, last.text) == (FINISH_STOP, 3, "")
    assert call.code is None
    assert call.trailers["x-request-id"].startswith("req_")


async def test_what_is_ready_at_once_is_one_event(parts):
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    assert [(e.text, e.HasField("plan"), e.finish) for e in call.events] == [
        ("Hello", True, 0),
        ("", False, FINISH_STOP),
    ]


async def test_what_is_asked_for_arrives(parts):
    parts.retrieval.reply = SearchReply()
    sampling = SamplingOptions(
        temperature=0.0, top_k=5, top_p=0.25, seed=9, max_tokens=7, stop=["x"], ignore_eos=True
    )
    named = [said("user", "Hi", "ann")]
    asked = ChatRequest(
        model=MODEL, messages=named, sampling=sampling, vector_store_ids=["vs_1", "vs_2"]
    )
    await chat(parts, Call(asked))
    await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    whole, plain = (opened.request for opened in parts.tokenizers.opened)
    told = whole.sampling
    assert (told.temperature, told.top_k, told.top_p, told.seed) == (0.0, 5, 0.25, 9)
    assert (told.max_tokens, told.ignore_eos, list(whole.stop)) == (7, True, ["x"])
    assert [(m.role, text_of(m), m.name) for m in whole.chat.messages] == [("user", "Hi", "ann")]
    (search,) = parts.retrieval.searches
    assert (list(search.collections), search.query) == (["vs_1", "vs_2"], "Hi")
    assert search.limit == parts.settings.retrieval.top_k
    told = plain.sampling
    assert (told.temperature, told.top_p, told.top_k, told.max_tokens) == (1.0, 1.0, 0, 0)
    assert (told.ignore_eos, list(plain.stop), plain.chat.messages[0].name) == (False, [], "")


async def test_a_text_or_token_ids_to_complete(parts):
    await complete(parts, Call(CompleteRequest(model=MODEL, text="Say")))
    await complete(parts, Call(CompleteRequest(model=MODEL, token_ids=TokenIds(ids=[4, 5]))))
    text, ids = (opened.request for opened in parts.tokenizers.opened)
    assert (text.text, text.sampling.max_tokens) == ("Say", 16)
    assert list(ids.token_ids.ids) == [4, 5]


async def test_a_record_hangs_below_the_callers_trace(parts):
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    told = parts.records.find(call.trailers["x-request-id"], "acme").as_json()
    assert told["route"] == "Chat"
    (root,) = [span for span in told["spans"] if span["name"] == "request"]
    assert root["parent"] == "cd" * 8


# ---- who may, and how much ----------------------------------------------------------------------


async def test_a_key_for_some_models_is_shown_only_these(parts):
    parts.auth.keys["Bearer some"] = principal(models=frozenset({MODEL}))
    parts.auth.keys["Bearer embeds"] = principal(models=frozenset({EMBEDDING_MODEL}))

    async def names(key: str) -> list[str]:
        reply = await inference(parts).list_models(None, Call(key=key))
        assert isinstance(reply, PublicListModelsReply)
        return [model.name for model in reply.models]

    assert await names("Bearer k") == ["other", MODEL, EMBEDDING_MODEL]
    assert await names("Bearer some") == [MODEL]
    assert await names("Bearer embeds") == [EMBEDDING_MODEL]
    parts.retrieval.embedding_model = ""
    assert await names("Bearer k") == ["other", MODEL]


class Embeds:
    """Retrieval that embeds when it is let."""

    def __init__(self) -> None:
        self.embedding_model = EMBEDDING_MODEL
        self.requests: list[Any] = []
        self.traces: list[int] = []
        self.go_on = asyncio.Event()

    async def embed(self, request: Any, span: Any, record: Any) -> EmbedReply:
        self.requests.append(request)
        self.traces.append(span.trace_id)
        await self.go_on.wait()
        vectors = [Vector(values=[float(len(text))]) for text in request.texts]
        return EmbedReply(vectors=vectors, tokens=len(request.texts))


async def test_embeddings_have_places_as_generations_do(parts):
    parts.retrieval = Embeds()
    service = inference(parts)
    asked = PublicEmbedRequest(model=EMBEDDING_MODEL, texts=["a", "bb"])
    running = [asyncio.create_task(service.pooled("Embed")(None, Call(asked))) for _ in range(2)]
    await until(lambda: len(parts.retrieval.requests) == 2)
    refused = Call(asked)
    with pytest.raises(Aborted):
        await service.pooled("Embed")(None, refused)
    assert (refused.code, refused.asked) == (CODE.RESOURCE_EXHAUSTED, 0)
    assert refused.trailers["retry-after"] == "1"
    parts.retrieval.go_on.set()
    for reply in await asyncio.gather(*running):
        assert reply is not None
        assert [list(vector.values) for vector in reply.vectors] == [[1.0], [2.0]]
        assert reply.tokens == 2
    assert parts.retrieval.requests[0].caller.tenant == "acme"
    assert set(parts.retrieval.traces) == {int("ab" * 16, 16)}, "the caller's trace"
    assert (parts.intake.running, parts.intake.bytes_held) == (0, 0)


@pytest.mark.parametrize("method", ["chat", "complete", "embed"])
async def test_a_strangers_message_stays_unread(parts, method):
    call = Call(ChatRequest(model=MODEL, messages=HI), key="Bearer other")
    service = inference(parts)
    handler = service.pooled("Embed") if method == "embed" else getattr(service, method)
    with pytest.raises(Aborted):
        await handler(None, call)
    assert (call.code, call.asked) == (CODE.UNAUTHENTICATED, 0)


async def test_a_message_is_held_at_its_own_size_until_its_call_ends(parts):
    parts.tokenizers.script = lambda opened: None
    asked = CompleteRequest(model=MODEL, text="x" * 5000)
    running = asyncio.create_task(complete(parts, Call(asked)))
    await until(lambda: len(parts.tokenizers.opened) == 1)
    assert parts.intake.bytes_held == len(asked.SerializeToString())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert parts.intake.bytes_held == 0


async def test_a_message_that_has_no_room_is_not_read(parts):
    with parts.intake.visit("acme") as taken:
        taken.hold(50_000)
        call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    assert (call.code, call.asked) == (CODE.RESOURCE_EXHAUSTED, 0)


async def test_tools_and_forms_as_over_rest(parts):
    def calls(opened: Opened) -> None:
        call = ToolCallDelta(index=0, name="find", arguments="{}")
        opened.say(
            TextDelta(reasoning="Well.", token_ids=[1], plan=PromptPlan(window=512)),
            TextDelta(tool_calls=[call], token_ids=[2]),
            TextDelta(finish=FINISH_TOOL_CALLS),
        )
        opened.finish()

    parts.tokenizers.script = calls
    called = Message(role="assistant", tool_calls=[ToolCall(id="c", name="find", arguments="{}")])
    result = Message(role="tool", content=[ContentPart(text="12")], tool_call_id="c")
    asked = ChatRequest(
        model=MODEL,
        messages=[*HI, called, result],
        tools=[Tool(name="find", parameters='{"type": "object"}', strict=True)],
        tool_choice=ToolChoice(mode=ToolChoice.NAMED, name="find"),
        parallel_tool_calls=False,
        chat_template_kwargs='{"enable_thinking": false}',
        constraint=Constraint(choice=Constraint.Options(texts=["a"])),
    )
    call = await chat(parts, Call(asked))
    assert "".join(event.reasoning for event in call.events) == "Well."
    assert [c.name for event in call.events for c in event.tool_calls] == ["find"]
    assert call.events[-1].finish == FINISH_TOOL_CALLS
    (opened,) = parts.tokenizers.opened
    sent = opened.request
    assert list(sent.chat.messages) == list(asked.messages)
    assert (list(sent.chat.tools), sent.chat.tool_choice) == (list(asked.tools), asked.tool_choice)
    assert sent.chat.one_call
    assert sent.chat.template_options == asked.chat_template_kwargs
    assert sent.sampling.constraint == asked.constraint


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("messages[0].content", "messages[0].content"),
        ("tools", "tools"),
        ("guided_regex", "constraint.regex"),
        ("tools[0].vector_store_ids", "vector_store_ids"),
        ("tools[0].vector_store_ids[1]", "vector_store_ids[1]"),
        ("temperature", "sampling.temperature"),
        ("stop[1]", "sampling.stop[1]"),
        ("max_tokens", "sampling.max_tokens"),
        ("max_tokens_or_so", "max_tokens_or_so"),
        ("prompt", "prompt"),
        ("model", "model"),
    ],
)
async def test_a_field_is_named_as_grpc_has_it(parts, theirs, ours):
    parts.tokenizers.script = says(invalid("odd", theirs, stage="tokenizer"))
    call = await complete(parts, Call(CompleteRequest(model=MODEL, text="x")))
    assert (call.code, call.details, call.trailers["x-param"]) == (
        CODE.INVALID_ARGUMENT,
        "odd",
        ours,
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (CompleteRequest(model=MODEL), "prompt"),
        (CompleteRequest(model=MODEL, text=""), "prompt"),
        (CompleteRequest(model=MODEL, token_ids=TokenIds()), "prompt"),
        (CompleteRequest(text="x"), "model"),
        (
            CompleteRequest(model=MODEL, text="x", sampling=SamplingOptions(top_p=0.0)),
            "sampling.top_p",
        ),
    ],
)
async def test_what_a_completion_lacks_is_named(parts, message, param):
    call = await complete(parts, Call(message))
    assert (call.code, call.trailers["x-param"]) == (CODE.INVALID_ARGUMENT, param)
    assert parts.tokenizers.opened == []


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (ChatRequest(messages=HI, tools=[Tool(name="f g")]), "tools[0].name"),
        (
            ChatRequest(messages=HI, tools=[Tool(name="f", parameters="{")]),
            "tools[0].parameters",
        ),
        (
            ChatRequest(messages=HI, tools=[Tool(name="f", parameters='{"required": 5}')]),
            "tools[0].parameters.required",
        ),
        (
            ChatRequest(messages=HI, documents=[Passage(title="a\nb", text="c")]),
            "documents[0].title",
        ),
        (ChatRequest(messages=HI, constraint=Constraint(regex="")), "constraint.regex"),
        (ChatRequest(messages=HI, constraint=Constraint()), "constraint"),
        (ChatRequest(messages=HI, constraint=Constraint(json_object=False)), "constraint"),
        (
            ChatRequest(messages=[*HI, Message(role="assistant", tool_calls=[ToolCall(id="c")])]),
            "messages[1].tool_calls[0].name",
        ),
        (
            ChatRequest(messages=[Message(role="user", content=[ContentPart()])]),
            "messages[0].content[0]",
        ),
        (ChatRequest(messages=[Message(role="user")]), "messages[0].content"),
    ],
)
async def test_what_is_not_built_or_not_known_is_refused_by_name(parts, asked, param):
    asked.model = MODEL
    call = await chat(parts, Call(asked))
    assert (call.code, call.trailers["x-param"]) == (CODE.INVALID_ARGUMENT, param)
    assert parts.tokenizers.opened == []


@pytest.mark.parametrize(
    "odd", [Passage(text="x", score=0.5), Passage(text="x", position=1), Passage(source_id="f")]
)
async def test_a_clients_document_is_its_own(parts, odd):
    documents = [Passage(text="fine"), odd]
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI, documents=documents)))
    assert (call.code, call.trailers["x-param"]) == (CODE.INVALID_ARGUMENT, "documents[1]")


@pytest.mark.parametrize(
    ("after_s", "told"), [(0.0, None), (0.2, "1"), (1.0, "1"), (2.2, "3"), (7.0, "7")]
)
async def test_when_to_come_back_is_told_as_over_http(parts, after_s, told):
    full = PenstockError(CODE.RESOURCE_EXHAUSTED, "full", retry_after_s=after_s)
    parts.tokenizers.script = says(full)
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    assert (call.code, call.trailers.get("retry-after")) == (CODE.RESOURCE_EXHAUSTED, told)
    assert "x-param" not in call.trailers
    assert call.trailers["x-request-id"].startswith("req_")


async def test_a_fault_of_our_own_is_told_without_its_text(parts):
    async def breaks(name: str) -> Any:
        raise ValueError("the secret")

    parts.models.find = breaks
    before = counted("Chat", 500)
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI)))
    assert call.code is CODE.INTERNAL
    assert "secret" not in call.details
    assert counted("Chat", 500) == before + 1


async def test_a_caller_that_reads_nothing_is_given_up_with_its_last_word(parts, monkeypatch):
    monkeypatch.setattr(calls, "_LAST_WORD_S", 0.01)
    parts.settings.gateway.write_timeout_s = 0.01
    before = counted("Chat", 429)
    call = await chat(parts, Call(ChatRequest(model=MODEL, messages=HI), reads=False))
    assert (call.events, call.code) == ([], None)
    assert counted("Chat", 429) == before + 1
    told = parts.records.find(call.trailers["x-request-id"], "acme").as_json()
    assert told["error"]["code"] == "client_too_slow"
    assert parts.tokenizers.opened[0].cancelled
    assert (parts.intake.running, parts.intake.bytes_held) == (0, 0)


async def test_calls_are_counted_by_how_they_end(parts):
    before = {status: counted("Complete", status) for status in (200, 400, 401, CLIENT_GONE)}
    await complete(parts, Call(CompleteRequest(model=MODEL, text="x")))
    await complete(parts, Call(CompleteRequest(model=MODEL)))
    await complete(parts, Call(CompleteRequest(model=MODEL, text="x"), key="Bearer other"))
    parts.tokenizers.script = lambda opened: None
    running = asyncio.create_task(complete(parts, Call(CompleteRequest(model=MODEL, text="x"))))
    await until(lambda: len(parts.tokenizers.opened) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert parts.tokenizers.opened[1].cancelled
    for status, count in before.items():
        assert counted("Complete", status) == count + 1, status
