"""What a run keeps is whole or as it was, and no two write it."""

import os
from pathlib import Path

import pytest
import torch

from models.recipe.files import alone, replacing, state_of


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "card.md", list[str]()
    path.write_text("before")
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(path.read_text()))
    with replacing(path) as new:
        new.write_text("after")
    assert seen == ["before"]
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["card.md"]


def test_what_is_cut_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"

    def cut_off() -> None:
        with replacing(path) as new:
            new.write_bytes(b"half")
            raise KeyboardInterrupt

    torch.save({"pool": 3}, path)
    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert state_of(path) == {"pool": 3}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"PK", "Error"),
        (b"hello, a text", "Error"),
        (b"\x80\x02junk of a pickle.", "Error"),
        (bytes(range(256)), "Error"),
    ],
)
def test_what_is_no_state_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"cut\.pt cannot be read \(.*{why}.*\): if it is cut off"
    ):
        state_of(path)


def test_a_state_is_a_file_of_a_training(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt holds a list: no training saved it"):
        state_of(tmp_path / "other.pt")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        state_of(tmp_path)


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        alone(tmp_path),
        pytest.raises(BlockingIOError, match="another training runs in"),
        alone(tmp_path),
    ):
        pass
    with alone(tmp_path):
        assert not list(tmp_path.iterdir())
