"""Placement: what must decide it, one thing at a time."""

from dataclasses import replace
from graphlib import TopologicalSorter
from types import SimpleNamespace

import pytest

from protos import worker_pb2
from services.common.discovery import Replica
from services.router.block_index import Holder, Reach
from services.router.placement import (
    FORGOTTEN_S,
    OPTIMISM,
    TOLD,
    TRUSTED_S,
    Ask,
    Placement,
    Rates,
    place,
    rates_of,
    reasons,
)
from services.router.workers import Worker


def worker(number: int, role: str = "both", host: str = "host", **load: float) -> Worker:
    """An idle, measured worker, unless `load` says otherwise."""
    figures = {
        "max_running": 32,
        "free_blocks": 1000,
        "total_blocks": 1000,
        "block_size": 16,
        "prefill_tokens_per_s": 2000,
        "decode_step_ms": 10,
        **load,
    }
    facts = {"role": role, "model": "m", "block_size": "16", "max_running": "32"}
    replica = Replica("worker", f"w{number}", "127.0.0.1:1", host, 1, facts=facts)
    peer = SimpleNamespace(id=replica.id, replica=replica)
    return Worker(peer, Holder(1 << number), worker_pb2.Load(**figures))  # type: ignore[arg-type]


NOW = 10_000.0
ASK = Ask(prompt_tokens=1000, max_tokens=100, matched={}, split="auto", split_min_tokens=128)


def told(placement: Placement) -> dict[str, str]:
    best = placement.candidates[:TOLD]
    return reasons(placement.plan, best, len(placement.candidates))


def test_the_shorter_queue():
    workers = [worker(0, queued_prefill_tokens=500), worker(1), worker(2, running=3)]
    placement = place(ASK, workers)
    assert placement.plan.decode is workers[1]
    assert placement.plan.ttft_s == pytest.approx(0.5)
    assert [p.cost_s for p in placement.candidates] == sorted(
        p.cost_s for p in placement.candidates
    )


def test_a_prompt_alone_runs_where_prompts_do():
    workers = [worker(0, "decode"), worker(1, "prefill"), worker(2, "decode")]
    alone = replace(ASK, prompt_alone=True, max_tokens=1, split="always")
    for split in ("always", "auto"):
        placement = place(replace(alone, split=split), workers)
        assert (placement.plan.decode, placement.plan.prefill) == (workers[1], None)
    assert place(alone, workers[::2]).plan.decode in workers


def test_the_cached_prefix_until_its_queue_costs_more():
    cached, idle = worker(0), worker(1)
    ask = replace(ASK, matched={cached.holder.bit: 50})
    plan = place(ask, [cached, idle]).plan
    assert plan.decode is cached
    assert (plan.cached_tokens, plan.uncached_tokens) == (800, 200)
    cached.load.queued_prefill_tokens = 700
    assert place(ask, [cached, idle]).plan.decode is cached
    cached.load.queued_prefill_tokens = 900
    assert place(ask, [cached, idle]).plan.decode is idle


def test_a_prefix_on_disk_is_worth_less_than_one_on_the_device_and_more_than_none():
    """By how fast it comes, which the worker has measured; else it is taken to be faster than
    computing."""
    device, disk, bare = workers = [worker(n) for n in range(3)]
    below = {disk.holder.bit: Reach(50, 40)}
    ask = replace(ASK, matched={device.holder.bit: 50, disk.holder.bit: 10}, below=below)
    order = [plan.decode for plan in place(ask, workers).candidates if not plan.prefill]
    assert order == [device, disk, bare]
    plan = place(ask, [disk]).plan
    assert (plan.cached_tokens, plan.loaded_tokens, plan.uncached_tokens) == (800, 640, 200)
    assert plan.ttft_s == pytest.approx(200 / 2000 + 640 / 10_000)
    disk.load.load_tokens_per_s = 64_000
    assert place(ask, [disk]).plan.ttft_s == pytest.approx(200 / 2000 + 640 / 64_000)
    assert "cached 800, of them 640 on disk" in told(place(ask, workers))["w1"]


def test_what_a_worker_would_rather_compute_counts_as_if_it_were_not_on_disk():
    """Its disk is slower than it computes, so it will."""
    one = worker(0)
    ask = replace(ASK, matched={one.holder.bit: 10}, below={one.holder.bit: Reach(50, 40)})
    plain = place(replace(ask, below={}), [one]).plan
    one.load.load_tokens_per_s = 1999
    assert place(ask, [one]).plan == plain
    one.load.load_tokens_per_s = 2001
    plan = place(ask, [one]).plan
    assert (plan.cached_tokens, plan.loaded_tokens, plan.uncached_tokens) == (800, 640, 200)
    assert plan.ttft_s == pytest.approx(200 / 2000 + 640 / 2001)


def test_a_slow_disk_is_left_for_who_computes_sooner():
    """By what passes before blocks come, too, which weighs the more the fewer they are."""
    disk, other = worker(0, load_tokens_per_s=1e12, load_delay_s=0.3), worker(1)
    below = {disk.holder.bit: Reach(60, 60)}
    plan = place(replace(ASK, below=below), [other, disk]).plan
    assert plan.decode is disk
    assert plan.ttft_s == pytest.approx(40 / 2000 + 0.3)
    below = {disk.holder.bit: Reach(30, 30)}
    placement = place(replace(ASK, below=below), [disk, other])
    assert {one.cached_tokens for one in placement.candidates} == {0}
    queued = worker(2, queued_prefill_tokens=800)
    below = {queued.holder.bit: Reach(60, 60)}
    queued.load.load_tokens_per_s, queued.load.load_delay_s = 1e9, 0.2
    assert place(replace(ASK, below=below), [queued, other]).plan.decode is other
    queued.load.load_delay_s = 0.01
    assert place(replace(ASK, below=below), [queued, other]).plan.decode is queued


def test_loading_is_in_nobodys_way():
    """Other than a prompt that is computed: those who decode there do not wait for it."""
    one = worker(0, running=8, load_tokens_per_s=2000)
    below = {one.holder.bit: Reach(60, 60)}
    computed, loaded = (
        place(replace(ASK, below=how, split="never"), [one]).plan for how in ({}, below)
    )
    assert loaded.ttft_s == pytest.approx(computed.ttft_s)
    assert computed.cost_s - loaded.cost_s == pytest.approx(8 * 960 / 2000)


def test_who_decodes_of_a_split_loads_nothing():
    """It gets from the other side what its device has not, and needs room for all of that."""
    first, then = worker(0, "prefill"), worker(1, "decode")
    ask = replace(ASK, split="always")
    plain = place(ask, [first, then]).plan
    below = {then.holder.bit: Reach(60, 60)}
    assert place(replace(ask, below=below), [first, then]).plan == plain
    below = {first.holder.bit: Reach(60, 60)}
    assert place(replace(ask, below=below), [first, then]).plan.loaded_tokens == 960
    short = worker(2, free_blocks=10, load_tokens_per_s=1e9)
    free = worker(3, load_tokens_per_s=1e9)
    below = {one.holder.bit: Reach(60, 60) for one in (short, free)}
    costs = {p.decode: p.cost_s for p in place(replace(ASK, below=below), [short, free]).candidates}
    assert costs[short] > costs[free], "what is loaded needs blocks"


def test_a_whole_cached_prompt_still_computes_its_last_token():
    one = worker(0)
    ask = replace(ASK, prompt_tokens=160, matched={one.holder.bit: 10})
    assert place(ask, [one]).plan.uncached_tokens == 16
    assert place(replace(ask, prompt_tokens=161), [one]).plan.uncached_tokens == 1


def test_what_was_just_sent_counts_before_the_news_show_it():
    workers = [worker(n) for n in range(4)]
    chosen = []
    for _ in range(8):
        plan = place(replace(ASK, split="never"), workers).plan
        plan.decode.sent(plan.uncached_tokens)
        chosen.append(plan.decode.id)
    assert sorted(chosen) == sorted(["w0", "w1", "w2", "w3"] * 2)


def test_a_hot_prefix_does_not_pile_up():
    workers = [worker(n) for n in range(3)]
    ask = replace(ASK, matched={1: 60}, split="never")  # w0 has nearly all of it
    used = set()
    for _ in range(40):
        plan = place(ask, workers).plan
        plan.decode.sent(plan.uncached_tokens)
        used.add(plan.decode.id)
    assert used == {"w0", "w1", "w2"}


def test_a_full_batch_and_full_memory_are_avoided():
    assert place(ASK, [worker(0, running=32), worker(1, running=30)]).plan.decode.id == "w1"
    assert (
        place(ASK, [worker(0, free_blocks=10), worker(1, queued_prefill_tokens=500)]).plan.decode.id
        == "w1"
    )


def aged(worker: Worker, age_s: float) -> Worker:
    """Its rates last moved so long before NOW."""
    worker.prefill_measured_s = worker.step_measured_s = NOW - age_s
    return worker


def test_an_unmeasured_worker_is_tried():
    known = aged(worker(0), 0)
    new = worker(1, prefill_tokens_per_s=0, decode_step_ms=0)
    rates = rates_of([known, new], NOW)
    assert rates[known] == Rates(2000, pytest.approx(0.01))
    assert rates[new].prefill_tokens_per_s == pytest.approx(2000 * OPTIMISM)
    assert rates[new].step_s == pytest.approx(0.01 / OPTIMISM)
    assert place(ASK, [known, new], NOW).plan.decode is new
    assert rates_of([new], NOW)[new].prefill_tokens_per_s > 0


def test_a_worker_that_was_slow_once_is_tried_again():
    """Its first step took 20 s; while it gets nothing it measures nothing."""
    quick = aged(worker(0), 0)
    slow = worker(1, prefill_tokens_per_s=25, decode_step_ms=500)
    seen = []
    for age_s in (0, TRUSTED_S, 60, 90, FORGOTTEN_S):
        seen.append(rates_of([quick, aged(slow, age_s)], NOW)[slow].prefill_tokens_per_s)
    assert seen[0] == seen[1] == pytest.approx(25)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(2000 * OPTIMISM)
    assert place(ASK, [quick, aged(slow, 0)], NOW).plan.decode is quick
    assert place(ASK, [quick, aged(slow, FORGOTTEN_S)], NOW).plan.decode is slow


def test_every_worker_is_tried_now_and_then():
    """One after the other, each on an idle pool whose first worker is the quickest."""
    pool = [aged(worker(n, prefill_tokens_per_s=2000 - 300 * n), 0) for n in range(3)]
    tried = []
    for now in range(int(NOW), int(NOW) + 300, 2):
        chosen = place(ASK, pool, now).plan.decode
        chosen.prefill_measured_s = chosen.step_measured_s = now
        tried.append(chosen.id)
    assert min(tried.count(w.id) for w in pool) >= 2
    assert tried.count("w0") > 100


def test_news_that_move_a_rate_refresh_it():
    seen = aged(worker(0), 50)
    same = worker_pb2.Load()
    same.CopyFrom(seen.load)
    same.running = 5
    seen.learn(same)
    assert (seen.load.running, seen.prefill_measured_s) == (5, NOW - 50)
    moved = worker_pb2.Load()
    moved.CopyFrom(same)
    moved.decode_step_ms = 11
    seen.learn(moved)
    assert seen.prefill_measured_s == NOW - 50
    assert seen.step_measured_s != NOW - 50


def test_split_when_it_spares_the_decoding():
    prefill, decode = worker(0, "prefill"), worker(1, "decode")
    idle = place(ASK, [prefill, decode])
    assert idle.plan.prefill is prefill  # spares whoever comes next
    quick = worker(1, "decode", prefill_tokens_per_s=1_000_000)
    assert place(ASK, [prefill, quick]).plan.prefill is None  # the hand-over is not worth it
    assert place(ASK, [prefill, worker(1, "both")]).plan.prefill is None  # no pool to keep apart
    decode.load.running = 8
    busy = place(ASK, [prefill, decode])
    assert (busy.plan.prefill, busy.plan.decode) == (prefill, decode)
    assert busy.split_reason == "cheaper split"
    assert set(busy.best_costs()) == {"split", "unsplit"}
    prefill.load.queued_prefill_tokens = 20_000
    assert place(ASK, [prefill, decode]).plan.prefill is None


def test_split_not_weighed():
    pool = [worker(0, "prefill"), worker(1, "decode", running=8)]
    short = place(replace(ASK, prompt_tokens=100), pool)
    assert short.plan.name == "w1"
    assert "fewer than 128 uncached" in short.split_reason
    assert place(replace(ASK, split="never"), pool).split_reason == "switched off"
    assert place(replace(ASK, max_tokens=1, split="always"), pool).plan.prefill is None
    always = place(replace(ASK, prompt_tokens=20, split="always"), pool)
    assert always.plan.name == "w0 > w1"


@pytest.mark.parametrize(("role", "missing"), [("prefill", "decode"), ("decode", "prefill")])
def test_one_role_alone(role, missing):
    placement = place(replace(ASK, split="always"), [worker(0, role), worker(1, role)])
    assert placement.plan.prefill is None
    assert placement.split_reason == f"degraded: no {missing} worker"


def test_a_prefill_worker_decodes_only_when_it_must():
    pool = [worker(0, "prefill"), worker(1, "decode", running=31, queued_prefill_tokens=5000)]
    placement = place(replace(ASK, split="never"), pool)
    assert placement.plan.decode.id == "w1"


@pytest.mark.parametrize("count", [1, 2])
def test_workers_of_both_roles_are_never_paired(count):
    pool = [worker(n, running=8 * n) for n in range(count)]
    placement = place(replace(ASK, split="always"), pool)
    assert placement.plan.prefill is None
    assert placement.split_reason == "no worker of one role to pair"


def test_no_circle_of_workers_waits_for_each_other():
    """The blocks that a split reserves on its decode worker wait for its prefill worker."""
    roles = ["both"] * 8 + ["prefill"] * 2 + ["decode"] * 2
    # Those of both roles are the best ends: they must not keep the others from being paired.
    pool = [
        worker(n, role, running=0 if role == "both" else 30, queued_prefill_tokens=10 * n)
        for n, role in enumerate(roles)
    ]
    waits = TopologicalSorter[str]()
    kinds = set()
    for plan in place(replace(ASK, split="always"), pool).candidates:
        if plan.prefill:
            waits.add(plan.decode.id, plan.prefill.id)
            kinds.add((plan.prefill.role, plan.decode.role))
    waits.prepare()  # raises CycleError
    assert kinds == {("prefill", "both"), ("both", "decode")}


def test_the_nearer_decode_worker_among_equals():
    prefill = worker(0, "prefill", host="a")
    far, near = worker(1, "decode", host="b"), worker(2, "decode", host="a")
    plan = place(replace(ASK, split="always"), [prefill, far, near]).plan
    assert plan.decode is near


def test_the_record_is_bounded_and_names_the_choice():
    placement = place(ASK, [worker(n, running=n) for n in range(20)])
    shown = told(placement)
    assert len(shown) <= TOLD + 2
    assert placement.plan.name in shown
    assert "ttft" in shown[placement.plan.name]


def test_the_figures_of_an_unsplit_plan():
    """Each term by hand, none of them zero."""
    ask = replace(ASK, matched={1: 10})
    one = worker(0, running=30, waiting=2, queued_prefill_tokens=130, free_blocks=20)
    one.sent(70)
    plan = place(ask, [one], now=0).plan
    assert (plan.name, plan.cached_tokens, plan.uncached_tokens) == ("w0", 160, 840)
    # 33 sequences in 32 slots: this one waits for 2 slots, of 64 tokens each, shared by 32.
    assert plan.ttft_s == pytest.approx(2 * 64 * 0.01 / 32 + (130 + 70 + 840) / 2000)
    assert plan.itl_s == pytest.approx(0.01 * 1.5)
    interference_s = 33 * 840 / 2000
    no_room_s = ((840 + 100) / 16 - 20) * 16 / 2000
    assert plan.cost_s == pytest.approx(plan.ttft_s + 100 * 0.015 + interference_s + no_room_s)

    half_full = place(ASK, [worker(0, running=15)], now=0).plan
    assert half_full.ttft_s == pytest.approx(0.5)
    assert half_full.itl_s == pytest.approx(0.01 * 1.25)
    assert half_full.cost_s == pytest.approx(0.5 + 1.25 + 15 * 0.5)
    last_slot = place(ASK, [worker(0, running=31)], now=0).plan
    assert last_slot.ttft_s == pytest.approx(0.5)
    # Not measured yet, and without news of its blocks.
    new = worker(0, free_blocks=0, total_blocks=0, prefill_tokens_per_s=0, decode_step_ms=0)
    unknown = place(replace(ASK, max_tokens=10_000), [new], now=0).plan
    assert unknown.ttft_s == pytest.approx(1000 / (2000 * OPTIMISM))
    assert unknown.cost_s == pytest.approx(unknown.ttft_s + 128 * unknown.itl_s)
    assert unknown.itl_s == pytest.approx(0.03 / OPTIMISM * (1 + 0.5 / 32))


def test_a_prompt_takes_longer_where_others_decode():
    """By the share of the time that it gets there; how long they stand still for it, it does not
    change."""
    alone, shared = (
        place(ASK, [worker(0, running=3, prompt_share=share)], now=0).plan for share in (1, 0.25)
    )
    assert alone.ttft_s == pytest.approx(0.5)
    assert shared.ttft_s == pytest.approx(4 * alone.ttft_s)
    assert shared.cost_s - alone.cost_s == pytest.approx(3 * alone.ttft_s)
    queued = worker(0, running=3, prompt_share=0.5, queued_prefill_tokens=600)
    queued.sent(400)
    assert place(ASK, [queued], now=0).plan.ttft_s == pytest.approx(2.0)
    calm, busy = worker(0, running=1), worker(1, running=1, prompt_share=0.5)
    assert place(ASK, [busy, calm]).plan.decode is calm


@pytest.mark.parametrize(("host", "tokens_per_s"), [("host", 1e6), ("other", 1e5)])
def test_the_figures_of_a_split_plan(host: str, tokens_per_s: float):
    """The prompt is the first worker's, moved is what the second one lacks, the rest is its."""
    first = worker(0, "prefill", queued_prefill_tokens=300, running=3, decode_step_ms=99)
    then = worker(
        1,
        "decode",
        host,
        running=33,
        free_blocks=9,
        decode_step_ms=20,
        prefill_tokens_per_s=1000,
        queued_prefill_tokens=7777,
    )
    ask = replace(ASK, matched={1: 20, 2: 10}, split="always")
    plan = place(ask, [first, then], now=0).plan
    assert (plan.name, plan.cached_tokens, plan.uncached_tokens) == ("w0 > w1", 320, 680)
    assert plan.first is first
    assert plan.ttft_s == pytest.approx(2 * 64 * 0.02 / 32 + (300 + 680) / 2000)
    assert plan.itl_s == pytest.approx(0.02 * 1.5)
    no_room_s = ((840 + 100) / 16 - 9) * 16 / 1000
    handover_s = 0.01 + 840 / tokens_per_s
    assert plan.cost_s == pytest.approx(plan.ttft_s + 100 * 0.03 + handover_s + no_room_s)


def test_the_best_few_of_each_end_are_paired():
    """By what each end costs itself: the queue of prompts of the one, the batch of the other."""
    firsts = [worker(n, "prefill", queued_prefill_tokens=100 * n) for n in range(6)]
    thens = [worker(10 + n, "decode", running=3 * n, waiting=1) for n in range(6)]
    thens[0].load.free_blocks = 1  # has no room, and so is the worst
    placement = place(replace(ASK, split="always"), [*firsts[::-1], *thens[::-1]], now=0)
    pairs = {plan.name for plan in placement.candidates if plan.prefill}
    best = [(f"w{first}", f"w{10 + then}") for first in range(4) for then in range(1, 5)]
    assert pairs == {f"{first} > {then}" for first, then in best}
    assert placement.plan.name == "w0 > w11"
    assert placement.plan.cost_s == min(p.cost_s for p in placement.candidates if p.prefill)


def test_forced_apart_even_where_it_costs_more():
    first, then = worker(0, "prefill", queued_prefill_tokens=50_000), worker(1, "decode")
    placement = place(replace(ASK, split="always"), [first, then], now=0)
    assert placement.candidates[0].prefill is None
    assert placement.plan.prefill is first
    assert placement.split_reason == "asked for"
    costs = placement.best_costs()
    assert set(costs) == {"unsplit", "split"}
    assert costs["unsplit"] < costs["split"] == placement.plan.cost_s
    assert place(ASK, [first, then], now=0).split_reason == "cheaper unsplit"


def test_of_each_kind_the_least_cost_is_told():
    firsts = [worker(n, "prefill", queued_prefill_tokens=900 * n) for n in range(3)]
    placement = place(ASK, [*firsts, worker(9), worker(8, running=20)], now=0)
    kinds = {True: "split", False: "unsplit"}
    costs: dict[str, list[float]] = {"split": [], "unsplit": []}
    for plan in placement.candidates:
        costs[kinds[plan.prefill is not None]].append(plan.cost_s)
    assert all(len(set(each)) > 1 for each in costs.values())
    assert placement.best_costs() == {kind: min(each) for kind, each in costs.items()}


def test_the_bounds_of_splitting_are_exact():
    pool = [worker(0, "prefill"), worker(1, "decode", running=8)]
    assert place(replace(ASK, prompt_tokens=128), pool).plan.prefill
    assert not place(replace(ASK, prompt_tokens=127), pool).plan.prefill
    assert place(replace(ASK, max_tokens=2, split="always"), pool).plan.prefill
    why = place(replace(ASK, max_tokens=1), pool).split_reason
    assert why == "a single token: nothing to decode"


def test_the_record_tells_how_many_it_leaves_out_and_the_choice_wherever_it_stands():
    idle = [worker(n, running=n) for n in range(TOLD)]
    assert list(told(place(ASK, idle, now=0))) == [f"w{n}" for n in range(TOLD)]
    more = told(place(ASK, [*idle, worker(9, running=31), worker(8, running=31)], now=0))
    assert more["more candidates"] == "2"
    # What is chosen is dearer than all that is told.
    decoding = [worker(n, "decode", running=n) for n in range(TOLD)]
    slow = worker(9, "prefill", queued_prefill_tokens=90_000)
    forced = told(place(replace(ASK, split="always"), [slow, *decoding], now=0))
    assert len(forced) == TOLD + 2
    assert "w9 > w0" in forced
    plan = place(ASK, [worker(0)], now=0).plan
    assert told(place(ASK, [worker(0)], now=0)) == {
        "w0": f"cost {plan.cost_s:.3f} s, ttft 500.0 ms, itl 10.2 ms, cached 0, uncached 1000"
    }


def test_a_rate_fades_between_its_trust_and_its_end():
    """Half-way it is the geometric mean of its own and a little more than the best."""
    quick = aged(worker(0, prefill_tokens_per_s=6400, decode_step_ms=10), 0)
    slow = worker(1, prefill_tokens_per_s=100, decode_step_ms=160)
    half = rates_of([quick, aged(slow, (TRUSTED_S + FORGOTTEN_S) / 2)], NOW)[slow]
    assert half.prefill_tokens_per_s == pytest.approx(800 * OPTIMISM**0.5)
    assert half.step_s == pytest.approx(0.04 / OPTIMISM**0.5)
    apart = aged(slow, 0)
    apart.step_measured_s = NOW - 2 * FORGOTTEN_S  # each rate has an age of its own
    rates = rates_of([quick, apart], NOW)[slow]
    assert rates.prefill_tokens_per_s == pytest.approx(100)
    assert rates.step_s == pytest.approx(0.01 / OPTIMISM)
    # A worker that measured next to nothing is measured all the same.
    tiny = aged(worker(0, prefill_tokens_per_s=0.5, decode_step_ms=0.5), 0)
    new = worker(1, prefill_tokens_per_s=0, decode_step_ms=0)
    rates = rates_of([tiny, new], NOW)
    assert rates[tiny] == Rates(0.5, 0.0005)
    assert rates[new] == Rates(0.5 * OPTIMISM, 0.0005 / OPTIMISM)


def test_kv_is_handed_over_only_where_it_has_the_same_form():
    """Other settings of a model come step by step, too: as good as a pair may look."""

    def of(number: int, role: str, dtype: str) -> Worker:
        made = worker(number, role)
        made.replica.facts["kv_format"] = f"{dtype} panels"
        return made

    first, other = of(0, "prefill", "float32"), of(1, "decode", "bfloat16")
    always = replace(ASK, split="always")
    assert place(always, [first, other]).plan.prefill is None
    fitting = of(2, "decode", "float32")
    fitting.load.running = 30  # as bad as it may look
    plan = place(always, [first, other, fitting]).plan
    assert (plan.prefill, plan.decode) == (first, fitting)
