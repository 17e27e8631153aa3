"""What a process may use of the processor and of memory: affinity, and limits of either version of
cgroups."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from services.cli.stack.checkpoints import check_engines
from services.common.config import ModelSpec, Settings
from services.worker.engine.config import EngineConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.parallel.seating import _own
from services.worker.engine.process import cgroups
from services.worker.engine.process.cores import usable_cores
from services.worker.engine.process.host_memory import usable_memory
from services.worker.engine.runners.making import make_runner
from services.worker.engine.sizes import num_blocks
from tests.support.checkpoint import write_checkpoint

GIB = 2**30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """A host with these groups of the process's own, and these files in the mount of all."""

    def given(groups: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(cgroups, "_OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(cgroups, "_MOUNT", tmp_path / "mount")

    return given


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
    host: Callable[[str, dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int,
) -> None:
    host(groups, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, 8 * GIB),
        ("0::/", {"memory.max": "max\n"}, 8 * GIB),
        (
            "0::/pods/one",
            {"pods/memory.max": f"{3 * GIB}\n", "pods/one/memory.max": "max"},
            3 * GIB,
        ),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2 * GIB),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8 * GIB),
    ],
)
def test_memory(
    host: Callable[[str, dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int,
) -> None:
    host(groups, files)
    sizes = {"SC_PHYS_PAGES": 8 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert usable_memory() == expected


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_more_kv_than_memory_is_refused_and_not_found_out_by_filling_it(
    tmp_path: Path, host: Callable[[str, dict[str, str]], None], kernels: str
) -> None:
    host("0::/", {"memory.max": str(GIB)})
    model = str(write_checkpoint(tmp_path / "model"))
    for name, value in {"kv_cache_bytes": GIB + 2**20, "num_blocks": 2**20}.items():
        config = EngineConfig(model, kernels=kernels, threads=1, **{name: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"^{name} .* KV blocks, .* 1,024 MiB of memory"):
            make_runner(config)


def test_ranks_of_a_host_have_its_memory_together(
    tmp_path: Path, host: Callable[[str, dict[str, str]], None]
) -> None:
    """Those of others have their own."""
    host("0::/", {"memory.max": str(GIB)})
    folder = write_checkpoint(tmp_path / "model")
    half = {"kv_cache_bytes": GIB * 5 // 8, "threads": 1}
    config = EngineConfig(str(folder), tensor_parallel=2, **half)  # type: ignore[arg-type]
    model = read_config(folder)
    assert num_blocks(_own(config, 0, 1), model, "float32")
    with pytest.raises(ValueError, match=r"needs 1,280 MiB for KV .* 1,024 MiB of memory"):
        num_blocks(_own(config, 1, 2), model, "float32")
    for strategy, fits in (("STRICT_PACK", False), ("SPREAD", True)):
        own = {"tensor_parallel": 2, "placement_group_strategy": strategy, **half}
        told = ModelSpec(name="m", path=str(folder), worker=own)  # type: ignore[arg-type]
        with nullcontext() if fits else pytest.raises(RuntimeError, match="needs 1,280 MiB"):
            check_engines(told, folder, Settings())
