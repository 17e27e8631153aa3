"""A generation's way through the gateway, by stand-ins for its neighbours: what comes in which
order, what is kept of it, and what ends with it."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protos.common_pb2 import (
    FINISH_LENGTH,
    FINISH_STOP,
    Passage,
    Status,
)
from protos.retrieval_pb2 import SearchReply
from protos.tokenizer_pb2 import Chat, PromptRequest, TextDelta
from services.common.errors import PenstockError, invalid
from services.common.link import End
from services.common.text.content import said, text_of
from services.gateway import metrics
from services.gateway.runs import recorded
from services.gateway.runs.pipeline import serve
from services.gateway.runs.prompt import Prompt
from services.gateway.stores.vector_stores.store_files import Unready
from tests.support.gateway_parts import EMBEDDING_MODEL, MODEL, Opened, principal
from tests.support.waiting import until
from tests.unit.gateway.generating import (
    CODE,
    Front,
    answering_parts,
    asks,
    ends,
    nothing_is_held,
    record,
    refused,
    says,
    served,
    several,
    usage,
)


@pytest.fixture
def parts() -> Iterator[Any]:
    with answering_parts() as parts:
        yield parts


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


def searching(**more: Any) -> Prompt:
    documents = [Passage(title="mine", text="own")]
    request = PromptRequest(
        model=MODEL, chat=Chat(messages=[said("user", "Q")], passages=documents)
    )
    given = {"stores": ("vs_1", "vs_2"), "max_chunks": 7, "question": "Q", **more}
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
    assert opened.request.chat.searched
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
    chat = parts.tokenizers.opened[0].request.chat
    assert ([p.title for p in chat.passages], chat.searched) == (["mine"], False)


def leaning() -> Prompt:
    turns = (("user", "Who built Signal Tower?"), ("assistant", "Ada Brandt."))
    messages = [*(said(role, text) for role, text in turns), said("user", "When was she born?")]
    request = PromptRequest(model=MODEL, chat=Chat(messages=messages))
    return Prompt(request, stores=("vs_1",), max_chunks=3, question="When was she born?")


async def test_a_question_that_leans_is_searched_for_with_what_it_is_about(parts):
    parts.retrieval.reply = SearchReply(passages=FOUND, tokens=9)
    front = Front(leaning())
    told = await served(parts, front)
    (search,) = parts.retrieval.searches
    assert search.query == "Ada Brandt When was she born?"
    (asked,) = parts.tokenizers.opened
    assert text_of(asked.request.chat.messages[-1]) == "When was she born?"
    (answer,) = front.finished
    told_of = (answer.search.query, answer.search.rewritten, answer.search.tokens)
    assert told_of == (search.query, "rule", 9)
    made = told["decisions"][0]
    assert (made["subject"], made["choice"]) == ("query", "rule")
    assert made["reasons"] == {"why": "pointing", "words_added": "2"}  # none of its text


async def test_a_search_made_before_says_how_long_ago(parts):
    parts.retrieval.reply = SearchReply(passages=FOUND, age_s=12.5, cached=True)
    front = Front(searching())
    (made,) = (await served(parts, front))["decisions"]
    (answer,) = front.finished
    assert (answer.search.age_s, answer.search.stale, answer.warning) == (12.5, False, "")
    assert (made["choice"], made["reasons"]["age_s"]) == ("told again", "12.5")


async def test_one_told_because_the_store_is_away_is_marked(parts):
    parts.retrieval.reply = SearchReply(passages=FOUND, age_s=700, stale=True)
    front = Front(searching())
    (made,) = (await served(parts, front))["decisions"]
    (answer,) = front.finished
    assert answer.search.stale
    assert answer.warning.endswith("passages are of a search 700 s ago")
    assert made["choice"] == "stale"
    assert len(answer.passages) == 3


async def test_rewriting_can_be_switched_off(parts):
    parts.settings.retrieval.rewriting = "off"
    front = Front(leaning())
    await served(parts, front)
    assert parts.retrieval.searches[0].query == "When was she born?"
    assert front.finished[0].search.rewritten == ""


def rewriting_by(parts: Any, script: Any) -> None:
    """The model "other" does it, as `script` says."""
    answers = parts.tokenizers.script
    parts.settings.retrieval.rewriting_model = "other"

    def by_model(opened: Opened) -> None:
        (script if opened.request.model == "other" else answers)(opened)

    parts.tokenizers.script = by_model


async def test_a_model_that_is_named_for_it_rewrites_in_the_callers_name(parts):
    rewriting_by(parts, says("When was Ada", " Brandt born?\nReally?", used=usage(20, 0, 6)))
    front = Front(leaning())
    told = await served(parts, front)
    assert parts.retrieval.searches[0].query == "When was Ada Brandt born?"
    assert front.finished[0].search.rewritten == "model"
    rewriting, answering = parts.tokenizers.opened
    assert rewriting.request.caller.tenant == answering.request.caller.tenant == "acme"
    assert rewriting.request.caller.priority == answering.request.caller.priority
    assert told["decisions"][0]["choice"] == "model"
    assert "rewrite" in [span["name"] for span in told["spans"]]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (ends(CODE.UNAVAILABLE), "odd"),
        (lambda opened: None, "timeout"),
        (says("  \n"), "no_question"),
        (says("word " * 100), "no_question"),
    ],
)
async def test_without_the_models_word_the_rule_stands(parts, script, why):
    parts.settings.retrieval.rewriting_timeout_s = 0.05 if why == "timeout" else 5.0
    rewriting_by(parts, script)
    front = Front(leaning())
    told = await served(parts, front)
    assert parts.retrieval.searches[0].query == "Ada Brandt When was she born?"
    made = told["decisions"][0]
    assert (made["choice"], made["reasons"]["model"]) == ("rule", why)


async def test_a_key_that_may_not_use_that_model_has_the_rule(parts):
    rewriting_by(parts, says("x"))
    parts.auth.keys["Bearer k"] = principal(models=frozenset({MODEL, EMBEDDING_MODEL}))
    told = await served(parts, Front(leaning()))
    assert len(parts.tokenizers.opened) == 1
    assert told["decisions"][0]["choice"] == "rule"


async def test_what_stands_for_itself_is_not_asked_about(parts):
    rewriting_by(parts, says("x"))
    prompt = leaning()
    prompt.question = "Where does the Lake Ferry of Nordholm leave?"
    prompt.request.chat.messages[-1].CopyFrom(said("user", prompt.question))
    await served(parts, Front(prompt))
    assert parts.retrieval.searches[0].query == prompt.question
    assert len(parts.tokenizers.opened) == 1


async def test_a_search_that_is_wrong_is_the_requests_error(parts):
    parts.retrieval.reply = invalid("too long", "query", stage="retrieval", reason="long")
    front = Front(searching())
    assert (await refused(parts, front)).reason == "long"
    assert parts.tokenizers.opened == []
    assert record(parts, front)["error"]["stage"] == "retrieval"


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


async def test_what_an_answer_cites_is_checked_and_counted(parts):
    def counts() -> list[float]:
        kinds = [metrics.citations.labels(of) for of in ("known", "unknown")]
        kinds += [metrics.quotations.labels(outcome) for outcome in ("found", "unfounded")]
        return [kind._value.get() for kind in kinds]

    text = "the tide comes in twice a day, at six"
    parts.retrieval.reply = SearchReply(passages=[Passage(title="a", text=text)])
    quotes = ['"the tide comes in twice a day" [2]', ' and "the tide comes in thrice" [2]', " [7]"]
    parts.tokenizers.script = says(*quotes, passages=2)
    before, front = counts(), Front(searching())
    await served(parts, front)
    (answer,) = front.finished
    checked = answer.citations
    assert (checked.cited, checked.unknown, checked.quoted) == (2, (7,), 2)
    assert answer.text[checked.unfounded[0].index :].startswith("the tide comes in thrice")
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 1, 1, 1]


async def test_without_passages_nothing_is_checked(parts):
    parts.tokenizers.script = says("[1] [2]")
    front = Front()
    await served(parts, front)
    assert front.finished[0].citations is None
