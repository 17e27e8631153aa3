"""What a decode of a mixture of experts takes, beside the bytes that it must read.

    python -m bench.experts [--folder DIR] [--quantization auto int8] [--batches 1 8] [--json FILE]

The model is four layers of Qwen3-30B-A3B with 32 experts of its 128, of which a token chooses 8,
and random weights (1.3 GB, written to the folder if it is not there). Tokens differ from step to
step, and so do the experts that they choose. Told are, as medians of a batch's steps, the experts
that were chosen in a layer, the bytes of weights that the step therefore reads (all but those of
the other experts and of the embedding), those bytes over its time and over the processor's time of
all threads, and the share of a plain read of memory, taken between two rounds, that the first is.
Beside it stands what the step would take if it read all experts, by that plain read.
"""

import argparse
import ctypes
import json
import os
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.result_file import result_file
from bench.sweep import BLOCK, decode_plan, fill
from kernels.cpu import structures
from kernels.cpu.matrix import Held, elements_of
from services.worker.engine.config import QUANTIZATIONS, EngineConfig
from services.worker.engine.models.registry import read_config
from services.worker.engine.weights.weights import shapes

if TYPE_CHECKING:
    from services.worker.engine.runners.cpu_runner import CpuRunner

HELD: dict[str, tuple[Held, Held]] = {"auto": ("", ""), "int8": ("int8", "int8")}
HELD |= {"int4": ("int8", "int4"), "fp8": ("int8", "fp8"), "w8a8": ("int8", "w8a8")}
"""Of each quantization what embedding and head are held in, and what the other matrices are."""
CONTEXT = 128
STEPS = 12
"""Of a batch in a round."""
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path(".peers/models/experts"))
    add("--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    add("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--rounds", type=int, default=3)
    add("--json", type=result_file, help="where the table goes, too")
    given = parser.parse_args()
    written(given.folder)
    rows = []
    for row in measured(given):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def written(folder: Path) -> None:
    """The checkpoint, if it is not there whole."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes(read_config(folder)).items():
        made = torch.ones(shape)
        if len(shape) > 1:
            made.normal_(0.0, 0.02, generator=generator)
        tensors[name] = made.to(torch.bfloat16)
    unfinished = folder / "unfinished"
    save_file(tensors, unfinished, {"format": "pt"})
    unfinished.rename(folder / "model.safetensors")


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each format and batch."""
    from bench.peers.floors import bytes_per_s
    from services.worker.engine.runners.cpu_runner import CpuRunner
    from services.worker.engine.runners.making import make_runner

    blocks = max(given.batches) * -(-CONTEXT // BLOCK)
    for name in given.quantization:
        runner = make_runner(
            EngineConfig(
                str(given.folder),
                quantization=name,
                block_size=BLOCK,
                num_blocks=blocks,
                max_running=max(given.batches),
                threads=given.threads,
            )
        )
        assert isinstance(runner, CpuRunner)
        fill(runner)
        found: dict[int, list[dict[str, float]]] = {batch: [] for batch in given.batches}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(given.rounds):
                read = max(bytes_per_s(given.threads, Path(folder)).values())
                for batch in given.batches:
                    for step in range(STEPS):
                        seed = number * STEPS + step
                        found[batch].append(one_step(runner, given.folder, name, batch, seed, read))
        for batch, rows in found.items():
            middle = {key: median(row[key] for row in rows) for key in rows[0]}
            yield {"quantization": name, "batch": batch, **middle}


def one_step(
    runner: "CpuRunner", folder: Path, quantization: str, batch: int, seed: int, read: float
) -> dict[str, float]:
    plan = decode_plan(batch, CONTEXT)
    # Tokens that no step before had: whose experts are not in the cache.
    ids = array("i", [3 + (seed * batch + row) * 37 % 31000 for row in range(batch)])
    plan = replace(plan, token_ids=ids)
    before = time.process_time()
    seconds = runner.collect(runner.launch(plan)).seconds
    cpu_s = time.process_time() - before
    model, info = read_config(folder), runner.info
    assert model.experts is not None
    of_tables, of_experts = HELD[quantization]
    hidden, inner = model.hidden_size, model.experts.inner
    expert = matrix_bytes(2 * inner, hidden, of_experts) + matrix_bytes(hidden, inner, of_experts)
    every = expert * model.experts.count * len(model.experts.layers)
    rest = info.parameter_bytes - matrix_bytes(model.vocab_size, hidden, of_tables) - every
    rest += info.kv_bytes_per_block * len(plan.tables)
    counts = chosen_counts(runner)
    size = rest + expert * sum(counts)
    return {
        "chosen": sum(counts) / len(counts),
        "step_ms": seconds * 1e3,
        "step_cpu_ms": cpu_s * 1e3,
        "read_mb": size / 1e6,
        "gb_per_s": size / seconds / 1e9,
        "gb_per_cpu_s": size / cpu_s / 1e9,
        "plain_read_gb_per_s": read / 1e9,
        "share": size / seconds / read,
        "floor_of_all_ms": (rest + every) / read * 1e3,
    }


def matrix_bytes(n: int, k: int, held: Held) -> int:
    return elements_of(n, k, held) * (1 if held else 2)


def chosen_counts(runner: "CpuRunner") -> list[int]:
    """Of each layer of experts: how many the step chose that ran last."""
    addresses = runner._program._mixtures.values()
    mixtures = [structures.Mixture.from_address(address) for address in addresses]
    return [ctypes.c_int.from_address(one.groups).value for one in mixtures]


if __name__ == "__main__":
    raise SystemExit(main())
