import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from services.cli.commands.up import local_models, with_adapters
from services.cli.main import main
from services.cli.running import Running, find_running, holding, state_file
from services.cli.stack.replicas import missing
from services.cli.stack.replicas import wanted as waited_for
from services.common.children import dying_with_parent
from services.common.config import Settings
from services.common.discovery import Replica
from services.common.versions import version

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start tells is read here: it does not go on in a process of its own."""
    monkeypatch.setattr(
        "services.cli.commands.up.supervise", lambda _report: SimpleNamespace(again=False)
    )


def test_models_are_named_by_their_folder(tmp_path: Path) -> None:
    (tmp_path / "my-llama").mkdir()
    specs = local_models([str(tmp_path / "my-llama"), "org/other"])
    assert [spec.name for spec in specs] == ["my-llama", "other"]
    assert specs[0].path == str(tmp_path / "my-llama")
    assert specs[1].path == "org/other"


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="called llama"):
        local_models(["a/llama", "b/llama"])


def test_a_folder_whose_name_is_none_of_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my llama").mkdir()
    with pytest.raises(ValueError, match=r"^--model: .*'my llama', and a model's name has at most"):
        local_models([str(tmp_path / "my llama")])


def test_adapters_are_the_one_models(tmp_path: Path) -> None:
    (model,) = local_models([])
    (found,) = with_adapters([model], [f"pirate={tmp_path}"])
    assert found.adapters == {"pirate": str(tmp_path)}
    assert (found.name, found.path) == (model.name, model.path)
    assert with_adapters([model], []) == [model]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["pirate"], "'pirate' is not NAME=DIR"),
        (["=HERE"], "is not NAME=DIR"),
        (["pirate=/no/such"], "is not NAME=DIR of a folder that is there"),
        (["pirate=HERE", "pirate=HERE"], "two models or adapters are called 'pirate'"),
        (["demo=HERE"], "two models or adapters are called 'demo'"),
        (["a#b=HERE"], "^--lora: a model's name has at most 100 letters"),
    ],
)
def test_a_wrong_lora_is_refused(tmp_path: Path, given: list[str], words: str) -> None:
    given = [one.replace("HERE", str(tmp_path)) for one in given]
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        with_adapters(local_models([]), given)
    with pytest.raises(ValueError, match="of which model"):
        with_adapters([*local_models([]), *local_models(["a/b"])], given)


def test_an_adapter_that_does_not_fit_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--lora", f"pirate={tmp_path}"]) == 1
    assert "adapter 'pirate': " in (told := capsys.readouterr().err)
    assert "adapter_config.json is missing" in told
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["up", "--model", str(tmp_path)]) == 1
    assert "config.json is missing: it is an adapter" in capsys.readouterr().err


def test_a_model_without_an_owner_is_told_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--model", "gpt2"]) == 1
    assert "written OWNER/NAME" in capsys.readouterr().err


def test_the_shipped_model_is_the_default() -> None:
    (spec,) = local_models([])
    assert spec.name == "demo"


def test_a_running_penstock_is_found_only_while_it_runs(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert find_running(settings) is None
    state = asdict(Running("u", "g", "r", "n", "k", os.getpid()))
    state_file(settings).write_text(json.dumps(state))
    assert find_running(settings) is None  # a crashed one's, whose process id is used again
    with holding(settings):
        running = find_running(settings)
        assert running is not None
        assert (running.url, running.grpc) == ("u", "g")
        state_file(settings).write_text(json.dumps({**state, "pid": os.getppid()}))
        assert find_running(settings) is None  # a crashed one's, and the next one only starts
        state_file(settings).write_text("half a fi")
        assert find_running(settings) is None


_HOLD = """
import sys
from services.cli.running import holding
from services.common.config import Settings
with holding(Settings()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_penstock_per_data_directory_until_its_process_has_ended(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_DATA_DIR": str(tmp_path)},
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(RuntimeError, match=rf"starts or ends .* \(pid {first.pid}\)"):
            holding(settings).__enter__()
        state = asdict(Running("http://there", "g", "r", "n", "k", first.pid))
        state_file(settings).write_text(json.dumps(state))
        with pytest.raises(RuntimeError, match="already runs here at http://there"):
            holding(settings).__enter__()
        first.kill()
    assert find_running(settings) is None
    with holding(settings):
        pass


def test_looking_for_one_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with holding(settings):
        pass
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            find_running(settings)

    state = asdict(Running("u", "g", "r", "n", "k", 1))
    state_file(settings).write_text(json.dumps(state))
    with ThreadPoolExecutor(2) as threads:
        try:
            for _ in range(2):
                threads.submit(look)
            for _ in range(20):
                with holding(settings):
                    pass
        finally:
            ended.set()


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


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PENSTOCK_POLICY__FILE", __file__, "is not YAML"),
        ("PENSTOCK_POLICY__FILE", "/no/rules.yaml", "/no/rules.yaml: No such file"),
        ("PENSTOCK_WORKER__DEVICE", "banana", "WORKER__DEVICE"),
        ("PENSTOCK_LOG_LEVEL", "LOUD", "setting PENSTOCK_LOG_LEVEL"),
        ("REDIS_URL", "notaurl", "setting REDIS_URL: must be redis://"),
        ("PENSTOCK_REDIS_URL", "redis://host:port/0", "setting PENSTOCK_REDIS_URL: must"),
        ("QDRANT_URL", "qdrant:6333", "setting QDRANT_URL: must"),
        ("PENSTOCK_RETRIEVAL__REPLICAS", "2", "setting PENSTOCK_RETRIEVAL__REPLICAS: a local"),
        ("PENSTOCK_GATEWAY__CORS_ORIGINS", "https://x", "GATEWAY__CORS_ORIGINS: 'https://x'"),
        ("PENSTOCK_MODELS", "demo", "setting PENSTOCK_MODELS: 'demo' is not JSON"),
        ("REDIS_URL", NOBODY, f"Redis at {NOBODY}: "),
    ],
)
def test_a_wrong_setting_is_told_before_anything_starts(
    variable: str,
    value: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(_: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("services.cli.ground.ray_cluster.RayCluster.start", start)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv(variable, value)
    assert main(["up", "--port", "0"]) in (1, 2)
    (line,) = [e for e in capsys.readouterr().err.splitlines() if not e.startswith("·")]
    assert line.startswith("penstock: ")
    assert said in line


def test_a_server_that_is_not_there_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "hello"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: http://127.0.0.1:1/v1/models: ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no folder", "there is no folder"),
        ("json", "config.json is not JSON"),
        ("architecture", "'GPT2LMHeadModel' is not supported"),
        ("no weights", "neither model.safetensors nor its index.json is there"),
        ("cut", "model.safetensors: broken, or cut short"),
        ("number", "config.json: num_hidden_layers 'six' is not a number"),
        ("shape", "model.norm.weight is [256], config.json makes it [128]"),
        ("no tokenizer", "has no tokenizer.json"),
        ("tokenizer", "tokenizer.json cannot be read"),
    ],
)
def test_a_broken_checkpoint_is_told_before_anything_starts(
    fault: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shipped, folder = Path(local_models([])[0].path), tmp_path / "broken"
    if fault != "no folder":
        shutil.copytree(shipped, folder)
        config = json.loads((shipped / "config.json").read_text())
        if fault == "architecture":
            config["architectures"] = ["GPT2LMHeadModel"]
        if fault == "number":
            config["num_hidden_layers"] = "six"
        if fault == "shape":
            config |= {"hidden_size": 128, "head_dim": 64}
            norm = {"model.norm.weight": torch.ones(256)}
            save_file(norm, folder / "model.safetensors")
        (folder / "config.json").write_text("{nope" if fault == "json" else json.dumps(config))
        if fault == "no weights":
            (folder / "model.safetensors").unlink()
        if fault == "cut":
            (folder / "model.safetensors").write_bytes(b"0" * 1000)
        if fault == "no tokenizer":
            (folder / "tokenizer.json").unlink()
        if fault == "tokenizer":
            (folder / "tokenizer.json").write_text('{"version": "1.0"')
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    assert main(["up", "--model", str(folder)]) == 1
    told = capsys.readouterr().err
    assert str(folder) in told
    assert said in told
    assert "redis" not in told, "nothing was started"
    assert not (tmp_path / "data").exists()


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has no models."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("hub", "said"),
    [
        ("empty", "the hub has no model of this name"),
        ("closed", "the hub gave no answer"),
        ("silent", "the hub gave no answer"),
        ("offline", "offline mode is enabled"),
    ],
)
def test_a_wrong_hub_id_is_told_within_seconds(hub: str, said: str, tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its settings when it is imported."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    silent = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = {"silent": silent.getsockname()[1], "closed": 1}.get(hub, server.server_port)
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_OFFLINE": "1" if hub == "offline" else "0",
        "PENSTOCK_DATA_DIR": str(tmp_path / "data"),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "up", "--model", "nobody/nothing"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        server.shutdown()
        server.server_close()
        silent.close()
    assert done.returncode == 1
    assert "nobody/nothing" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_says_by_what(number: signal.Signals, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # It is not to give up first, should this process have no turn for some seconds.
        patient = "socket_timeout=60&socket_connect_timeout=60"
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0?{patient}"
        environment = {**os.environ, "PENSTOCK_DATA_DIR": str(tmp_path), "REDIS_URL": url}
        command = [sys.executable, "-m", "services.cli", "keys", "list"]
        with subprocess.Popen(
            [*dying_with_parent("KILL"), *command],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            silent.settimeout(60)
            with silent.accept()[0] as asked:
                asked.settimeout(60)
                assert asked.recv(1)  # it waits for an answer now
                process.send_signal(number)
                said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (128 + number, "")


def test_commands_without_a_running_penstock_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("REDIS_URL", NOBODY)
    for command in (["chat", "hello"], ["status"], ["keys", "list"]):
        assert main(command) == 1
        assert "penstock up" in capsys.readouterr().err, command


def test_which_penstock_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {version()}\n"


_HEAVY = ["torch", "transformers", "ray", "qdrant_client", "numpy", "aiohttp"]
_EVERY = [*_HEAVY, "pydantic", "redis", "grpc", "httpx", "rich"]


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("--help", _EVERY),
        ("--version", _EVERY),
        ("up --help", _EVERY),
        ("up --port http", _EVERY),
        ("bench --help", _EVERY),
        ("bench serve --help", _EVERY),
        ("chat --help", _EVERY),
        ("status --help", _EVERY),
        ("keys create --help", _EVERY),
        ("keys create --weight much", _EVERY),
        ("bench engine --help", ["torch", "ray", "redis", "grpc"]),
        ("status", _HEAVY),
        ("chat hello", _HEAVY),
        ("keys list", _HEAVY),
        ("demo --help", _EVERY),
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
    split = {name for _, name in waited_for(settings)}
    assert {"prefill worker of demo", "decode worker of demo"} <= split
    wanted = waited_for(Settings(models=[m.sized(0, 1) for m in settings.models]))
    assert {name for _, name in wanted} - split == {"worker of demo"}
    facts = {"role": "both", "model": "demo"}
    view = SimpleNamespace(replicas={"w": Replica("worker", "w", "h:1", "h", 1, facts=facts)})
    assert "worker of demo" not in missing(wanted, {"worker": view})  # type: ignore[dict-item]
