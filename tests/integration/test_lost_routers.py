"""Routers are lost under a tokenizer: the answer is what it would have been."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from protos.common_pb2 import FINISH_LENGTH, FINISH_STOP
from protos.router_pb2 import GenerateRequest
from protos.tokenizer_pb2 import PromptRequest, TextDelta
from protos.worker_pb2 import TokenDelta
from services.common.embedded_redis import EmbeddedRedis
from services.common.errors import PenstockError, unavailable
from services.common.link import End, LinkCall
from services.common.policy import Policy, load_rules
from services.common.service import Host
from services.tokenizer.answers.generation import MAX_LOSSES
from tests.support.link_peers import links_made_anew_at_once
from tests.support.prompts import prompt_of
from tests.support.resumes import resume_of
from tests.support.tokenizer_bed import (
    Bed,
    Script,
    Story,
    bed,
    cut_off,
    ids,
    question,
    router_class,
)
from tests.support.waiting import until

TEXT = "The water 東京 🚰 is\n\nUse here.\n\nUser: and more"
STOP = "\n\nUser"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis
) -> AsyncIterator[Bed]:
    """A tokenizer and two routers, which do what `script` is set to."""

    async def script(call: LinkCall, request: GenerateRequest) -> None:
        assert two.script is not None
        await two.script(call, request)

    folder = tmp_path_factory.mktemp("two")
    with links_made_anew_at_once():
        async with bed(folder, redis_server.url, "two-routers", script, script) as made:
            two = made
            yield two


def last(b: Bed) -> TextDelta:
    assert [delta.finish for delta in b.deltas[:-1]] == [0] * (len(b.deltas) - 1)
    assert [n for n, delta in enumerate(b.deltas) if delta.HasField("plan")] == [0]
    return b.deltas[-1]


async def told(b: Bed, script: Script, request: PromptRequest) -> tuple[End, list[GenerateRequest]]:
    """The request's end with `script` behind it, and what the routers were asked."""
    b.script = script
    for n in range(len(b.routers)):
        b.router(n).requests.clear()
    await until(lambda: len(b.pipeline.routers.ready()) == len(b.routers))
    end = await b.ask(request)
    return end, [r for n in range(len(b.routers)) for r in b.router(n).requests]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stop", [[], [STOP]], ids=["to its length", "to a stop string"])
async def test_wherever_a_router_is_lost_the_answer_is_the_same(two: Bed, stop: list[str]) -> None:
    # Before the first token, within characters, within stop strings, behind the last token.
    request = question(stop=stop)
    end, (undisturbed,) = await told(two, Story(TEXT), request)
    assert end.status.code == 0
    expected, whole = two.text, last(two)
    assert expected == (TEXT.split(STOP)[0] if stop else TEXT)
    assert whole.finish == (FINISH_STOP if stop else FINISH_LENGTH)
    assert (whole.usage.cached_tokens, undisturbed.generated_prefix) == (3, 0)
    assert whole.usage.draft_tokens == 2 * whole.usage.accepted_tokens
    assert whole.usage.accepted_tokens == whole.usage.completion_tokens

    for position in range(len(ids(TEXT)) + 1):
        story = Story(TEXT, dies_before=[position])
        end, asked = await told(two, story, request)
        assert (end.status.code, two.text) == (0, expected), position
        assert (last(two).finish, last(two).usage) == (whole.finish, whole.usage), position
        given = [id for delta in two.deltas for id in delta.token_ids]
        assert given == ids(TEXT)[: whole.usage.completion_tokens]
        if position >= len(given):  # it was complete
            assert len(asked) == 1
            continue
        resumed = max(asked, key=lambda r: r.generated_prefix)
        assert len(asked) == 2
        assert resumed.generated_prefix == position
        assert prompt_of(resumed) == [
            *prompt_of(undisturbed),
            *ids(TEXT)[:position],
        ]
        assert resumed.sampling.max_tokens == undisturbed.sampling.max_tokens - position
        assert (resumed.sampling.seed, resumed.caller) == (7, undisturbed.caller)
        (again,) = [d for d in end.record.decisions if d.subject == "router"]
        assert (again.choice, again.reasons["why"]) == ("went on", "peer_lost")
        assert again.reasons["tokens_so_far"] == str(position)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("deaths", [[0, 0], [5, 5], [3, 9], [0, 4, 8]])
async def test_several_losses_in_a_row(two: Bed, deaths: list[int]) -> None:
    end, asked = await told(two, Story(TEXT, dies_before=deaths), question())
    assert (end.status.code, two.text, len(asked)) == (0, TEXT, len(deaths) + 1)
    assert last(two).usage.completion_tokens == len(ids(TEXT))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_routers_die_of_ends(two: Bed) -> None:
    end, asked = await told(two, Story(TEXT, dies_before=[4] * 99), question())
    assert (end.status.stage, end.status.reason) == ("router", "peer_lost")
    assert len(asked) == MAX_LOSSES + 1
    assert two.text, "what came before counts"


@pytest.mark.asyncio(loop_scope="module")
async def test_routers_that_drain_are_no_losses_of_the_request_s_making(two: Bed) -> None:
    """An upgrade may move it as often as there are routers."""
    story, drains = Story(TEXT), 0

    async def drains_first(call: LinkCall, request: GenerateRequest) -> None:
        nonlocal drains
        if drains <= MAX_LOSSES:
            drains += 1
            raise unavailable("is draining", stage="router", reason="draining")
        await story(call, request)

    end, asked = await told(two, drains_first, question())
    assert (end.status.code, two.text, len(asked)) == (0, TEXT, MAX_LOSSES + 2)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("reason", ["queue_full", "internal", "no_replica"])
async def test_what_a_router_refuses_is_asked_of_no_other(two: Bed, reason: str) -> None:
    async def refuses(call: LinkCall, request: GenerateRequest) -> None:
        raise unavailable("no", stage="router", reason=reason)

    end, asked = await told(two, refuses, question())
    assert (end.status.reason, len(asked)) == (reason, 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_all_tokens_came_but_the_finish_did_not(two: Bed) -> None:
    async def says_all_but_that_it_is_all(call: LinkCall, request: GenerateRequest) -> None:
        call.send(TokenDelta(token_ids=ids("water")).SerializeToString())
        await call._link.outbox.flushed()
        cut_off(call._link._server)
        await asyncio.Event().wait()

    request = question()
    request.sampling.max_tokens = len(ids("water"))
    end, asked = await told(two, says_all_but_that_it_is_all, request)
    assert (end.status.code, two.text, len(asked)) == (0, "water", 1)
    assert (last(two).finish, last(two).usage.completion_tokens) == (FINISH_LENGTH, 3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_that_says_nothing_after_the_finish_costs_the_record_alone(two: Bed) -> None:
    async def never_ends(call: LinkCall, request: GenerateRequest) -> None:
        await Story("water")(call, request)
        await asyncio.Event().wait()

    two.script = never_ends
    async with asyncio.timeout(20):
        end = await two.open(question(), timeout_s=600).ended()
    assert (end.status.code, two.text) == (0, "water")
    assert "router" not in {span.name for span in end.record.spans}


async def test_a_drain_at_the_end_of_its_grace_moves_what_still_runs(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    story = Story(TEXT, dies_before=[6], how="draining")
    async with bed(tmp_path, redis_url, namespace, story, story) as b:
        end = await b.ask(question())
        assert (end.status.code, b.text) == (0, TEXT)
        (moved,) = [d for d in end.record.decisions if d.subject == "router"]
        assert (moved.reasons["why"], moved.reasons["tokens_so_far"]) == ("draining", "6")
        drained = next(r for n in (0, 1) if (r := b.router(n)).links.draining)
        assert "router" in {span.name for span in end.record.spans}
        assert len(drained.requests) == 1


async def test_the_only_router_is_waited_for(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    story = Story(TEXT, pauses_before=4)
    async with bed(tmp_path, redis_url, namespace, story, patience_s=20.0) as b:
        request = b.open(question())
        await until(lambda: story.told == 4)
        await b.routers[0].stop(grace_s=0)
        assert not request.outcome.done()
        story.gate.set()
        b.routers.append(Host(router_class(story), b.settings))
        await b.routers[1].start()
        assert (await request.ended()).status.code == 0
        assert b.text == TEXT


async def test_no_router_within_the_patience_is_an_error_that_names_it(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    story = Story(TEXT, dies_before=[5])
    async with bed(tmp_path, redis_url, namespace, story, patience_s=0) as b:
        error = await b.refused(question())
        assert (error.code, error.stage) == (grpc.StatusCode.UNAVAILABLE, "router")
        assert error.reason == "no_replica"
        assert TEXT.startswith(b.text)
        assert b.text


# ---- an answer that another tokenizer began ------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_is_gone_on_with_in_the_window_and_under_the_policy_it_began_with(
    two: Bed,
) -> None:
    request = question()
    request.chat.passages.add(title="Secret", text="water " * 20)
    request.sampling.max_tokens = 0  # as many as the window leaves
    end, (first,) = await told(two, Story(TEXT), request)
    assert end.status.code == 0
    before, after = two.deltas[:7], "".join(delta.text for delta in two.deltas[7:])

    request.resume.CopyFrom(resume_of(before))
    rooms, file = two.pipeline.catalog._pools._rooms, two.pipeline.policy
    before_it = file.current
    rooms["tiny", request.resume.checkpoint] = 128  # would cut the second passage
    file.current = Policy.of(load_rules(b"rules: [{name: all, pattern: .}]"))
    try:
        end, (second,) = await told(two, Story(TEXT), request)
    finally:
        rooms.clear()
        file.current = before_it
    assert (end.status.code, two.text) == (0, after)
    known = len(request.resume.choices[0].token_ids)
    assert prompt_of(second) == [*prompt_of(first), *ids(TEXT)[:known]]
    assert second.generated_prefix == known
    assert first.sampling.max_tokens - second.sampling.max_tokens == known
    assert not any(delta.HasField("plan") for delta in two.deltas)
    usage = two.deltas[-1].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(prompt_of(first)), 3)
    assert usage.completion_tokens == len(ids(TEXT))


@pytest.mark.asyncio(loop_scope="module")
async def test_another_prompt_or_text_is_refused_instead_of_gone_on_with(two: Bed) -> None:
    await told(two, Story(TEXT), question())
    before = resume_of(two.deltas[:5])

    async def refusal(request: PromptRequest, **change: object) -> PenstockError:
        request.resume.CopyFrom(before)
        for name, value in change.items():
            begun = request.resume.choices[0] if name == "characters" else request.resume
            setattr(begun, name, value)
        end, asked = await told(two, Story(TEXT), request)
        assert (asked, two.deltas) == ([], [])
        return PenstockError.from_status(end.status)

    for error in (
        await refusal(question("What was it?")),
        await refusal(question(), prompt_digest=b"x"),
        await refusal(question(), checkpoint="another"),
        await refusal(question(), characters=before.choices[0].characters + 1),
    ):
        assert (error.code, error.stage) == (grpc.StatusCode.UNAVAILABLE, "tokenizer")
        assert error.reason == "cannot_resume"


@pytest.mark.asyncio(loop_scope="module")
async def test_to_go_on_behind_nothing_is_no_way_around_the_policy(two: Bed) -> None:
    request = question("a TOP secret")
    request.resume.SetInParent()
    end, asked = await told(two, Story(TEXT), request)
    assert (end.status.param, asked) == ("resume.choices", [])
