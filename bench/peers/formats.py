"""Penstock's engine beside llama.cpp's library on the same GGUF files, Q8_0 and Q4_0.

    python -m bench.peers.formats [--formats q8_0 q4_0] [--model M4] [--threads 1]
                                  [--workloads decode prefill many] [--repetitions 3]
                                  [--folder .peers] [--out STEM]

Both are in processes of their own, read one file and take turns, A B A B, each alone (the other is
stopped). llama.cpp is the npm package's, with kernels for each processor; pip brings what writes
the files. Three workloads: one request that generates (decode), one long prompt (prefill), 32
requests at once. Told are tokens by the wall's seconds and by the processor's: with one thread the
latter says what the work costs on a machine that others use, too.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bench.peers import checkpoints, workloads
from bench.peers.comparison import LLAMA_CPP, OURS, turns
from bench.peers.contestant import Contestant
from bench.peers.contestants import DRIVERS, ROOT, version
from bench.peers.foreign import ForeignLoad
from bench.peers.workloads import Asked
from services.common.checkpoints.checkpoint import locate
from services.common.config import ModelSpec

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
"""llama.cpp v0.5.0, built for each x86-64 processor; the driver has its structures."""
LIBRARIES = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
WRITER = ("gguf==0.19.0", "numpy")
ASKED = {"decode": 1.0, "prefill": 1.2, "many": 2.0}
"""How many times llama.cpp's tokens a second are asked for."""


@dataclass(frozen=True)
class Figure:
    """Of one run of a workload. Rates in tokens a second: generated ones, of a prompt its own."""

    contestant: str
    format: str
    workload: str
    repetition: int
    tok_per_s: float
    tok_per_cpu_s: float
    foreign_cores: float


def asked(workload: str) -> list[Asked]:
    if workload == "decode":
        return [Asked(one.prompt[:8], 64) for one in workloads.make("w2")]
    if workload == "prefill":
        return [Asked(one.prompt, 1) for one in workloads.make("w2")]
    return [Asked(one.prompt[:64], 32) for one in workloads.make("w1")]


def main() -> int:
    given = _arguments()
    folder: Path = given.folder.resolve()
    for part in ("models", "workloads", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # of unfolded GGUF files
    python = _install(folder)
    checkpoint = checkpoints.write(given.model, folder / "models")
    figures: list[Figure] = []
    for kind in given.formats:
        path = folder / "models" / f"{given.model}-{kind}.gguf"
        if not path.exists():
            _say(f"writing {path}")
            _driver(python, "to_gguf", [str(checkpoint), str(path), kind])
        with ExitStack() as ends:
            running = {
                name: _started(name, kind, path, python, folder, given.threads, ends)
                for name in (OURS, LLAMA_CPP)
            }
            for workload in given.workloads:
                for figure in _measured(running, kind, workload, given.repetitions, folder):
                    figures.append(figure)
                    _say(f"{figure}")
                _write(given, figures)
    return 0


def _write(given: argparse.Namespace, figures: list[Figure]) -> None:
    """After each workload: what was measured is there, whatever fails later."""
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m bench.peers.formats", *sys.argv[1:]]),
        "processor": _processor(),
        "model": given.model,
        "threads": given.threads,
        "penstock": version(OURS),
        "llama.cpp": PACKAGE,
    }
    given.out.with_name(given.out.name + ".md").write_text(page(about, figures))
    whole = {"about": about, "figures": [asdict(figure) for figure in figures]}
    given.out.with_name(given.out.name + ".json").write_text(json.dumps(whole, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, '')}, {len(os.sched_getaffinity(0))} cores"


def _arguments() -> argparse.Namespace:
    date = datetime.now(UTC).date().isoformat()
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.formats",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--formats", nargs="+", choices=("q8_0", "q4_0"), default=("q8_0", "q4_0"))
    add("--workloads", nargs="+", choices=list(ASKED), default=list(ASKED))
    add("--model", choices=list(checkpoints.SHAPES), default="M4")
    add("--threads", type=int, default=1)
    add("--repetitions", type=int, default=3)
    add("--folder", type=Path, default=Path(".peers"), help="of packages, models and logs")
    out = Path(__file__).resolve().parents[1] / "results" / f"peers-formats-{date}"
    add("--out", type=Path, default=out, help="without .md or .json")
    given = parser.parse_args()
    if given.repetitions < 1 or given.threads < 1:
        parser.error("--repetitions and --threads must be at least 1")
    if not given.out.parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")
    return given


def _install(folder: Path) -> str:
    """llama.cpp's library, and a Python that writes GGUF files: its command."""
    home = folder / "formats"
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        _say(f"installing {PACKAGE} into {home}")
        home.mkdir(exist_ok=True)
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "--quiet", "install", *WRITER], check=True)
        subprocess.run(["npm", "install", "--ignore-scripts", PACKAGE], cwd=home, check=True)
        (home / "installed").touch()
    return str(python)


def _driver(python: str, name: str, arguments: list[str]) -> None:
    command = [python, "-m", f"{DRIVERS}.{name}", *arguments]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def _started(
    name: str, kind: str, path: Path, python: str, folder: Path, threads: int, ends: ExitStack
) -> Contestant:
    """Warmed up and stopped. Raises ContestantError."""
    if name == OURS:
        model = str(locate(ModelSpec(name="m", path=str(path))))
        command = [sys.executable, "-m", f"{DRIVERS}.run_penstock", model, str(threads)]
        command.append(str(folder / "packed"))
    else:
        libraries = str(folder / "formats" / LIBRARIES)
        command = [python, "-m", f"{DRIVERS}.run_llama_library", libraries, str(path), str(threads)]
    log = folder / "logs" / f"{name}-{kind}.log"
    contestant = Contestant(name, command, log, {"PYTHONPATH": str(ROOT)})
    ends.callback(contestant.stop)
    contestant.start()
    warm = folder / "workloads" / "warm.jsonl"
    workloads.write([Asked([7 * 16] * 64, 8)], warm)
    contestant.run(warm)
    contestant.freeze()
    return contestant


def _measured(
    running: dict[str, Contestant], kind: str, workload: str, repetitions: int, folder: Path
) -> Iterator[Figure]:
    for repetition, name in turns(list(running), repetitions):
        path, one = folder / "workloads" / f"{workload}-{repetition}.jsonl", running[name]
        requests = workloads.turned(asked(workload), repetition + 1)
        workloads.write(requests, path)
        one.thaw()
        load, before = ForeignLoad(one.cpu_s), one.cpu_s()
        answer = one.run(path)
        cpu_s, foreign = one.cpu_s() - before, load.cores()
        one.freeze()
        tokens = sum(len(r.prompt) if workload == "prefill" else r.output for r in requests)
        rates = tokens / answer["wall_s"], tokens / cpu_s
        yield Figure(name, kind, workload, repetition, *rates, foreign)


def page(about: dict[str, object], figures: list[Figure]) -> str:
    lines = [
        f"# Penstock beside llama.cpp on the same GGUF files ({about['date']})",
        "",
        f"`{about['command']}`. Medians of turns, each alone; both read one file, with as many "
        "threads.",
        "",
        *(f"- {name}: {value}" for name, value in about.items() if name not in ("date", "command")),
        "",
        "| format | workload | | tokens/s | a processor's second |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for kind in dict.fromkeys(figure.format for figure in figures):
        for workload, bound in ASKED.items():
            if (kind, workload) not in {(f.format, f.workload) for f in figures}:
                continue
            rates = {}
            for name in (OURS, LLAMA_CPP):
                of = [
                    f
                    for f in figures
                    if (f.contestant, f.format, f.workload) == (name, kind, workload)
                ]
                rates[name] = [median(f.tok_per_s for f in of), median(f.tok_per_cpu_s for f in of)]
                told = " | ".join(f"{rate:.1f}" for rate in rates[name])
                lines.append(f"| {kind} | {workload} | {name} | {told} |")
            ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
            told = " | ".join(f"{ratio:.2f} x" for ratio in ratios)
            lines.append(f"| {kind} | {workload} | asked {bound:.1f} x | {told} |")
    others = [figure.foreign_cores for figure in figures]
    lines += ["", f"Cores that others used meanwhile: {min(others):.2f} to {max(others):.2f}.", ""]
    return "\n".join(lines)


def _say(message: str) -> None:
    print(f"bench peers formats: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
