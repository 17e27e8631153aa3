"""What no engine on this machine can go below: operations at the machine's best rate of a matrix
product, bytes at the rate of a plain read."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.peers.checkpoints import Shape
from bench.peers.workloads import Asked
from kernels.cpu import build

SOURCE = Path(__file__).with_name("read_bandwidth.cc")
_PRODUCTS = ((2048, 2048, 2048), (512, 2048, 5632), (512, 768, 2048))
"""Rows, inputs, outputs: of prompts in these models, and one that is good for any library."""
_PASSES = 7


@dataclass(frozen=True)
class Machine:
    """Rates of all cores that this process may use."""

    flop_per_s: dict[str, float]
    """By type, `float32` and `bfloat16`: of PyTorch's best product."""
    bytes_per_s: dict[str, float]
    """By kind of page, `pages_4k` and `pages_2m`; empty where there is no compiler."""

    @property
    def best_flop_per_s(self) -> float:
        return max(self.flop_per_s.values())

    @property
    def best_bytes_per_s(self) -> float | None:
        return max(self.bytes_per_s.values(), default=None)


def typical(looks: Sequence[Machine]) -> Machine:
    """The median of each rate: on a shared host they differ from minute to minute."""
    first = looks[0]
    return Machine(
        {name: median(look.flop_per_s[name] for look in looks) for name in first.flop_per_s},
        {name: median(look.bytes_per_s[name] for look in looks) for name in first.bytes_per_s},
    )


def measure(threads: int, folder: Path) -> Machine:
    """A few seconds. `folder`: where the program that reads memory is built."""
    return Machine(_flop_per_s(threads), bytes_per_s(threads, folder))


def _flop_per_s(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        rates = []
        for rows, inputs, outputs in _PRODUCTS:
            x, weights = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            with torch.inference_mode():
                torch.nn.functional.linear(x, weights)
                for _ in range(_PASSES):
                    began = time.perf_counter()
                    torch.nn.functional.linear(x, weights)
                    took = time.perf_counter() - began
                    rates.append(2 * rows * inputs * outputs / took)
        best[str(dtype).removeprefix("torch.")] = max(rates)
    return best


def bytes_per_s(threads: int, folder: Path) -> dict[str, float]:
    """Of a plain read. `folder`: where the program that reads memory is built."""
    compiler = build.compiler()
    if compiler is None:
        return {}
    program = folder / "read_bandwidth"
    options = ["-O3", "-march=native", "-std=c++17", "-fno-exceptions", "-pthread"]
    command = [*compiler, *options, str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    told = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    rates: dict[str, float] = json.loads(told.stdout)
    return rates


def floor_s(shape: Shape, requests: list[Asked], flop_per_s: float, bytes_per_s: float) -> float:
    """Seconds for a workload at least: each prompt token computed once, prefixes that requests
    share once for all; then as many steps as the longest answer has tokens, each of which reads
    the weights, and the keys and values of the requests that still run. Operations and bytes may
    go on at once: the longer of the two."""
    flop, read = prompts_flop(shape, requests), 0.0
    for step in range(1, max(asked.output for asked in requests)):
        contexts = [len(asked.prompt) + step for asked in requests if asked.output > step]
        flop += decode_flop(shape, contexts)
        read += decode_bytes(shape, contexts)
    return max(flop / flop_per_s, read / bytes_per_s)


def prompts_flop(shape: Shape, requests: list[Asked]) -> float:
    return sum(_prompt_flop(shape, asked, known) for asked, known in _with_known(requests))


def _with_known(requests: list[Asked]) -> list[tuple[Asked, int]]:
    """Each request, and how many of its first tokens the one before it has too."""
    known: list[tuple[Asked, int]] = []
    before: list[int] = []
    for asked in requests:
        same = 0
        for token, earlier in zip(asked.prompt, before, strict=False):
            if token != earlier:
                break
            same += 1
        known.append((asked, same))
        before = asked.prompt
    return known


def _prompt_flop(shape: Shape, asked: Asked, known: int) -> float:
    """Of a prompt's tokens from `known` on, and of the logits of its last one."""
    tokens = len(asked.prompt)
    looked_at = (tokens * (tokens + 1) - known * (known + 1)) / 2
    linear = 2 * shape.layers * shape.layer_weights * (tokens - known)
    return linear + 4 * shape.layers * shape.hidden * looked_at + 2 * shape.output_weights


def decode_flop(shape: Shape, contexts: list[int]) -> float:
    """Of one step that gives each sequence a token; `contexts`: their lengths with it."""
    weights = shape.layers * shape.layer_weights + shape.output_weights
    return 2 * weights * len(contexts) + 4 * shape.layers * shape.hidden * sum(contexts)


def decode_bytes(shape: Shape, contexts: list[int]) -> float:
    """That such a step reads: the weights in bf16 once, and every sequence's keys and values."""
    weights = 2 * (shape.layers * shape.layer_weights + shape.output_weights)
    return weights + shape.kv_bytes_per_token * sum(contexts)
