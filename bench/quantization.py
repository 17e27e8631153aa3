"""What a weight format costs in quality and brings in speed (docs/quantization.md).

    python -m bench.quantization quality [--model models/demo] [--count 50]
    python -m bench.quantization speed --model DIR [--rounds 5] [--json FILE]

quality: the demonstration model's tasks over names that training never saw, beside the weights as
they are: the share of answers that are right to the letter, in how many of their tokens the
likeliest one is the same, and the KL divergence of the logits behind them, in nats a token. The
arithmetic is float32, on the values that a format's weights stand for: what differs is the format.

speed: a decode step of one sequence by each format in turn, and between them a plain read of
memory. Told is how many bytes a second the step's weights and KV come to, and what share of the
plain read that is; of both the best of a round, and of rounds the median.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from bench.result_file import checkpoint_folder, result_file
from kernels.cpu.matrix import rounded
from services.worker.engine.config import QUANTIZATIONS, EngineConfig, Quantization
from services.worker.engine.models.registry import read_config

if TYPE_CHECKING:
    from models.recipe.model import Llama
    from services.worker.engine.runner import Runner

CONTEXT, STEPS_S = 128, 1.0
"""Tokens behind a decode; how long steps of a format are taken at a time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    of_quality = parts.add_parser("quality")
    of_quality.add_argument("--model", type=checkpoint_folder, default=Path("models/demo"))
    of_quality.add_argument("--count", type=int, default=50, help="answers of a task")
    of_quality.add_argument("--skills", nargs="+", default=None, help="default: all")
    of_speed = parts.add_parser("speed")
    of_speed.add_argument("--model", type=checkpoint_folder, required=True)
    of_speed.add_argument("--rounds", type=int, default=5)
    for part in (of_quality, of_speed):
        part.add_argument("--json", type=result_file, help="where the table goes, too")
    given = parser.parse_args()
    told = quality(given) if given.part == "quality" else speed(given)
    rows = []
    for row in told:
        print(json.dumps(row), flush=True)
        rows.append(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def quality(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each task a row for each format, then for each one of all."""
    import torch

    from models.recipe import batches, evaluate
    from models.recipe.export import load
    from models.recipe.template import render

    exact, tokenizer = load(given.model)
    models = {QUANTIZATIONS[0]: exact}
    for name in QUANTIZATIONS[1:]:
        models[name], _ = load(given.model)
        round_matrices(models[name], name)
    rows: dict[Quantization, list[dict[str, Any]]] = {name: [] for name in models}
    for skill in given.skills or evaluate.SKILLS:
        right: dict[str, list[bool]] = {name: [] for name in models}
        same: dict[str, list[bool]] = {name: [] for name in models}
        apart: dict[str, list[float]] = {name: [] for name in models}
        for case in evaluate.cases(skill, given.count):
            ids = tokenizer.encode(render(case), add_special_tokens=False).ids
            start = batches.answer_start(ids)
            answer, read = torch.tensor(ids[start:]), torch.tensor([ids[:-1]])
            with torch.no_grad():
                wanted = exact.logits(exact.hidden(read)[0, start - 1 :])
                for name, model in models.items():
                    found = model.logits(model.hidden(read)[0, start - 1 :])
                    said = found.argmax(-1)
                    right[name].append(torch.equal(said, answer))
                    same[name] += (said == wanted.argmax(-1)).tolist()
                    apart[name] += kl(wanted, found).tolist()
        for name in models:
            row = {
                "right": 100 * mean(right[name]),
                "tokens_agree": 100 * mean(same[name]),
                "kl": mean(apart[name]),
            }
            rows[name].append(row)
            yield {"format": name, "task": skill, **row}
    for name, told in rows.items():
        yield {"format": name, "task": "all", **{k: mean(row[k] for row in told) for k in told[0]}}


def round_matrices(model: "Llama", quantization: str) -> None:
    """To the values that a format's weights stand for; beside int4 the embedding and the head are
    int8 (services/worker/engine/cpu_weights.py)."""
    import torch

    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                table = "embed_tokens" in name or "lm_head" in name
                to = "int8" if table else quantization
                weights.copy_(torch.from_numpy(rounded(weights.numpy(), to)))


def kl(wanted: Any, found: Any) -> Any:
    """Of each row of logits [rows, vocab], in nats: of the distribution that is wanted from the
    one that was found."""
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def speed(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each round and format, then one of each format's medians."""
    from bench.peers.floors import bytes_per_s
    from services.worker.engine.runner import make_runner

    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        runners = {
            name: make_runner(
                EngineConfig(
                    str(given.model),
                    quantization=name,
                    num_blocks=16,
                    max_model_len=2 * CONTEXT,
                    threads=threads,
                )
            )
            for name in QUANTIZATIONS
        }
        found: dict[Quantization, list[dict[str, float]]] = {name: [] for name in runners}
        for number in range(given.rounds):
            for name, runner in runners.items():
                read = max(bytes_per_s(threads, Path(folder)).values())
                step_s = best_step_s(runner)
                size = step_bytes(runner, given.model, name)
                row = {
                    "step_ms": step_s * 1e3,
                    "step_mb": size / 1e6,
                    "gb_per_s": size / step_s / 1e9,
                    "plain_read_gb_per_s": read / 1e9,
                    "share": size / step_s / read,
                }
                found[name].append(row)
                yield {"format": name, "round": number, **row}
    for name, rows in found.items():
        yield {"format": name, **{key: median(row[key] for row in rows) for key in rows[0]}}


def best_step_s(runner: "Runner") -> float:
    from bench.sweep import decode_plan

    plan, began = decode_plan(1, CONTEXT), time.perf_counter()
    times: list[float] = []
    while len(times) < 5 or time.perf_counter() - began < STEPS_S:
        times.append(runner.collect(runner.launch(plan)).seconds)
    return min(times)


def step_bytes(runner: "Runner", folder: Path, quantization: str) -> int:
    """That a decode of one sequence must read: its keys and values, and all weights but those of an
    embedding that is not the head, too, of which it takes a row."""
    model, info = read_config(folder), runner.info
    table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    if quantization == "auto":
        table = info.parameter_bytes * table // info.num_parameters
    return info.parameter_bytes - table + info.kv_bytes_per_block * CONTEXT // info.block_size


if __name__ == "__main__":
    raise SystemExit(main())
