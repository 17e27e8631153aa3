"""A generation's way through the gateway, by stand-ins for its neighbours: what comes in which
order, what is kept of it, and what ends with it."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from protos.common_pb2 import (
    FINISH_LENGTH,
    FINISH_STOP,
    Passage,
    Record,
    Span,
    Status,
    Usage,
)
from protos.retrieval_pb2 import SearchReply
from protos.tokenizer_pb2 import Chat, PromptPlan, PromptRequest, TextDelta
from services.common.content import said
from services.common.errors import PenstockError, invalid
from services.common.link import End
from services.common.logs import JsonLines
from services.common.metrics import BoundedNames
from services.gateway import metrics
from services.gateway.intake import Place
from services.gateway.metering.prices import Cost
from services.gateway.runs import prompt as prompt_module
from services.gateway.runs import recorded
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Answer, Prompt
from services.gateway.stores.store_files import Unready
from tests.support.gateway_parts import MODEL, Opened, Tokenizers, gateway_parts, principal
from tests.support.waiting import until

CODE = grpc.StatusCode


class Front:
    """A client's side, in memory."""

    def __init__(self, *prompts: Prompt, key: str = "Bearer k") -> None:
        self.request_id = f"req_{id(self)}"
        self.route = "Test"
        self.endpoint = "POST /v1/chat/completions"
        self.authorization: str | None = key
        self.traceparent: str | None = None
        self.prompts = list(prompts) or [asks()]
        self.places: list[Place] = []
        self.refuses: Exception | None = None
        self.texts: dict[int, str] = {}
        self.finished: list[Answer] = []

    async def read(self, place: Place) -> list[Prompt]:
        self.places.append(place)
        place.hold(10)
        if self.refuses is not None:
            raise self.refuses
        return self.prompts

    async def write(self, answer: Answer, deltas: list[TextDelta]) -> None:
        text = "".join(delta.text for delta in deltas)
        self.texts[answer.index] = self.texts.get(answer.index, "") + text

    def admitted(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)

    @property
    def shown(self) -> bool:
        return bool(self.texts)

    async def finish(self, answers: list[Answer], cost: Cost | None) -> None:
        self.finished, self.cost = answers, cost


def asks(text: str = "Hi", model: str = MODEL, **more: Any) -> Prompt:
    return Prompt(PromptRequest(model=model, text=text), **more)


def usage(prompt: int = 8, cached: int = 4, completion: int = 3) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)


def says(*words: str, used: Usage | None = None, passages: int = 9) -> Callable[[Opened], None]:
    def script(opened: Opened) -> None:
        plan = PromptPlan(window=512, passages_used=passages)
        for number, word in enumerate(words):
            first = {} if number else {"plan": plan}
            opened.say(TextDelta(text=word, token_ids=[1, 2], **first))
        opened.say(TextDelta(finish=FINISH_STOP, usage=used or usage()))
        opened.finish()

    return script


def ends(code: grpc.StatusCode, *words: str, **status: Any) -> Callable[[Opened], None]:
    def script(opened: Opened) -> None:
        opened.say(*[TextDelta(text=word, token_ids=[1]) for word in words])
        below = Record(spans=[Span(service="worker", name="step")])
        told = Status(code=code.value[0], **{"stage": "worker", "reason": "odd", **status})
        opened.finish(End(status=told, record=below))

    return script


@pytest.fixture
def parts() -> Iterator[Any]:
    with gateway_parts(max_requests=4, max_held_bytes=1000) as parts:
        parts.tokenizers = Tokenizers(says("Hello", " world"))
        yield parts


async def served(parts: Any, front: Front) -> dict[str, Any]:
    """Runs it; what its record tells its tenant."""
    async with asyncio.timeout(30):
        await serve(parts, front)
    return record(parts, front)


async def refused(parts: Any, front: Front) -> PenstockError:
    with pytest.raises(PenstockError) as told:
        await served(parts, front)
    return told.value


def record(parts: Any, front: Front, tenant: str = "acme") -> dict[str, Any]:
    journal = parts.records.find(front.request_id, tenant)
    assert journal is not None
    return dict(journal.as_json())


def nothing_is_held(parts: Any) -> bool:
    return (parts.intake.running, parts.intake.bytes_held) == (0, 0)


# ---- the way in ---------------------------------------------------------------------------------


async def test_an_answer_and_its_record(parts):
    front = Front(asks(tags={"user": "u"}))
    told = await served(parts, front)
    assert front.texts == {0: "Hello world"}
    (answer,) = front.finished
    assert (answer.text, answer.finish, answer.usage) == ("Hello world", FINISH_STOP, usage())
    assert answer.request_id == front.request_id
    (opened,) = parts.tokenizers.opened
    assert (opened.request.caller.tenant, opened.request.text) == ("acme", "Hi")
    assert opened.request.caller.request_id == front.request_id
    assert (told["status"], told["model"], told["tokens"]) == ("ok", MODEL, 4)
    assert told["metadata"] == {"user": "u"}
    names = [span["name"] for span in told["spans"]]
    assert sorted(names) == ["authenticate", "generate", "limits", "request", "validate"]
    (generating,) = [s for s in told["spans"] if s["name"] == "generate"]
    assert opened.traceparent.split("-")[2] == generating["id"]
    assert front.places[0].tenant == "acme"
    assert nothing_is_held(parts)


async def test_of_a_stranger_nothing_is_read_and_nothing_is_kept(parts):
    front = Front(key="Bearer other")
    assert (await refused(parts, front)).code is CODE.UNAUTHENTICATED
    assert front.places == []
    assert parts.records.find(front.request_id, "acme") is None


async def test_of_what_has_no_place_nothing_is_read_and_nothing_is_kept(parts):
    front = Front()
    with parts.intake.slot("acme"), parts.intake.slot("acme"):
        assert (await refused(parts, front)).reason == "too_many_requests"
    assert front.places == []
    assert parts.records.find(front.request_id, "acme") is None


async def test_a_bad_request_leaves_its_record_and_nothing_else(parts):
    front = Front()
    front.refuses = invalid("odd", "messages", reason="odd")
    assert (await refused(parts, front)).param == "messages"
    assert record(parts, front)["error"]["code"] == "odd"
    assert parts.tokenizers.opened == []
    assert nothing_is_held(parts)


async def test_a_key_for_some_models_learns_nothing_of_others(parts):
    parts.auth.keys["Bearer some"] = principal(models=frozenset({"other"}))
    for model in (MODEL, "nobody"):
        error = await refused(parts, Front(asks(model=model), key="Bearer some"))
        assert (error.code, error.reason) == (CODE.PERMISSION_DENIED, "model_not_allowed")
    await served(parts, Front(asks(model="other"), key="Bearer some"))
    unknown = await refused(parts, Front(asks(model="nobody")))
    assert (unknown.code, unknown.param) == (CODE.NOT_FOUND, "model")
    assert len(parts.tokenizers.opened) == 1


async def test_a_request_has_one_deadline(parts):
    parts.settings.gateway.request_timeout_s = 77
    parts.settings.gateway.tokenizer_patience_s = 5
    before = time.monotonic()
    await served(parts, Front())
    (opened,) = parts.tokenizers.opened
    assert before + 77 <= opened.deadline <= time.monotonic() + 77
    assert parts.tokenizers.patience_s == 5


# ---- passages -----------------------------------------------------------------------------------


def searching(**more: Any) -> Prompt:
    documents = [Passage(title="mine", text="own")]
    request = PromptRequest(
        model=MODEL, chat=Chat(messages=[said("user", "Q")], passages=documents)
    )
    given = {"stores": ("vs_1", "vs_2"), "max_passages": 7, "question": "Q", **more}
    return Prompt(request, **given)


FOUND = [Passage(title="a", text="x", score=0.75), Passage(title="b", text="y", score=0.5)]


async def test_passages_come_behind_the_clients_own(parts):
    parts.retrieval.reply = SearchReply(passages=FOUND)
    front = Front(searching())
    told = await served(parts, front)
    (search,) = parts.retrieval.searches
    assert (search.caller.tenant, list(search.collections)) == ("acme", ["vs_1", "vs_2"])
    assert (search.query, search.limit) == ("Q", 7)
    assert parts.stores.asked == [("acme", ("vs_1", "vs_2"))]
    (opened,) = parts.tokenizers.opened
    assert [p.title for p in opened.request.chat.passages] == ["mine", "a", "b"]
    (answer,) = front.finished
    assert [p.title for p in answer.passages_used] == ["mine", "a", "b"]
    assert answer.warning == ""
    (made,) = told["decisions"]
    assert (made["subject"], made["choice"]) == ("retrieval", "searched")
    assert made["reasons"] == {"passages": "2", "best_score": "0.75"}


async def test_only_those_that_the_prompt_holds_are_told(parts):
    parts.retrieval.reply = SearchReply(passages=FOUND)
    parts.tokenizers.script = says("x", passages=2)
    front = Front(searching())
    await served(parts, front)
    assert [p.title for p in front.finished[0].passages_used] == ["mine", "a"]


async def test_without_stores_nothing_is_searched(parts):
    front = Front(searching(stores=()))
    assert (await served(parts, front))["decisions"] == []
    assert parts.retrieval.searches == []
    assert [p.title for p in front.finished[0].passages_used] == ["mine"]


async def test_a_search_that_finds_nothing_is_told_as_one(parts):
    (made,) = (await served(parts, Front(searching())))["decisions"]
    assert made["reasons"] == {"passages": "0", "best_score": "0"}


@pytest.mark.parametrize(
    "code",
    [
        CODE.UNAVAILABLE,
        CODE.DEADLINE_EXCEEDED,
        CODE.RESOURCE_EXHAUSTED,
        CODE.INTERNAL,
        CODE.UNKNOWN,
    ],
)
async def test_while_retrieval_is_away_the_answer_says_so(parts, code):
    parts.retrieval.reply = PenstockError(code, "it is away", stage="retrieval")
    parts.stores.unready = Unready((), 1)
    skipped = metrics.retrieval_skipped.labels(code.name.lower())
    before, front = skipped._value.get(), Front(searching())
    told = await served(parts, front)
    not_ready, away = front.finished[0].warning.split("; ")
    assert not_ready == "not searched: and 1 more"
    assert "it is away" in away
    (made,) = told["decisions"]
    assert (made["choice"], made["reasons"]["cause"]) == ("skipped", code.name.lower())
    assert skipped._value.get() == before + 1
    assert [p.title for p in parts.tokenizers.opened[0].request.chat.passages] == ["mine"]


async def test_a_search_that_is_wrong_is_the_requests_error(parts):
    parts.retrieval.reply = invalid("too long", "query", stage="retrieval", reason="long")
    front = Front(searching())
    assert (await refused(parts, front)).reason == "long"
    assert parts.tokenizers.opened == []
    assert record(parts, front)["error"]["stage"] == "retrieval"


# ---- several prompts ----------------------------------------------------------------------------


def several(count: int) -> list[Prompt]:
    return [asks(f"{n}", param=f"prompt[{n}]") for n in range(count)]


async def test_several_answers_keep_their_prompts_order(parts):
    def backwards(opened: Opened) -> None:
        if len(parts.tokenizers.opened) == 3:
            for number, one in reversed(list(enumerate(parts.tokenizers.opened, 1))):
                says(f"<{one.request.text}>", used=usage(number, 10 * number, 100 * number))(one)

    parts.tokenizers.script = backwards
    front = Front(*several(3))
    told = await served(parts, front)
    assert [answer.text for answer in front.finished] == ["<0>", "<1>", "<2>"]
    assert [answer.index for answer in front.finished] == [0, 1, 2]
    assert [answer.usage.prompt_tokens for answer in front.finished] == [1, 2, 3]
    assert told["tokens"] == 6


async def test_the_first_that_fails_ends_all_and_is_named(parts):
    def one_fails(opened: Opened) -> None:
        if len(parts.tokenizers.opened) == 3:
            told = {"message": "bad", "stage": "tokenizer", "param": "prompt"}
            ends(CODE.INVALID_ARGUMENT, **told)(parts.tokenizers.opened[1])

    parts.tokenizers.script = one_fails
    front = Front(*several(3))
    error = await refused(parts, front)
    assert (error.param, error.message) == ("prompt[1]", "bad")
    assert all(opened.cancelled for opened in parts.tokenizers.opened)
    assert front.finished == []
    assert nothing_is_held(parts)


@pytest.mark.parametrize(
    ("of", "told", "named"),
    [
        ("prompt[2]", "prompt", "prompt[2]"),
        ("prompt[2]", "prompt[7]", "prompt[2][7]"),
        ("prompt[2]", "max_tokens", "max_tokens"),
        ("", "prompt", "prompt"),
    ],
)
async def test_a_fields_name_is_the_clients(parts, of, told, named):
    parts.tokenizers.script = ends(CODE.INVALID_ARGUMENT, param=told)
    assert (await refused(parts, Front(asks(param=of)))).param == named


# ---- ends ---------------------------------------------------------------------------------------


async def test_an_error_from_below_comes_with_what_is_known_of_it(parts):
    parts.tokenizers.script = ends(
        CODE.RESOURCE_EXHAUSTED, "so", " far", message="full", retry_after_ms=2500
    )
    front, spent = Front(), metrics.tokens.labels(MODEL, "completion")
    before = spent._value.get()
    error = await refused(parts, front)
    assert (error.code, error.message, error.retry_after_s) == (
        CODE.RESOURCE_EXHAUSTED,
        "full",
        2.5,
    )
    assert front.texts == {0: "so far"}
    told = record(parts, front)
    assert (told["status"], told["error"]["stage"]) == ("resource_exhausted", "worker")
    assert ("worker", "step") in [(span["service"], span["name"]) for span in told["spans"]]
    assert told["tokens"] == 2
    assert spent._value.get() == before + 2, "they were computed"
    assert nothing_is_held(parts)


async def test_an_end_without_a_finish_is_no_answer(parts):
    parts.tokenizers.script = lambda opened: (
        opened.say(TextDelta(text="so far")),
        opened.finish(),
    )
    front = Front()
    error = await refused(parts, front)
    assert (error.code, error.stage) == (CODE.INTERNAL, "tokenizer")
    assert "broke off" in error.message
    assert front.finished == []


async def test_what_is_lost_behind_the_finish_is_no_error(parts):
    def script(opened: Opened) -> None:
        opened.say(TextDelta(text="all", finish=FINISH_LENGTH, usage=usage()))
        opened.finish(End(status=Status(code=14, stage="tokenizer", reason="peer_lost")))

    parts.tokenizers.script = script
    front = Front()
    assert (await served(parts, front))["status"] == "ok"
    assert (front.finished[0].text, front.finished[0].finish) == ("all", FINISH_LENGTH)
    assert len(parts.tokenizers.opened) == 1


async def test_a_request_that_never_ends_is_ended(parts, monkeypatch):
    monkeypatch.setattr(recorded, "_LAST_WORD_S", 0.01)
    parts.settings.gateway.request_timeout_s = 0.01
    parts.tokenizers.script = lambda opened: None
    front = Front()
    error = await refused(parts, front)
    assert (error.code, error.reason, error.stage) == (
        CODE.DEADLINE_EXCEEDED,
        "deadline",
        "gateway",
    )
    assert parts.tokenizers.opened[0].cancelled
    assert record(parts, front)["error"]["code"] == "deadline"
    assert nothing_is_held(parts)


async def test_a_client_that_goes_away_frees_everything(parts):
    parts.tokenizers.script = lambda opened: opened.say(TextDelta(text="one", token_ids=[1]))
    front = Front()
    running = asyncio.create_task(serve(parts, front))
    await until(lambda: front.texts == {0: "one"})
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert parts.tokenizers.opened[0].cancelled
    told = record(parts, front)
    assert (told["status"], told["error"]["stage"]) == ("cancelled", "client")
    assert nothing_is_held(parts)


async def test_a_fault_of_our_own_is_noted_without_its_words(parts):
    front = Front()
    front.refuses = ValueError("the secret")
    with pytest.raises(ValueError, match="the secret"):
        await served(parts, front)
    error = record(parts, front)["error"]
    assert (error["code"], error["stage"]) == ("internal", "gateway")
    assert "secret" not in error["message"]
    assert nothing_is_held(parts)


async def test_another_tokenizer_goes_on_and_the_record_says_so(parts):
    def script(opened: Opened) -> None:
        if len(parts.tokenizers.opened) < 3:
            ends(CODE.UNAVAILABLE, "x", stage="tokenizer", reason="peer_lost")(opened)
        else:
            says("y")(opened)

    parts.tokenizers.script = script
    front = Front()
    told = await served(parts, front)
    assert front.texts == {0: "xxy"}
    (made,) = [d for d in told["decisions"] if d["subject"] == "tokenizer"]
    assert made["choice"] == "tokenizer-3"
    assert made["reasons"]["lost"] == "tokenizer-1, tokenizer-2"
    steps = [span for span in told["spans"] if span["name"] == "step"]
    assert len(steps) == 2, "what the lost ones told is kept"


async def test_what_a_lost_tokenizer_told_is_kept_though_none_goes_on(parts):
    parts.tokenizers.script = ends(CODE.UNAVAILABLE, "x", stage="tokenizer", reason="peer_lost")
    pick = parts.tokenizers.pick_least_loaded

    async def one_only(patience_s: float) -> Any:
        if parts.tokenizers.opened:
            raise PenstockError(CODE.UNAVAILABLE, "none", stage="tokenizer", reason="no_replica")
        return await pick(patience_s)

    parts.tokenizers.pick_least_loaded = one_only
    front = Front()
    assert (await refused(parts, front)).reason == "no_replica"
    assert "step" in [span["name"] for span in record(parts, front)["spans"]]


# ---- figures ------------------------------------------------------------------------------------


def samples(histogram: Any) -> dict[str, float]:
    (metric,) = histogram.collect()
    return {s.name.rpartition("_")[2]: s.value for s in metric.samples if "le" not in s.labels}


async def test_tokens_are_counted_by_kind_and_first_ones_timed(parts):
    names = ("prompt", "cached", "completion")
    kinds = {kind: metrics.tokens.labels(MODEL, kind) for kind in names}
    before = {kind: counter._value.get() for kind, counter in kinds.items()}
    first = samples(metrics.ttft.labels(MODEL))["count"]
    parts.tokenizers.script = says("a", "b", used=usage(50, 20, 7))
    await served(parts, Front(*several(2)))
    spent = {kind: counter._value.get() - before[kind] for kind, counter in kinds.items()}
    assert spent == {"prompt": 100, "cached": 40, "completion": 14}
    assert samples(metrics.ttft.labels(MODEL))["count"] == first + 1


def counted(model: str, outcome: str) -> float:
    return float(metrics.generations.labels(model, outcome)._value.get())


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (says("a"), "ok"),
        (ends(CODE.UNAVAILABLE, "half"), "failed"),
        (ends(CODE.INTERNAL), "failed"),
        (ends(CODE.DEADLINE_EXCEEDED), "failed"),
        (ends(CODE.RESOURCE_EXHAUSTED), "limited"),
        (ends(CODE.INVALID_ARGUMENT), "refused"),
        (ends(CODE.CANCELLED), "cancelled"),
    ],
)
async def test_generations_are_counted_by_whose_fault_their_end_is(parts, script, outcome):
    parts.tokenizers.script = script
    before = counted(MODEL, outcome)
    with suppress(PenstockError):
        await served(parts, Front())
    assert counted(MODEL, outcome) == before + 1


async def test_a_model_that_does_not_exist_gets_no_label(parts):
    before = counted(metrics.UNKNOWN, "refused")
    await refused(parts, Front(asks(model="nobody")))
    assert counted(metrics.UNKNOWN, "refused") == before + 1
    assert b"nobody" not in generate_latest()


async def test_tokens_are_told_by_tenant_up_to_a_number_of_them(parts):
    parts.tenants_told = parts.meter._tenants_told = BoundedNames(1)
    parts.auth.keys["Bearer late"] = principal(tenant="late-tenant")

    def spent(tenant: str) -> float:
        return float(metrics.tenant_tokens.labels(tenant, "completion")._value.get())

    before = spent("acme"), spent("other")
    await served(parts, Front())
    late = Front(key="Bearer late")
    await serve(parts, late)
    assert (spent("acme"), spent("other")) == (before[0] + 3, before[1] + 3)
    assert b"late-tenant" not in generate_latest()


async def test_a_requests_line_in_the_log_has_its_trace_and_no_text(parts):
    lines: list[dict[str, Any]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonLines("gateway").format(record)))

    logger, reader = logging.getLogger(recorded.__name__), Reader()
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    try:
        front = Front(asks(text="a secret question"))
        await served(parts, front)
    finally:
        logger.removeHandler(reader)
        logger.setLevel(logging.NOTSET)
    (line,) = [one for one in lines if front.request_id in one["message"]]
    (opened,) = parts.tokenizers.opened
    assert line["trace_id"] == opened.traceparent.split("-")[1]
    assert "secret" not in json.dumps(lines)


async def test_an_answers_rate_is_of_the_tokens_behind_its_first_arrival(monkeypatch):
    clock = iter([10.0, 10.5, 12.0])
    now = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(prompt_module, "time", now)
    answer = prompt_module.Answer("r", MODEL, [])
    assert answer.tokens_per_s is None
    for ids in ([1, 2], [3], [4, 5, 6]):
        answer.add([TextDelta(token_ids=ids)])
    assert answer.tokens_per_s == 2.0


async def test_a_whole_answers_rate_is_counted_and_no_broken_one(parts):
    for script, more in ((says("a", "b"), 1), (ends(CODE.UNAVAILABLE, "a", "b"), 0)):
        front = Front()

        async def slowly(opened: Opened, script: Any = script, front: Front = front) -> None:
            opened.say(TextDelta(text="x", token_ids=[9]))
            await until(lambda: front.texts == {0: "x"})
            script(opened)

        telling: list[asyncio.Task[None]] = []
        parts.tokenizers.script = lambda opened, to=telling, tell=slowly: to.append(
            asyncio.create_task(tell(opened))
        )
        before = samples(metrics.rate.labels(MODEL))["count"]
        with suppress(PenstockError):
            await served(parts, front)
        await asyncio.gather(*telling)
        assert samples(metrics.rate.labels(MODEL))["count"] == before + more


async def test_the_gap_between_arrivals_is_shared_by_their_tokens(parts, monkeypatch):
    clock = iter([10.0, 16.0, 17.0])
    now = SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
    monkeypatch.setattr(prompt_module, "time", now)
    front = Front()

    async def one_by_one(opened: Opened) -> None:
        opened.say(TextDelta(text="a", token_ids=[1, 2]))
        await until(lambda: front.texts == {0: "a"})
        opened.say(TextDelta(text="b", token_ids=[3, 4, 5]))
        await until(lambda: front.texts == {0: "ab"})
        opened.say(TextDelta(finish=FINISH_STOP))
        opened.finish()

    telling: list[asyncio.Task[None]] = []
    parts.tokenizers.script = lambda opened: telling.append(asyncio.create_task(one_by_one(opened)))
    before = samples(metrics.itl.labels(MODEL))
    await served(parts, front)
    await telling[0]
    after = samples(metrics.itl.labels(MODEL))
    assert after["sum"] - before["sum"] == pytest.approx(2.0)
    assert after["count"] - before["count"] == 1


async def test_prompts_and_answers_are_kept_only_where_that_is_switched_on(parts):
    for shown in (False, True):
        parts.settings.log_prompts = shown
        told = await served(parts, Front(*several(2)))
        (span,) = [s for s in told["spans"] if s["name"] == "generate"]
        expected = {"prompt": "0\n1", "answer": "Hello world\nHello world"} if shown else {}
        assert span["attributes"] == expected
