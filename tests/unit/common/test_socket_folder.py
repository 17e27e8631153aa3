"""Folders for sockets: closed to others, gone with their owner, and nobody else's is touched."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from services.common.locks.socket_folder import SocketFolder

HOLDS = """
import sys
from services.common.locks.socket_folder import SocketFolder
folder = SocketFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_closed_to_others_and_goes_with_its_owner(temporary: Path) -> None:
    folder = SocketFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "deep").mkdir()
    folder.close()
    assert not list(temporary.iterdir())
    SocketFolder()  # and is dropped
    assert not list(temporary.iterdir())


def test_that_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    kept = temporary / "logs"
    kept.mkdir()
    (kept / "log").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        (path / "link").symlink_to(kept)
        (path / "socket").touch()
        first = SocketFolder()
        assert (path / "socket").exists(), "its owner lives"
        holder.kill()
        holder.wait()
    second = SocketFolder()
    assert not path.exists()
    assert (kept / "log").exists(), "what a link points to is not of the folder"
    assert first.path.exists()
    assert second.path.exists()


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock")])
def test_one_swept_before_it_was_locked_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    plain = getattr(module, name)
    swept: list[Path] = []

    def late(*arguments: Any) -> Any:
        if not swept:
            swept.extend(temporary.iterdir())
            swept[0].rmdir()
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, late)
        folder = SocketFolder()
    assert folder.path != swept[0]
    assert list(temporary.iterdir()) == [folder.path]


def test_what_is_not_plainly_a_dead_ones_stays(temporary: Path) -> None:
    stays = [temporary / "penstock-run-open", temporary / "penstock-other", temporary / "else"]
    for path in stays:
        path.mkdir(mode=0o700)
    stays[0].chmod(0o755)  # not as one of these is made
    link = temporary / "penstock-run-link"
    link.symlink_to(stays[2])
    file = temporary / "penstock-run-file"
    file.touch()
    SocketFolder()
    assert all(path.exists() for path in (*stays, link, file))


def test_those_of_other_users_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = temporary / "penstock-run-theirs"
    path.mkdir(mode=0o700)
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        SocketFolder()
    assert path.exists()
    SocketFolder()
    assert not path.exists(), "the same folder, of this user"
