"""The block pool's contracts, and the hashes that name blocks."""

import numpy as np
import pytest

from services.common.block_hash import block_hashes, extend_hash, root_hash
from services.worker.engine.kv.block_pool import BlockPool, IntegrityError
from services.worker.engine.outputs import KvEvents


def names(count: int) -> list[bytes]:
    return [bytes([i]) * 16 for i in range(count)]


def test_hashes_are_chained_salted_and_of_full_blocks_only() -> None:
    tokens = list(range(10))
    hashes = block_hashes(tokens, 4, b"tenant")
    assert [len(h) for h in hashes] == [16, 16]
    assert hashes == block_hashes(tokens[:8], 4, b"tenant")
    assert hashes[0] == extend_hash(root_hash(b"tenant"), tokens[:4])
    assert hashes[1] == extend_hash(hashes[0], tokens[4:8])
    assert set(hashes).isdisjoint(block_hashes(tokens, 4, b"other"))
    # The same block after another beginning is another block.
    assert block_hashes([9, *tokens[1:]], 4, b"tenant")[1] != hashes[1]
    of_adapters = [block_hashes(tokens, 4, b"tenant", adapter) for adapter in ("a", "b")]
    assert not {*hashes} & {*of_adapters[0]} | {*hashes, *of_adapters[0]} & {*of_adapters[1]}
    assert root_hash(b"tenant", "a") != root_hash(b"tenanta")
    assert block_hashes([], 4, b"") == block_hashes([1, 2, 3], 4, b"") == []


def test_hash_is_stable_across_processes_and_releases() -> None:
    # Router and workers of different builds must agree.
    assert block_hashes([0, 1, 2**32 - 1], 3, b"s")[0].hex() == "976eb6f4ee51880ab6f855c80da85c30"


def test_freed_blocks_keep_their_content_until_it_is_needed() -> None:
    pool = BlockPool(3, 4)
    first, second, third = names(3)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], first)
    pool.publish(blocks[1], second)
    pool.free(blocks)
    assert pool.num_free == 3
    assert pool.match([first, second, third]) == blocks
    assert pool.match([second]) == [blocks[1]]
    assert pool.match([third, first]) == []
    assert pool.take_events() == [KvEvents(True, [first, second])]

    pool.acquire([blocks[0]])
    assert pool.num_free == 2
    # The empty block goes first, then the cached one.
    assert pool.allocate(2)[1] == blocks[1]
    assert pool.take_events() == [KvEvents(False, [second])]
    assert pool.snapshot() == [first]
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)


def test_eviction_is_least_recently_used_and_tail_first() -> None:
    pool = BlockPool(4, 4)
    hashes = names(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, block_hash in zip(old + new, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.free(old)
    pool.free(new)
    pool.acquire(pool.match(hashes[:2]))
    pool.free(old)  # used again: now the most recent
    pool.take_events()
    pool.allocate(4)
    assert pool.take_events() == [KvEvents(False, [hashes[3], hashes[2], hashes[1], hashes[0]])]


def test_shared_blocks_are_free_only_when_nobody_holds_them() -> None:
    pool = BlockPool(2, 4)
    (name,) = names(1)
    (block,) = pool.allocate(1)
    pool.publish(block, name)
    pool.acquire([block])
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free, pool.num_unheld([block])) == (1, 1, 0)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free, pool.num_unheld([block])) == (0, 2, 1)
    with pytest.raises(IntegrityError, match="nobody holds it"):
        pool.free([block])


def test_first_publisher_wins() -> None:
    pool = BlockPool(2, 4)
    (name,) = names(1)
    one, two = pool.allocate(2)
    pool.publish(one, name)
    pool.publish(two, name)
    assert pool.match([name]) == [one]
    pool.free([one, two])
    pool.check([])
    assert pool.take_events() == [KvEvents(True, [name])]


def test_withdraw_takes_bad_content_out_unless_another_relies_on_it() -> None:
    pool = BlockPool(2, 4)
    mine, shared = names(2)
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, (mine, shared), strict=True):
        pool.publish(block, block_hash)
    pool.acquire(blocks[1:])
    pool.withdraw(blocks)
    assert pool.snapshot() == [shared]
    pool.check([blocks, blocks[1:]])


def test_what_is_forgotten_is_found_no_more_unless_somebody_holds_it() -> None:
    pool = BlockPool(3, 4, 2)
    gone, held, other = names(3)
    blocks = pool.allocate(3)
    for block, name, group in zip(blocks, (gone, held, other), (0, 0, 1), strict=True):
        pool.publish(block, name, group)
    pool.free([blocks[0], blocks[2]])
    pool.forget([gone, held, other], 0)
    assert pool.snapshot() == [held]
    assert pool.holds(other, 1)
    assert pool.take_events()[-1] == KvEvents(False, [gone])
    pool.check([blocks[1:2]])


def test_events_replayed_on_a_snapshot_lead_to_the_same_state() -> None:
    pool = BlockPool(2, 4)
    hashes = names(4)
    mirror: set[bytes] = set()
    for start in (0, 2, 0):
        blocks = pool.allocate(2)
        for block, block_hash in zip(blocks, hashes[start : start + 2], strict=True):
            pool.publish(block, block_hash)
        pool.free(blocks)
    late = set(pool.snapshot())
    for event in pool.take_events():
        for state in (mirror, late):
            (state.update if event.stored else state.difference_update)(event.hashes)
    assert mirror == late == set(pool.snapshot())


def test_check_finds_leaks_and_double_holds() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(IntegrityError, match="wrong reference count"):
        pool.check([])
    with pytest.raises(IntegrityError, match="wrong reference count"):
        pool.check([blocks, blocks])
    with pytest.raises(IntegrityError, match="twice"):
        pool.check([blocks + blocks])


def test_a_block_is_named_the_same_whatever_its_tokens_come_in() -> None:
    """Names are between hosts and versions: they do not change."""
    tokens = [0, 1, 127, 128, 2**31, 2**32 - 1, 5, 6]
    named = block_hashes(tokens, 4, b"tenant")
    assert named == block_hashes(np.array(tokens, np.uint32), 4, b"tenant")
    assert named[-1].hex() == "9d362d9e6fada4ffd960e98b9c500853"
