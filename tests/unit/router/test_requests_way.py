"""A request's way through the router: admitted, placed, run, gone on with, and left in order."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from protos import common_pb2, worker_pb2
from protos.common_pb2 import FINISH_LENGTH
from protos.router_pb2 import GenerateRequest
from services.common.block_hash import block_hashes, tenant_salt
from services.common.config import RouterSettings, Settings
from services.common.errors import PenstockError, unavailable
from services.common.link import LinkState
from services.common.packed_ids import pack
from services.common.telemetry.telemetry import Telemetry
from services.router import breaker, chains, metrics, pipeline
from services.router.admission import Ticket
from services.router.quarantine import Quarantine, fingerprint
from tests.support.prompts import prompt_of
from tests.support.scripted_workers import CHECKPOINT, Call, Opened, Pool
from tests.support.waiting import until

PROMPT = list(range(100))
LOST = unavailable("lost", stage="worker", reason="peer_lost")


class Door:
    """Admission that lets all in at once, or refuses, and remembers who came and left."""

    def __init__(self) -> None:
        self.came: list[Ticket] = []
        self.again: list[Ticket] = []
        self.left: list[Ticket] = []
        self.refusal: PenstockError | None = None

    async def admit(self, ticket: Ticket) -> None:
        self.came.append(ticket)
        if self.refusal:
            raise self.refusal
        ticket.granted.set_result(None)

    async def admit_again(self, ticket: Ticket) -> None:
        self.again.append(ticket)
        ticket.heard()
        ticket.granted.set_result(None)

    def leave(self, ticket: Ticket) -> None:
        self.left.append(ticket)


class Listed:
    """The registry's models."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    async def has(self, name: str) -> bool:
        return name in self.names


class Rig:
    def __init__(self, **options: Any) -> None:
        options = {"worker_patience_s": 0.0, **options}
        self.settings = Settings(router=RouterSettings(**options))
        self.pool = Pool(self.settings)
        self.door = Door()
        self.models = Listed()
        self.quarantine = Quarantine(self.pool.workers.poke)
        self.router = pipeline.Router(
            self.settings,
            Telemetry("router", "r"),
            self.pool.workers,
            cast(Any, self.models),
            cast(Any, self.door),
            self.quarantine,
        )

    def serve(self, request: GenerateRequest) -> "Served":
        call = Call(request.SerializeToString())
        return Served(call, asyncio.create_task(pipeline.serve(self.router, cast(Any, call))))

    async def nth(self, id: str, count: int) -> Opened:
        """The worker's request number `count`."""
        await until(lambda: len(self.pool.opened[id]) == count)
        return self.pool.opened[id][-1]


class Served:
    def __init__(self, call: Call, task: "asyncio.Task[None]") -> None:
        self.call, self.task = call, task

    async def end(self) -> common_pb2.Status:
        async with asyncio.timeout(5):
            await asyncio.wait([self.task])
        assert self.call.status is not None
        return self.call.status

    @property
    def decisions(self) -> list[tuple[str, str]]:
        return [(told.subject, told.choice) for told in self.call.record.decisions]

    def told(self, subject: str) -> dict[str, str]:
        (one,) = (told for told in self.call.record.decisions if told.subject == subject)
        return dict(one.reasons)


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def request(**facts: Any) -> GenerateRequest:
    caller = {"request_id": "r", "tenant": "acme", "priority": 2, "weight": 1.0}
    sampling = {"max_tokens": 3}
    return GenerateRequest(
        caller=common_pb2.Caller(**{**caller, **facts.pop("caller", {})}),
        sampling=common_pb2.Sampling(**{**sampling, **facts.pop("sampling", {})}),
        **{"model": "m", "checkpoint": CHECKPOINT, "prompt_token_ids": pack(PROMPT), **facts},
    )


def counted(counter: Any) -> float:
    return float(counter._value.get())


# ---- what comes in ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "param"),
    [
        ({"caller": {"tenant": ""}}, "caller.tenant"),
        ({"caller": {"tenant": "a\0b"}}, "caller.tenant"),
        ({"caller": {"priority": 0}}, "caller.priority"),
        ({"caller": {"priority": 4}}, "caller.priority"),
        ({"caller": {"weight": 0.0}}, "caller.weight"),
        ({"caller": {"weight": -1.0}}, "caller.weight"),
        ({"caller": {"weight": float("inf")}}, "caller.weight"),
        ({"caller": {"weight": float("nan")}}, "caller.weight"),
        ({"prompt_token_ids": pack([])}, "prompt_token_ids"),
        ({"prompt_token_ids": pack([1, 2]), "generated_prefix": 2}, "generated_prefix"),
        ({"prompt_token_ids": pack([1, 2]), "generated_prefix": 3}, "generated_prefix"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(facts: dict[str, Any], param: str) -> None:
    with pytest.raises(PenstockError) as told:
        pipeline.parse(request(**facts).SerializeToString())
    error = told.value
    assert (error.code, error.param) == (grpc.StatusCode.INVALID_ARGUMENT, param)
    assert (error.stage, error.message) == ("router", f"{param} is missing or out of range")


@pytest.mark.parametrize(
    "facts",
    [
        {"caller": {"priority": 1, "weight": 1e-9}},
        {"caller": {"priority": 3, "weight": 1e9}},
        {"prompt_token_ids": pack([1, 2]), "generated_prefix": 1},
        {"prompt_token_ids": pack([0])},
        {"sampling": {"max_tokens": 1}},
    ],
)
def test_what_is_just_in_range_is_taken_as_it_is(facts: dict[str, Any]) -> None:
    assert pipeline.parse(request(**facts).SerializeToString()) == request(**facts)


@pytest.mark.parametrize(
    "odd", [b"\xff\xff", request(prompt_token_ids=pack(PROMPT) + b"\x80").SerializeToString()]
)
async def test_what_is_no_request_is_refused_and_leaves_nothing(rig: Rig, odd: bytes) -> None:
    call = Call(odd)
    await pipeline.serve(rig.router, cast(Any, call))
    assert call.status is not None
    assert (call.status.code, call.status.stage) == (3, "router")
    assert call.status.message == "not a GenerateRequest"
    assert rig.door.came == []


@pytest.mark.parametrize(
    ("facts", "cost", "resumed"),
    [
        ({}, 103, False),
        ({"sampling": {"max_tokens": 5000}}, 228, False),  # as much as is expected
        ({"generated_prefix": 4, "sampling": {"max_tokens": 50}}, 0, True),  # was charged before
    ],
)
async def test_what_a_request_claims(
    rig: Rig, facts: dict[str, Any], cost: float, resumed: bool
) -> None:
    rig.pool.worker("w")
    served = rig.serve(request(caller={"tenant": "t", "priority": 3, "weight": 2.5}, **facts))
    await rig.nth("w", 1)
    (ticket,) = rig.door.came
    assert (ticket.model, ticket.tenant, ticket.lane, ticket.weight) == ("m", "t", 3, 2.5)
    assert (ticket.cost, ticket.resumed, len(ticket.id)) == (cost, resumed, 32)
    assert ticket.left_over == min(128, facts.get("sampling", {}).get("max_tokens", 3))
    assert rig.door.left == []
    served.task.cancel()
    await served.end()
    assert rig.door.left == [ticket]


@pytest.mark.parametrize(
    ("model", "known"),
    [("m", True), ("registered", True), ("left", False), ("other", False)],
)
async def test_a_model_is_known_if_the_registry_lists_it_or_a_worker_of_it(
    rig: Rig, model: str, known: bool
) -> None:
    """Known without a worker is not available; unknown is an error of the client."""
    rig.models.names.add("registered")
    peer, gone = rig.pool.peer("w"), rig.pool.peer("gone", model="left")
    assert rig.pool.workers.models() == {"m", "left"}
    cast(Any, peer.link).state = LinkState.DEAD
    rig.pool.gone(gone)
    status = await rig.serve(request(model=model)).end()
    if known:
        assert (status.code, status.reason) == (14, "no_worker")
    else:
        assert (status.code, status.reason, status.param) == (5, "model_not_found", "model")
        assert rig.door.came == [], "it takes no place in any queue"
    assert status.stage == "router"
    assert len(rig.door.left) == 1


# ---- how it ends --------------------------------------------------------------------------------


async def test_a_whole_answer(rig: Rig) -> None:
    rig.pool.worker("w")
    ok = metrics.ended.labels("ok")
    before = counted(ok), counted(metrics.output_tokens), counted(metrics.prompt_tokens)
    served = rig.serve(request())
    worker = await rig.nth("w", 1)
    worker.give(1, 2, cached=32)
    worker.give(3, finish=FINISH_LENGTH)
    worker.end()
    assert (await served.end()).code == 0
    assert served.call.tokens == [1, 2, 3]
    assert [subject for subject, _ in served.decisions] == ["admission", "placement", "split"]
    names = {span.name for span in served.call.record.spans}
    assert names >= {"router", "admit", "place", "run", "on w"}
    (root,) = (span for span in served.call.record.spans if span.name == "router")
    told = {key: root.attributes[key] for key in ("model", "prompt_tokens", "output_tokens")}
    assert told == {"model": "m", "prompt_tokens": "100", "output_tokens": "3"}
    assert root.attributes["cached_tokens"] == "32"
    assert float(root.attributes["ttft_ms"]) >= 0
    after = counted(ok), counted(metrics.output_tokens), counted(metrics.prompt_tokens)
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 3, 100]
    assert len(rig.door.left) == 1


@pytest.mark.parametrize(
    ("error", "outcome", "stage"),
    [
        (unavailable("away", stage="", reason="admission_away"), "unavailable", "router"),
        (unavailable("away", stage="tokenizer", reason="x"), "unavailable", "tokenizer"),
    ],
)
async def test_a_refusal_names_its_stage_and_takes_its_place_back(
    rig: Rig, error: PenstockError, outcome: str, stage: str
) -> None:
    rig.pool.worker("w")
    rig.door.refusal = error
    before = counted(metrics.ended.labels(outcome))
    served = rig.serve(request())
    status = await served.end()
    assert (status.stage, status.reason) == (stage, error.reason)
    assert counted(metrics.ended.labels(outcome)) == before + 1
    assert served.decisions == [("admission", "refused")]
    assert rig.door.left == rig.door.came
    assert rig.pool.opened["w"] == []


async def test_a_client_that_goes_away_is_no_success(rig: Rig) -> None:
    rig.pool.worker("w")
    before = counted(metrics.ended.labels("cancelled"))
    served = rig.serve(request())
    (await rig.nth("w", 1)).give(1)
    served.task.cancel()
    assert (await served.end()).code != 0
    assert counted(metrics.ended.labels("cancelled")) == before + 1
    assert rig.pool.log == ["stop w"]
    assert len(rig.door.left) == 1
    assert "placement" in dict(served.decisions), "its record says where it was"


# ---- going on elsewhere -------------------------------------------------------------------------


async def test_losses_are_told_and_counted_and_the_prompt_is_counted_once(rig: Rig) -> None:
    for id in ("w1", "w2"):
        rig.pool.worker(id)
    failovers = metrics.failovers.labels("engine_died")
    before = counted(failovers), counted(metrics.prompt_tokens)
    served = rig.serve(request())
    await until(lambda: any(rig.pool.opened.values()))
    lost = "w1" if rig.pool.opened["w1"] else "w2"
    other = "w2" if lost == "w1" else "w1"
    first = await rig.nth(lost, 1)
    first.give(1, cached=0)
    first.end(grpc.StatusCode.UNAVAILABLE, "engine_died")
    second = await rig.nth(other, 1)
    assert prompt_of(second.work) == [*PROMPT, 1]
    (there,) = (w for w in rig.pool.workers.all() if w.id == other)
    assert [sent.prefill_tokens for sent in there.unseen] == [101], "what is made is to compute too"
    second.give(2, 3, finish=FINISH_LENGTH)
    second.end()
    assert (await served.end()).code == 0
    assert served.call.tokens == [1, 2, 3]
    assert served.told("failover") == {
        "lost": lost,
        "cause": "engine_died",
        "tokens_so_far": "1",
        "number": "1",
        "engines_ended": "1",
    }
    subjects = [subject for subject, _ in served.decisions]
    assert subjects == ["admission", "placement", "split", "failover", *subjects[4:]]
    assert set(subjects[4:]) == {"placement", "split", "breaker"}
    assert (counted(failovers), counted(metrics.prompt_tokens)) == (before[0] + 1, before[1] + 100)
    assert {span.name for span in served.call.record.spans} >= {"on w1", "on w2"}


@pytest.mark.parametrize("allowed", [0, 1, 2])
async def test_so_many_losses_and_no_more(allowed: int) -> None:
    rig = Rig(max_failovers=allowed)
    rig.pool.worker("w")
    served = rig.serve(request())
    for count in range(1, allowed + 2):
        worker = await rig.nth("w", count)
        worker.end(grpc.StatusCode.UNAVAILABLE, f"peer_lost_{count}")
    status = await served.end()
    assert (status.reason, status.stage) == (f"peer_lost_{allowed + 1}", "worker")
    assert len(rig.pool.opened["w"]) == allowed + 1
    assert len(rig.door.left) == 1


async def test_a_drain_is_no_loss_to_be_counted() -> None:
    """A long answer outlives an upgrade of all workers, one after the other, and losses too."""
    rig = Rig(max_failovers=1, worker_patience_s=5.0)
    served = rig.serve(request(sampling={"max_tokens": 9}))
    reasons = ["draining", "draining", "peer_lost", "draining", "draining"]
    for n, reason in enumerate(reasons):
        peer = rig.pool.peer(f"w{n}")
        worker = await rig.nth(f"w{n}", 1)
        worker.give(n)
        rig.pool.gone(peer)
        worker.end(grpc.StatusCode.UNAVAILABLE, reason)
    rig.pool.worker("last")
    (await rig.nth("last", 1)).give(5, finish=FINISH_LENGTH)
    assert (await served.end()).code == 0
    assert served.call.tokens == [0, 1, 2, 3, 4, 5]


async def test_after_a_broken_hand_over_it_is_not_split_again() -> None:
    rig = Rig(split="always")
    rig.pool.worker("p", "prefill")
    rig.pool.worker("d", "decode")
    served = rig.serve(request())
    (await rig.nth("d", 1)).end(grpc.StatusCode.UNAVAILABLE, "kv_transfer")
    (await rig.nth("p", 1)).end(grpc.StatusCode.UNAVAILABLE, "kv_transfer")
    alone = await rig.nth("d", 2)
    assert alone.work.mode == worker_pb2.WorkRequest.UNSPLIT
    alone.end(grpc.StatusCode.UNAVAILABLE, "peer_lost")
    again = await rig.nth("p", 2)  # the decode worker is left alone
    assert again.work.mode == worker_pb2.WorkRequest.UNSPLIT, "it stays so"
    again.give(1, finish=FINISH_LENGTH)
    again.end()
    assert (await served.end()).code == 0
    modes = [
        told.reasons["mode"] for told in served.call.record.decisions if told.subject == "split"
    ]
    assert modes == ["always", "never", "never"]


async def test_a_recall_is_no_loss(rig: Rig) -> None:
    """It waits again, is placed again, and says so; its prompt is not counted again."""
    rig.pool.worker("w")
    before = counted(metrics.prompt_tokens)
    served = rig.serve(request())
    first = await rig.nth("w", 1)
    first.give(1, cached=0)
    (ticket,) = rig.door.came
    assert ticket.progress is not None
    assert ticket.progress() == (101, 2)
    ticket.wait_again(ticket.left_over)
    second = await rig.nth("w", 2)
    assert rig.door.again == [ticket]
    assert rig.pool.log == ["stop w"]
    assert prompt_of(second.work) == [*PROMPT, 1]
    second.give(2, 3, finish=FINISH_LENGTH)
    second.end()
    assert (await served.end()).code == 0
    assert served.told("recall") == {"number": "1", "tokens_so_far": "1", "order": "redis"}
    assert "failover" not in dict(served.decisions)
    assert counted(metrics.prompt_tokens) == before + 100


async def test_what_another_router_gave_is_no_prompt_to_count(rig: Rig) -> None:
    rig.pool.worker("w")
    before = counted(metrics.prompt_tokens)
    served = rig.serve(request(generated_prefix=10))
    worker = await rig.nth("w", 1)
    worker.give(1, finish=FINISH_LENGTH)
    worker.end()
    assert (await served.end()).code == 0
    assert served.decisions[0] == ("admission", "went on")
    assert counted(metrics.prompt_tokens) == before


async def test_who_was_convicted_meanwhile_does_not_run() -> None:
    """Two of one kind: the second waits for a worker while the first ends two engines."""
    rig = Rig(worker_patience_s=60.0)
    rig.models.names.add("listed")
    served = rig.serve(request(model="listed"))
    await until(lambda: bool(rig.door.came))
    rig.quarantine._convict(rig.quarantine.case(request(model="listed")).fingerprint)
    rig.pool.worker("w", model="listed")
    status = await served.end()
    assert status.reason == "request_quarantined"
    assert rig.pool.opened["w"] == []
    refused = await rig.serve(request(model="listed")).end()
    assert refused.reason == "request_quarantined"
    assert len(rig.door.came) == 1, "its like takes no place"


# ---- where it is placed -------------------------------------------------------------------------


async def test_each_worker_is_matched_by_its_own_block_size(rig: Rig) -> None:
    sizes = {"small": 16, "large": 32}
    peers = {id: rig.pool.peer(id, block_size=size) for id, size in sizes.items()}
    for count, (best, blocks) in enumerate([("large", 3), ("small", 7)], 1):
        size = sizes[best]
        hashes = block_hashes(PROMPT[: blocks * size], size, tenant_salt("acme"))
        rig.pool.tell(peers[best], events=[(True, hashes[:2] if count == 1 else hashes[:6])])
        served = rig.serve(request())
        worker = await rig.nth(best, 1)
        worker.give(1, finish=FINISH_LENGTH)
        worker.end()
        await served.end()
        assert served.told("split")["uncached_tokens"] == str(100 - (64 if count == 1 else 96))


@pytest.mark.parametrize(
    ("size", "held", "hashed"),
    [
        (16, 0, [1024]),  # nobody holds its beginning: no more of it is hashed
        (16, 63, [1024]),
        (16, 64, [1024, 3000]),
        (16, 65, [1024, 3000]),
        (16, 187, [1024, 3000]),
        (2048, 0, [1024, 3000]),  # a block of its own is longer than what is looked at first
        (2048, 1, [1024, 3000]),
    ],
)
async def test_a_long_prompt_is_hashed_as_far_as_somebody_may_hold_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int, held: int, hashed: list[int]
) -> None:
    prompt = [id % 97 for id in range(3000)]
    peer = rig.pool.peer("w", block_size=size)
    hashes = block_hashes(prompt[: held * size], size, tenant_salt("acme"))
    rig.pool.tell(peer, events=[(True, hashes)])
    seen: list[int] = []

    def counted(token_ids: Any, *how: Any) -> list[bytes]:
        seen.append(len(token_ids))
        return block_hashes(token_ids, *how)

    monkeypatch.setattr(chains, "block_hashes", counted)
    served = rig.serve(request(prompt_token_ids=pack(prompt)))
    worker = await rig.nth("w", 1)
    worker.give(1, finish=FINISH_LENGTH)
    worker.end()
    await served.end()
    assert seen == hashed
    assert served.told("split")["uncached_tokens"] == str(3000 - held * size)


async def test_another_tenants_blocks_are_not_its(rig: Rig) -> None:
    theirs, idle = rig.pool.peer("theirs"), rig.pool.worker("idle")
    hashes = block_hashes(PROMPT, 16, tenant_salt("other"))
    rig.pool.tell(theirs, events=[(True, hashes)], load=worker_pb2.Load(running=1))
    served = rig.serve(request())
    worker = await rig.nth(idle.id, 1)
    assert [sent.prefill_tokens for sent in idle.unseen] == [100]
    worker.give(1, finish=FINISH_LENGTH)
    worker.end()
    await served.end()


async def test_a_request_waits_for_a_sound_worker_and_takes_the_first() -> None:
    rig = Rig(worker_patience_s=60.0)
    lost = rig.pool.worker("w")
    lost.breaker.began().lost()
    served = rig.serve(request())
    await until(lambda: bool(rig.door.came))
    assert rig.pool.opened["w"] == []
    rig.pool.worker("sound")
    worker = await rig.nth("sound", 1)
    worker.give(1, finish=FINISH_LENGTH)
    worker.end()
    assert (await served.end()).code == 0
    assert rig.pool.opened["w"] == []
    assert served.told("breaker") == {"w": "open, 1 of its last 1 requests failed"}


async def test_waiting_for_a_worker_ends_with_the_patience() -> None:
    rig = Rig(worker_patience_s=0.05)
    rig.models.names.add("listed")
    served = rig.serve(request(model="listed"))
    await until(lambda: bool(rig.door.came))
    rig.pool.worker("another")  # a change, but none that helps
    status = await served.end()
    assert (status.code, status.reason, status.stage) == (14, "no_worker", "router")


async def test_nobody_waits_for_a_worker_of_a_model_that_was_removed() -> None:
    rig = Rig(worker_patience_s=3600.0)
    rig.models.names.add("m")
    served = rig.serve(request())
    await until(lambda: bool(rig.door.came))
    rig.models.names.clear()
    rig.pool.workers.poke()  # as the router does then
    status = await served.end()
    assert (status.code, status.reason, status.param) == (5, "model_not_found", "model")
    assert rig.door.left == rig.door.came


async def test_an_only_worker_is_tried_as_soon_as_its_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody tells of that."""
    monkeypatch.setattr(breaker, "PROBE_S", 0.05)
    rig = Rig(worker_patience_s=60.0)
    rig.pool.worker("w")
    served = rig.serve(request())
    for count in (1, 2):
        (await rig.nth("w", count)).end(grpc.StatusCode.UNAVAILABLE, "peer_lost")
    worker = await rig.nth("w", 3)
    worker.give(1, finish=FINISH_LENGTH)
    worker.end()
    assert (await served.end()).code == 0


# ---- two checkpoints of a model -----------------------------------------------------------------


async def test_a_request_runs_on_workers_of_its_checkpoint_alone() -> None:
    """Split, and when one is lost: the other checkpoint's workers are idle and hold its prefix."""
    rig = Rig(split="always", worker_patience_s=0.0)
    for id, role in (("p", "prefill"), ("d", "decode")):
        rig.pool.worker(id, role)
        other = rig.pool.peer(f"other-{id}", role, digest="other")
        hashes = block_hashes(PROMPT, 16, tenant_salt("acme"))
        rig.pool.tell(other, events=[(True, hashes)])
    served = rig.serve(request())
    first, then = await rig.nth("p", 1), await rig.nth("d", 1)
    assert first.work.checkpoint == then.work.checkpoint == CHECKPOINT
    first.give(1)
    first.end()
    then.end(grpc.StatusCode.UNAVAILABLE, "peer_lost")
    again = await rig.nth("p", 2)  # better a prefill worker than another checkpoint's decoder
    again.give(2, 3, finish=FINISH_LENGTH)
    again.end()
    assert (await served.end()).code == 0
    assert served.call.tokens == [1, 2, 3]
    assert not rig.pool.opened["other-p"]
    assert not rig.pool.opened["other-d"]


async def test_a_replaced_checkpoint_is_told_at_once_while_nothing_was_made_of_the_answer() -> None:
    rig = Rig(worker_patience_s=60.0)
    rig.pool.worker("new", digest="new")
    looks: list[bool] = []
    rig.pool.on_look = lambda: looks.append(True)
    status = await rig.serve(request()).end()
    assert (status.code, status.reason, status.stage) == (14, "checkpoint_replaced", "router")
    assert looks, "one that came in this moment would be seen"


async def test_a_checkpoint_whose_worker_just_came_is_not_replaced() -> None:
    rig = Rig(worker_patience_s=60.0)
    rig.pool.worker("new", digest="new")
    rig.pool.on_look = lambda: rig.pool.opened.get("w") or rig.pool.peer("w")
    served = rig.serve(request())
    opened = await rig_opens(rig, "w")
    opened.give(1, finish=FINISH_LENGTH)
    opened.end()
    assert (await served.end()).code == 0


async def rig_opens(rig: Rig, id: str) -> Opened:
    await until(lambda: bool(rig.pool.opened.get(id)))
    return rig.pool.opened[id][-1]


@pytest.mark.parametrize("before", [0, 5])
async def test_what_was_begun_waits_for_a_worker_of_its_checkpoint(before: int) -> None:
    """By this router, or by one that was lost: another checkpoint cannot go on with it."""
    rig = Rig(worker_patience_s=60.0)
    peer = rig.pool.peer("w")
    rig.pool.worker("new", digest="new")
    if before:
        rig.pool.gone(peer)
    served = rig.serve(request(generated_prefix=before))
    if not before:
        (await rig.nth("w", 1)).give(1)
        rig.pool.gone(peer)
        rig.pool.opened["w"][0].end(grpc.StatusCode.UNAVAILABLE, "peer_lost")
    await until(lambda: len(rig.door.came) == 1)
    await asyncio.sleep(0)
    assert not served.task.done()
    rig.pool.worker("back")
    opened = await rig_opens(rig, "back")
    opened.give(2, finish=FINISH_LENGTH)
    opened.end()
    assert (await served.end()).code == 0
    assert not rig.pool.opened["new"]


async def test_a_request_without_its_checkpoint_is_refused(rig: Rig) -> None:
    rig.pool.worker("w")
    status = await rig.serve(request(checkpoint="")).end()
    assert (status.code, status.param) == (3, "checkpoint")


def test_of_another_checkpoint_a_request_is_not_alike() -> None:
    assert fingerprint(request()) != fingerprint(request(checkpoint="other"))
    assert fingerprint(request()) == fingerprint(request())
