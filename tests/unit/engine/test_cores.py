"""What a process may use of the processor: affinity, and quotas of either version of cgroups."""

import os
from pathlib import Path

import pytest

from services.worker.engine import cores
from services.worker.engine.cores import usable_cores


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/pods/one", {"pods/cpu.max": "300000 100000", "pods/one/cpu.max": "max 100000"}, 3),
        ("0::/of/the/host", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "junk"}, 8),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n0::/",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "9\n", "cpu,cpuacct/a/cpu.cfs_period_us": "2"},
            4,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("5:cpuset:/", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, 8),
    ],
)
def test_quotas(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int,
) -> None:
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cores, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores() == 1
