"""Questions to stores whose embedding model is a served one: embedded in the caller's name, at his
cost and in time; else the words are looked for alone, which the answer says."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from protos.common_pb2 import FINISH_STOP, Passage, Usage
from protos.retrieval_pb2 import SearchReply
from protos.tokenizer_pb2 import Pool, Pooled, TextDelta
from services.common.config import MeteringSettings
from services.common.config.retrieval import ServedEmbedder
from services.gateway.identity.limits import Bound, Limit
from services.gateway.metering.run import Verdict
from services.gateway.stores.vector_stores.store_files import Unready
from tests.support.gateway_parts import (
    EMBEDDING_MODEL,
    MODEL,
    Opened,
    SharedMeter,
    Tokenizers,
    gateway_parts,
    principal,
)
from tests.unit.gateway.generating import CODE, Front, ends, refused, says, served, usage
from tests.unit.gateway.test_generate import searching

PRICES = MeteringSettings.model_validate({"prices": {"other": {"prompt": 100.0, "cached": 1.0}}})


def embeds(*numbers: float) -> Callable[[Opened], None]:
    def script(opened: Opened) -> None:
        for index in range(len(opened.request.pool.inputs)):
            delta = TextDelta(usage=Usage(prompt_tokens=10), finish=FINISH_STOP)
            delta.pooled.append(Pooled(index=index, values=np.array(numbers, "<f4").tobytes()))
            opened.say(delta)
        opened.finish()

    return script


@pytest.fixture
def meter() -> SharedMeter:
    return SharedMeter()


@pytest.fixture
def parts(meter: SharedMeter) -> Iterator[Any]:
    with gateway_parts(PRICES, meter) as parts:
        own = parts.settings.retrieval
        own.served_embedders = {"other": ServedEmbedder(dimension=3, query="query: ")}
        own.query_embedding_timeout_s = 30
        parts.retrieval.further = {"other"}
        parts.stores.unready = Unready(models={"vs_1": "other", "vs_2": "other"})
        parts.retrieval.reply = SearchReply(
            passages=[Passage(title="a", text="x", score=0.75)], by_words=["vs_1"]
        )
        parts.tokenizers = Tokenizers()
        asks(parts, embeds(1, 0, 0))
        yield parts


def asks(parts: Any, script: Callable[[Opened], None]) -> None:
    """The model "other" answers as the script says."""
    answer = says("Hello", used=usage(8, 0, 3))

    def each(opened: Opened) -> None:
        (script if opened.request.model == "other" else answer)(opened)

    parts.tokenizers.script = each


async def test_a_question_has_the_vector_of_its_stores_model(parts, meter):
    parts.retrieval.reply.cached = True  # the search: not the question's vector
    front = Front(searching())
    told = await served(parts, front)
    (search,) = parts.retrieval.searches
    assert (search.embedder, list(search.vector.values)) == ("other", [1, 0, 0])
    asked = parts.tokenizers.opened[0].request
    assert (asked.pool.task, asked.pool.judged) == (Pool.EMBED, False)
    assert [one.text for one in asked.pool.inputs] == ["query: Q"]
    assert (asked.caller.tenant, asked.caller.request_id) == (
        "acme",
        f"{front.request_id}:search:embed",
    )
    lines = {run.who["route"]: (run.who["model"], run.used.prompt) for run in meter.settled}
    assert lines["search"] == ("other", 10)
    assert front.cost.nanos == 10 * 100_000
    assert front.finished[0].search.tokens == 10
    assert "were indexed by an earlier embedding model" in front.finished[0].warning
    assert "embed" in [span["name"] for span in told["spans"]]


def never(opened: Opened) -> None:
    pass


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (never, "did not answer within 0.01 s"),
        (ends(CODE.UNAVAILABLE), "failed: "),
        (ends(CODE.DEADLINE_EXCEEDED), "did not answer in time"),
        (ends(CODE.INVALID_ARGUMENT), "failed: "),
        (embeds(1, 0), "failed: the model 'other' makes vectors of 2 numbers"),
        *(
            (embeds(1, 0, number), "failed: the model 'other' makes vectors of no direction")
            for number in (float("nan"), float("inf"), 3e38)
        ),
        (embeds(0, 0, 0), "failed: the model 'other' makes vectors of no direction"),
    ],
)
async def test_without_it_the_words_are_looked_for_alone(parts, meter, script, words):
    asks(parts, script)
    if script is never:
        parts.settings.retrieval.query_embedding_timeout_s = 0.01
    front = Front(searching())
    await served(parts, front)
    (search,) = parts.retrieval.searches
    assert (search.embedder, search.HasField("vector")) == ("other", False)
    assert [one.title for one in front.finished[0].passages_used] == ["mine", "a"]
    (warning,) = front.finished[0].warning.split("; ")
    assert warning.startswith(f"the embedding model 'other' {words}")
    assert warning.endswith("its stores were searched by words alone")
    assert front.finished[0].search.tokens == 0
    assert all(one.settled or one.cancelled for one in parts.tokenizers.opened)


async def test_one_that_is_not_served_is_not_waited_for(parts):
    parts.settings.retrieval.served_embedders = {"gone": ServedEmbedder(dimension=3)}
    parts.retrieval.further = {"gone"}
    parts.stores.unready = Unready(models={"vs_1": "gone"})
    front = Front(searching(stores=("vs_1",)))
    await served(parts, front)
    (_answer,) = parts.tokenizers.opened
    assert "the embedding model 'gone' failed: " in front.finished[0].warning


async def test_of_a_long_question_it_reads_the_ends(parts):
    await served(parts, Front(searching(question="first" + " middle" * 5000 + " last")))
    (text,) = [one.text for one in parts.tokenizers.opened[0].request.pool.inputs]
    assert text.startswith("query: first")
    assert text.endswith(" last")
    assert len(text.encode()) <= 3 * 512


async def test_who_may_not_use_it_or_has_no_room_is_refused(parts, meter):
    parts.auth.keys["Bearer k"] = principal(models=frozenset({MODEL, EMBEDDING_MODEL}))
    assert (await refused(parts, Front(searching()))).code is grpc.StatusCode.PERMISSION_DENIED
    limit = Limit.model_validate({"name": "l", "of": "tokens", "per": "minute", "most": 1})
    parts.auth.keys["Bearer k"] = replace(principal(), limits=(Bound("key", limit),))
    bound = parts.auth.keys["Bearer k"].limits[0]
    meter.verdict = Verdict(blocked_by=bound, wait_s=1.0)
    assert (await refused(parts, Front(searching()))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert parts.tokenizers.opened == []
