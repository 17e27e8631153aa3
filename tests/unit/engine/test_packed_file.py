"""A file that one process makes and all map: it is whole, or it is not there."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.worker.engine import packed_file
from services.worker.engine.packed_file import mapped

CONTENT = bytes(range(256)) * 41
SIZE = len(CONTENT)

_HALF = f"""
import os, signal, sys, time
from pathlib import Path
from services.worker.engine.packed_file import mapped

def write(file):
    os.write(file, b"x" * {SIZE // 2})
    print("half", flush=True)
    time.sleep(600)

mapped(Path(sys.argv[1]), "key", {SIZE}, write)
"""


class Writer:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, file: int) -> None:
        self.calls += 1
        os.pwrite(file, CONTENT, 0)


def take(folder: Path, write: Callable[[int], None], key: str = "key") -> bytes:
    return mapped(folder, key, SIZE, write)[1].tobytes()


def never(file: int) -> None:
    raise AssertionError("it is there already")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def one_that_is_half_done(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that makes the file and does not get on."""
    command = [sys.executable, "-c", _HALF, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once somebody waits for another's file."""
    event = threading.Event()

    def sleep(seconds: float) -> None:
        event.set()
        threading.Event().wait(seconds)

    monkeypatch.setattr(packed_file.time, "sleep", sleep)
    return event


def test_it_is_made_once_and_mapped_by_all(tmp_path: Path) -> None:
    folder, write = tmp_path / "not" / "there", Writer()
    path, first = mapped(folder, "key", SIZE, write)
    again, second = mapped(folder, "key", SIZE, never)
    assert first.tobytes() == second.tobytes() == CONTENT
    assert path == again == folder / "key.packed"
    assert names(folder) == ["key.packed"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o400
    assert not first.flags.writeable


def test_who_comes_while_it_is_made_waits_for_it(tmp_path: Path, waits: threading.Event) -> None:
    got: list[bytes] = []
    other = threading.Thread(target=lambda: got.append(take(tmp_path, never)))

    def write(file: int) -> None:
        other.start()
        assert waits.wait(30)
        Writer()(file)

    assert take(tmp_path, write) == CONTENT
    other.join(30)
    assert got == [CONTENT]
    assert names(tmp_path) == ["key.packed"]


def test_it_is_waited_for_whoever_makes_it_is_killed_and_it_is_made_anew(
    tmp_path: Path, waits: threading.Event
) -> None:
    got, write = [], Writer()
    with one_that_is_half_done(tmp_path) as process:
        assert names(tmp_path) == ["key.part"]
        other = threading.Thread(target=lambda: got.append(take(tmp_path, write)))
        other.start()
        assert waits.wait(30)
        assert not got
        process.send_signal(signal.SIGKILL)
        other.join(30)
    assert got == [CONTENT]
    assert write.calls == 1
    assert names(tmp_path) == ["key.packed"]


def test_one_that_does_not_get_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "PATIENCE_S", 0.05)
    with one_that_is_half_done(tmp_path), pytest.raises(TimeoutError, match="does not get on"):
        take(tmp_path, Writer())


def test_one_that_gets_on_is_waited_for_whatever_it_takes(
    tmp_path: Path, waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(packed_file.time, "monotonic", lambda: now[0])
    got: list[bytes] = []
    other = threading.Thread(target=lambda: got.append(take(tmp_path, never)))

    def write(file: int) -> None:
        other.start()
        for piece in range(1, 6):
            os.ftruncate(file, piece)
            for _ in range(2):  # it has looked at this one, and then at the clock
                waits.clear()
                assert waits.wait(30)
            now[0] += packed_file.PATIENCE_S * 0.9
        Writer()(file)

    assert take(tmp_path, write) == CONTENT
    other.join(30)
    assert got == [CONTENT]


def _cut(path: Path) -> None:
    os.truncate(path, SIZE // 2)


def _cut_at_its_end(path: Path) -> None:
    os.truncate(path, SIZE)


def _zeros(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def _of_another_key(path: Path) -> None:
    mapped(path.parent, "yek", SIZE, Writer())
    path.with_name("yek.packed").rename(path)


def _writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def _of_another_user(path: Path) -> None:
    os.chown(path, 12345, 12345)


spoilt = pytest.mark.parametrize(
    "spoil",
    [_cut, _cut_at_its_end, _zeros, _of_another_key, _writable_by_others]
    + ([_of_another_user] if os.geteuid() == 0 else []),
)


@spoilt
def test_what_is_not_whole_or_anothers_is_made_anew(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path, _ = mapped(tmp_path, "key", SIZE, lambda file: os.ftruncate(file, SIZE))
    path.chmod(0o600)
    spoil(path)
    write = Writer()
    assert take(tmp_path, write) == CONTENT
    assert write.calls == 1
    assert names(tmp_path) == ["key.packed"]
    assert take(tmp_path, never) == CONTENT


def test_what_is_mapped_stays_when_the_file_goes_or_is_made_anew(tmp_path: Path) -> None:
    path, first = mapped(tmp_path, "key", SIZE, Writer())
    path.unlink()
    _, second = mapped(tmp_path, "key", SIZE, lambda file: os.ftruncate(file, SIZE))
    assert second.tobytes() == bytes(SIZE)
    assert first.tobytes() == CONTENT


def test_where_nothing_can_be_written_it_says_so_and_takes_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="/proc"):
        take(Path("/proc/penstock"), Writer())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        take(tmp_path / "file" / "below", Writer())
    (tmp_path / "key.packed").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        take(tmp_path, Writer())


def test_a_disk_that_fills_leaves_nothing_behind(tmp_path: Path) -> None:
    def write(file: int) -> None:
        os.write(file, CONTENT[: SIZE // 2])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        take(tmp_path, write)
    assert names(tmp_path) == []


Usage = namedtuple("Usage", "total used free")


@contextmanager
def used(path: Path) -> Iterator[None]:
    """As by another process."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def put(folder: Path, key: str, age_s: float) -> Path:
    path = folder / f"{key}.packed"
    path.write_bytes(b"of another checkpoint")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_others_that_nobody_used_for_long_go_when_one_is_made(tmp_path: Path) -> None:
    old, new = packed_file.KEEP_S + 60, packed_file.KEEP_S - 60
    put(tmp_path, "old", old)
    put(tmp_path, "new", new)
    os.utime(put(tmp_path, "x", 0).rename(tmp_path / "dead.part"), (0, 0))
    with used(put(tmp_path, "old-and-used", old)):
        take(tmp_path, Writer())
    assert names(tmp_path) == ["key.packed", "new.packed", "old-and-used.packed"]


def test_taking_one_is_using_it(tmp_path: Path) -> None:
    path, memory = mapped(tmp_path, "key", SIZE, Writer())
    os.utime(path, (0, 0))
    path, memory = mapped(tmp_path, "key", SIZE, never)
    assert time.time() - path.stat().st_mtime < 600
    os.utime(path, (0, 0))
    take(tmp_path, Writer(), "another")  # while this process has the first one mapped
    assert path.exists()
    assert memory.tobytes() == CONTENT


def test_for_room_the_oldest_go_that_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [put(tmp_path, name, age) for name, age in (("a", 300), ("b", 200), ("c", 100))]
    room = packed_file.SPARE_BYTES + SIZE

    def disk_usage(path: Path) -> Usage:
        gone = sum(not other.exists() for other in others)
        return Usage(0, 0, room - 1 + gone)

    monkeypatch.setattr(packed_file.shutil, "disk_usage", disk_usage)
    with used(others[0]):
        take(tmp_path, Writer())
    assert names(tmp_path) == ["a.packed", "c.packed", "key.packed"]
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda path: Usage(0, 0, room - 1))
    with suppress(FileNotFoundError):
        (tmp_path / "key.packed").unlink()
    with pytest.raises(OSError, match="no room for"):
        take(tmp_path, Writer())
    assert "key.part" not in names(tmp_path)
