"""Who may import whom: the layout of the design, held."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = {"gateway", "retrieval", "tokenizer", "router", "worker"}
ENGINE_MAY = {"llguidance", "torch", "triton", "numpy", "safetensors", "tokenizers", "kernels"}


def imported(path: Path) -> set[str]:
    """Every module that the file imports, at any depth of it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def python_files(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name]


@pytest.mark.parametrize("service", sorted(SERVICES | {"common"}))
def test_a_service_imports_common_protos_and_itself(service: str) -> None:
    siblings = {f"services.{name}" for name in (SERVICES | {"cli", "app"}) - {service}}
    for path in python_files(f"services/{service}"):
        for name in imported(path):
            own = ".".join(name.split(".")[:2])
            assert own not in siblings, f"{path.relative_to(ROOT)} imports {name}"
            if service != "worker":
                assert name.split(".")[0] != "kernels", f"{path.relative_to(ROOT)} imports {name}"


COMMON_TOO = tuple(
    f"services.common.{name}"
    for name in (
        *("block_hash", "checkpoints.gguf", "checkpoints.sampled", "checkpoints.sentence_modules"),
        *("locks.own_folders", "text.lark"),
    )
)
ROOMS = {f"services.common.{room}" for room in ("checkpoints", "locks", "text")}


@pytest.mark.parametrize("folder", ["services/worker/engine", "kernels"])
def test_the_engine_runs_without_any_service(folder: str) -> None:
    for path in python_files(folder):
        for name in imported(path):
            top = name.split(".")[0]
            allowed = (
                top in ENGINE_MAY
                or top in sys.stdlib_module_names
                or name.startswith("services.worker.engine")
                or name.startswith(COMMON_TOO)
                or name in {"services", "services.worker", "services.common"} | ROOMS
            )
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_who_wants_no_structure_loads_no_grammars() -> None:
    """The library and the process that tries grammars are there once a constraint comes."""
    code = "import sys, services.worker.engine.engine; print('llguidance' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout == "False\n"


def test_the_scheduler_touches_no_tensor() -> None:
    engine = ROOT / "services/worker/engine"
    rooms = [*(engine / "scheduling").glob("*.py"), *(engine / "kv/tiers").glob("*.py")]
    names = ("kv/block_pool", "kv/tables", "sequence", "messages", "plan")
    for path in [*rooms, *(engine / f"{name}.py" for name in names)]:
        assert not {n for n in imported(path) if n.split(".")[0] == "torch"}


def called(path: Path) -> set[str]:
    """The names of all attributes that the file looks up."""
    return {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("folder", ["services", "bench"])
def test_only_the_transport_dials_and_listens(folder: str) -> None:
    ends = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
    for path in python_files(folder):
        name = str(path.relative_to(ROOT))
        if name == "services/common/transport.py":
            continue
        assert not called(path) & ends, f"{name} dials or listens by itself"
        # The public door is for strangers: it asks for keys, not for the install's secret.
        if name != "services/gateway/api/grpc/server.py":
            assert "grpc.aio.server" not in path.read_text(), f"{name} serves without the lock"
