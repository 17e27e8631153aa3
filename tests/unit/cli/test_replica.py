"""What a replica under Serve tells of its own start."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from services import app
from services.common.config import ModelSpec, Settings
from services.common.redis import connect
from services.common.start_failures import first_told
from services.post import Post

BEGIN: Any = app.Replica.__init__  # on a stand-in: a Replica has a `__del__` that Serve awaits
TINY = ModelSpec(name="tiny", path="/nowhere")


class HostThatFails:
    def __init__(self, *_: Any) -> None: ...

    async def start(self) -> None:
        raise ValueError("no such folder")


@pytest.mark.parametrize(
    ("part", "stand_in", "why"),
    [
        ("serve_replica", SimpleNamespace(), "add_port_to_grpc_server"),  # of another Ray
        ("Host", HostThatFails, "no such folder"),
    ],
)
async def test_whatever_keeps_it_from_starting_is_told_to_who_waits(
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    stand_in: Any,
    why: str,
) -> None:
    monkeypatch.setattr(app, "serve_replica", SimpleNamespace(add_port_to_grpc_server=None))
    monkeypatch.setattr(app, part, stand_in)
    settings = Settings(redis_url=redis_url, namespace=namespace, models=[TINY])
    with pytest.raises((AttributeError, ValueError), match=why):
        await BEGIN(SimpleNamespace(), Post.of("worker", settings, TINY, "decode").sealed())
    redis = connect(redis_url)
    told = await first_told(redis, namespace)
    await redis.aclose()
    assert told is not None
    assert told.who == "decode worker of tiny"
    assert why in told.why


async def test_settings_that_its_version_does_not_know_are_told_to_who_waits(
    redis_url: str, namespace: str
) -> None:
    sealed = Post.of("gateway", Settings(redis_url=redis_url, namespace=namespace)).sealed()
    data = json.loads(sealed.get_secret_value())
    data["settings"]["gateway"] = {"newer": 1}
    with pytest.raises(ValueError, match="PENSTOCK_GATEWAY__NEWER"):
        await BEGIN(SimpleNamespace(), SecretStr(json.dumps(data)))
    redis = connect(redis_url)
    told = await first_told(redis, namespace)
    await redis.aclose()
    assert told is not None
    assert told.who == "gateway"
    assert "PENSTOCK_GATEWAY__NEWER" in told.why


def test_rays_lines_go_where_ours_do(tmp_path: Path) -> None:
    """In a process of its own, set up as Serve sets up a replica's."""
    file = tmp_path / "serve.log"
    program = f"""
import logging, sys
from services import app
from services.common.telemetry.logs import configure_logging
its = logging.getLogger("ray.serve")
its.propagate = False
its.addHandler(logging.FileHandler({str(file)!r}))
configure_logging("router", "info")
app._take_logs_of_ray()
its.warning("of Serve")
logging.getLogger("ray").warning("of Ray")
print("log:" + app._log())
"""
    command = [sys.executable, "-c", program]
    with (tmp_path / "worker.err").open("wb") as err:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=err, check=True, text=True)
    assert done.stdout.strip() == f"log:{tmp_path / 'worker.err'}"
    lines = (tmp_path / "worker.err").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["of Serve", "of Ray"]
    assert file.read_text() == ""
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "log:", "standard error is no file that one could look into"
