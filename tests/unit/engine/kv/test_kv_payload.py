"""Shared-memory segments: one owner, removed once, and none left by the dead."""

import errno
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine import KvBlocks, SharedRef
from services.worker.engine.kv import payload as kv_payload
from services.worker.engine.process import wire
from tests.support.hangs import no_hanging

DATA = bytes(range(256)) * 100
OWNER = "penstock-kv-0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    return tmp_path


def segments(folder: Path) -> list[str]:
    """All but the files of their owners."""
    return [path.name for path in folder.glob("penstock-kv-*-*")]


def test_take_gives_the_bytes_and_removes_the_segment(folder: Path) -> None:
    ref = kv_payload.share(memoryview(DATA))
    assert kv_payload.share(DATA) != ref
    assert kv_payload.take(ref) == DATA
    assert len(segments(folder)) == 1
    with pytest.raises(OSError, match="No such file"):
        kv_payload.take(ref)
    assert kv_payload.take(DATA) is DATA


def test_offsets_and_sizes_are_honoured_and_checked(folder: Path) -> None:
    ref = kv_payload.share(DATA)
    assert kv_payload.take(SharedRef(ref.name, 10, 20)) == DATA[10:30]
    ref = kv_payload.share(DATA)
    with pytest.raises(ValueError, match="holds 25590 bytes, not 25600"):
        kv_payload.take(SharedRef(ref.name, 10, len(DATA)))
    ref = kv_payload.share(DATA)
    with pytest.raises(ValueError, match="not 1152921504606846976"):  # nothing is allocated
        kv_payload.take(SharedRef(ref.name, 0, 2**60))
    assert not segments(folder)


def test_discard_is_harmless_twice(folder: Path) -> None:
    ref = kv_payload.share(DATA)
    for _ in range(2):
        kv_payload.discard(ref)
    kv_payload.discard(DATA)
    assert not segments(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "x",
        "penstock-kv-0123456789abcdef-1/../y",
        "penstock-kv-0123456789abcdef",
        "",
    ],
)
def test_foreign_names_touch_nothing(folder: Path, name: str) -> None:
    (folder / "x").write_text("kept")
    with pytest.raises(ValueError, match="not a KV segment's name"):
        kv_payload.take(SharedRef(name, 0, 1))
    kv_payload.discard(SharedRef(name, 0, 1))
    assert (folder / "x").read_text() == "kept"


def test_a_read_that_stops_short_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of over 2 GiB does."""
    reads = []

    class Short(io.FileIO):
        def readinto(self, buffer: object) -> int:
            reads.append(super().readinto(memoryview(buffer)[:1000]))  # type: ignore[arg-type]
            return reads[-1]

        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 1000))

    ref = kv_payload.share(DATA)
    monkeypatch.setattr(kv_payload, "open", lambda path, *_, **__: Short(path), raising=False)
    assert kv_payload.take(SharedRef(ref.name, 5, 2500)) == DATA[5:2505]
    assert reads == [1000, 1000, 500]


OTHER = """
import sys, time
from pathlib import Path
from services.worker.engine.kv import payload as kv_payload
kv_payload.FOLDER = Path(sys.argv[1])
print(kv_payload.share(b"x" * 100).name, flush=True)
time.sleep(600)
"""


def test_sweep_removes_what_dead_processes_left(folder: Path) -> None:
    """A name says nothing of process ids, so it makes no difference in which namespace they ran."""
    mine = kv_payload.share(DATA)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout
        theirs = other.stdout.readline().strip()
        (folder / "penstock-kv-strange").write_text("not of this kind")
        kv_payload.sweep()
        left = set(segments(folder))
        other.kill()
    assert left == {mine.name, theirs}
    kv_payload.sweep()
    assert segments(folder) == [mine.name]
    assert not (folder / theirs.rsplit("-", 1)[0]).exists()
    assert (folder / "penstock-kv-strange").exists()
    assert kv_payload.take(mine) == DATA


def test_what_another_user_put_there_holds_up_no_sweep(folder: Path) -> None:
    pipe, link, aimed_at = folder / OWNER, folder / f"{OWNER[:-1]}e", folder / "aimed-at"
    os.mkfifo(pipe)
    aimed_at.touch()
    link.symlink_to(aimed_at)
    with no_hanging():
        kv_payload.sweep()
    assert not pipe.exists()  # this user's: it can be locked, so its process is no more
    assert link.is_symlink()
    assert aimed_at.exists()


def test_a_sweep_between_making_and_locking_takes_no_live_owners_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = kv_payload.fcntl.flock
    swept = []

    def swept_before(descriptor: object, how: int) -> None:
        if not swept:
            swept.append(True)
            kv_payload.sweep()
        flock(descriptor, how)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_payload.fcntl, "flock", swept_before)
    ref = kv_payload.share(DATA)
    assert swept
    assert (folder / ref.name.rsplit("-", 1)[0]).exists(), "or nobody would ever sweep it"
    kv_payload.sweep()
    assert segments(folder) == [ref.name]


def test_no_segment_stays_when_there_is_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kv_payload, "open", lambda fd, *_, **__: NoRoom(fd, "wb"), raising=False)
    with pytest.raises(OSError, match="No space left"):
        kv_payload.share(DATA)
    assert not segments(folder)


def test_kv_data_is_not_copied_into_the_pickle() -> None:
    data = bytearray(DATA)
    head, block = wire.encode(KvBlocks("a", 0, 1, memoryview(data)))
    (count,) = wire.COUNT.unpack_from(head)
    pickled = head[wire.COUNT.size + 8 * count :]
    assert wire.decode_sizes(bytes(head[wire.COUNT.size : -len(pickled)])) == (
        len(pickled),
        len(data),
    )
    assert len(pickled) < 300
    data[0] = 77
    assert bytes(block)[0] == 77
    blocks = wire.decode([bytes(pickled), bytes(block)])
    assert blocks == KvBlocks("a", 0, 1, blocks.data)
    assert bytes(blocks.data) == data
    assert pickle.loads(pickle.dumps(KvBlocks("a", 0, 1, b"xy"), 5)).data == b"xy"


def test_a_message_without_kv_is_one_piece() -> None:
    """Its reader wakes once, and its writer calls the system once."""
    (frame,) = wire.encode(("cancel", "a"))
    assert wire.COUNT.unpack_from(frame) == (1,)
    assert wire.decode([bytes(frame[wire.COUNT.size + 8 :])]) == ("cancel", "a")


def test_segments_are_this_users_alone(folder: Path) -> None:
    """They hold what tenants said."""
    kv_payload.share(DATA)
    assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0, 0]


def test_a_forked_process_has_names_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its segments would be swept when the first one ends, or overwrite each other's."""
    mine = kv_payload.share(DATA).name.rsplit("-", 1)[0]
    monkeypatch.setattr(kv_payload.os, "getpid", lambda: -1)
    theirs = kv_payload.share(DATA).name.rsplit("-", 1)[0]
    assert theirs != mine
    held = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    assert [name for name in held if name.startswith(str(folder))] == [str(folder / theirs)]


def test_a_name_with_more_behind_it_is_not_ours(folder: Path) -> None:
    name = kv_payload.share(DATA).name
    (folder / f"{name}.kept").write_text("kept")
    for more in (".kept", "\n"):
        with pytest.raises(ValueError, match="not a KV segment's name"):
            kv_payload.take(SharedRef(name + more, 0, 1))
    assert len(list(folder.iterdir())) == 3
