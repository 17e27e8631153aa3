"""Generate the Python modules of the contracts: `python protos/generate.py`.

Run by the build (setup.py) and by `make protos`; does nothing when the modules are newer than
every `.proto` file.
"""

import sys
from importlib.resources import files
from pathlib import Path

PROTOS = Path(__file__).resolve().parent


def is_current(sources: list[Path]) -> bool:
    """Whether every generated module is at least as new as every source and this script."""
    made = [PROTOS / f"{s.stem}_pb2{end}" for s in sources for end in (".py", ".pyi", "_grpc.py")]
    newest = max(p.stat().st_mtime for p in [*sources, Path(__file__)])
    return all(p.exists() and p.stat().st_mtime >= newest for p in made)


def generate() -> None:
    """Compile all `.proto` files of this folder; raises RuntimeError when protoc refuses one."""
    sources = sorted(PROTOS.glob("*.proto"))
    if is_current(sources):
        return
    from grpc_tools import protoc

    root = PROTOS.parent
    arguments = ["protoc", f"-I{root}", f"-I{files('grpc_tools') / '_proto'}"]
    arguments += [f"--{out}={root}" for out in ("python_out", "pyi_out", "grpc_python_out")]
    arguments += [str(s.relative_to(root)) for s in sources]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message is above")


if __name__ == "__main__":
    sys.exit(generate())
