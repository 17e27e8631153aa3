"""What Ray is told before it starts, and what becomes of its parts that end, without a Ray."""

import os
import stat
import sys
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.worker import print_worker_logs

from services.cli.ground.ray_cluster import RayCluster, RayLost


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_ray_asks_for_a_token_of_this_install_and_stays_on_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RAY_AUTH_TOKEN": "of another", "RAY_AUTH_MODE": "disabled", "PATH": "/bin"}
    monkeypatch.setattr(os, "environ", environment)
    data = tmp_path / "data"
    (data / "ray").mkdir(parents=True)
    (data / "ray" / "old").touch()
    RayCluster(data, tmp_path / "one")._prepare()
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    first = token.read_text()
    assert "RAY_AUTH_TOKEN" not in environment, "it would be used in place of the file"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["PATH"] == "/bin"
    assert (token.parent, mode(token), mode(data)) == (data, 0o600, 0o700)
    assert len(first) >= 32
    state = Path(environment["RAY_gcs_storage_path"])
    assert state.is_relative_to(data)
    assert (mode(state), [path.name for path in state.iterdir()]) == (0o700, ["session_name"])
    RayCluster(data, tmp_path / "two")._prepare()
    assert token.read_text() == first


def test_what_serve_does_all_the_time_is_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names that this Ray knows: another would change nothing, without a word."""
    monkeypatch.setattr(os, "environ", environment := {"PATH": "/bin"})
    RayCluster(tmp_path / "data", tmp_path / "sockets")._prepare()
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    known = (Path(ray.origin).parent / "serve/_private/constants.py").read_text()
    told = {name: value for name, value in environment.items() if name.startswith("RAY_SERVE")}
    assert sorted(told.values()) == ["0", "0", "0.25"]
    assert [name for name in told if f'"{name}"' not in known] == []


def test_the_logs_of_each_start_are_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    cluster = RayCluster(tmp_path / "data", tmp_path / "sockets")
    cluster._prepare()
    assert cluster.logs is not None
    assert cluster.logs.parent == tmp_path / "data" / "logs"
    session = (tmp_path / "data" / "ray" / "session_name").read_text()
    assert (tmp_path / "sockets" / "ray" / session / "logs").resolve() == cluster.logs.resolve()


def test_an_earlier_state_that_cannot_be_removed_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    kept, data = tmp_path / "kept", tmp_path / "data"
    kept.mkdir()
    data.mkdir()
    (kept / "old").touch()
    (data / "ray").symlink_to(kept)
    with pytest.raises(RuntimeError, match=f"{data / 'ray'}.*cannot be removed.*symbolic link"):
        RayCluster(data, tmp_path / "sockets")._prepare()
    assert [path.name for path in kept.iterdir()] == ["old"]


class Node:
    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.done: list[str] = []

    def dead_processes(self) -> list[tuple[str, Any]]:
        return [(name, SimpleNamespace(pid=1)) for name in self.dead]

    def kill_gcs_server(self, check_alive: bool) -> None:
        assert not check_alive, "it is dead"
        self.done.append("forget")

    def start_gcs_server(self) -> None:
        self.done.append("start")


@pytest.mark.parametrize(
    ("dead", "done"),
    [
        ([], []),
        (["log_monitor"], []),
        (["gcs_server"], ["forget", "start"]),
        (["raylet"], None),
        (["gcs_server", "raylet"], None),
    ],
)
def test_the_state_service_is_started_again_and_a_lost_raylet_is_the_end(
    tmp_path: Path, dead: list[str], done: list[str] | None
) -> None:
    cluster, node = RayCluster(tmp_path, tmp_path), Node(*dead)
    cluster._node = node
    if done is None:
        with pytest.raises(RayLost, match="raylet"):
            cluster.tend()
        assert not node.done
    else:
        assert len(cluster.tend()) == (1 if done else 0)
        assert node.done == done


@pytest.mark.parametrize(
    ("terminal", "asked", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "1"}, False),
        (False, {}, False),
        (False, {"RAY_COLOR_PREFIX": "1"}, True),
    ],
)
def test_what_ray_tells_has_colours_on_a_terminal_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    asked: dict[str, str],
    coloured: bool,
) -> None:
    for name in ("NO_COLOR", "RAY_COLOR_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, **asked})
    output = StringIO()
    monkeypatch.setattr(output, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", output)
    RayCluster(tmp_path / "data", tmp_path / "sockets")._prepare()
    print_worker_logs({"pid": "raylet", "lines": ["A worker died"]}, output)  # type: ignore[dict-item]
    assert "A worker died" in output.getvalue()
    assert ("\x1b" in output.getvalue()) == coloured
