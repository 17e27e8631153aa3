"""The tier on disk alone: what its threads tell, and that they end."""

import errno
import os
from pathlib import Path
from threading import Event

import pytest

from services.worker.engine.kv.tiers import disk
from services.worker.engine.kv.tiers.disk import DiskTier
from services.worker.engine.kv.tiers.folder import DIGEST_BYTES, Folder, Name
from services.worker.engine.kv.tiers.loading import Wanted

SIZE = 64


def make(root: Path, kind: str = "one") -> DiskTier:
    return DiskTier(Folder(root / "kv", kind, SIZE, 2**20))


def name_of(number: int) -> Name:
    return bytes([number]) * 16, 0


def put(tier: DiskTier, *numbers: int) -> None:
    """It is written, or could not be."""
    tier.store([name_of(one) for one in numbers], lambda at: memoryview(bytes(SIZE * len(at))))
    while tier.num_on_way:
        tier.wait(1)
        assert not list(tier.take())


def test_it_ends_while_more_is_to_be_read_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_BETWEEN_BYTES", SIZE)
    tier = make(tmp_path)
    tier.load([Wanted(name_of(number), 0) for number in range(9)])
    tier.wait(60)
    assert tier.has_events
    tier.close()
    assert not any(thread.is_alive() for thread in tier._threads)


def test_a_disk_that_fails_is_complained_of_once_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bool:
        raise OSError(errno.EIO, "i/o error")

    tier = make(tmp_path)
    for told in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write", broken)
            put(tier, 1, 2, 3)
        # Of the last of them its number is told before its words.
        assert sum("i/o error" in record.message for record in caplog.records) == told
        put(tier, 100 + told)
    assert (tier.counts.failed, tier.counts.stored) == (6, 2)
    tier.close()


def test_many_that_came_or_went_are_told_by_and_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path)
    put(first, *range(9))
    first.close()
    monkeypatch.setattr(disk, "_TOLD", 4)
    tier = make(tmp_path)
    put(tier, 100)
    tier.forget([name_of(3)])
    told = []
    while tier.has_events:
        told.append(tier.take_events())
    assert len(told) >= 3
    assert all(sum(len(event.hashes) for event in events) <= 4 for events in told)
    held: set[bytes] = set()
    for event in (event for events in told for event in events):
        (held.update if event.stored else held.difference_update)(event.hashes)
    assert held == {name_of(n)[0] for n in (*range(9), 100) if n != 3}
    tier.close()


def test_the_bytes_of_other_models_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LOOK_S", 0.01)
    tier, other = make(tmp_path), make(tmp_path, kind="other")
    put(tier, 1)
    put(other, 1, 2)
    while tier.counts.held_bytes != 3 * (SIZE + DIGEST_BYTES):
        tier.wait(1)
        assert not list(tier.take())
    assert not tier.holds(*name_of(2))
    for one in (tier, other):
        one.close()


def test_what_the_device_used_until_now_is_no_old_file(tmp_path: Path) -> None:
    """It was stored before, came back, and is evicted again."""
    tier = make(tmp_path)
    put(tier, 1, 2)
    for path in tmp_path.rglob("*-0"):
        os.utime(path, (1, 1))
    put(tier, 1)
    put(tier, 3)
    old = [path for path in tmp_path.rglob("*-0") if path.stat().st_mtime == 1]
    assert [path.name for path in old] == [f"{name_of(2)[0].hex()}-0"]
    tier.close()


def test_what_proved_bad_goes_also_when_it_is_not_there_yet(tmp_path: Path) -> None:
    tier = make(tmp_path)
    put(tier, 1, 2)
    tier.store([name_of(3)], lambda at: memoryview(bytes(SIZE)))
    tier.forget([name_of(1), name_of(3), name_of(9)])
    assert not tier.holds(*name_of(1))
    put(tier, 4)
    put(tier, 5)
    assert [number for number in range(10) if tier.holds(*name_of(number))] == [2, 4, 5]
    assert len(list(tmp_path.rglob("*-0"))) == 3
    assert tier.counts.evicted == 0, "it is not to make room"
    tier.close()


def test_what_proved_bad_on_its_way_is_found_by_nobody_however_late_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, may_write, may_remove = make(tmp_path), Event(), Event()
    write, remove = Folder.write, Folder.remove

    def write_late(folder: Folder, name: Name, content: bytes) -> bool:
        may_write.wait()
        return write(folder, name, content)

    def remove_late(folder: Folder, name: Name) -> None:
        may_remove.wait()
        remove(folder, name)

    monkeypatch.setattr(Folder, "write", write_late)
    monkeypatch.setattr(Folder, "remove", remove_late)
    both = [name_of(1), name_of(2)]  # one is being written, one waits for that
    tier.store(both, lambda at: memoryview(bytes(SIZE * len(at))))
    tier.forget(both)
    may_write.set()
    while tier.num_on_way:
        tier.wait(1)
        assert not list(tier.take())
    assert not any(tier.holds(*name) for name in both)
    tier.store(both, lambda at: memoryview(bytes(SIZE * len(at))))
    assert not tier.num_on_way, "what is to be removed is not written anew before"
    may_remove.set()
    while not all(tier.holds(*name) for name in both):
        put(tier, 1, 2)
        tier.wait(1)
        assert not list(tier.take())
    tier.close()
