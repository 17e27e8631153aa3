"""Who takes part, and what each needs made of a checkpoint before it can."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.comparison import LLAMA_CPP, OURS
from bench.peers.contestant import Contestant
from bench.peers.install import PINNED, InstallError, install

DRIVERS = "bench.peers.drivers"
ROOT = Path(__file__).resolve().parents[2]
PEERS = ("vllm", "openvino", LLAMA_CPP)


class PrepareError(Exception):
    """A model could not be brought into a peer's format."""


@dataclass(frozen=True)
class Place:
    folder: Path
    """Of environments, models and logs."""
    threads: int
    arithmetic: str
    """`bf16` or `f32`: what the processor computes fast."""

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


def prepare(name: str, checkpoint: Path, place: Place) -> Contestant:
    """Not started yet. Raises InstallError or PrepareError."""
    (place.folder / "logs").mkdir(exist_ok=True)
    if name == OURS:
        return _penstock(checkpoint, place)
    install(name, place.folder)
    return _PREPARE[name](checkpoint, place)


def version(name: str) -> str:
    """Of a peer, the pinned one; of ourselves, the commit."""
    if name != OURS:
        return PINNED[name].partition("==")[2]
    command = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "not a checkout"


def _penstock(checkpoint: Path, place: Place) -> Contestant:
    arguments = [str(checkpoint), str(place.threads), str(place.folder / "packed")]
    return _contestant(OURS, sys.executable, "run_penstock", arguments, place)


def _vllm(checkpoint: Path, place: Place) -> Contestant:
    arguments = [str(checkpoint), place.arithmetic, str(place.threads)]
    contestant = _contestant("vllm", _python(place, "vllm"), "run_vllm", arguments, place)
    contestant.environment["VLLM_CACHE_ROOT"] = str(place.folder / "vllm" / "cache")
    contestant.environment["LD_PRELOAD"] = ":".join(map(str, vllm_preloads(place)))
    return contestant


def vllm_preloads(place: Place) -> list[Path]:
    """What vLLM's documentation asks to load before it: Intel's OpenMP, which pip brings, and
    tcmalloc, which the machine has or has not."""
    tcmalloc = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return [*tcmalloc[:1], *(place.folder / "vllm" / "lib").glob("libiomp5.so")]


def _openvino(checkpoint: Path, place: Place) -> Contestant:
    exported = checkpoint.with_name(f"{checkpoint.name}-openvino")
    _make(
        exported,
        lambda path: [
            str(place.folder / "openvino" / "bin" / "optimum-cli"),
            *("export", "openvino", "--model", str(checkpoint)),
            *("--task", "text-generation-with-past", "--weight-format", "fp16", str(path)),
        ],
        place,
    )
    arguments = [str(exported), place.arithmetic, str(place.threads)]
    return _contestant("openvino", _python(place, "openvino"), "run_openvino", arguments, place)


def _llama_cpp(checkpoint: Path, place: Place) -> Contestant:
    kind = {"bf16": "bf16", "f32": "f16"}[place.arithmetic]
    model = checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf")
    python = _python(place, LLAMA_CPP)
    _make(
        model,
        lambda path: [python, "-m", f"{DRIVERS}.to_gguf", str(checkpoint), str(path), kind],
        place,
    )
    server = place.folder / LLAMA_CPP / "build" / "bin" / "llama-server"
    arguments = [str(server), str(model), str(place.threads)]
    return _contestant(LLAMA_CPP, python, "run_llama_cpp", arguments, place)


_PREPARE: dict[str, Callable[[Path, Place], Contestant]] = {
    "vllm": _vllm,
    "openvino": _openvino,
    LLAMA_CPP: _llama_cpp,
}


def _contestant(
    name: str, python: str, driver: str, arguments: list[str], place: Place
) -> Contestant:
    command = [python, "-m", f"{DRIVERS}.{driver}", *arguments]
    return Contestant(name, command, place.log(name), {"PYTHONPATH": str(ROOT)})


def _python(place: Place, name: str) -> str:
    return str(place.folder / name / "bin" / "python")


def _make(path: Path, command: Callable[[Path], list[str]], place: Place) -> None:
    """Runs what makes `path`, unless it is there."""
    if path.exists():
        return
    print(f"writing {path}", flush=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    log = place.log(path.name)
    with log.open("ab") as output:
        done = subprocess.run(
            command(unfinished),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    if done.returncode:
        raise PrepareError(f"{path.name} could not be made, see {log}")
    unfinished.rename(path)


Unprepared = (InstallError, PrepareError)
