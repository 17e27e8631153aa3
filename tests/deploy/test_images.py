"""The images: what goes into them, who they run as, how they say that they are well."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.cli.command_line import parser
from services.common.config import unknown_names
from tests.deploy.dockerfile import Stage, build_context, exec_form, stages, steps_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/docker"
IMAGES = ("cpu", "cuda", "dev", "")


@pytest.fixture(scope="module")
def of() -> dict[str, Stage]:
    return stages((FOLDER / "Dockerfile").read_text())


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_without_a_target_the_cpu_image_is_built(of: dict[str, Stage]) -> None:
    assert list(of)[-1] == ""
    assert of[""].base == "cpu"
    assert of[""].steps == []


def test_all_stages_are_of_one_base_that_a_build_may_choose(of: dict[str, Stage]) -> None:
    outside = {stage.base for stage in of.values()} - set(of)
    assert outside == {"${BASE}"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_else_than_10001(image: str, of: dict[str, Stage]) -> None:
    users = [rest for name, rest in steps_of(image, of) if name == "USER"]
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_libraries_are_a_layer_below_the_code(image: str, of: dict[str, Stage]) -> None:
    copied = [rest for name, rest in of[image].steps if name == "COPY"]
    assert copied == [
        f"--from=dependencies-{image} /opt/penstock/.venv /opt/penstock/.venv",
        "--from=code /opt/built /opt/penstock",
    ]
    # A change of the code leaves the libraries as they are.
    below = steps_of(f"dependencies-{image}", of)
    taken = {word for name, rest in below if name == "COPY" for word in rest.split()[:-1]}
    assert taken == {"pyproject.toml", "constraints.txt"}


def test_what_builds_stays_behind(of: dict[str, Stage]) -> None:
    """No compiler, no pip, no package lists in what is shipped."""
    shipped = " ".join(rest for name, rest in of["runtime"].steps if name == "RUN")
    [installed] = [part for part in shipped.split("&&") if " install " in part and "apt" in part]
    assert installed.split()[2:] == ["--yes", "--no-install-recommends", "openssl", "tini"]
    assert "rm -rf /var/lib/apt/lists/*" in shipped
    for image in ("cpu", "cuda"):
        assert not of[image].said("RUN")


def test_what_it_starts_with_are_commands_that_exist(of: dict[str, Stage]) -> None:
    runtime = of["runtime"]
    [entrypoint] = map(exec_form, runtime.said("ENTRYPOINT"))
    [given] = map(exec_form, runtime.said("CMD"))
    [probe] = map(exec_form, runtime.said("HEALTHCHECK"))
    assert entrypoint == ["tini", "--", "penstock"]
    assert parser().parse_args(given).module == "services.cli.commands.up"
    assert probe[0] == "penstock"
    assert parser().parse_args(probe[1:]).module == "services.cli.commands.probe"


def test_its_environment_are_settings_and_the_door_is_open_to_the_container_s_network(
    of: dict[str, Stage],
) -> None:
    environment = of["runtime"].environment
    assert unknown_names(environment) == []
    assert environment["PENSTOCK_GATEWAY__HOST"] == "0.0.0.0"
    assert "PENSTOCK_BIND_HOST" not in environment  # what is behind the door: the loopback
    # Files that a read-only root has no place for go where something writable is mounted.
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["PENSTOCK_DATA_DIR"] == environment["HOME"] == "/var/lib/penstock"


def test_all_that_is_copied_exists_and_is_let_through(of: dict[str, Stage]) -> None:
    context = build_context(ROOT)
    copied = [
        source
        for stage in of.values()
        for rest in stage.said("COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert len(copied) > 5
    for source in copied:
        assert any(f"{name}/".startswith(f"{source}/") for name in context), source


def test_each_package_of_the_project_is_in_the_image(of: dict[str, Stage]) -> None:
    """What pyproject.toml packages is what is copied to be built."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {word for rest in of["code"].said("COPY") for word in rest.split()[:-1]}
    assert packages <= copied
    assert all(find_spec(package) for package in packages)


def test_a_build_sees_sources_and_neither_secrets_nor_history(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    wanted = [
        "pyproject.toml",
        "constraints.txt",
        "services/worker/engine/engine.py",
        "services/router/admission/take.lua",
        "models/demo/model.safetensors",
        "models/recipe/template.jinja",
        "protos/gateway.proto",
        "protos/generate.py",
    ]
    unwanted = [
        ".git/config",
        ".env",
        ".venv/bin/python",
        ".penstock/key",
        ".penstock/internal-secret",
        "deploy/docker/.env",
        "deploy/docker/compose.yaml",
        "services/.env",
        "services/gateway/connections/door.key",
        "services/gateway/connections/door.pem",
        "services/gateway/connections/door.crt",
        "services/gateway/__pycache__/auth.cpython-311.pyc",
        "protos/gateway_pb2.py",
        "protos/gateway_pb2_grpc.py",
        "tests/unit/test_x.py",
        "id_ed25519",
    ]
    for name in (*wanted, *unwanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert build_context(tmp_path) == set(wanted)


def test_the_image_s_library_list_is_one_that_was_tested(of: dict[str, Stage]) -> None:
    """Whatever is installed keeps to constraints.txt, uv itself included."""
    pinned = (ROOT / "constraints.txt").read_text()
    assert "\nuv==" in pinned
    installs = [
        rest
        for name in ("tools", "dependencies-cpu", "dependencies-cuda", "code")
        for rest in of[name].said("RUN")
        for rest in rest.split("&&")
        if "pip install" in rest or "uv build" in rest
    ]
    assert len(installs) == 5
    for command in installs:
        free = "--no-deps" in command  # the wheel that was just built
        assert (
            free
            or "constraints constraints.txt" in command
            or "constraint constraints.txt" in command
        )


def test_the_readme_s_commands_of_containers_exist() -> None:
    text = (ROOT / "README.md").read_text()
    block = text[text.index("## In containers") : text.index("## Call it")]
    lines = [line.split("  #")[0].strip() for line in block.splitlines() if line.startswith("    ")]
    built = [line for line in lines if line.startswith("docker build")]
    assert built
    assert all((ROOT / line.split("-f ")[1].split()[0]).exists() for line in built)
    inside = [line.partition(" penstock ")[2] for line in lines if " exec " in line]
    assert len(inside) == 2
    for command in inside:
        assert parser().parse_args(command.removeprefix("penstock ").split()).tenant == "acme"
