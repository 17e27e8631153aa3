"""Builds the CPU kernels: a library for each instruction set, from the same sources.

Run by setup.py, so that an install has them, and by hand: `python kernels/cpu/build.py`. Takes the
machine's own compiler or, where there is none, the one that the `ziglang` wheel brings; the sources
use no C++ library, so that neither needs one. Standard library only: it runs before anything else
of Penstock is there.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
_EXTRA = os.environ.get("PENSTOCK_KERNELS_FLAGS", "").split()
"""Of the compiler, for a build apart: `make sanitize`."""
BUILT = HERE / "built" / "extra" if _EXTRA else HERE / "built"
_SOURCES = sorted((HERE / "native").glob("*.cc"))
_ALL = sorted((HERE / "native").iterdir())

_X86_64_V3 = ["-mavx2", "-mfma", "-mf16c", "-mprfchw"]
_AVX512 = [*_X86_64_V3, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
FLAGS = {
    "avx2": _X86_64_V3,
    "avx512": _AVX512,
    "avx512_bf16": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
}
"""By instruction set, the later ones the better."""

_OPTIONS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"]
_OPTIONS += ["-fvisibility=hidden", "-fno-math-errno", "-pthread", *_EXTRA]


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, the system's, or that of the ziglang wheel."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name):
            return [name]
    # Without this, it would first build a C++ library of its own, for two minutes.
    zig = [sys.executable, "-m", "ziglang", "c++", "-nostdlib++"]
    return zig if find_spec("ziglang") else None


def needs_wheel() -> bool:
    """Whether the kernels can be built here once ziglang is there, and not before."""
    return _is_x86() and compiler() is None


def path_of(instruction_set: str) -> Path:
    """Where the library of these sources is, or would be: named after their content."""
    digest = hashlib.sha256(" ".join(_OPTIONS + FLAGS[instruction_set]).encode())
    for source in _ALL:
        digest.update(source.read_bytes())
    return BUILT / f"{instruction_set}-{digest.hexdigest()[:12]}.so"


def build() -> list[str]:
    """Builds what is missing, two at a time; gives what stands in the way, if anything does. Then
    the engine takes what there is, and PyTorch where there is nothing."""
    if not _is_x86():
        return [f"the CPU kernels are for x86-64 on Linux, not for {platform.machine()}"]
    missing = [name for name in FLAGS if not path_of(name).exists()]
    command = compiler()
    if missing and command is None:
        return ["the CPU kernels need a C++ compiler: install one, or `pip install ziglang`"]
    BUILT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda name: _build(command or [], name), missing))
    for old in set(BUILT.glob("*.so")) - {path_of(name) for name in FLAGS}:
        old.unlink(missing_ok=True)
    return [words for words in told if words]


def _is_x86() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _build(command: list[str], instruction_set: str) -> str:
    """What the compiler says if it fails: an old one does not know every instruction set."""
    path = path_of(instruction_set)
    # A file of this name is whole, whoever builds beside us.
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        output = Path(folder) / path.name
        arguments = [*_OPTIONS, *FLAGS[instruction_set], *map(str, _SOURCES), "-o", str(output)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        if done.returncode:
            return f"the CPU kernels for {instruction_set}: {command[0]}: {done.stderr[-1000:]}"
        output.replace(path)
    return ""


if __name__ == "__main__":
    for words in build():
        print(words, file=sys.stderr)
