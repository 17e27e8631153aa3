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

from services.worker.engine.weights import packed_file
from services.worker.engine.weights.packed_file import mapped
from tests.support.hangs import no_hanging

CONTENT = bytes(range(256)) * 41
SIZE = len(CONTENT)

_HALF = f"""
import os, signal, sys, time
from pathlib import Path
from services.worker.engine.weights.packed_file import mapped

def write(file):
    os.write(file, b"x" * {SIZE // 2})
    print("half", flush=True)
    time.sleep(600)

mapped(Path(sys.argv[1]), "key", {SIZE}, write)
"""


_DIES = f"""
import os, sys
from pathlib import Path
from services.worker.engine.weights.packed_file import mapped

os.fsync = lambda file: os._exit(9)
mapped(Path(sys.argv[1]), "key", {SIZE}, lambda file: os.pwrite(file, b"x", {SIZE - 1}))
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
    assert path.stat().st_mode & 0o777 == 0o600
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


def test_pipes_in_the_folder_hold_up_nobody(tmp_path: Path) -> None:
    for name in ("key.packed", "other.packed", "key.packed.used", "other.part"):
        os.mkfifo(tmp_path / name)
        os.utime(tmp_path / name, (0, 0))
    with no_hanging():
        assert take(tmp_path, Writer()) == CONTENT
        os.utime(tmp_path / "key.packed", (0, 0))
        assert take(tmp_path, never) == CONTENT
    assert names(tmp_path) == ["key.packed", "key.packed.used"]


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


def age(path: Path) -> None:
    """As if nobody had used it for years."""
    os.utime(path, (0, 0))
    path.with_suffix(".packed.used").unlink(missing_ok=True)


def test_taking_one_is_using_it(tmp_path: Path) -> None:
    path = mapped(tmp_path, "key", SIZE, Writer())[0]  # and mapped no more
    age(path)
    take(tmp_path, never)
    take(tmp_path, Writer(), "another")
    assert names(tmp_path) == ["another.packed", "key.packed", "key.packed.used"]


def test_its_use_is_noted_beside_it_and_goes_with_it(tmp_path: Path) -> None:
    """On an overlay a file that is touched is copied whole."""
    path = mapped(tmp_path, "key", SIZE, Writer())[0]  # and mapped no more
    age(path)
    before = path.stat()
    take(tmp_path, never)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ctime_ns == before.st_ctime_ns
    used = path.with_suffix(".packed.used")
    noted = time.time() - 600
    os.utime(used, (noted, noted))
    take(tmp_path, never)
    assert used.stat().st_mtime == pytest.approx(noted), "once a day is enough"
    os.utime(used, (0, 0))
    take(tmp_path, Writer(), "another")
    assert names(tmp_path) == ["another.packed"]


@pytest.mark.parametrize("made_here", [True, False], ids=["its maker", "another"])
def test_it_stays_for_as_long_as_it_is_mapped(tmp_path: Path, made_here: bool) -> None:
    if not made_here:
        take(tmp_path, Writer())
    path, memory = mapped(tmp_path, "key", SIZE, Writer() if made_here else never)
    age(path)
    take(tmp_path, Writer(), "another")
    assert path.exists()
    assert memory.tobytes() == CONTENT
    del memory
    age(path)
    take(tmp_path, Writer(), "a third")
    assert not path.exists()


def _refusing(error: OSError, operation: int, times: int) -> Callable[[int, int], None]:
    """A flock that refuses some of an operation's first calls."""
    flock, left = fcntl.flock, [times]

    def refuse(file: int, asked: int) -> None:
        if asked & operation and left[0]:
            left[0] -= 1
            raise error
        flock(file, asked)

    return refuse


def test_who_is_looked_at_by_a_remover_holds_it_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take(tmp_path, Writer())
    flock = _refusing(BlockingIOError(), fcntl.LOCK_SH, times=3)
    monkeypatch.setattr(packed_file.fcntl, "flock", flock)
    path, memory = mapped(tmp_path, "key", SIZE, never)
    age(path)
    take(tmp_path, Writer(), "another")
    assert path.exists()
    assert memory.tobytes() == CONTENT
    assert not caplog.records


def test_a_file_system_that_locks_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flock = _refusing(OSError(37, "No locks available"), fcntl.LOCK_SH, times=1)
    monkeypatch.setattr(packed_file.fcntl, "flock", flock)
    assert take(tmp_path, Writer()) == CONTENT
    assert "key.packed cannot be locked" in caplog.text
    assert "No locks available" in caplog.text


def test_nothing_is_opened_for_writing_that_an_overlay_would_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, []

    def note(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.name.endswith(".packed") and flags & os.O_ACCMODE != os.O_RDONLY:
            opened.append(path.name)
        return real(path, flags, mode)

    old = put(tmp_path, "old", packed_file.KEEP_S + 60)
    monkeypatch.setattr(packed_file.os, "open", note)
    take(tmp_path, Writer())
    take(tmp_path, never)
    assert not old.exists()
    assert opened == []


@pytest.mark.parametrize("why", ["not open for writing", "no locks"])
def test_on_nfs_a_file_is_opened_for_writing_to_be_removed(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        writes = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        old = os.readlink(f"/proc/self/fd/{file}").endswith("old.packed")
        if operation & fcntl.LOCK_EX and not writes:
            raise OSError(9, "Bad file descriptor")
        if operation & fcntl.LOCK_EX and old and why == "no locks":
            raise OSError(37, "No locks available")
        real(file, operation)

    put(tmp_path, "old", packed_file.KEEP_S + 60)
    monkeypatch.setattr(packed_file.fcntl, "flock", flock)
    take(tmp_path, Writer())
    if why == "no locks":
        assert "old.packed cannot be removed" in caplog.text
        assert "No locks available" in caplog.text
    else:
        assert names(tmp_path) == ["key.packed"]


@pytest.mark.parametrize("patient", [True, False])
def test_one_that_is_synchronized_is_waited_for_as_a_slow_disk_needs(
    tmp_path: Path, waits: threading.Event, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    now, fsync, whole = [0.0], os.fsync, SIZE + len(b"penstock weightskey")
    monkeypatch.setattr(packed_file.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(packed_file, "SLOW_DISK", 1)
    got: list[bytes | type[OSError]] = []

    def come() -> None:
        try:
            got.append(take(tmp_path, never))
        except OSError as error:
            got.append(type(error))

    other = threading.Thread(target=come)

    def slow(file: int) -> None:
        other.start()
        for _ in range(2):  # it has looked, and then at the clock
            waits.clear()
            assert waits.wait(30)
        now[0] += whole + packed_file.PATIENCE_S + (-1 if patient else 1)
        if patient:
            for _ in range(2):
                waits.clear()
                assert waits.wait(30)
        else:
            other.join(30)
        fsync(file)

    monkeypatch.setattr(packed_file.os, "fsync", slow)
    assert take(tmp_path, Writer()) == CONTENT
    other.join(30)
    assert got == [CONTENT if patient else TimeoutError]


def test_one_that_dies_while_it_synchronizes_is_followed_by_any_of_its_user(
    tmp_path: Path,
) -> None:
    """Also by one who is not root, whom no mode stops."""
    command = [sys.executable, "-c", _DIES, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 9
    (part,) = tmp_path.iterdir()
    assert part.name == "key.part"
    assert part.stat().st_mode & 0o600 == 0o600
    write = Writer()
    assert take(tmp_path, write) == CONTENT
    assert write.calls == 1


def test_nothing_is_left_of_what_a_dead_one_wrote(tmp_path: Path) -> None:
    (tmp_path / "key.part").write_bytes(b"x" * 2 * SIZE)
    (tmp_path / "key.part").chmod(0o600)

    def write(file: int) -> None:
        os.pwrite(file, b"a", SIZE - 1)

    _, few = mapped(tmp_path, "key", SIZE, write)
    assert few.tobytes() == bytes(SIZE - 1) + b"a"


def test_a_lock_on_what_is_no_longer_its_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one ends, or gives up, between this one's opening and its locking."""
    real, part = fcntl.flock, tmp_path / "key.part"
    asked: list[int] = []

    def flock(file: int, operation: int) -> None:
        if not asked:
            part.unlink()
            part.touch(0o600)  # a third one's
        asked.append(file)
        real(file, operation)

    monkeypatch.setattr(packed_file.fcntl, "flock", flock)

    def write(file: int) -> None:
        assert os.path.samestat(os.fstat(file), part.stat())
        Writer()(file)

    assert take(tmp_path, write) == CONTENT


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
