"""The folders of logs in the data directory: one per start, the newest few."""

from pathlib import Path

from services.cli.stack.logs import new_logs


def test_each_start_has_a_folder_and_the_newest_stay(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    strange = folder / "2026-01-01 of the operator's own"
    strange.mkdir(parents=True)
    lost = [folder / f"2026-01-{day:02}T10-00-00Z-{99 - day}" for day in range(1, 8)]
    for path in reversed(lost):
        path.mkdir()
        (path / "raylet.out").write_text("why")
    new = new_logs(tmp_path)
    assert new.parent == folder
    assert sorted(folder.iterdir()) == [strange, *lost[3:], new], "four before this one"
    assert (lost[-1] / "raylet.out").read_text() == "why"
    for path in (folder, new):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "logs").mkdir()
    for day in range(1, 8):
        (tmp_path / "logs" / f"2026-01-{day:02}T10-00-00Z-1").symlink_to(elsewhere)
    (elsewhere / "log").touch()
    new_logs(tmp_path)
    assert (elsewhere / "log").exists()
