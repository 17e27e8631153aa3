"""KV blocks in files: what is found is what was written, whoever else writes, dies or meddles."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.worker.engine.kv.tiers import folder as folder_module
from services.worker.engine.kv.tiers import own_files
from services.worker.engine.kv.tiers.folder import DIGEST_BYTES, Folder, Name

SIZE = 4096
FILE = SIZE + DIGEST_BYTES


def name_of(number: int, group: int = 0) -> Name:
    return number.to_bytes(2, "big") * 8, group


def content_of(number: int) -> bytes:
    return bytes([number % 256, number // 256]) * (SIZE // 2)


def make(root: Path, limit: int = 100 * FILE, kind: str = "one") -> Folder:
    return Folder(root, kind, SIZE, limit)


def file_of(folder: Folder, name: Name) -> Path:
    (found,) = folder.root.glob(f"{folder.kind}/*/{name[0].hex()}-{name[1]}")
    return found


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_what_was_written_is_found_by_its_name_and_kind(tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert folder.write(name_of(1), content_of(1))
    assert folder.write(name_of(1, 3), content_of(2))
    assert folder.read(name_of(1)) == content_of(1)
    assert folder.read(name_of(1, 3)) == content_of(2)
    assert folder.read(name_of(2)) is None
    assert make(tmp_path, kind="other").read(name_of(1)) is None
    assert not folder.write(name_of(1), content_of(1)), "it is there"
    assert make(tmp_path).read(name_of(1)) == content_of(1), "another engine's"


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "data" / "kv")
    folder.write(name_of(1), content_of(1))
    path = file_of(folder, name_of(1))
    for one in (path, *path.parents[:3]):
        assert not one.stat().st_mode & 0o077, one


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
@pytest.mark.parametrize("of_kind", [False, True])
def test_a_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, mode: int, of_kind: bool
) -> None:
    """The digest has no key: who writes there writes keys and values."""
    folder = make(tmp_path / "kv")
    (folder.root / folder.kind if of_kind else folder.root).chmod(mode)
    with pytest.raises(PermissionError, match="nobody else may write there"):
        make(tmp_path / "kv")
    with pytest.raises(PermissionError):
        folder.write(name_of(1), content_of(1))
    assert not files(tmp_path)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: os.getuid() + 1)
    whose = f"user {os.getuid()}'s.*to be user {os.getuid() + 1}'s"
    with pytest.raises(PermissionError, match=whose):
        make(tmp_path / "kv")


def cut(path: Path) -> None:
    os.truncate(path, FILE - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[DIGEST_BYTES + SIZE // 2] ^= 1
    path.write_bytes(data)


def zero_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: FILE // 2].ljust(FILE, b"\0"))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def link(path: Path) -> None:
    """To a file that would be right."""
    path.rename(path.parents[2] / "right")
    path.symlink_to(path.parents[2] / "right")


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


HARMS = [cut, empty, lengthen, turn_a_bit, zero_its_end, open_to_all, link, dangle]


@pytest.mark.parametrize("harm", HARMS)
def test_a_torn_or_changed_file_is_none_and_goes(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    folder = make(tmp_path)
    folder.write(name_of(1), content_of(1))
    path = file_of(folder, name_of(1))
    harm(path)
    assert folder.read(name_of(1)) is None
    assert not path.is_symlink()
    assert not path.exists()
    assert folder.write(name_of(1), content_of(1))
    assert folder.read(name_of(1)) == content_of(1)


def test_a_file_of_another_name_group_or_kind_is_none(tmp_path: Path) -> None:
    """Whole, but not what its name says: moved, or put there by somebody."""
    folder, other = make(tmp_path), make(tmp_path, kind="other")
    for at, wrong in ((folder, name_of(2)), (folder, name_of(1, 1)), (other, name_of(1))):
        folder.write(name_of(1), content_of(1))
        at.write(wrong, content_of(9))
        file_of(folder, name_of(1)).replace(file_of(at, wrong))
        assert at.read(wrong) is None


def test_what_another_user_has_put_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    folder.write(name_of(1), content_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "geteuid", lambda: os.getuid() + 1)
        assert folder.read(name_of(1)) is None
    assert not files(tmp_path)


@pytest.mark.parametrize("harm", [link, dangle])
def test_a_link_is_written_over_and_not_through(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    folder = make(tmp_path)
    folder.write(name_of(1), content_of(2))
    path = file_of(folder, name_of(1))
    harm(path)
    assert folder.write(name_of(1), content_of(1))
    assert folder.read(name_of(1)) == content_of(1)
    assert not path.is_symlink()


def test_what_is_no_file_is_none(tmp_path: Path) -> None:
    folder = make(tmp_path)
    folder.write(name_of(1), content_of(1))
    path = file_of(folder, name_of(1))
    path.unlink()
    os.mkfifo(path)
    assert folder.read(name_of(1)) is None


def test_it_holds_no_more_than_its_bytes_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    folder = make(tmp_path, limit=10 * FILE)
    for number in range(10):
        folder.write(name_of(number), content_of(number))
        os.utime(file_of(folder, name_of(number)), (number, number))
    assert folder.read(name_of(0)) == content_of(0)  # now it was used last
    for number in range(10, 14):
        folder.write(name_of(number), content_of(number))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE
    left = {number for number in range(14) if folder.read(name_of(number))}
    assert left == {0, *range(14 - len(left) + 1, 14)}
    assert len(left) >= 8
    assert folder.evicted == 14 - len(left)


def test_the_bound_is_of_all_kinds_and_all_engines(tmp_path: Path) -> None:
    """What others have written meanwhile is seen before there is too much."""
    old, other, folder = (make(tmp_path, 10 * FILE, kind) for kind in ("old", "one", "one"))
    for number in range(6):
        old.write(name_of(number), content_of(number))
        os.utime(file_of(old, name_of(number)), (number, number))
    for number in range(4):
        for one, base in ((other, 100), (folder, 200)):
            one.look()
            one.write(name_of(base + number), content_of(number))
        assert len(files(tmp_path)) <= 10
    assert not old.read(name_of(0))
    assert all(folder.read(name_of(base + n)) for base in (100, 200) for n in range(4))


def test_what_others_wrote_and_removed_is_learned(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    one.write(name_of(1), content_of(1))
    one.write(name_of(2), content_of(2))
    make(tmp_path, kind="other").write(name_of(3), content_of(3))
    other.look()
    assert [sorted(names) for names in other.take_changes()] == [[name_of(1), name_of(2)], []]
    file_of(one, name_of(1)).unlink()
    one.write(name_of(4), content_of(4))
    other.look()
    assert other.take_changes() == ([name_of(4)], [name_of(1)])
    assert other.held_bytes == 3 * FILE
    other.look()
    assert other.take_changes() == ([], [])


def test_folders_that_did_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    for number in range(3):
        folder.write(name_of(256 * number), content_of(number))
    for shelf in (tmp_path / folder.kind).iterdir():
        os.utime(shelf, (1000, 1000))
    folder.look()
    reads: list[Path] = []
    named: list[str] = []
    real = folder_module._read_shelf
    monkeypatch.setattr(
        folder_module, "_read_shelf", lambda path, *rest: reads.append(path) or real(path, *rest)
    )
    real_name = folder_module._name
    monkeypatch.setattr(folder_module, "_name", lambda file: named.append(file) or real_name(file))
    folder.look()
    assert not reads
    assert not named, "of what is there nothing is gone through"
    make(tmp_path).write(name_of(1), content_of(1))
    folder.look()
    assert len(reads) == 1


def test_of_a_kind_one_file_is_asked_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds of thousands, and others have other sizes."""
    folder = make(tmp_path)
    for number in range(9):
        folder.write(name_of(number), content_of(number))
        Folder(tmp_path, "other", 64, 100 * FILE).write(name_of(number), bytes(64))
    asked: list[str] = []
    real = os.scandir

    @contextmanager
    def scandir(path: Path) -> Iterator[Iterator[Any]]:
        def told(entry: Any) -> Any:
            def stat(**how: bool) -> os.stat_result:
                asked.append(entry.name)
                return cast(os.stat_result, entry.stat(**how))

            names = "name", "path", "is_dir", "is_file"
            return SimpleNamespace(stat=stat, **{name: getattr(entry, name) for name in names})

        with real(path) as entries:
            yield map(told, entries)

    monkeypatch.setattr(folder_module.os, "scandir", scandir)
    folder = make(tmp_path)
    folder.look()
    assert len(asked) == 1
    assert folder.held_bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_what_was_found_and_made_room_for_at_once_is_not_told_as_there(tmp_path: Path) -> None:
    other, folder = make(tmp_path, 10 * FILE), make(tmp_path, 10 * FILE)
    for number in range(5):
        folder.write(name_of(100 + number), content_of(number))
    for number in range(5):
        other.write(name_of(number), content_of(number))
        os.utime(file_of(other, name_of(number)), (number, number))
    for number in range(5, 10):
        folder.write(name_of(100 + number), content_of(number))
    before, _ = folder.take_changes()
    folder.write(name_of(110), content_of(110))
    added, gone = folder.take_changes()
    assert folder.evicted > 5
    assert added == [name_of(110)]
    assert set(gone) & set(before)
    assert not any(folder.read(name) for name in (*gone, *map(name_of, range(5))))
    assert folder.held_bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_less_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_disk_bytes 100 is less than one block"):
        make(tmp_path, limit=100)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(own_files.Path, "rename", full)
        with pytest.raises(OSError, match="no space"):
            folder.write(name_of(1), content_of(1))
    assert not files(tmp_path)
    assert folder.take_changes() == ([], [])
    assert folder.write(name_of(1), content_of(1))


def without(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def without(*_: object) -> None:
        raise OSError(number, "as the system says it")

    with monkeypatch.context() as patch:
        patch.setattr(own_files.fcntl, "flock", without)
        with pytest.raises(OSError, match=r"no file locks \(flock\).*/kv"):
            make(tmp_path / "kv")
    assert not files(tmp_path)
    make(tmp_path / "kv")
    assert not files(tmp_path)


def test_a_disk_that_is_full_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have room again."""

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(own_files.tempfile, "TemporaryFile", full)
    assert make(tmp_path).read(name_of(1)) is None


def test_locks_that_go_cost_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a process has so many, and the engine needs some."""
    folder, held, real_open, real_close = make(tmp_path), set[int](), os.open, os.close

    def opens(path: object, *rest: int) -> int:
        file = real_open(path, *rest)  # type: ignore[call-overload]
        if str(path).startswith(str(tmp_path)):
            held.add(file)
        assert isinstance(file, int)
        return file

    def closes(file: int) -> None:
        real_close(file)
        held.discard(file)

    monkeypatch.setattr(own_files.os, "open", opens)
    monkeypatch.setattr(own_files.os, "close", closes)
    monkeypatch.setattr(own_files.fcntl, "flock", without)
    with pytest.raises(OSError, match="no locks"):
        folder.write(name_of(1), content_of(1))
    assert not held
    assert not files(tmp_path)


def test_a_write_that_stops_halfway_leaves_nothing(tmp_path: Path) -> None:
    """A real limit on what a file may have, in a process of its own."""
    code = f"""
import resource
from pathlib import Path
from tests.unit.engine.kv.test_kv_folder import content_of, make, name_of
folder = make(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE // 2}, {SIZE // 2}))
try:
    folder.write(name_of(1), content_of(1))
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EFBIG}\n"
    assert not files(tmp_path)


def test_a_disk_that_others_fill_gets_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies here is worth less than what else is on the disk."""
    folder, blocks = make(tmp_path), 1000
    free = 200

    def statvfs(_: object) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in files(tmp_path)) // FILE
        return SimpleNamespace(f_blocks=blocks, f_frsize=FILE, f_bavail=free - taken)

    monkeypatch.setattr(folder_module.os, "statvfs", statvfs)
    for number in range(20):
        folder.write(name_of(number), content_of(number))
        os.utime(file_of(folder, name_of(number)), (number, number))
    free = 60  # 50 are to be left to others
    assert folder.write(name_of(20), content_of(20))
    assert statvfs(None).f_bavail >= 50
    assert folder.read(name_of(20)) == content_of(20)
    assert folder.read(name_of(19)) == content_of(19)
    assert folder.read(name_of(0)) is None
    free = 40
    with pytest.raises(OSError, match="the disk is full"):
        folder.write(name_of(21), content_of(21))
    assert not files(tmp_path)
    free = 200
    assert folder.write(name_of(21), content_of(21))


def test_what_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    for path in ("notes.txt", "0123/ab/x", "ab", ".hidden"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"mine" * 10_000)
    folder = make(tmp_path, limit=3 * FILE)
    (tmp_path / folder.kind / "ab").mkdir()
    (tmp_path / folder.kind / "ab" / "notes").write_bytes(b"mine")
    for number in range(8):
        folder.write(name_of(number), content_of(number))
    mine = [path for path in files(tmp_path) if path.read_bytes().startswith(b"mine")]
    assert len(mine) == 5


WRITER = """
import sys, time
from pathlib import Path
from services.worker.engine.kv.tiers import own_files
from tests.unit.engine.kv.test_kv_folder import content_of, make, name_of

def stop(begun, path):
    print("begun", flush=True)
    time.sleep(600)

root, limit, first, end, stops = sys.argv[1:]
if stops:
    own_files.Path.rename = stop
folder = make(Path(root), int(limit))
for number in range(int(first), int(end)):
    folder.write(name_of(number), content_of(number))
    assert number < 3 or folder.read(name_of(number - 3)) in (None, content_of(number - 3))
"""


def writer(root: Path, limit: int, first: int, end: int, stops: str = "") -> subprocess.Popen[str]:
    """A process that writes blocks; `stops`: with one that it does not end."""
    arguments = [str(one) for one in (root, limit, first, end, stops)]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_what_another_process_evicts_meanwhile_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as if it were there, it left no room for anything."""
    folder = make(tmp_path, 4 * FILE)
    for number in range(4):
        assert folder.write(name_of(number), content_of(number))
    look = folder.look

    def looked() -> Any:
        found = look()
        for number in range(4):
            folder._path(name_of(number)).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(folder, "look", looked)
    assert folder.write(name_of(9), content_of(9))
    look()
    assert folder.held_bytes == FILE


def test_two_processes_write_the_same_and_evict_for_each_other(tmp_path: Path) -> None:
    limit = 20 * FILE
    both = [writer(tmp_path, limit, 0, 150), writer(tmp_path, limit, 50, 200)]
    assert [process.wait(120) for process in both] == [0, 0]
    folder = make(tmp_path, limit)
    folder.look()
    found = [number for number in range(200) if folder.read(name_of(number)) == content_of(number)]
    assert len(found) * FILE == sum(path.stat().st_size for path in files(tmp_path))
    # Either may not see what the other writes while it does itself.
    assert 15 <= len(found) <= 40


def test_what_a_killed_writer_left_goes_and_what_one_writes_stays(tmp_path: Path) -> None:
    process = writer(tmp_path, 100 * FILE, 1, 2, stops="yes")
    try:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        folder = make(tmp_path)
        folder.look()
        assert len(files(tmp_path)) == 1, "it is being written"
        assert folder.take_changes() == ([], [])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    folder = make(tmp_path)
    folder.look()
    assert not files(tmp_path)


def test_a_kind_has_so_many_blocks_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes there may be: routers are told of each. Others' stay, and those that were
    used last."""
    monkeypatch.setattr(folder_module, "MOST_BLOCKS", 32)
    other = make(tmp_path, kind="other")
    for number in range(8):
        other.write(name_of(number), content_of(number))
    folder, beside = make(tmp_path), make(tmp_path)
    for number in range(32):
        folder.write(name_of(number), content_of(number))
        os.utime(file_of(folder, name_of(number)), (number, number))
    assert not folder.evicted
    assert folder.read(name_of(0)) == content_of(0)
    beside.look()
    assert beside.write(name_of(99), content_of(99))
    beside.look()
    assert (beside.evicted, len(beside._names)) == (3, 30)
    gone = [number for number in range(32) if folder.read(name_of(number)) is None]
    assert gone == [1, 2, 3]
    assert all(other.read(name_of(number)) for number in range(8))
