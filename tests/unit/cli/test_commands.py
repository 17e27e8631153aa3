import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli.main import main
from services.cli.running import Running, find_running, state_file
from services.cli.stack import _missing, _wanted
from services.cli.up import local_models
from services.common.config import Settings
from services.common.discovery import Replica

NOBODY = "redis://127.0.0.1:1/0"


def test_models_are_named_by_their_folder(tmp_path: Path) -> None:
    (tmp_path / "my-llama").mkdir()
    specs = local_models([str(tmp_path / "my-llama"), "org/other"])
    assert [spec.name for spec in specs] == ["my-llama", "other"]
    assert specs[0].path == str(tmp_path / "my-llama")
    assert specs[1].path == "org/other"


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="called llama"):
        local_models(["a/llama", "b/llama"])


def test_the_shipped_model_is_the_default() -> None:
    (spec,) = local_models([])
    assert spec.name == "demo"


def test_a_running_penstock_is_found_only_while_it_runs(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert find_running(settings) is None
    state = asdict(Running("u", "g", "r", "n", "k", os.getpid()))
    state_file(settings).write_text(json.dumps(state))
    running = find_running(settings)
    assert running is not None
    assert (running.url, running.grpc) == ("u", "g")
    state_file(settings).write_text(json.dumps({**state, "pid": 2**22 - 1}))
    assert find_running(settings) is None
    state_file(settings).write_text("half a fi")
    assert find_running(settings) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--decode", "0"], "--decode"),
        (["--prefill", "-1"], "--prefill"),
        (["--port", "99999"], "--port"),
        (["--port", "http"], "--port"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["up", *arguments])
    assert left.value.code == 2
    assert named in capsys.readouterr().err


def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMIT", "many")
    assert main(["up"]) == 2
    assert "PENSTOCK_ROUTER__QUEUE_LIMIT" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["no folder", "json", "architecture", "weights", "tokenizer"])
def test_a_broken_checkpoint_is_told_before_anything_starts(
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "broken"
    if fault != "no folder":
        folder.mkdir()
        config = json.loads((Path(local_models([])[0].path) / "config.json").read_text())
        if fault == "architecture":
            config["architectures"] = ["GPT2LMHeadModel"]
        (folder / "config.json").write_text("{nope" if fault == "json" else json.dumps(config))
        if fault != "weights":
            (folder / "model.safetensors").touch()
        if fault != "tokenizer":
            (folder / "tokenizer.json").touch()
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    assert main(["up", "--model", str(folder)]) == 1
    said = capsys.readouterr().err
    assert str(folder) in said
    assert "redis" not in said, "nothing was started"
    assert not (tmp_path / "data").exists()


def test_a_taken_port_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert str(port) in said
    assert "redis" not in said, "nothing was started"


def test_commands_without_a_running_penstock_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    assert main(["chat", "hello"]) == 1
    assert "penstock up" in capsys.readouterr().err


_HEAVY = ["torch", "transformers", "ray", "qdrant_client", "numpy", "aiohttp"]
_EVERY = [*_HEAVY, "pydantic", "redis", "grpc", "httpx", "rich"]


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("--help", _EVERY),
        ("up --help", _EVERY),
        ("up --port http", _EVERY),
        ("bench --help", _EVERY),
        ("bench engine --help", ["torch", "ray", "redis", "grpc"]),
        ("status", _HEAVY),
        ("chat hello", [*_HEAVY, "grpc"]),
        ("keys list", _HEAVY),
        ("demo --help", _HEAVY),
    ],
)
def test_a_command_imports_what_it_runs(
    arguments: str, unneeded: list[str], tmp_path: Path
) -> None:
    """Half a second for a command is spent on imports, or not at all."""
    script = (
        "import contextlib, sys\n"
        "from services.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        f"    main({arguments.split()})\n"
        f"print('imported', [name for name in {unneeded} if name in sys.modules])\n"
    )
    environment = {**os.environ, "PENSTOCK_DATA_DIR": str(tmp_path), "REDIS_URL": NOBODY}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("imported []\n"), done.stdout + done.stderr


def test_what_is_waited_for_is_named_as_people_say_it() -> None:
    settings = Settings(models=local_models([]))
    split = {name for _, name in _wanted(settings, 1, 1)}
    assert {"prefill worker of demo", "decode worker of demo"} <= split
    wanted = _wanted(settings, 0, 1)
    assert {name for _, name in wanted} - split == {"worker of demo"}
    facts = {"role": "both", "model": "demo"}
    view = SimpleNamespace(replicas={"w": Replica("worker", "w", "h:1", "h", 1, facts=facts)})
    assert "worker of demo" not in _missing(wanted, {"worker": view})  # type: ignore[dict-item]
