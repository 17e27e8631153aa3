import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from services.cli.main import main
from services.cli.stack import Running, find_running, local_models, state_file
from services.common.config import Settings


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


def test_wrong_values_name_the_option_or_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--decode", "0"]) == 1
    assert "--decode" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_ROUTER__QUEUE_LIMIT", "many")
    assert main(["up"]) == 2
    assert "PENSTOCK_ROUTER__QUEUE_LIMIT" in capsys.readouterr().err


def test_commands_without_a_running_penstock_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    assert main(["chat", "hello"]) == 1
    assert "penstock up" in capsys.readouterr().err
