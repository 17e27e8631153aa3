"""The index against the plain sets that it stands for."""

import random

import hypothesis.strategies as st
from hypothesis import given

from services.router.block_index import BlockIndex
from tests.support.block_counts import known

BLOCKS = [bytes([n]) * 16 for n in range(8)]

OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "store", "evict", "sweep"]),
        st.integers(0, 3),
        st.lists(st.sampled_from(BLOCKS), max_size=6),
        st.booleans(),
    ),
    max_size=40,
)


@given(ops=OPS, chain=st.lists(st.sampled_from(BLOCKS), max_size=8))
def test_matches_what_the_holders_hold(ops, chain):
    index = BlockIndex()
    holders: dict[int, tuple] = {}
    for op, slot, blocks, below in ops:
        if op == "sweep":
            index.sweep(len(blocks))
        elif op == "add" and slot not in holders:
            holders[slot] = (index.add(), (set(), set()))
        elif slot in holders:
            holder, held = holders[slot]
            if op == "store":
                index.store(holder, blocks, below)
                held[below].update(blocks)
            elif op == "evict":
                index.evict(holder, blocks, below)
                held[below].difference_update(blocks)
            elif op == "remove":
                index.remove(holder)
                del holders[slot]
    expected, reached = {}, {}
    for holder, (held, below) in holders.values():
        if length := leading(chain, held):
            expected[holder.bit] = length
        length = leading(chain, held | below)
        if loads := sum(block not in held for block in chain[:length]):
            reached[holder.bit] = (length, loads)
    for block in BLOCKS:
        there = any(block in held | below for _, (held, below) in holders.values())
        assert index.holds(block) is there
    assert index.match(chain) == expected
    assert index.match_below(chain) == reached
    assert len({holder.bit for holder, _ in holders.values()}) == len(holders)
    while index.sweep(3):
        pass
    assert known(index) == len(
        set().union(*(held | below for _, (held, below) in holders.values()))
    )
    assert index.match(chain) == expected
    assert index.match_below(chain) == reached


def test_of_a_long_chain_each_holders_loads_are_counted():
    rng, index = random.Random(3), BlockIndex()
    chain = [n.to_bytes(16) for n in range(200)]
    expected = {}
    for number in range(40):
        holder = index.add()
        held = {block for block in chain if rng.random() < number / 40}
        below = set(chain[: rng.randrange(200)])
        index.store(holder, held)
        index.store(holder, below, below=True)
        length = leading(chain, held | below)
        if loads := sum(block not in held for block in chain[:length]):
            expected[holder.bit] = (length, loads)
    assert len(expected) > 30
    assert index.match_below(chain) == expected


def leading(chain, held):
    return next((n for n, block in enumerate(chain) if block not in held), len(chain))


def test_reads_no_further_than_somebody_follows():
    index = BlockIndex()
    holder = index.add()
    index.store(holder, BLOCKS[:2])
    read = []
    chain = (read.append(block) or block for block in BLOCKS)
    assert index.match(chain) == {holder.bit: 2}
    assert read == BLOCKS[:3]


def test_a_removed_holder_counts_at_once_and_its_bit_returns_swept():
    index = BlockIndex()
    first, second = index.add(), index.add()
    index.store(first, BLOCKS)
    index.store(second, BLOCKS[:1])
    index.remove(first)
    assert index.match(BLOCKS) == {second.bit: 1}
    assert index.add().bit not in (first.bit, second.bit)
    assert index.sweep(3)
    assert known(index) >= len(BLOCKS) - 3, "no more at once than it was told"
    assert not index.sweep(100)
    assert known(index) == 1
    again = index.add()
    assert again.bit == first.bit
    assert index.match(BLOCKS) == {second.bit: 1}, "it holds nothing of its predecessor's"
    index.store(again, BLOCKS[:3])
    assert index.match(BLOCKS) == {second.bit: 1, again.bit: 3}
