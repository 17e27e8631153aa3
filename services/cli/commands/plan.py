"""`penstock plan`: what a model would need and how fast it would be, by arithmetic alone
(docs/planning.md)."""

import argparse
import json
from typing import Any

from services.cli.console import console, folding_table
from services.cli.planning.costs import Costs
from services.cli.planning.devices import GIB, device
from services.cli.planning.fleet import WIDTHS, Load, Replica, narrowest, replicas_for
from services.cli.planning.shapes import shape_of
from services.worker.engine.models.config import ModelConfig
from services.worker.engine.sizes import choose_dtype

_ASSUMED = {
    "bfloat16": "bfloat16 is assumed, the checkpoint's: GPUs and CPUs with AVX512-BF16 compute in "
    "it; other CPUs compute in float32, twice as many bytes (--kv-format float32)",
    "float32": "float32 is assumed, in which engines compute where a checkpoint is not bfloat16",
}

_FEW_BITS = (
    "the checkpoint's weights have fewer bits ({}), which config.json does not tell for each "
    "matrix: --precision int8, fp8 or int4 plans with them"
)


def main(arguments: argparse.Namespace) -> int:
    found = {"kv": kv, "gpus": gpus}[arguments.action](arguments)
    if arguments.json:
        print(json.dumps(found))
        return 0
    table = folding_table("of", "planned", title=f"{arguments.model}")
    for name, value in found.items():
        table.add_row(*_in_words(name, value, arguments))
    console().print(table)
    return 0


def kv(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError."""
    model = shape_of(arguments.model)
    if arguments.tokens > model.context:
        raise ValueError(_beyond(f"--tokens {arguments.tokens}", model.context))
    costs = Costs(model, kv_format=_kv_format(arguments, model))
    found = {
        "kv_format": costs.kv_format,
        "kv_bytes_per_token": costs.kv_bytes(1),
        "tokens": arguments.tokens,
        "kv_bytes_per_sequence": costs.kv_bytes(arguments.tokens),
        "sequences": arguments.sequences,
        "kv_bytes": costs.kv_bytes(arguments.tokens) * arguments.sequences,
    }
    if arguments.memory is not None:
        room = arguments.memory * GIB
        found["memory_bytes"] = int(room)
        found["tokens_in_memory"] = int(room // costs.kv_bytes(1))
        found["sequences_in_memory"] = int(room // costs.kv_bytes(arguments.tokens))
    if arguments.kv_format is None:
        found["note"] = _ASSUMED[costs.kv_format]
    return found


def gpus(arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError."""
    model = shape_of(arguments.model)
    load = Load(arguments.prompt, arguments.output)
    if load.tokens > model.context:
        words = f"--prompt {load.prompt} and --output {load.output}"
        raise ValueError(_beyond(words, model.context))
    few_bits = model.scheme.method and arguments.precision is None
    costs = Costs(model, arguments.precision or "bfloat16", _kv_format(arguments, model))
    of_type = device(arguments.gpu)
    replica = narrowest(costs, of_type, load)
    if replica is None or replica.width > arguments.gpus:
        least = f"{replica.width} are" if replica else f"not even {WIDTHS[-1]} would be"
        raise ValueError(
            f"--gpus {arguments.gpus}: {least} enough of {arguments.gpu} for "
            f"{costs.weight_bytes / GIB:.1f} GiB of weights in {costs.precision} and one "
            f"request's {costs.kv_bytes(load.tokens) / GIB:.2f} GiB of keys and values"
        )
    notes = [_FEW_BITS.format(model.scheme.method)] if few_bits else []
    return _fleet(arguments, replica, load, notes)


def _fleet(
    arguments: argparse.Namespace, replica: Replica, load: Load, notes: list[str]
) -> dict[str, Any]:
    costs, room = replica.costs, replica.sequences(load.tokens)
    sequences = min(room, arguments.max_running)
    speed = replica.speed(load, sequences, arguments.efficiency)
    replicas = arguments.gpus // replica.width
    found = {
        "parameters": costs.parameters,
        "active_parameters": costs.active_parameters,
        "precision": costs.precision,
        "kv_format": costs.kv_format,
        "weight_bytes": int(costs.weight_bytes),
        "gpus_per_replica": replica.width,
        "replicas": replicas,
        "kv_room_bytes_per_replica": int(replica.kv_room),
        "kv_bytes_per_request": costs.kv_bytes(load.tokens),
        "sequences_in_memory": room,
        "sequences_at_once": sequences,
        "ttft_s": speed.ttft_s,
        "itl_s": speed.itl_s,
        "output_tok_per_s": speed.output_tok_per_s * replicas,
        "requests_per_s": speed.requests_per_s * replicas,
    }
    if arguments.requests_per_s is not None:
        wanted = replicas_for(arguments.requests_per_s, speed)
        found["gpus_for_requests_per_s"] = wanted * replica.width
    if replica.width > 1:
        notes.append(
            f"a replica of {replica.width} GPUs needs tensor parallelism, which this version never "
            "ran on GPUs; what they tell one another is not counted"
        )
    if costs.precision not in ("float32", "bfloat16"):
        notes.append(f"weights in {costs.precision} never ran on a GPU")
    if notes:
        found["note"] = "; ".join(notes)
    return found


def _kv_format(arguments: argparse.Namespace, model: ModelConfig) -> str:
    """As it was asked for, or in what an engine computes where it can compute in all."""
    return arguments.kv_format or choose_dtype("auto", model, "cpu", has_dot=True)


def _beyond(words: str, context: int) -> str:
    return f"{words}: the model's context has {context} tokens"


def _in_words(name: str, value: Any, arguments: argparse.Namespace) -> tuple[str, str]:
    if name == "gpus_for_requests_per_s":
        return f"gpus for {arguments.requests_per_s:g} requests/s", f"{value:,}"
    words = name.replace("_", " ")
    if "_bytes" in name:
        small = value < GIB / 100
        return words.replace("bytes ", "").removesuffix(" bytes"), (
            f"{value:,} bytes" if small else f"{value / GIB:,.2f} GiB"
        )
    if name.endswith("_per_s"):
        told = f"{value:.2g}" if value < 1 else f"{value:,.{int(value < 1000)}f}"
        return words.replace(" per s", "/s"), told
    if name.endswith("_s"):
        return words.removesuffix(" s"), f"{value * 1000:,.1f} ms"
    return words, f"{value:,}" if isinstance(value, int) else str(value)
