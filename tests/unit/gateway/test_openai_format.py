"""Answers in OpenAI's shapes, whole and in events, and what is put together of deltas."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from protos.common_pb2 import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    Passage,
    Range,
    Searched,
    TokenIds,
    Usage,
)
from protos.gateway_pb2 import GenerateEvent
from protos.tokenizer_pb2 import Chat, Echo, PromptPlan, PromptRequest, TextDelta, TextLogprob
from services.common.text.content import said
from services.gateway.api.grpc.events import ending_of, tell_beginning
from services.gateway.api.rest.logprobs import OfText, joined
from services.gateway.api.rest.openai_format import (
    Chunks,
    chat_completion,
    event,
    text_completion,
)
from services.gateway.api.rest.whole import completion
from services.gateway.runs import prompt as prompt_module
from services.gateway.runs.prompt import Answer, Prompt, total_usage

PASSAGES = [
    Passage(
        title="a.md", text="x", score=0.123456, source_id="file-1", rows=Range(first=4, last=9)
    ),
    Passage(title="mine", text="y"),
    Passage(title="left out", text="z"),
]


def answer(
    text: str = "See [1].", finish: Any = FINISH_STOP, index: int = 0, used: int = 2
) -> Answer:
    made = Answer("req_abc", "m", PASSAGES[:], index, created=7)
    usage = Usage(prompt_tokens=10 + index, cached_tokens=4, completion_tokens=3)
    made.add([TextDelta(text=text, plan=PromptPlan(window=512, user=5, passages_used=used))])
    made.add([TextDelta(finish=finish, usage=usage)])
    return made


def told(events: bytes) -> list[Any]:
    *blocks, rest = events.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [
        block[6:].decode() if block == b"data: [DONE]" else json.loads(block[6:])
        for block in blocks
    ]


def test_usage_tells_what_was_guessed() -> None:
    """Of all choices; and nothing where nothing was."""
    guessed = [answer(index=0), answer(index=1)]
    assert "speculation" not in chat_completion(guessed)["usage"]
    guessed[0].usage.draft_tokens, guessed[0].usage.accepted_tokens = 7, 4
    guessed[1].usage.draft_tokens = 2
    told = chat_completion(guessed)["usage"]
    assert told["speculation"] == {"draft_tokens": 9, "accepted_tokens": 4}
    assert told["completion_tokens"] == 6


# ---- whole --------------------------------------------------------------------------------------


def test_a_chats_answer():
    made = answer()
    made.warnings += ["one", "two"]
    whole = chat_completion([made])
    assert (whole["id"], whole["object"], whole["created"]) == (
        "chatcmpl-abc",
        "chat.completion",
        7,
    )
    (choice,) = whole["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    message = choice["message"]
    assert (message["role"], message["content"], message["refusal"]) == (
        "assistant",
        "See [1].",
        None,
    )
    assert [(a["index"], a["file_id"]) for a in message["annotations"]] == [(4, "file-1")]
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    extension = whole["penstock"]
    assert extension["request_id"] == "req_abc"
    assert extension["warning"] == "one; two"
    assert extension["passages"] == [
        {
            "index": 1,
            "file_id": "file-1",
            "filename": "a.md",
            "title": "a.md",
            "score": 0.1235,
            "rows": {"first": 4, "last": 9},
        },
        {"index": 2, "file_id": None, "filename": "mine", "title": "mine", "score": 0.0},
    ]
    plan = PromptPlan(window=512, user=5, passages_used=2)
    assert extension["plan"] == {
        field.name: getattr(plan, field.name) for field in plan.DESCRIPTOR.fields
    }


def test_passages_without_room_are_told_of_in_every_form() -> None:
    made, warning = answer(), "1 of 3 passages had no room in the context window"
    made.add([TextDelta(plan=PromptPlan(window=512, passages_used=2, passages_dropped=1))])
    assert chat_completion([made])["penstock"]["warning"] == warning
    last = told(Chunks(made, chat=True, include_usage=False).closing())[-1]
    assert last["penstock"]["warning"] == warning
    begins = GenerateEvent()
    tell_beginning(begins, made)
    assert begins.warning == warning
    made.warnings.append("one")
    assert made.warning == f"one; {warning}"


def test_an_answer_to_each_prompt_ends_by_itself():
    answers = [answer("one", FINISH_LENGTH), answer("two", FINISH_STOP, 1)]
    whole = text_completion(answers)
    assert (whole["id"], whole["object"]) == ("cmpl-abc", "text_completion")
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]] == [
        (0, "one", "length"),
        (1, "two", "stop"),
    ]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (21, 6)
    assert [plan["user"] for plan in whole["penstock"]["plans"]] == [5, 5]
    alone = text_completion(answers[:1])["penstock"]
    assert (alone["plan"]["window"], "plans" in alone, "warning" in alone) == (512, False, False)


def candidate(data: bytes, logprob: float) -> TextLogprob.Candidate:
    text = data.decode("utf-8", "replace")
    return TextLogprob.Candidate(text=text, bytes=data, logprob=logprob)


def thought(
    data: bytes, logprob: float, *top: TextLogprob.Candidate, offset: int = 0
) -> TextLogprob:
    return TextLogprob(token=candidate(data, logprob), top=top, offset=offset)


EURO = "€".encode()
PIECES = [
    thought(EURO[:1], -0.5, candidate(EURO[:1], -0.5), candidate(b"x", -1.0)),
    thought(EURO[1:], -0.25, candidate(b"y", -0.125), candidate(b"z", -3.0)),
    thought(b"b", -0.75, offset=1),
]


def with_logprobs() -> Answer:
    made = answer("€b", used=0)
    made.wants_logprobs = True
    made.add([TextDelta(logprobs=PIECES)])
    return made


async def in_one_piece(answers: list[Answer], *, chat: bool) -> dict[str, Any]:
    """As the client reads it."""
    told: dict[str, Any] = json.loads(orjson.dumps(await completion(answers, None, chat=chat)))
    return told


async def test_the_choices_of_a_chat_share_their_prompt():
    made = [with_logprobs(), answer("other", FINISH_LENGTH, index=1)]
    made[1].choice = 1
    found = await in_one_piece(made, chat=True)
    first, second = found["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert found["usage"]["prompt_tokens"] == 10, "once"
    assert found["usage"]["completion_tokens"] == 6
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert second["logprobs"] is None
    start, end, letter = first["logprobs"]["content"]
    assert (start["token"], start["bytes"], start["logprob"]) == ("\ufffd", [0xE2], -0.5)
    assert [one["token"] for one in end["top_logprobs"]] == ["y", "z"]
    assert letter == {"token": "b", "bytes": [98], "logprob": -0.75, "top_logprobs": []}


@pytest.mark.parametrize("chat", [True, False])
async def test_logprobs_of_many_tokens_leave_the_loop_to_others(chat: bool) -> None:
    """Whose turn comes once for so many tokens, however many there are in all."""
    made = answer("many", used=0)
    made.wants_logprobs = True
    made.add([TextDelta(logprobs=PIECES * 400)])
    made.echo = None if chat else Echo(text="q" * 300, logprobs=[PIECES[2]] * 300)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    (choice,) = (await in_one_piece([made], chat=chat))["choices"]
    other.cancel()
    told = choice["logprobs"]
    tokens = len(told["content"] if chat else told["tokens"])
    assert tokens == 1200 if chat else 1500
    assert turns >= tokens // 32
    if not chat:
        of_text = OfText()
        want = joined([of_text.echo(made.echo), of_text.next(made.logprobs)])
        assert told == json.loads(json.dumps(want))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_tells_of_its_prompt_and_of_each_token(streamed):
    made = with_logprobs()
    unexpected, second = TextLogprob(token=candidate(b"The", 0.0)), thought(b" q", -2.0, offset=3)
    made.echo = Echo(text="The q", logprobs=[unexpected, second])
    if streamed:
        chunks = Chunks(made, chat=False, include_usage=False)
        deltas = [TextDelta(logprobs=PIECES[:1]), TextDelta(text="€b", logprobs=PIECES[1:])]
        assert chunks.delta(TextDelta(token_ids=[1])) == b""
        events = told(chunks.opening() + b"".join(map(chunks.delta, deltas)))
        pieces = [event["choices"][0] for event in events]
        text = "".join(piece["text"] for piece in pieces)
        found = joined([piece["logprobs"] for piece in pieces])
    else:
        (choice,) = (await in_one_piece([made], chat=False))["choices"]
        text, found = choice["text"], choice["logprobs"]
    assert text == "The q€b"
    tokens = ["The", " q", *(piece.token.text for piece in PIECES)]
    assert found == {
        "tokens": tokens,
        "token_logprobs": [None, -2.0, -0.5, -0.25, -0.75],
        "top_logprobs": [
            None,
            None,
            {tokens[2]: -0.5, "x": -1.0},
            {"y": -0.125, "z": -3.0} | {tokens[3]: -0.25},
            None,
        ],
        "text_offset": [0, 3, 5, 5, 6],
    }


# ---- events -------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [False, True])
def test_the_events_of_a_chat(counts):
    made = answer("See [1].", FINISH_LENGTH)
    chunks = Chunks(made, chat=True, include_usage=counts)
    text = 'a"\n\0\u2028é'
    sent = (
        chunks.opening()
        + chunks.delta(TextDelta(text=text))
        + chunks.closing()
        + chunks.ending([made])
    )
    assert sent.isascii()
    opening, said, closing, *ending, done = told(sent)
    assert done == "[DONE]"
    head = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    for chunk in (opening, said, closing):
        assert {name: chunk[name] for name in head} == head
        assert ("usage" in chunk) is counts
        assert chunk.get("usage") is None
        assert chunk["choices"][0]["index"] == 0
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said["choices"][0]["delta"] == {"content": text}
    (last,) = closing["choices"]
    assert (last["finish_reason"], said["choices"][0]["finish_reason"]) == ("length", None)
    assert last["delta"]["annotations"][0]["file_id"] == "file-1"
    assert closing["penstock"]["plan"]["passages_used"] == 2
    assert len(ending) == counts
    if counts:
        assert ending[0]["choices"] == []
        assert ending[0]["usage"]["total_tokens"] == 13


@pytest.mark.parametrize("chat", [False, True])
def test_each_event_tells_what_its_answer_used_so_far_if_asked(chat):
    made = answer("See [1].")
    made.finish = FINISH_NONE
    chunks = Chunks(made, chat=chat, include_usage=True, continuous_usage=True)
    made.add([TextDelta(usage=Usage(prompt_tokens=9, cached_tokens=4))])
    sent, counts = chunks.opening(), [0] if chat else []
    for text, tokens in (("a", 1), ("", 1), ("bc", 2)):
        delta = TextDelta(text=text, token_ids=range(tokens))
        made.add([delta])
        sent += chunks.delta(delta)
        counts += [made.tokens] if text else []
    made.finish, made.usage = FINISH_LENGTH, Usage(prompt_tokens=9, completion_tokens=4)
    *events, last, done = told(sent + chunks.closing() + chunks.ending([made]))
    assert [one["usage"]["completion_tokens"] for one in events] == [*counts, 4]
    found = [one["usage"]["prompt_tokens"] for one in events]
    assert found[-len(counts) :] == [9] * len(counts)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 13, "[DONE]")


def test_the_events_of_completions():
    answers = [answer("one", index=0, used=0), answer("two", index=1, used=0)]
    of_both = [Chunks(one, chat=False, include_usage=True) for one in answers]
    said, closing = told(of_both[1].delta(TextDelta(text="x")) + of_both[1].closing())
    assert (said["id"], said["object"]) == ("cmpl-abc", "text_completion")
    assert said["choices"] == [{"index": 1, "text": "x", "finish_reason": None, "logprobs": None}]
    assert closing["choices"][0] == {
        "index": 1,
        "text": "",
        "finish_reason": "stop",
        "logprobs": None,
    }
    counted, _ = told(of_both[0].ending(answers))
    assert counted["usage"]["prompt_tokens"] == 21


def test_only_what_the_prompt_holds_is_cited_in_events():
    made = answer("See [1], [2] and [3].", used=2)
    closing = told(Chunks(made, chat=True, include_usage=False).closing())[0]
    assert [a["index"] for a in closing["choices"][0]["delta"]["annotations"]] == [4, 9]


def test_a_chat_without_marks_ends_with_an_empty_delta():
    made = answer("plain")
    closing = told(Chunks(made, chat=True, include_usage=False).closing())[0]
    assert closing["choices"][0]["delta"] == {}


def test_an_event_is_one_line():
    assert event({"a": "\u2028\n", "b": 1}) == b'data: {"a":"\\u2028\\n","b":1}\n\n'


# ---- what is put together -----------------------------------------------------------------------


def test_an_answer_counts_what_arrives_and_the_time_between(monkeypatch):
    clock = iter([100.0, 100.5, 102.0])
    now = SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 7.9)
    monkeypatch.setattr(prompt_module, "time", now)
    made = Answer("req_abc", "m", PASSAGES[:])
    assert made.created == 7
    assert made.add([TextDelta(token_ids=[1, 2]), TextDelta(text="a", token_ids=[3])]) == (3, 0.0)
    assert made.add([TextDelta(text="b", token_ids=[4])]) == (1, 0.5)
    assert made.add([TextDelta(text="c")]) == (0, 1.5)
    assert (made.text, made.finish, made.passages_used) == ("abc", 0, [])


def test_usage_known_early_is_not_yet_the_answers():
    made = Answer("req_abc", "m", [])
    first = TextDelta(text="a", plan=PromptPlan(passages_used=1))
    first.usage.CopyFrom(Usage(prompt_tokens=9, cached_tokens=4))
    made.add([first])
    assert made.usage == Usage()
    assert made.used == Usage(prompt_tokens=9, cached_tokens=4)
    made.add([TextDelta(finish=FINISH_STOP, usage=Usage(prompt_tokens=9, completion_tokens=2))])
    assert (made.usage.completion_tokens, made.plan.passages_used) == (2, 1)


def test_usage_is_summed_by_kind():
    total = total_usage([answer(index=0), answer(index=1), answer(index=2)])
    assert (total.prompt_tokens, total.cached_tokens, total.completion_tokens) == (33, 12, 9)


def test_what_is_shown_of_a_prompt():
    chat = Chat(messages=[said("user", "Q"), said("assistant", "A")])
    assert Prompt(PromptRequest(chat=chat)).text == "user: Q\nassistant: A"
    assert Prompt(PromptRequest(text="T")).text == "T"
    assert Prompt(PromptRequest(token_ids=TokenIds(ids=[1, 2]))).text == "2 token ids"


# ---- what was searched for, and what is cited ---------------------------------------------------

WRONG = 'It "rains on every day of the year" [1]. See [9].'
FIGURES = {
    "cited": 1,
    "unknown": [9],
    "quoted": 1,
    "unfounded": [{"index": 4, "length": 30, "passages": [1]}],
}


def test_figures_of_citations_come_whole_and_with_a_streams_end():
    made = answer(WRONG)
    assert chat_completion([made])["penstock"]["citations"] == FIGURES
    chunks = Chunks(made, chat=True, include_usage=False)
    (closing,) = told(chunks.closing())
    assert closing["penstock"]["citations"] == FIGURES
    event = ending_of(made)
    assert (event.citations.cited, list(event.citations.unknown)) == (1, [9])
    (one,) = event.citations.unfounded
    assert (one.index, one.length, list(one.passages)) == (4, 30, [1])
    bare = answer("See [1].", used=0)
    assert "citations" not in chat_completion([bare])["penstock"]
    assert not ending_of(bare).HasField("citations")


def test_each_choice_has_its_own():
    first, second = answer("See [1]."), answer(WRONG, index=1)
    second.choice = 1
    whole = chat_completion([first, second])
    assert whole["penstock"]["citations"]["unknown"] == []
    assert "penstock" not in whole["choices"][0]
    assert whole["choices"][1]["penstock"] == {"citations": FIGURES}


def test_how_the_stores_were_searched():
    made = answer()
    assert "search" not in chat_completion([made])["penstock"]
    made.search = Searched(query="Q", tokens=3)
    assert chat_completion([made])["penstock"]["search"] == {"query": "Q", "tokens": 3}
    made.search = Searched(query="Q", tokens=3, rewritten="rule", age_s=1.23456, stale=True)
    assert chat_completion([made])["penstock"]["search"] == {
        "query": "Q",
        "tokens": 3,
        "rewritten": "rule",
        "age_s": 1.235,
        "stale": True,
    }
    event = GenerateEvent()
    tell_beginning(event, made)
    assert event.search == made.search
