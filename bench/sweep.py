"""What a token costs the engine: by batch and context, and with requests waiting.

    python -m bench.sweep --model DIR [--json FILE] [--plots FOLDER] [--only cost waiting]

A decode step is given to the runner as a plan, with a cache full of numbers: every point takes
milliseconds, whatever its context. Of a step of the whole engine, what the planning thread computes
is set against how long the step takes; the kernels run in threads of their own. `planning_s` is all
of it, from one step's end to the next, `collecting_s` the part behind the runner's `collect`,
`frame_s` what it takes besides to write the output for another process. `--plots` draws
cost-by-batch.svg, cost-by-context.svg and planning.svg.
"""

import argparse
import json
import os
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from bench.result_file import checkpoint_folder, result_file
from kernels.sampling import SAMPLING
from services.worker.engine.config import EngineConfig
from services.worker.engine.messages import Request, Sampling
from services.worker.engine.plan import Collected, StepPlan
from services.worker.engine.process import wire

if TYPE_CHECKING:
    from services.worker.engine.engine import Engine
    from services.worker.engine.runners.runner import Runner, Ticket

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4000)
WAITING = (0, 10, 100, 300, 1000)
PASS_S = 0.25
"""Of steps at one point, whose median counts."""
RUNNING = 32
PLANNED_STEPS = 100
_MS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BLOCK = 16

Points = list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=checkpoint_folder, required=True)
    add("--json", type=result_file, help="where the points go")
    add("--plots", type=Path, help="folder for the drawings")
    add("--only", nargs="+", choices=["cost", "waiting"], default=["cost", "waiting"])
    given = parser.parse_args()
    found: dict[str, Points] = {}
    if "cost" in given.only:
        found["cost"] = list(_told(costs(given.model)))
    if "waiting" in given.only:
        found["waiting"] = list(_told(waiting(given.model)))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.plots:
        draw(found, given.plots)
    return 0


def _told(points: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
    for point in points:
        print(json.dumps(point), flush=True)
        yield point


def costs(model: Path) -> Iterator[dict[str, float]]:
    """Seconds of a decode step for each batch and context that the model has."""
    from services.worker.engine.runners.making import make_runner

    blocks = max(BATCHES) * -(-max(CONTEXTS) // BLOCK)
    config = EngineConfig(str(model), num_blocks=blocks, block_size=BLOCK, threads=_threads())
    runner = make_runner(config)
    fill(runner)
    for context in (c for c in CONTEXTS if c <= runner.info.max_model_len):
        for batch in BATCHES:
            step_s = _median_s(runner, decode_plan(batch, context))
            yield {"batch": batch, "context": context, "step_s": step_s}


def decode_plan(batch: int, context: int) -> StepPlan:
    """One token for each of `batch` sequences of `context` tokens, that one included, each with
    blocks of its own."""
    each = -(-context // BLOCK)
    rows = array("i", range(batch))
    return StepPlan(
        token_ids=array("i", [20]) * batch,
        positions=array("i", [context - 1]) * batch,
        starts=array("i", range(batch + 1)),
        lengths=array("i", [context]) * batch,
        tables=array("i", range(batch * each)),
        num_decodes=batch,
        sampled=rows,
        rows=rows,
        sampling_words=array("i", bytes(batch * SAMPLING.itemsize)),
    )


def fill(runner: "Runner") -> None:
    """Pages of zeros that nobody wrote would all be one page in the cache. Finite numbers in any
    format, scales too."""
    count = runner.info.kv_bytes_per_block // 2
    numbers = np.random.default_rng(0).normal(size=count).astype(np.float32)
    # A bfloat16 is the upper half of a float32, and two of them are one.
    content = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    for block in range(runner.info.num_blocks):
        runner.cache.write([block], content.tobytes())


def _median_s(runner: "Runner", plan: StepPlan) -> float:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < PASS_S:
        before = time.perf_counter()
        runner.collect(runner.launch(plan))
        times.append(time.perf_counter() - before)
    return median(times)


def waiting(model: Path) -> Iterator[dict[str, float]]:
    """Seconds of the planning thread and of the whole, for a step of RUNNING sequences."""
    from services.worker.engine.engine import Engine

    config = EngineConfig(str(model), kv_cache_bytes=2**30, max_running=RUNNING, threads=_threads())
    engine = Engine(config)
    for count in WAITING:
        _add(engine, RUNNING + count)
        # Past the prompts, whose steps are long: all that may run decodes.
        while engine.step().prefill_tokens:
            pass
        planned, collected, framed, whole = zip(
            *(_step_s(engine) for _ in range(PLANNED_STEPS)), strict=True
        )
        load = engine.load()
        assert (load.running, load.waiting) == (RUNNING, count), "the sweep's own steps are off"
        yield {
            "waiting": count,
            "planning_s": median(planned),
            "collecting_s": median(collected),
            "frame_s": median(framed),
            "step_s": median(whole),
        }
        for number in range(RUNNING + count):
            engine.cancel(str(number))
        while engine.has_work:
            engine.step()


def _step_s(engine: "Engine") -> tuple[float, float, float, float]:
    """Processor seconds of this thread: of a step, of it behind `collect`, and of its frame;
    and the step's seconds."""
    real, ended = engine._runner.collect, 0.0

    def collect(ticket: "Ticket") -> Collected:
        nonlocal ended
        collected = real(ticket)
        ended = time.thread_time()
        return collected

    with mock.patch.object(engine._runner, "collect", collect):
        thread, wall = time.thread_time(), time.perf_counter()
        output = engine.step()
        told, whole = time.thread_time(), time.perf_counter() - wall
    wire.encode(output)
    return told - thread, told - ended, time.thread_time() - told, whole


def _add(engine: "Engine", count: int) -> None:
    sampling = Sampling(max_tokens=2 * PLANNED_STEPS, temperature=0, ignore_eos=True)
    for number in range(count):
        engine.add(Request(str(number), [20 + number] * BLOCK, sampling))


def draw(found: dict[str, Points], folder: Path) -> None:
    """Replaces the drawings of what was found."""
    import matplotlib

    matplotlib.use("svg")
    # The same points give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penstock"})
    folder.mkdir(parents=True, exist_ok=True)
    if cost := found.get("cost"):
        _lines(cost, "batch", "context", folder / "cost-by-batch.svg")
        _lines(cost, "context", "batch", folder / "cost-by-context.svg")
    if planning := found.get("waiting"):
        _planning(planning, folder / "planning.svg")


def _lines(points: Points, across: str, line: str, path: Path) -> None:
    figure, axes = _axes(f"{across}, sequences" if across == "batch" else f"{across}, tokens")
    for value in sorted({point[line] for point in points}):
        own = [point for point in points if point[line] == value]
        costs_ms = [1e3 * point["step_s"] / point["batch"] for point in own]
        axes.plot([p[across] for p in own], costs_ms, marker="o", label=f"{line} {value:g}")
    axes.set(xscale="log", yscale="log", ylabel="ms per token")
    _ticks(axes.xaxis, sorted({point[across] for point in points}))
    _ticks(axes.yaxis, _MS)
    _save(figure, axes, path)


def _planning(points: Points, path: Path) -> None:
    figure, axes = _axes("requests waiting")
    shares = [100 * point["planning_s"] / point["step_s"] for point in points]
    axes.plot(range(len(points)), shares, marker="o", label="planning")
    axes.axhline(2, linestyle="--", color="gray", label="the limit")
    axes.set(ylabel="% of a step of 32 sequences", ylim=(0, max(3, *shares) * 1.1))
    axes.set_xticks(range(len(points)), labels=[f"{point['waiting']:g}" for point in points])
    _save(figure, axes, path)


def _axes(across: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.grid(alpha=0.3)
    return figure, axes


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """These and no others, of those that lie in view."""
    least, most = axis.get_view_interval()
    shown = [value for value in values if least <= value <= most]
    axis.set_ticks(shown, labels=[f"{value:g}" for value in shown])
    axis.minorticks_off()


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def _threads() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
