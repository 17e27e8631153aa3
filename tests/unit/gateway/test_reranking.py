"""What a chat's search found, ranked anew by a served model: in time, at the caller's cost, or left
as it was, which the answer and the record say."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos.common_pb2 import FINISH_STOP, Passage, Usage
from protos.retrieval_pb2 import Ranking, SearchReply
from protos.tokenizer_pb2 import Pool, Pooled, TextDelta
from services.common.config import MeteringSettings
from services.gateway import metrics
from services.gateway.identity.limits import Bound, Limit
from services.gateway.metering.run import Verdict
from services.gateway.runs.pipeline import serve
from tests.support.gateway_parts import (
    EMBEDDING_MODEL,
    MODEL,
    Opened,
    SharedMeter,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.unit.gateway.generating import CODE, Front, ends, says, served, usage
from tests.unit.gateway.test_generate import searching

PRICES = MeteringSettings.model_validate(
    {"prices": {"other": {"prompt": 100.0, "output": 100.0}, MODEL: {"prompt": 1, "output": 1}}}
)


def found(*texts: str) -> SearchReply:
    passages = [
        Passage(title=f"t{n}", text=text, score=0.9 - n / 10) for n, text in enumerate(texts)
    ]
    return SearchReply(passages=passages, tokens=7)


def scores(*values: float) -> Callable[[Opened], None]:
    """Of the passages in their order; the last comes first."""

    def script(opened: Opened) -> None:
        for index, value in reversed(list(enumerate(values))):
            delta = TextDelta(usage=Usage(prompt_tokens=10))
            delta.pooled.append(Pooled(index=index, values=np.array([value], "<f4").tobytes()))
            if not index:
                delta.finish = FINISH_STOP
            opened.say(delta)
        opened.finish()

    return script


@pytest.fixture
def meter() -> SharedMeter:
    return SharedMeter()


@pytest.fixture
def parts(meter: SharedMeter) -> Iterator[Any]:
    with gateway_parts(PRICES, meter) as parts:
        parts.settings.retrieval.reranking_model = "other"
        parts.retrieval.reply = found("x", "y", "z")
        parts.tokenizers = Tokenizers()
        asks(parts, scores(0.25, 0.75, 0.5))
        yield parts


def asks(parts: Any, script: Callable[[Opened], None]) -> None:
    """The model "other" answers as the script says."""
    answer = says("Hello", used=usage(8, 0, 3))

    def each(opened: Opened) -> None:
        (script if opened.request.model == "other" else answer)(opened)

    parts.tokenizers.script = each


def in_prompt(parts: Any) -> list[tuple[str, float]]:
    """Behind the client's own passage."""
    chat = parts.tokenizers.opened[-1].request.chat
    return [(one.title, round(one.score, 4)) for one in chat.passages][1:]


def outcome(parts: Any, told: dict[str, Any]) -> tuple[str, dict[str, str]]:
    (made,) = [one for one in told["decisions"] if one["subject"] == "passages"]
    return made["choice"], made["reasons"]


def counted(of: str) -> float:
    return metrics.reranked.labels(of)._value.get()


async def test_the_model_says_what_comes_first(parts):
    before, front = counted("reranked"), Front(searching(max_chunks=2))
    told = await served(parts, front)
    assert parts.retrieval.searches[0].limit == 24, "more than are wanted"
    ranking, _ = parts.tokenizers.opened
    pool = ranking.request.pool
    assert pool.task == Pool.SCORE
    assert [one.text for one in pool.queries] == ["Q"]
    assert [one.text for one in pool.inputs] == ["t0\nx", "t1\ny", "t2\nz"]
    assert ranking.request.caller.tenant == "acme"
    assert in_prompt(parts) == [("t1", 0.75), ("t2", 0.5)]
    search = front.finished[0].search
    assert (search.reranked, search.not_reranked) == ("other", "")
    assert outcome(parts, told) == ("reranked", {"model": "other"})
    assert "rerank" in [span["name"] for span in told["spans"]]
    assert counted("reranked") == before + 1
    (passage, _) = front.finished[0].passages_used[1:]
    assert passage.scores.reranked == 0.75


async def test_its_score_is_what_a_threshold_is_of(parts):
    await served(parts, Front(searching(score_threshold=0.6)))
    assert parts.retrieval.searches[0].score_threshold == 0, "the search's own says nothing of it"
    assert in_prompt(parts) == [("t1", 0.75)]


@pytest.mark.parametrize("late", [False, True])
async def test_neighbours_are_joined_when_it_is_known_which_chunks_are_told(parts, late):
    """So a limit is of chunks, and a threshold of each, with the model's word and without it."""
    parts.retrieval.reply = found("w", "x", "y", "z")
    for number, passage in enumerate(parts.retrieval.reply.passages):
        passage.title, passage.position = "t", number
        parts.retrieval.reply.stretches.add(collection="c", start=2 * number, end=2 * number + 1)
    if late:
        parts.settings.retrieval.reranking_timeout_s = 0.05
        asks(parts, lambda opened: None)
    else:
        asks(parts, scores(0.1, 0.9, 0.8, 0.85))
    await served(parts, Front(searching(max_chunks=2, score_threshold=0.75)))
    chat = parts.tokenizers.opened[-1].request.chat
    told = [(one.text, round(one.score, 4)) for one in chat.passages][1:]
    assert told == ([("w\nx", 0.9)] if late else [("x", 0.9), ("z", 0.85)])


async def test_as_many_are_ranked_as_are_asked_for(parts):
    parts.settings.retrieval.reranking_passages = 2
    await served(parts, Front(searching(max_chunks=7)))
    assert parts.retrieval.searches[0].limit == 7
    assert [title for title, _ in in_prompt(parts)] == ["t1", "t2", "t0"]


@pytest.mark.parametrize(
    ("script", "why", "counts"),
    [
        (ends(CODE.UNAVAILABLE), "odd", "failed"),
        (lambda opened: None, "timeout", "late"),
        (ends(CODE.DEADLINE_EXCEEDED), "timeout", "late"),  # which a service tells a moment before
        (scores(0.5), "internal", "failed"),  # of one of three
        (scores(0.5, float("nan"), 1), "no_numbers", "failed"),
    ],
)
async def test_without_its_word_the_search_stands(parts, script, why, counts):
    parts.settings.retrieval.reranking_timeout_s = 0.05 if why == "timeout" else 5.0
    asks(parts, script)
    before, front = counted(counts), Front(searching(max_chunks=2, score_threshold=0.85))
    told = await served(parts, front)
    assert in_prompt(parts) == [("t0", 0.9)], "of the search's own score"
    search = front.finished[0].search
    assert (search.reranked, search.not_reranked) == ("", why)
    assert outcome(parts, told) == ("left", {"model": "other", "why": why})
    assert counted(counts) == before + 1


async def test_a_key_that_may_not_use_it_has_the_search_as_it_is(parts):
    parts.auth.keys["Bearer k"] = principal(models=frozenset({MODEL, EMBEDDING_MODEL}))
    front = Front(searching())
    await served(parts, front)
    assert front.finished[0].search.not_reranked == "model_not_allowed"
    assert [one.request.model for one in parts.tokenizers.opened] == [MODEL]


@pytest.mark.parametrize(
    "ranking", [Ranking(ranker=Ranking.NONE), Ranking(embedding_weight=1, text_weight=1)]
)
async def test_who_says_how_scores_are_made_gets_these(parts, ranking):
    front = Front(searching(ranking=ranking))
    told = await served(parts, front)
    assert parts.retrieval.searches[0].limit == 7
    assert len(in_prompt(parts)) == 3
    assert "passages" not in [one["subject"] for one in told["decisions"]]
    assert front.finished[0].search.reranked == front.finished[0].search.not_reranked == ""


async def test_where_nothing_is_found_nobody_is_asked(parts):
    parts.retrieval.reply = SearchReply(tokens=7)
    front = Front(searching())
    await served(parts, front)
    assert len(parts.tokenizers.opened) == 1
    assert front.finished[0].search.reranked == ""


async def test_of_a_passage_that_is_too_long_the_beginning_is_read(parts):
    parts.retrieval.reply = found("ö" * 4000)
    asks(parts, scores(0.5))
    await served(parts, Front(searching()))
    (said,) = parts.tokenizers.opened[0].request.pool.inputs
    assert 1300 < len(said.text.encode()) <= 3 * 512, "the window has 512 tokens"
    assert said.text.endswith("ö")


async def test_it_has_a_line_in_the_ledger_and_its_cost_is_the_requests(parts, meter):
    front = Front(searching())
    await served(parts, front)
    lines = {run.who["route"]: run for run in meter.settled}
    line = lines["rerank"]
    assert (line.who["model"], line.id) == ("other", f"{front.request_id}:rerank")
    assert (line.status, line.used.prompt, line.used.cost) == ("ok", 30, 3_000_000)
    assert front.cost.nanos == 3_000_000 + 11_000


async def test_a_limit_in_its_way_leaves_the_search_as_it_is(parts, meter):
    async def not_the_model(run: Any) -> Verdict:
        if run.who["model"] != "other":
            return Verdict()
        assert run.held.tokens > 0
        return Verdict(blocked_by=run.bounds[-1])

    limit = Limit.model_validate({"name": "l", "of": "tokens", "per": "minute", "most": 9})
    parts.auth.keys["Bearer k"] = replace(principal(), limits=(Bound("key", limit),))
    meter.reserve = not_the_model
    front = Front(searching())
    await served(parts, front)
    assert front.finished[0].search.not_reranked == "rate_limit_exceeded"
    assert [title for title, _ in in_prompt(parts)] == ["t0", "t1", "t2"]


async def test_what_it_said_of_a_passage_is_not_asked_again(parts, meter):
    await served(parts, Front(searching()))
    asked = len(parts.tokenizers.opened)
    parts.retrieval.reply = found("x", "y", "z")
    front = Front(searching())
    told = await served(parts, front)
    assert [one.request.model for one in parts.tokenizers.opened[asked:]] == [MODEL]
    assert in_prompt(parts) == [("t1", 0.75), ("t2", 0.5), ("t0", 0.25)]
    assert outcome(parts, told) == ("reranked", {"model": "other"})
    paid = [run.used.prompt for run in meter.settled if run.who["route"] == "rerank"]
    assert paid == [30]

    parts.retrieval.reply = found("x", "new", "z")
    asks(parts, scores(0.9))
    await served(parts, Front(searching()))
    (one,) = parts.tokenizers.opened[-2].request.pool.inputs
    assert one.text == "t1\nnew", "of it alone"
    assert in_prompt(parts) == [("t1", 0.9), ("t2", 0.5), ("t0", 0.25)]


@pytest.mark.parametrize("other", ["tenant", "model", "question", "age"])
async def test_of_others_it_is_asked(parts, other, monkeypatch):
    await served(parts, Front(searching()))
    asked, more = len(parts.tokenizers.opened), {}
    parts.retrieval.reply = found("x", "y", "z")
    if other == "tenant":
        parts.auth.keys["Bearer k"] = principal("rival")
    if other == "model":
        parts.settings.retrieval.reranking_model = MODEL
        parts.tokenizers.script = lambda opened: (
            scores(0.25, 0.75, 0.5) if opened.request.HasField("pool") else says("Hello")
        )(opened)
    if other == "question":
        more = {"question": "Q?"}
    if other == "age":
        parts.scores._max_age_s = 0.0
    await serve(parts, Front(searching(**more)))
    assert parts.tokenizers.opened[asked].request.HasField("pool")
