"""Shared-memory segments: one owner, removed once, and none left by the dead."""

import errno
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine import KvBlocks, SharedRef, kv_payload, wire

DATA = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kv_payload, "FOLDER", tmp_path)
    return tmp_path


def test_take_gives_the_bytes_and_removes_the_segment(folder: Path) -> None:
    ref = kv_payload.share(memoryview(DATA))
    assert kv_payload.share(DATA) != ref
    assert kv_payload.take(ref) == DATA
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(OSError, match="No such file"):
        kv_payload.take(ref)
    assert kv_payload.take(DATA) is DATA


def test_offsets_and_sizes_are_honoured_and_checked(folder: Path) -> None:
    ref = kv_payload.share(DATA)
    assert kv_payload.take(SharedRef(ref.name, 10, 20)) == DATA[10:30]
    ref = kv_payload.share(DATA)
    with pytest.raises(ValueError, match="holds 25590 bytes, not 25600"):
        kv_payload.take(SharedRef(ref.name, 10, len(DATA)))
    assert not list(folder.iterdir())


def test_discard_is_harmless_twice(folder: Path) -> None:
    ref = kv_payload.share(DATA)
    for _ in range(2):
        kv_payload.discard(ref)
    kv_payload.discard(DATA)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "x", "penstock-kv-1-1-1/../y", ""])
def test_foreign_names_touch_nothing(folder: Path, name: str) -> None:
    (folder / "x").write_text("kept")
    with pytest.raises(ValueError, match="not a KV segment's name"):
        kv_payload.take(SharedRef(name, 0, 1))
    kv_payload.discard(SharedRef(name, 0, 1))
    assert (folder / "x").read_text() == "kept"


def test_sweep_removes_what_dead_processes_left(folder: Path) -> None:
    alive = kv_payload.share(DATA)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    namespace = alive.name.split("-")[2]
    (folder / f"penstock-kv-{namespace}-{gone.pid}-0").write_bytes(DATA)
    elsewhere = folder / f"penstock-kv-1-{gone.pid}-0"  # of another container
    elsewhere.write_bytes(DATA)
    kv_payload.sweep()
    assert {path.name for path in folder.iterdir()} == {alive.name, elsewhere.name}


def test_no_segment_stays_when_there_is_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kv_payload, "open", lambda fd, *_, **__: NoRoom(fd, "wb"), raising=False)
    with pytest.raises(OSError, match="No space left"):
        kv_payload.share(DATA)
    assert not list(folder.iterdir())


def test_kv_data_is_not_copied_into_the_pickle() -> None:
    data = bytearray(DATA)
    pieces = wire.encode(KvBlocks("a", 0, 1, memoryview(data)))
    assert len(pieces) == 3
    assert len(pieces[1]) < 300
    data[0] = 77
    assert bytes(pieces[2])[0] == 77
    blocks = wire.decode([bytes(piece) for piece in pieces[1:]])
    assert blocks == KvBlocks("a", 0, 1, blocks.data)
    assert bytes(blocks.data) == data
    assert pickle.loads(pickle.dumps(KvBlocks("a", 0, 1, b"xy"), 5)).data == b"xy"
