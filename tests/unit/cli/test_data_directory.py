"""What `up` says of a data directory that cannot hold what is written while Penstock runs."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from services.cli.stack.data_directory import FULL_BYTES, open_data_directory

Usage = namedtuple("Usage", "total used free")


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, size))


def test_one_is_made_that_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, FULL_BYTES)
    open_data_directory(tmp_path / "a" / "data")
    assert (tmp_path / "a" / "data").stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, FULL_BYTES - 1)
    with pytest.raises(
        RuntimeError, match=r"PENSTOCK_DATA_DIR: the disk of .* is full, 64 MiB are"
    ):
        open_data_directory(tmp_path / "data")


def test_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(RuntimeError, match=r"PENSTOCK_DATA_DIR: .*/data is not a folder"):
        open_data_directory(tmp_path / "data")


def test_what_keeps_it_from_being_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"PENSTOCK_DATA_DIR: .*/file/data: Not a directory"):
        open_data_directory(tmp_path / "file" / "data")


def test_one_that_may_only_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write wherever a disk takes it
    with pytest.raises(RuntimeError, match=r"PENSTOCK_DATA_DIR: .* cannot be written to"):
        open_data_directory(tmp_path / "data")
