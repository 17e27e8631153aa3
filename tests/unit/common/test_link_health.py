"""When the caller's end of a link takes its peer for silent or stalled, beat by beat."""

import pytest

from services.common.link.frames import LinkLostError, Vitals
from services.common.link.health import PeerHealth


def test_a_peer_is_silent_after_its_time_and_a_new_connection_begins_anew() -> None:
    health = PeerHealth(2.5, 10.0)
    for begin in (health.connected, health.heard, health.connected):
        begin()
        assert not health.beat(1.0)
        assert not health.beat(1.0)
    with pytest.raises(LinkLostError, match=r"silent for 3\.0 s"):
        health.beat(1.0)


def test_a_stall_is_told_once_and_ends_with_the_next_step() -> None:
    health = PeerHealth(100.0, 1.5)
    health.observe(Vitals(7, 1))
    assert [health.beat(1.0) for _ in range(4)] == [False, True, False, False]
    assert not health.observe(Vitals(7, 1))
    assert health.observe(Vitals(8, 1))
    assert [health.beat(1.0) for _ in range(3)] == [False, True, False], "and may stall again"
    health.connected()
    assert health.unmoved_s == 0
    assert not health.well_at_first(Vitals(8, 1))
    assert health.well_at_first(Vitals(8, 0)), "without work there is nothing to wait for"
