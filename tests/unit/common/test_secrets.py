"""What an install keeps to itself."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.locks.secrets import kept_secret, private_folder, redacted


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    first = kept_secret(folder, "token")
    assert len(first) >= 32
    assert kept_secret(folder, "token") == first
    assert kept_secret(folder, "other") != first
    assert kept_secret(tmp_path / "elsewhere", "token") != first
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {"token", "other"}


def test_processes_that_ask_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        for turn in range(20):
            name = f"token-{turn}"
            got = list(threads.map(lambda _, name=name: kept_secret(tmp_path, name), range(16)))
            assert len(set(got)) == 1


def test_what_was_open_is_tightened(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / "token").write_text("kept from before\n")
    (folder / "token").chmod(0o644)
    assert kept_secret(folder, "token") == "kept from before"
    assert mode(folder) == 0o700
    assert mode(folder / "token") == 0o600


def test_a_folder_shared_with_others_is_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(PermissionError, match="choose a folder below it"):
        private_folder(shared)
    assert mode(shared) == 0o1777


def test_an_empty_secret_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with pytest.raises(ValueError, match="empty"):
        kept_secret(tmp_path, "token")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:word@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:w:r/d@host:1/0", "rediss://user:***@host:1/0"),
        ("redis://user:word@[::1]:1/0?a=b", "redis://user:***@[::1]:1/0?a=b"),
        ("redis://host/0?db=1&password=word&x=y", "redis://host/0?db=1&password=***&x=y"),
        ("unix://:word@/tmp/redis?db=0", "unix://:***@/tmp/redis?db=0"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://user@host", "redis://user@host"),
    ],
)
def test_urls_are_shown_without_their_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
