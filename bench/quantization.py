"""What a format of weights, or of keys and values, costs in quality and brings in speed
(docs/quantization.md).

    python -m bench.quantization table [--formats FORMAT ...] [--count 10]
    python -m bench.quantization speed --model DIR [--of weights|kv] [--context 128] [--json FILE]

table: of each format that the engine has, or of those given, as "weights int8" and "kv fp8", what
the demonstration model says with it (format_quality.py), the bytes, and the time of a step beside
none, of a model of random weights whose bytes no cache holds. Goes into bench/results, and with
what lies there of other formats into docs/quantization.md.

speed: a decode step of one sequence by each format in turn, and between them a plain read of
memory. Told is how many bytes a second the step's weights and KV come to, and what share of the
plain read that is, of both the best of a round, and of rounds the median; and the processor's time,
which of one thread others on the machine move less.
"""

import argparse
import json
import math
import os
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.result_file import checkpoint_folder, result_file
from bench.sweep import BLOCK, decode_plan, fill
from kernels.sampling import SAMPLING
from services.worker.engine.config import KV_FORMATS, QUANTIZATIONS, EngineConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.plan import StepPlan

if TYPE_CHECKING:
    from services.worker.engine.runners.runner import Runner

STEPS_S = 1.0
"""How long steps of a format are taken at a time."""
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("quantization", QUANTIZATIONS),
    "kv": ("kv_format", KV_FORMATS),
}
"""What formats are of: the engine's setting, and its values."""
ALL = [f"{of} {name}" for of, (_, names) in SETTINGS.items() for name in names if name != "auto"]
RESULTS = Path(__file__).parent / "results/formats.json"
DOCS = Path(__file__).parents[1] / "docs/quantization.md"
MARKS = "<!-- formats -->", "<!-- end of formats -->"
"""Around the table in DOCS."""
CONTEXTS = {"weights": 128, "kv": 4096}
"""Tokens behind the decodes whose time is told."""
PROMPT = 256
PAIRS = 12
"""Of steps in turn, with a format and without; of each the shortest counts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    of_table = parts.add_parser("table")
    of_table.add_argument("--model", type=checkpoint_folder, default=Path("models/demo"))
    of_table.add_argument("--formats", nargs="+", choices=ALL, default=ALL)
    of_table.add_argument("--count", type=int, default=10, help="conversations of a task")
    of_table.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    of_speed = parts.add_parser("speed")
    of_speed.add_argument("--model", type=checkpoint_folder, required=True)
    of_speed.add_argument("--rounds", type=int, default=5)
    of_speed.add_argument("--context", type=int, default=128, help="tokens behind a decode")
    of_speed.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    of_speed.add_argument("--of", choices=tuple(SETTINGS), default="weights")
    of_speed.add_argument("--json", type=result_file, help="where the rows go, too")
    given = parser.parse_args()
    if given.part == "table":
        table(given)
        return 0
    rows = []
    for row in speed(given):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def table(given: argparse.Namespace) -> None:
    """Measures formats, and writes what is known of all."""
    from bench import format_quality
    from bench.peers import checkpoints

    settings = {name: {SETTINGS[of][0]: to} for name in given.formats for of, to in [name.split()]}
    apart = format_quality.measured(given.model, settings, given.count, threads=1)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known["auto"] = format_quality.row_of(apart["auto"], apart["auto"])
    large = checkpoints.write("M4", given.folder)
    for name, own in settings.items():
        of = name.split()[0]
        row = format_quality.row_of(apart[name], apart["auto"])
        known[name] = row | {"count": given.count} | cost(large, own, CONTEXTS[of])
        print(json.dumps({name: known[name]}), flush=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    before, rest = DOCS.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    DOCS.write_text("\n".join([before + MARKS[0], *lines(known), MARKS[1] + after]))


def cost(model: Path, own: dict[str, str], context: int) -> dict[str, float]:
    """Of a format's settings, as shares of what none takes: bytes of weights, and of KV; and how
    many times as fast a decode behind `context` tokens is, and a prompt of PROMPT tokens, by one
    thread's CPU time."""
    from services.worker.engine.runners.making import make_runner

    config = EngineConfig(
        str(model), block_size=BLOCK, num_blocks=-(-max(context, PROMPT) // BLOCK), threads=1
    )
    runners = [make_runner(config), make_runner(replace(config, **own))]  # type: ignore[arg-type]
    for runner in runners:
        fill(runner)
    weights, kv = zip(
        *((one.info.parameter_bytes, one.info.kv_bytes_per_block) for one in runners), strict=True
    )
    found = {"weight_bytes": weights[1] / weights[0], "kv_bytes": kv[1] / kv[0]}
    for what, plan in (("decode", decode_plan(1, context)), ("prompt", prompt_plan(PROMPT))):
        times: list[list[float]] = [[], []]
        for _ in range(PAIRS):
            for runner, of_one in zip(runners, times, strict=True):
                before = time.process_time()
                runner.collect(runner.launch(plan))
                of_one.append(time.process_time() - before)
        found[what] = min(times[0]) / min(times[1])
    return found


def prompt_plan(tokens: int) -> StepPlan:
    """Of one sequence that begins."""
    return StepPlan(
        token_ids=array("i", [20]) * tokens,
        positions=array("i", range(tokens)),
        starts=array("i", [0, tokens]),
        lengths=array("i", [tokens]),
        tables=array("i", [0] * -(-tokens // BLOCK)),
        num_decodes=0,
        sampled=array("i", [0]),
        rows=array("i", [tokens - 1]),
        sampling_words=array("i", bytes(SAMPLING.itemsize)),
    )


def lines(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Two tables."""
    auto = known["auto"]
    told = ("KL, answers", "KL, passages", "tokens agree", "right", "lost, gained", "bytes")
    yield f"| format | {' | '.join((*told, 'decode', 'prompt'))} |"
    yield f"| --- |{' ---: |' * (len(told) + 2)}"
    yield f"| as stored (bfloat16) | | | | {right(auto)} | | 1 | 1 | 1 |"
    named = [name for name in ALL if name in known]
    for name in named:
        row = known[name]
        size = row["weight_bytes"] if name.startswith("weights") else row["kv_bytes"]
        cells = (
            *(name, number(row["kl"]), number(row["kl_of_passages"]), f"{row['same']:.2f} %"),
            *(right(row), f"{row['lost']}, {row['gained']}", f"{size:.2f}"),
            *(f"{row['decode']:.2f}", f"{row['prompt']:.2f}"),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"Right answers of {auto['answers'] // len(auto['tasks'])} by task:"
    yield ""
    yield f"| format | {' | '.join(f'`{task}`' for task in auto['tasks'])} |"
    yield f"| --- |{' ---: |' * len(auto['tasks'])}"
    for name in ("auto", *named):
        yield f"| {name} | {' | '.join(map(str, known[name]['tasks'].values()))} |"


def right(row: dict[str, Any]) -> str:
    return f"{row['right']:.1f} ± {row['right_error']:.1f} % of {row['answers']}"


def number(value: float) -> str:
    """Of two digits."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def speed(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each round and format, then one of each format's medians."""
    from bench.peers.floors import bytes_per_s
    from services.worker.engine.runners.making import make_runner

    setting, formats = SETTINGS[given.of]
    blocks = -(-given.context // BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        runners = {
            name: make_runner(
                EngineConfig(
                    str(given.model),
                    **{setting: name},  # type: ignore[arg-type]
                    block_size=BLOCK,
                    num_blocks=blocks,
                    threads=given.threads,
                )
            )
            for name in formats
        }
        for runner in runners.values():
            fill(runner)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
        for number in range(given.rounds):
            for name, runner in runners.items():
                read = max(bytes_per_s(given.threads, Path(folder)).values())
                step_s, cpu_s = best_step_s(runner, given.context)
                kv = runner.info.kv_bytes_per_block * blocks
                weights = weight_bytes(runner, given.model, given.of == "kv" or name == "auto")
                size = kv + weights
                row = {
                    "step_ms": step_s * 1e3,
                    "step_cpu_ms": cpu_s * 1e3,
                    "step_mb": size / 1e6,
                    "kv_mb": kv / 1e6,
                    "gb_per_s": size / step_s / 1e9,
                    "plain_read_gb_per_s": read / 1e9,
                    "share": size / step_s / read,
                }
                found[name].append(row)
                yield {"format": name, "round": number, **row}
    for name, rows in found.items():
        yield {"format": name, **{key: median(row[key] for row in rows) for key in rows[0]}}


def best_step_s(runner: "Runner", context: int) -> tuple[float, float]:
    """The shortest, and the least of the processor's time, all threads'."""
    plan, began = decode_plan(1, context), time.perf_counter()
    times: list[tuple[float, float]] = []
    while len(times) < 5 or time.perf_counter() - began < STEPS_S:
        before = time.process_time()
        seconds = runner.collect(runner.launch(plan)).seconds
        times.append((seconds, time.process_time() - before))
    walls, processors = zip(*times, strict=True)
    return min(walls), min(processors)


def weight_bytes(runner: "Runner", folder: Path, as_stored: bool) -> int:
    """That a decode must read: all but those of an embedding that is not the head, too, of which it
    takes a row."""
    model, info = read_config(folder), runner.info
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    if as_stored:
        table = info.parameter_bytes * table // info.num_parameters
    return info.parameter_bytes - table


if __name__ == "__main__":
    raise SystemExit(main())
