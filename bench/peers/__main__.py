"""Penstock's engine beside vLLM, OpenVINO GenAI and llama.cpp, side by side in one run.

    python -m bench.peers [--peers vllm openvino llama.cpp] [--models S M]
                          [--workloads w1 w2 w3] [--repetitions 3] [--folder .peers] [--out STEM]

Installs the peers into environments of their own, makes models and workloads, then runs all in
turn, A B C A B C, each alone. Writes STEM.md and STEM.json after each workload of a model: what was
measured is there whatever fails later. A peer that fails is said in the table and does not stop
the rest.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import bench.peers.comparison as figures
from bench.peers import checkpoints, contestants, floors, workloads
from bench.peers.comparison import OURS, Comparison, Floor, Repetition
from bench.peers.contestant import Contestant, ContestantError
from bench.peers.foreign import ForeignLoad, wait_for_quiet
from bench.peers.table import About, page

RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    given = _arguments()
    folder: Path = given.folder.resolve()
    (folder / "workloads").mkdir(parents=True, exist_ok=True)
    place = contestants.Place(folder, len(os.sched_getaffinity(0)), _arithmetic())
    run = _Run(given, place, Comparison())
    for model in given.models:
        run.model(model)
    return 0


def _arguments() -> argparse.Namespace:
    date = datetime.now(UTC).date().isoformat()
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--peers", nargs="*", choices=contestants.PEERS, default=list(contestants.PEERS))
    add("--models", nargs="+", choices=("S", "M"), default=("S", "M"))
    add("--workloads", nargs="+", choices=workloads.WORKLOADS, default=list(workloads.WORKLOADS))
    add("--repetitions", type=int, default=3)
    add("--folder", type=Path, default=Path(".peers"), help="of environments, models and logs")
    add("--quiet-wait", type=float, default=60, help="seconds, for others to be done")
    add("--out", type=Path, default=RESULTS / f"peers-{date}", help="without .md or .json")
    given = parser.parse_args()
    if given.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if not given.out.parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")
    return given


class _Run:
    def __init__(
        self, given: argparse.Namespace, place: contestants.Place, comparison: Comparison
    ) -> None:
        self._given = given
        self._place = place
        self._comparison = comparison
        self._looks: list[floors.Machine] = []
        self._versions: dict[str, str] = {}

    def model(self, model: str) -> None:
        """Measures one model with all contestants, whose processes live as long as this takes."""
        checkpoint = checkpoints.write(model, self._place.folder / "models")
        self._look_at_machine(model)
        with ExitStack() as ends:
            running: dict[str, Contestant] = {}
            for name in [OURS, *self._given.peers]:
                if contestant := self._started(name, model, checkpoint, ends):
                    running[name] = contestant
            for workload in self._given.workloads:
                self._workload(workload, model, running)
                self._write()

    def _look_at_machine(self, model: str) -> None:
        """Its rates at this moment, and the floor from all looks so far."""
        wait_for_quiet(self._given.quiet_wait)
        self._looks.append(floors.measure(self._place.threads, self._place.folder))
        machine = floors.typical(self._looks)
        bandwidth = machine.best_bytes_per_s
        if bandwidth is None:
            return
        shape, flop = checkpoints.SHAPES[model], machine.best_flop_per_s
        w1, w2, w3 = (workloads.make(name) for name in workloads.WORKLOADS)
        prompt, answer = len(w2[0].prompt), w2[0].output
        given = self._given
        asked_of_each = [asked for name in given.workloads for asked in workloads.make(name)]
        tokens = sum(len(asked.prompt) + asked.output for asked in asked_of_each)
        kept = tokens * given.repetitions * shape.kv_bytes_per_token  # by a prefix cache
        self._comparison.floors[model] = Floor(
            w1_tok_per_s=sum(asked.output for asked in w1)
            / floors.floor_s(shape, w1, flop, bandwidth),
            w2_ttft_s=floors.prompts_flop(shape, w2) / flop,
            w2_itl_s=floors.decode_bytes(shape, [prompt + answer // 2]) / bandwidth,
            w3_wall_s=floors.floor_s(shape, w3, flop, bandwidth),
            most_rss=1.25 * shape.bytes + kept + 300e6,
        )

    def _started(
        self, name: str, model: str, checkpoint: Path, ends: ExitStack
    ) -> Contestant | None:
        """Started, warmed up by a small request and stopped; None where any of this failed."""
        try:
            contestant = contestants.prepare(name, checkpoint, self._place)
            _say(f"{model}: starting {name}")
            ends.callback(contestant.stop)
            wait_for_quiet(self._given.quiet_wait)
            contestant.start()
            warm = self._place.folder / "workloads" / "warm.jsonl"
            workloads.write([workloads.Asked([7 * 16] * 64, 8)], warm)
            contestant.run(warm)
        except (*contestants.Unprepared, ContestantError) as error:
            self._fail(name, model, error)
            return None
        contestant.freeze()
        self._comparison.start_s[name, model] = contestant.start_s
        self._versions[name] = contestants.version(name)
        return contestant

    def _workload(self, workload: str, model: str, running: dict[str, Contestant]) -> None:
        asked = workloads.make(workload)
        for repetition, name in figures.turns(list(running), self._given.repetitions):
            if name not in running:
                continue
            if name == next(iter(running)):
                self._look_at_machine(model)
            path = self._place.folder / "workloads" / f"{workload}-{repetition}.jsonl"
            workloads.write(workloads.turned(asked, repetition + 1), path)
            try:
                found = self._once(running[name], model, workload, path)
            except ContestantError as error:
                self._fail(name, model, error)
                running.pop(name).stop()
                continue
            self._comparison.repetitions.append(found)
            self._comparison.peak_rss[name, model] = running[name].peak_rss()
            _say(
                f"{model} {workload} {name}: {found.output_tok_per_s:.1f} tok/s, first token "
                f"{found.ttft_s * 1e3:.0f} ms, then {found.itl_s * 1e3:.1f} ms, whole "
                f"{found.wall_s:.2f} s, others used {found.foreign_cores:.2f} cores"
            )

    def _once(self, contestant: Contestant, model: str, workload: str, path: Path) -> Repetition:
        wait_for_quiet(self._given.quiet_wait)
        contestant.thaw()
        load = ForeignLoad(contestant.cpu_s)
        answer = contestant.run(path)
        foreign = load.cores()
        contestant.freeze()
        return Repetition.of(contestant.name, model, workload, answer, foreign)

    def _fail(self, name: str, model: str, error: Exception) -> None:
        _say(f"{model}: {error}")
        self._comparison.failed[name, model] = str(error)

    def _write(self) -> None:
        about = About(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            processor=_processor(),
            cores=self._place.threads,
            arithmetic=self._place.arithmetic,
            machine=floors.typical(self._looks),
            versions=self._versions,
        )
        stem: Path = self._given.out
        stem.with_name(stem.name + ".md").write_text(page(self._comparison, about))
        whole = {"about": asdict(about) | {"looks": [asdict(look) for look in self._looks]}}
        text = json.dumps(whole | self._comparison.as_json(), indent=1)
        stem.with_name(stem.name + ".json").write_text(text + "\n")
        _say(f"wrote {stem}.md and .json")


def _arithmetic() -> str:
    """bf16 where the processor multiplies it, else f32."""
    return "bf16" if "avx512_bf16" in _cpuinfo("flags").split() else "f32"


def _processor() -> str:
    return _cpuinfo("model name")


def _cpuinfo(name: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.partition(":")[0].strip() == name:
            return line.partition(":")[2].strip()
    return ""


def _say(message: str) -> None:
    print(f"bench peers: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
